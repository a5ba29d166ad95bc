"""Transfers as their users see them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ucxkv import numbers
from ucxkv.errors import LlmError, Status, error_for
from ucxkv.types import TransferReport

if TYPE_CHECKING:
    from ucxkv.catalogue import LocalEntry, RemoteEntry
    from ucxkv.geometry import Call, Plan
    from ucxkv.handle import TransferHandle
    from ucxkv.links import Link


_LOOK_SECONDS = 0.002
# More than any transfer has.
_MOST_LAYERS = 2**32


class Counts(NamedTuple):
    """What TransferHandle.submit compares with the present: each of it, if it is not None."""

    quieted: int | None = None
    barriers: int | None = None


PRESENT = Counts()


class Transfer:
    """A running pull: wait for it, await it, follow its layers, cancel it.

    It goes on whether or not this object is kept.  After it has ended, in whatever way, no byte of
    local memory is written on its behalf.
    """

    def __init__(self, handle: TransferHandle, call: Call) -> None:
        self._handle = handle
        self._call = call
        self._link: Link | None = None
        # Not the exception itself: its traceback would keep its callers' variables alive.
        self._failure: tuple[Status, str] | None = None

    def __repr__(self) -> str:
        state = "done" if self.done() else f"{self.bytes_done} bytes done"
        return f"<Transfer: {self._what}, {state}>"

    @property
    def _what(self) -> str:
        call = self._call
        if call.push:
            return f"push to cache {call.far_cache_id} of cluster {call.cluster_id}"
        return f"pull of cache {call.far_cache_id} from cluster {call.cluster_id}"

    # -- the engine's side ------------------------------------------------------------------------

    def _begin(
        self,
        link: Link,
        far: RemoteEntry,
        near: LocalEntry,
        plan: Plan,
        get: bool,
        attended: bool = False,
        counts: Counts = PRESENT,
    ) -> None:
        """Start moving bytes; `counts` are those of TransferHandle.submit."""
        self._link = link
        self._handle.submit(
            link.native,
            far.native,
            near.native,
            plan,
            get=get,
            attended=attended,
            quieted=counts.quieted,
            barriers=counts.barriers,
        )

    def _fail(self, error: LlmError) -> None:
        """End it with `error` before it has been submitted."""
        self._failure = (error.status, str(error))
        self._handle.end(int(error.status), str(error))

    def _abort(self, reason: str) -> None:
        self._handle.end(int(Status.FAILED), reason)
        self._handle.wait(signals=False)

    # -- the user's side --------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle.done

    @property
    def bytes_done(self) -> int:
        """Bytes that have landed and are known to be right, in layer order."""
        return self._handle.bytes_done

    def result(self, timeout: float | None = None) -> TransferReport:
        """Wait for the end, at most `timeout` seconds, and return the report or raise the error.

        A TimeoutError that is no LlmError means that it is still running: give it up with `cancel`.
        """
        if not self._handle.wait(timeout):
            raise TimeoutError(f"{self._what} is still running")
        return self._outcome()

    def cancel(self) -> bool:
        """End it now, fenced; False if it had ended before.

        Returns when nothing can be written on its behalf any more.  `result` then raises LlmError.
        """
        if self._handle.done:
            return False
        self._abort("it was cancelled")
        return self._handle.status == Status.FAILED

    def layers_done(self) -> int:
        """Number of layers, from the first selected one on, that have landed and are right."""
        return self._handle.layers_done

    def wait_layer(self, i: int, timeout_ms: float | None = None) -> None:
        """Wait until the `i`-th selected layer, counted from 0, has landed.

        Raises the transfer's error if it ends without that layer, TimeoutError after `timeout_ms`
        milliseconds, and IndexError for a layer it does not move.
        """
        number = numbers.integer(i, "i")
        if number < 0:
            raise IndexError(f"layer {i}")
        if not self._handle.wait(numbers.patience(timeout_ms), min(number, _MOST_LAYERS)):
            raise TimeoutError(f"layer {i} of {self._what} has not landed")
        if self._handle.layers_done > number:
            return
        self._outcome()
        raise IndexError(f"layer {i} of a transfer of {self._handle.layers} layers")

    def layers(self) -> Iterator[int]:
        """Yield the number of each selected layer, counted from 0, as it lands."""
        layer = 0
        while True:
            try:
                self.wait_layer(layer)
            except IndexError:
                return
            yield layer
            layer += 1

    def __await__(self) -> Generator[object, None, TransferReport]:
        return self._awaited().__await__()

    async def _awaited(self) -> TransferReport:
        """Wait on the running loop; being cancelled cancels the transfer, fenced."""
        try:
            await self._ended()
        except BaseException:
            self.cancel()
            raise
        return self._outcome()

    async def _ended(self) -> None:
        if self._handle.done:
            return
        try:
            # A descriptor of our own, since a loop has one reader for each.
            fd = os.dup(self._handle.event_fd())
        except OSError:
            # None is left: look now and then.
            while not self._handle.done:
                await asyncio.sleep(_LOOK_SECONDS)
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def over() -> None:
            loop.remove_reader(fd)
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(fd, over)
        try:
            await ended
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _outcome(self) -> TransferReport:
        handle = self._handle
        if handle.status == Status.SUCCESS:
            return TransferReport(
                bytes=handle.total,
                seconds=handle.seconds,
                path="get" if handle.get else "stream",
                spans=handle.spans,
            )
        if self._failure is None:
            self._failure = self._explain()
        raise error_for(*self._failure)

    def _explain(self) -> tuple[Status, str]:
        handle = self._handle
        status = Status(handle.status)
        where = ""
        cause = handle.reason
        link = self._link
        if link is not None:
            path = {True: "get", False: "stream", None: "not known"}[handle.get]
            names = ", ".join(link.native.transports) or "no endpoint"
            where = f" ({link.address}, path {path} over {names})"
            if status not in (Status.KV_CACHE_NOT_EXIST,) and link.native.error:
                cause = f"{cause}; data plane: {link.native.error}".lstrip("; ")
        if status is Status.TIMEOUT:
            waited = f"not complete after {self._call.timeout_ms:g} ms"
            if handle.total:
                waited += f", {handle.bytes_done} of {handle.total} bytes had landed"
            elif not cause:
                cause = "link or cache were still being waited for"
            cause = f"{waited}; {cause}" if cause else waited
        return status, f"{self._what}{where}: {cause or status.name}"
