"""Notices: what peers tell the owner of a cache when their pulls of it have completed."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucxkv.errors import LlmError

if TYPE_CHECKING:
    from ucxkv.engine import NativeEngine

_LOOK_SECONDS = 0.002
# poll() counts milliseconds in an int.
_POLL_SECONDS = 1e6


@dataclass(frozen=True)
class Notice:
    """`data` is what a pull by cluster `cluster_id` was given as its notice."""

    cluster_id: int
    data: bytes


class Notices:
    """An engine's notices: an iterator, an asynchronous iterator, and a descriptor to poll.

    Each notice comes out once, of whichever iterator asks first; those of one peer come in the
    order in which its pulls completed.  Iteration ends when none has come for the timeout, or when
    the engine is finalized.
    """

    def __init__(self, native: NativeEngine, timeout: float | None) -> None:
        self._native = native
        self._timeout = timeout
        self._lock = threading.Lock()
        self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def fileno(self) -> int:
        """A descriptor that is readable while there are notices, and when the engine is closed.

        It belongs to this object, is only to be polled, and goes with it.
        """
        with self._lock:
            if self._fd < 0:
                try:
                    self._fd = self._native.dup_notice_fd()
                except (OSError, RuntimeError) as error:
                    if self._native.closed:
                        raise LlmError("the engine was finalized") from error
                    raise LlmError(f"no descriptor for notices: {error}") from error
            return self._fd

    def __iter__(self) -> Notices:
        return self

    def __next__(self) -> Notice:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        poller: select.poll | None = None
        while True:
            notice = self._take()
            if notice is not None:
                return notice
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0 or self._native.closed:
                raise StopIteration
            if poller is None:
                poller = select.poll()
                try:
                    poller.register(self.fileno(), select.POLLIN)
                except LlmError:
                    if self._native.closed:
                        raise StopIteration from None
                    raise
            poller.poll(None if left is None else min(left, _POLL_SECONDS) * 1e3)

    def __aiter__(self) -> Notices:
        return self

    async def __anext__(self) -> Notice:
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        while True:
            notice = self._take()
            if notice is not None:
                return notice
            left = None if deadline is None else deadline - loop.time()
            if (left is not None and left <= 0) or self._native.closed:
                raise StopAsyncIteration
            await self._readable(left)

    def _take(self) -> Notice | None:
        taken = self._native.take_notice()
        return None if taken is None else Notice(*taken)

    async def _readable(self, seconds: float | None) -> None:
        """Wait for the descriptor, at most so long."""
        loop = asyncio.get_running_loop()
        try:
            # A loop has one reader for each descriptor, and several tasks may be waiting.
            fd = self._native.dup_notice_fd()
        except (OSError, RuntimeError):
            # None is left, or the engine has been closed: look now and then.
            await asyncio.sleep(_LOOK_SECONDS)
            return
        ready = asyncio.Event()
        loop.add_reader(fd, ready.set)
        try:
            await asyncio.wait_for(ready.wait(), seconds)
        except asyncio.TimeoutError:
            return
        finally:
            loop.remove_reader(fd)
            os.close(fd)
