"""Child interpreters that do what a test tells them to, lent to one test after another.

An interpreter is a process of its own, never a fork.  Functions are sent by name, so they must be
importable; each gets the child's Context first (see child.py).  Loading UCX takes far longer than
starting an engine: an interpreter that comes back whole is lent again, to whoever wants the same
environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from children import actions

HERE = Path(__file__).resolve().parent

# Slow tools (valgrind, sanitizers) stretch the harness's own limits, never a promised one.
PATIENCE = float(os.environ.get("UCXKV_TEST_PATIENCE", "1"))
WRAP = shlex.split(os.environ.get("UCXKV_TEST_WRAP", ""))

CALL_TIMEOUT = 30.0 * PATIENCE
# So many wait to be lent again.
MOST_IDLE = 8

# What must not be found in the output of a child that did as it was told.
TROUBLE = re.compile(
    r"ResourceWarning|Exception ignored|Exception in thread|Traceback \(most recent|"
    r"Fatal Python error|never retrieved|never awaited|Task was destroyed|"
    r"AddressSanitizer|LeakSanitizer|Segmentation fault|double free|corrupted|"
    r"Debug memory block|UCX +FATAL|Assertion"
)


class RemoteError(Exception):
    """A function raised in a child; the text is its traceback."""


class PeerDied(Exception):
    """The child went away while the test waited for an answer."""


class PeerHung(Exception):
    """The child did not answer in time; the text shows its stacks."""


class Pending:
    """A call under way in a child."""

    def __init__(self, interpreter: Interpreter, what: str) -> None:
        self.interpreter = interpreter
        self.what = what
        self.future: Future[Any] = Future()

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float | None = None) -> Any:
        limit = CALL_TIMEOUT if timeout is None else timeout * PATIENCE
        try:
            return self.future.result(limit)
        except FutureTimeout:
            stacks = self.interpreter.stacks()
            self.interpreter.kill()
            raise PeerHung(
                f"{self.what} in {self.interpreter.name} took more than {limit} s\n{stacks}"
            ) from None


class Interpreter:
    """A child process and the calls that it works on."""

    live: ClassVar[set[Interpreter]] = set()
    idle: ClassVar[list[Interpreter]] = []

    def __init__(
        self, env: Mapping[str, str], fds: Mapping[str, int], network: str | None = None
    ) -> None:
        self.env = dict(env)
        self.network = network
        self.name = "a child"
        self.killed = False
        self._output = os.memfd_create("output")
        weakref.finalize(self, os.close, self._output)
        self._shown = 0
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[int, Pending] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            # By ip, since UCX finds interfaces under /sys, which ip mounts anew as well.
            inside = ["ip", "netns", "exec", network] if network else []
            command = [*inside, *WRAP, sys.executable, str(HERE / "child.py"), str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                env=self.env,
                pass_fds=[theirs.fileno(), *fds.values()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        self._connection = Connection(ours.detach())
        self._reader = threading.Thread(target=self._read, name="answers", daemon=True)
        self._reader.start()
        Interpreter.live.add(self)
        self._connection.send({"path": sys.path, "fds": dict(fds)})

    @classmethod
    def lend(cls, env: Mapping[str, str], network: str | None = None) -> Interpreter:
        """One with this environment: of those that are idle, or a new one."""
        for number, interpreter in enumerate(cls.idle):
            if interpreter.env == env and interpreter.network == network:
                del cls.idle[number]
                return interpreter
        return cls(env, {}, network)

    def give_back(self, allow: re.Pattern[str] | None = None) -> None:
        """Keep it for the next one who wants its like, if it can be told from a new one by nothing
        but what it has loaded; otherwise let it end."""
        if self._pending or not self.post("main", actions.come_to_rest).result():
            self.end(allow)
            return
        self.check(allow)
        self._shown = self._size()
        Interpreter.idle.append(self)
        if len(Interpreter.idle) > MOST_IDLE:
            Interpreter.idle.pop(0).end()

    @classmethod
    def end_idle(cls) -> None:
        while cls.idle:
            cls.idle.pop().end()

    def post(self, lane: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        pending = Pending(self, func.__name__)
        with self._lock:
            self._number += 1
            number = self._number
            self._pending[number] = pending
            try:
                self._connection.send((number, lane, func, args, kwargs))
            except OSError:
                del self._pending[number]
                raise PeerDied(f"{self.name} is gone, before {func.__name__}") from None
        return pending

    def _read(self) -> None:
        try:
            while True:
                number, ok, value = self._connection.recv()
                with self._lock:
                    pending = self._pending.pop(number)
                if ok:
                    pending.future.set_result(value)
                else:
                    pending.future.set_exception(RemoteError(f"in {self.name}:\n{value}"))
        except (EOFError, OSError):
            pass
        with self._lock:
            lost = list(self._pending.values())
            self._pending.clear()
        for pending in lost:
            pending.future.set_exception(PeerDied(f"{self.name} died in {pending.what}"))

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        self._close()

    def end(self, allow: re.Pattern[str] | None = None) -> None:
        """Let the process end by itself, and look at how it does and at what it prints."""
        try:
            self._connection.send(None)
            code = self.process.wait(20 * PATIENCE)
            self._reader.join(10)
        except BaseException:
            self.kill()
            raise
        self._close()
        if code != 0:
            raise AssertionError(f"{self.name} ended with {code}")
        self.check(allow)

    def _close(self) -> None:
        Interpreter.live.discard(self)
        if self in Interpreter.idle:
            Interpreter.idle.remove(self)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _size(self) -> int:
        return os.fstat(self._output).st_size

    def output(self) -> str:
        """What it has printed since it was lent."""
        size = self._size() - self._shown
        return os.pread(self._output, size, self._shown).decode(errors="replace")

    def check(self, allow: re.Pattern[str] | None = None) -> None:
        """AssertionError when it has printed what a healthy one does not."""
        for line in self.output().splitlines():
            if TROUBLE.search(line) and not (allow and allow.search(line)):
                raise AssertionError(f"{self.name} printed: {line}")

    def stacks(self) -> str:
        """The stacks of all threads, as far as the process still answers signals."""
        before = len(self.output())
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self.output()[before:]
