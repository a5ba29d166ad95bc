"""Runs a command with the UCX of a Debian release, by the build that is in the project's folder.

    python -m tests.ucx debian12 -- pytest tests/pair      # UCX 1.13.1
    python -m tests.ucx debian13 -- pytest tests/pair      # UCX 1.18.1

The system's own UCX is used where it is that of the release, otherwise a root made by debootstrap
and kept in ~/.cache/ucxkv-ucx.  The exit code is the command's, 3 if the UCX cannot be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ucx.root import RELEASES, Release, Unavailable, inside, made
from ucxkv import _load

_PROJECT = Path(__file__).resolve().parents[2]
_UNAVAILABLE = 3


def _environment() -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**kept, "UCXKV_UCX": "system", "PATH": path}


def _command(name: str, release: Release, command: Sequence[str]) -> list[str]:
    system = _load.system_folder()
    if system is not None and (_load.version_in(system) or (0,))[:2] == release.ucx:
        return list(command)
    return inside(made(name), _PROJECT, command)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.ucx", description=__doc__.splitlines()[0])
    parser.add_argument("release", choices=sorted(RELEASES))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --, with its arguments")
    arguments = parser.parse_args()
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        parser.error("no command")
    try:
        full = _command(arguments.release, RELEASES[arguments.release], command)
    except (Unavailable, OSError, subprocess.TimeoutExpired) as error:
        print(f"{arguments.release} is not available: {error}", file=sys.stderr)
        return _UNAVAILABLE
    return subprocess.run(full, cwd=_PROJECT, env=_environment(), check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
