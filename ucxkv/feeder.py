"""A thread that looks at what does not announce itself, such as layers that become ready."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Protocol

from ucxkv.errors import LlmError

logger = logging.getLogger("ucxkv.feeder")

# The shortest time between two looks; it doubles as long as nothing moves.
SHORTEST_SECONDS = 0.0002


class Fed(Protocol):
    """What is looked at again and again until it is over."""

    def feed(self) -> float | None:
        """Look once: the most seconds until the next look, None for no more."""


class Feeder:
    """One daemon thread for all that an engine feeds: started at first use, asleep between uses."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Reentrant, unlike a lock: a collection may finalize the engine in any thread at any time.
        self._inbox: queue.SimpleQueue[Fed | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, one: Fed) -> None:
        """Feed `one` until it is over; LlmError if there is no thread to be had."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise LlmError(f"no thread to watch layers with: {error}") from error
                self._thread = thread
        self._inbox.put(one)

    def stop(self, timeout: float) -> None:
        """End the thread, within `timeout` seconds; calling it again is no error."""
        self._inbox.put(None)
        thread = self._thread
        # What it calls is the application's, which may finalize the engine from there.
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.error("what %s asks has not returned within %g s", self._name, timeout)

    def _run(self) -> None:
        fed: list[Fed] = []
        pause = SHORTEST_SECONDS
        while True:
            try:
                one = self._inbox.get(timeout=pause if fed else None)
            except queue.Empty:
                pause *= 2
            else:
                if one is None:
                    return
                fed.append(one)
                # What is over must not be kept alive by an idle thread.
                del one
                pause = SHORTEST_SECONDS
            pause = _look(fed, pause)


def _look(fed: list[Fed], pause: float) -> float:
    """Feed all once, drop what is over; the seconds until the next look, at most `pause`."""
    for one in tuple(fed):
        try:
            longest = one.feed()
        except BaseException:
            # One bad push must not end the thread that all others wait for.
            logger.exception("%r cannot be looked after any more", one)
            longest = None
        if longest is None:
            fed.remove(one)
        else:
            pause = min(pause, longest)
    return pause
