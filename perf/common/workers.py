"""Worker processes: started, called, stopped and ended, each within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from common.calls import Caller, CallError

_CHILD = Path(__file__).with_name("child.py")
_END_SECONDS = 10


class Worker:
    """A process that serves one object; `python` is its interpreter (None: this one).

    `environment` adds to, or with None takes from, the environment.  Its output is shown only if
    something goes wrong.
    """

    def __init__(
        self,
        served: str,
        *,
        name: str = "",
        python: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
        **arguments: Any,
    ) -> None:
        self.name = name or served
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        variables: dict[str, str | None] = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        if python is not None:
            # They belong to this interpreter.
            variables.update(PYTHONPATH=None, PYTHONHOME=None)
        variables.update(environment or {})
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    python or sys.executable,
                    _CHILD,
                    served,
                    str(theirs.fileno()),
                    json.dumps(arguments),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in variables.items() if value is not None},
                # Its own children end with it, and Ctrl-C reaches the script alone.
                start_new_session=True,
            )
        self._caller = Caller(ours, self.name)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def call(self, method: str, timeout: float = 60, **arguments: Any) -> Any:
        """Call a method of the served object; CallError with the process's output if it fails."""
        try:
            return self._caller.call(method, timeout, **arguments)
        except CallError as error:
            raise CallError(f"{error}\n{self.output()}") from None

    def start(self, method: str, **arguments: Any) -> None:
        """Call a method without waiting for its result."""
        self._caller.start(method, **arguments)

    def finish(self, method: str, timeout: float = 60) -> Any:
        """The result of the call that was started."""
        try:
            return self._caller.finish(method, timeout)
        except CallError as error:
            raise CallError(f"{error}\n{self.output()}") from None

    def output(self) -> str:
        """The end of what it has printed."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - 4000)
        return os.pread(self._output.fileno(), size - start, start).decode(errors="replace")

    def suspend(self) -> None:
        """Stop it, so that it takes no time from others."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        os.killpg(self.pid, signal.SIGCONT)

    def close(self, *, kill: bool = False) -> None:
        """End it: by itself, or by force where it does not end in time."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self._caller.close()
        try:
            if not kill:
                self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not end by itself", file=sys.stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(_END_SECONDS)
            self._output.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=kind is not None)
