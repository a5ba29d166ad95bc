"""What a worker process runs: ``child.py MODULE:CLASS FD ARGUMENTS`` serves one object.

It dies with the process that started it, also where it is stopped or waits for something.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    place, descriptor, arguments = sys.argv[1:4]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from common.calls import serve

    module, name = place.split(":")
    served = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    with socket.socket(fileno=int(descriptor)) as connection:
        serve(connection, served)
    close = getattr(served, "close", None)
    if close is not None:
        close()


main()
