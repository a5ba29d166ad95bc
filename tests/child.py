"""The child side of the harness: a process that runs what the test tells it to (see harness.py).

Three lanes, because a test wants to choose which thread of the process does a thing: "main" is the
main thread (signals, busy loops), "side" is the thread that reads the commands (answers while the
main thread is busy), and "thread" is a new thread for each call (several at once).
"""

from __future__ import annotations

import ctypes
import faulthandler
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


class Context:
    """What the functions of a test keep in the child between calls."""

    def __init__(self, fds: dict[str, int]) -> None:
        self.fds = fds
        self.engine: Any = None
        self.caches: dict[str, Any] = {}
        self.arenas: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.stop = threading.Event()


class ForkedExit(SystemExit):
    """Leave a forked copy of the child through the interpreter's ordinary exit."""


class Child:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.main_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        setup = connection.recv()
        sys.path[:] = setup["path"]
        self.context = Context(setup["fds"])

    def answer(self, number: int, ok: bool, value: Any) -> None:
        with self.lock:
            self.connection.send((number, ok, value))

    def run(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            value = func(self.context, *args, **kwargs)
        except ForkedExit:
            raise
        except BaseException:
            self.answer(number, False, traceback.format_exc())
        else:
            try:
                self.answer(number, True, value)
            except Exception:
                self.answer(number, False, traceback.format_exc())

    def read(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                if message is None:
                    break
                number, lane, func, args, kwargs = message
                call = (number, func, args, kwargs)
                if lane == "main":
                    self.main_queue.put(call)
                elif lane == "thread":
                    threading.Thread(target=self.run, args=call, name=f"call-{number}").start()
                else:
                    self.run(*call)
        except EOFError:
            pass
        finally:
            self.main_queue.put(None)

    def main(self) -> None:
        reader = threading.Thread(target=self.read, name="commands", daemon=True)
        reader.start()
        while (call := self.main_queue.get()) is not None:
            self.run(*call)
        reader.join(5)
        self.connection.close()


def main() -> None:
    # A stopped child would outlive a test process that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Child(Connection(int(sys.argv[1]))).main()


if __name__ == "__main__":
    # The functions of the tests see this module under its own name, so run that one.
    import child

    child.main()
