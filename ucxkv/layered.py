"""Pushes whose layers go one by one, each as soon as it is ready.

Each layer is an offer of its own, made when the layer is ready.  All are created together, with the
deadline of the whole, so that a layer that never becomes ready ends on time whoever has the GIL.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from ucxkv import numbers
from ucxkv.errors import LlmError, ParamInvalid, Status
from ucxkv.feeder import SHORTEST_SECONDS
from ucxkv.transfers import PRESENT, Counts, Transfer
from ucxkv.types import ALL_LAYERS, TransferReport

if TYPE_CHECKING:
    from ucxkv import geometry
    from ucxkv.catalogue import LocalEntry, RemoteEntry
    from ucxkv.handle import TransferHandle
    from ucxkv.links import Link

# The most seconds between two looks at layers that are asked for, and at the others, which only
# have to learn that the push has failed elsewhere.
_POLL_SECONDS = 0.002
_WATCH_SECONDS = 0.02

_FOREVER_SECONDS = 3e9

_GIVEN_UP = "another layer of the push failed"
_RAISED = "layer_ready raised "


class SetEvent(Protocol):
    """An event of threading, multiprocessing or asyncio."""

    def is_set(self) -> bool: ...


class QueryEvent(Protocol):
    """An event that a device records, such as torch.cuda.Event."""

    def query(self) -> bool: ...


LayerReady: TypeAlias = Literal[True] | Sequence[SetEvent | QueryEvent] | Callable[[int], bool]


@dataclass(frozen=True)
class Ready:
    """How layers become ready: `ask` for each, or being told where it is None.

    `events` is the number of layers that can be asked for, None for any.
    """

    ask: Callable[[int], bool] | None = None
    events: int | None = None

    def check(self, layers: int) -> None:
        """ParamInvalid if it is not made for so many layers."""
        if self.events not in (None, layers):
            raise ParamInvalid(f"{self.events} events for a push of {layers} layers")


def ready_by(layer_ready: Any) -> Ready | None:
    """The argument `layer_ready` of a push, its type checked (TypeError)."""
    if layer_ready is None:
        return None
    if layer_ready is True:
        return Ready()
    if inspect.iscoroutinefunction(layer_ready):
        raise TypeError("layer_ready must not be asynchronous: it is called by a thread")
    if callable(layer_ready):
        return Ready(layer_ready)
    if not isinstance(layer_ready, Sequence) or isinstance(layer_ready, (str, bytes)):
        raise TypeError(
            "layer_ready must be None, True, a sequence of events or a function,"
            f" not {type(layer_ready).__name__}"
        )
    looks = [_look_at(event) for event in layer_ready]
    return Ready(lambda layer: looks[layer](), len(looks))


def _look_at(event: Any) -> Callable[[], bool]:
    for name in ("is_set", "query"):
        look = getattr(event, name, None)
        if callable(look):
            return cast("Callable[[], bool]", look)
    raise TypeError(f"an event has is_set() or query(), which {type(event).__name__} has not")


def _type_name(value: object) -> str:
    """The name of its type, whatever that makes of being asked."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def layers_of(call: geometry.Call, near: LocalEntry) -> int:
    """Layers of a push as far as its source alone tells: right, unless the push is refused."""
    tensors = near.desc.num_tensors
    if call.src_layers != ALL_LAYERS:
        layers = call.src_layers[1] - call.src_layers[0] + 1
    elif call.dst_layers != ALL_LAYERS:
        layers = tensors // call.tensors_per_layer
    else:
        layers = -(-tensors // min(call.tensors_per_layer, tensors))
    return max(1, min(layers, tensors))


class _Layer(Transfer):
    """One layer of a push."""

    # What layer_ready has raised, if that has ended it.
    raised: BaseException | None = None

    def __init__(self, handle: TransferHandle, call: geometry.Call, number: int) -> None:
        super().__init__(handle, call)
        self._number = number

    def _withhold(
        self,
        link: Link,
        far: RemoteEntry,
        near: LocalEntry,
        plan: geometry.Plan,
        counts: Counts,
    ) -> None:
        self._link = link
        own = plan.layer(self._number)
        self._handle.submit(
            link.native,
            far.native,
            near.native,
            own,
            withheld=True,
            quieted=counts.quieted,
            barriers=counts.barriers,
        )

    @property
    def _what(self) -> str:
        return f"layer {self._number} of the {super()._what}"

    @property
    def failed(self) -> bool:
        return self._handle.done and self._handle.status != Status.SUCCESS

    @property
    def landed(self) -> bool:
        return self._handle.done and self._handle.status == Status.SUCCESS

    @property
    def given_up(self) -> bool:
        """It failed for no reason of its own."""
        return self._handle.reason == _GIVEN_UP

    def _end(self, status: Status, reason: str) -> None:
        self._handle.end(int(status), reason)

    def _outcome(self) -> TransferReport:
        try:
            return super()._outcome()
        except LlmError as error:
            raise error from (self.raised if self._handle.reason.startswith(_RAISED) else None)

    def _explain(self) -> tuple[Status, str]:
        handle, link = self._handle, self._link
        if handle.status == Status.TIMEOUT and handle.withheld and link is not None:
            late = f"it was not ready within {self._call.timeout_ms:g} ms"
            return Status.TIMEOUT, f"{self._what} ({link.address}): {late}"
        return super()._explain()


class LayeredPush(Transfer):
    """A push begun with `layer_ready`: its layers land each for itself, in any order.

    Layers are numbered from 0 within the pushed range.  The first failure ends the layers that
    have not landed, fenced; those that have keep their results.  `layers_done` and `layers` count
    from the first layer on, as for every Transfer, so a layer that lands before an earlier one is
    seen by `wait_layer` and `layer_results` first.
    """

    def __init__(
        self,
        new_handle: Callable[[], TransferHandle],
        layers: int,
        call: geometry.Call,
        ready: Ready,
    ) -> None:
        self._layers: list[_Layer] = []
        try:
            for layer in range(layers):
                self._layers.append(_Layer(new_handle(), call, layer))
        except BaseException:
            self._end(Status.FAILED, "it was not begun")
            raise
        super().__init__(self._layers[-1]._handle, call)
        self._how: Ready | None = ready
        self._ready = bytearray(layers)
        # The peer's cache, once all has been checked and the layers are on their link.
        self._far: RemoteEntry | None = None

    # -- the engine's side ------------------------------------------------------------------------

    def _begin(
        self,
        link: Link,
        far: RemoteEntry,
        near: LocalEntry,
        plan: geometry.Plan,
        get: bool,
        attended: bool = False,
        counts: Counts = PRESENT,
    ) -> None:
        if self._how is not None:
            self._how.check(len(self._layers))
        for layer in self._layers:
            layer._withhold(link, far, near, plan, counts)
        # In this order: layers that are told to be ready from now on are released by the teller.
        self._far = far
        for layer, ready in zip(self._layers, self._ready, strict=True):
            if ready:
                layer._handle.release()

    def _end(self, status: Status, reason: str) -> None:
        for layer in self._layers:
            layer._end(status, reason)

    def _fail(self, error: LlmError) -> None:
        for layer in self._layers:
            layer._fail(error)

    def _abort(self, reason: str) -> None:
        self._end(Status.FAILED, reason)
        for layer in self._layers:
            layer._handle.wait(signals=False)

    def feed(self) -> float | None:
        """Offer what has become ready, and end what has no hope; for the engine's feeder."""
        moved = False
        try:
            moved = self._ask_layers()
        except BaseException as error:
            # Whatever the application's code raises is this push's alone.  Its traceback begins
            # with a frame of ours, which has nothing to tell and would keep the push alive.
            trace = error.__traceback__
            BaseException.with_traceback(error, trace.tb_next if trace is not None else None)
            for layer in self._layers:
                layer.raised = error
            self._end(Status.FAILED, _RAISED + _type_name(error))
        if not self.done():
            self._spread_failure()
        if self.done():
            # What it was given may be large, and is the application's.
            self._how = None
            return None
        if moved:
            return SHORTEST_SECONDS
        asking = self._how is not None and self._how.ask is not None and not all(self._ready)
        return _POLL_SECONDS if asking else _WATCH_SECONDS

    def _ask_layers(self) -> bool:
        moved = False
        ask = self._how.ask if self._how is not None else None
        if ask is None or self._far is None:
            return False
        for number, layer in enumerate(self._layers):
            if self._ready[number] or layer.done():
                continue
            answer = ask(number)
            if inspect.isawaitable(answer):
                raise TypeError("an awaitable does not say whether a layer is ready")
            if answer:
                self.layer_ready(number)
                moved = True
        return moved

    def _spread_failure(self) -> None:
        if any(layer.failed for layer in self._layers):
            self._end(Status.FAILED, _GIVEN_UP)
        elif self._far is not None and self._far.native.retired:
            # What is on its way may still arrive in time.
            for layer in self._layers:
                if layer._handle.withheld:
                    layer._end(Status.KV_CACHE_NOT_EXIST, "its owner has unregistered it")

    # -- the user's side --------------------------------------------------------------------------

    def layer_ready(self, i: int) -> None:
        """Push the `i`-th layer now: it has been computed.

        In any order, from any thread, at most one effect per layer; it does not wait.  Where events
        or a function say what is ready, this is one more way to say so.  After the end it does
        nothing.  IndexError for a layer that the push does not have.
        """
        number = self._index(i)
        self._ready[number] = True
        if self._far is not None:
            self._layers[number]._handle.release()

    def layer_results(self) -> list[TransferReport | LlmError | None]:
        """For each layer its report once it has landed, its error if it failed, before that None.

        A report's `seconds` are those from the call to the layer's landing.
        """
        results: list[TransferReport | LlmError | None] = []
        for layer in self._layers:
            try:
                results.append(layer._outcome() if layer.done() else None)
            except LlmError as error:
                results.append(error.with_traceback(None))
        return results

    def done(self) -> bool:
        """Whether all its layers have ended, well or not."""
        return all(layer.done() for layer in self._layers)

    @property
    def bytes_done(self) -> int:
        """Bytes of the layers that have landed."""
        return sum(layer.bytes_done for layer in self._layers)

    def result(self, timeout: float | None = None) -> TransferReport:
        """Wait for all layers, at most `timeout` seconds; a report of all, or the first failure.

        The report's path is "get" if all layers took it.  A TimeoutError that is no LlmError means
        that it is still running.
        """
        end = None if timeout is None else time.monotonic() + min(timeout, _FOREVER_SECONDS)
        for layer in self._layers:
            if not layer._handle.wait(None if end is None else end - time.monotonic()):
                raise TimeoutError(f"{self._what} is still running")
        return self._outcome()

    def cancel(self) -> bool:
        """End the layers that have not landed, fenced; False if all had ended before.

        Returns when nothing is sent on its behalf any more.  `result` then raises LlmError.
        """
        running = [layer for layer in self._layers if not layer.done()]
        self._abort("it was cancelled")
        return any(layer._handle.status == Status.FAILED for layer in running)

    def layers_done(self) -> int:
        """Number of layers, from the first on, that have landed."""
        for number, layer in enumerate(self._layers):
            if not layer.landed:
                return number
        return len(self._layers)

    def wait_layer(self, i: int, timeout_ms: float | None = None) -> None:
        """Wait until the `i`-th layer has landed, whatever the others do.

        Raises its error if it has failed, TimeoutError after `timeout_ms` milliseconds, and
        IndexError for a layer that the push does not have.
        """
        layer = self._layers[self._index(i)]
        if not layer._handle.wait(numbers.patience(timeout_ms)):
            raise TimeoutError(f"{layer._what} has not landed")
        if layer.failed:
            self._raise(layer)

    async def _ended(self) -> None:
        # Each wait costs a descriptor, so the last layer first: usually it is the last to land.
        for layer in reversed(self._layers):
            await layer._ended()

    def _outcome(self) -> TransferReport:
        failed = [layer for layer in self._layers if layer.failed]
        if failed:
            self._raise(failed[0])
        reports = [layer._outcome() for layer in self._layers]
        return TransferReport(
            bytes=sum(report.bytes for report in reports),
            seconds=max(report.seconds for report in reports),
            path="get" if all(report.path == "get" for report in reports) else "stream",
            spans=sum(report.spans for report in reports),
        )

    def _raise(self, layer: _Layer) -> None:
        """Raise the error of a failed layer, or of the one that it was given up for."""
        if layer.given_up:
            layer = next((one for one in self._layers if one.failed and not one.given_up), layer)
        layer._outcome()

    def _index(self, i: int) -> int:
        number = numbers.integer(i, "i")
        if not 0 <= number < len(self._layers):
            raise IndexError(f"layer {i} of a push of {len(self._layers)} layers")
        return number
