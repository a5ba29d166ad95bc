"""The control thread with its event loop, and the calls of other threads into it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ucxkv.errors import LlmError

_T = TypeVar("_T")

logger = logging.getLogger("ucxkv.control")
logging.getLogger("ucxkv").addHandler(logging.NullHandler())

_SIGNAL_SECONDS = 0.1
_CLOSED = "the engine is closed"


class RateLimit:
    """Lets a few events pass at once, and then one in every `seconds`."""

    def __init__(self, burst: int = 5, seconds: float = 10.0) -> None:
        self._burst = float(burst)
        self._seconds = seconds
        self._tokens = float(burst)
        self._last = time.monotonic()
        self._dropped = 0

    def passes(self) -> int | None:
        """None if this event is one too many, else how many were since the last that passed."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._last) / self._seconds)
        self._last = now
        if self._tokens < 1:
            self._dropped += 1
            return None
        self._tokens -= 1
        dropped, self._dropped = self._dropped, 0
        return dropped


class Warnings:
    """Log records about what others do, each kind rate-limited."""

    def __init__(self) -> None:
        self._limits: dict[str, RateLimit] = {}

    def __call__(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        dropped = self._limits.setdefault(kind, RateLimit()).passes()
        if dropped:
            logger.log(level, "%s (and %d more of this kind, not logged)", text, dropped)
        elif dropped is not None:
            logger.log(level, "%s", text)


class Waiters:
    """Coroutines that wait for a condition; lives on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: set[asyncio.Future[None]] = set()

    def touch(self) -> None:
        """Something has changed: all look at their conditions."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            wake(future)

    async def until(self, condition: Callable[[], object], deadline: float) -> bool:
        """Wait until `condition` is true; False if it is not at `deadline` on the loop's clock."""
        while not condition():
            if self._loop.time() >= deadline:
                return False
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.add(future)
            timer = self._loop.call_at(deadline, wake, future)
            try:
                await future
            finally:
                timer.cancel()
                self._waiting.discard(future)
        return True


def wake(future: asyncio.Future[None]) -> None:
    """Let a future's waiter go on, if there is one still."""
    if not future.done():
        future.set_result(None)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that a forked child leaves alone: its epoll is shared with the parent's."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            super().__del__()


class ControlThread:
    """One daemon thread that runs an event loop, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        # Not the policy's choice: what runs here must not depend on the application's.
        self.loop: asyncio.AbstractEventLoop = _Loop()
        # The application's debug mode would measure how long it keeps the GIL itself.
        self.loop.set_debug(False)
        self.loop.set_exception_handler(self._on_error)
        self._limit = RateLimit()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Reentrant: a collection may finalize the engine in a thread that holds it.
        self._lock = threading.RLock()
        self._open = True
        self._tasks: set[asyncio.Future[Any]] = set()
        self._helpers: set[threading.Thread] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        dropped = self._limit.passes()
        if dropped is not None:
            logger.error(
                "%s (%d more before, not logged)",
                context.get("message", "error in the control thread"),
                dropped,
                exc_info=context.get("exception"),
            )

    @property
    def here(self) -> bool:
        """Whether the caller is the control thread."""
        return threading.current_thread() is self._thread

    # -- from any thread ------------------------------------------------------------------------

    def post(self, callback: Callable[..., object], *args: Any) -> bool:
        """Have the loop call it soon; False if the loop is closing."""
        with self._lock:
            if not self._open:
                return False
            self.loop.call_soon_threadsafe(callback, *args)
            return True

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run it on the loop; LlmError if the loop is closing."""
        with self._lock:
            if self._open:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise LlmError(_CLOSED)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run it on the loop and wait for its result; an interrupted wait cancels it."""
        future = self.submit(coroutine)
        try:
            self.wait(future, math.inf)
            return future.result()
        except concurrent.futures.CancelledError:
            raise LlmError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: concurrent.futures.Future[Any], deadline: float) -> None:
        """Wait until it is done, or until `deadline` on the monotonic clock."""
        while not future.done():
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return
            # In steps, since a signal may be taken by another thread and not break the wait.
            concurrent.futures.wait([future], min(seconds, _SIGNAL_SECONDS))

    def stop(
        self, farewell: Callable[[], Awaitable[None]], end: Callable[[], None], timeout: float
    ) -> bool:
        """Run `farewell` on the loop, end all tasks, run `end`, join the thread.

        True if that is done.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._open:
                self._open = False
                if not self._thread.is_alive():
                    self.loop.close()
                    return True
                # Whatever was submitted before runs before this, and is cancelled by it.
                self.loop.call_soon_threadsafe(self.spawn, self._finish(farewell, end, timeout / 2))
        if self.here:
            return False
        for thread in (self._thread, *tuple(self._helpers)):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # -- on the loop ----------------------------------------------------------------------------

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Hold a task until it is done, and log what it fails with."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.loop.call_exception_handler(
                {"message": "a task of the control thread failed", "exception": task.exception()}
            )

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task and `keep` it."""
        task = self.loop.create_task(coroutine)
        self.keep(task)
        return task

    async def aside(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call what may block in a thread of its own.

        A daemon, so that a name server that does not answer cannot hold up the interpreter's exit.
        """
        future: asyncio.Future[_T] = self.loop.create_future()

        def deliver(result: _T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result: _T | None = None
            problem: BaseException | None = None
            try:
                result = function(*args)
            except BaseException as error:
                problem = error
            # A closed loop means that nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(deliver, result, problem)

        thread = threading.Thread(target=run, name="ucxkv-aside", daemon=True)
        # One that has delivered may still be on its way out: `stop` joins what is alive.
        self._helpers = {helper for helper in self._helpers if helper.is_alive()} | {thread}
        thread.start()
        return await future

    async def _finish(
        self, farewell: Callable[[], Awaitable[None]], end: Callable[[], None], timeout: float
    ) -> None:
        try:
            await asyncio.wait_for(farewell(), timeout)
        except asyncio.TimeoutError:
            logger.debug("peers did not take their farewell in time")
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=timeout)
            # What the tasks closed last is closed in the loop's next round.
            await asyncio.sleep(0)
            self.loop.stop()
            end()
