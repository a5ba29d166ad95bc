"""A thread that only sleeps: what is promised within a time may be as late as it is."""

from __future__ import annotations

import os
import threading
import time

STEP = 0.01


class Sleeper:
    """Sleeps for 10 ms again and again; `late` is how much later than asked it woke at worst.

    With `cpu` it tells how late threads are there: a machine that has too much to do need not be
    late everywhere.
    """

    def __init__(self, cpu: int | None = None) -> None:
        self.late = 0.0
        self._cpu = cpu
        self._finish = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sleeper")

    def _run(self) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})
        while not self._finish.is_set():
            began = time.monotonic()
            time.sleep(STEP)
            self.late = max(self.late, time.monotonic() - began - STEP)

    def __enter__(self) -> Sleeper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finish.set()
        self._thread.join()
