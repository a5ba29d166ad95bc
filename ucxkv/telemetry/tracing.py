"""A span of OpenTelemetry for each transfer, with an event for each layer that has landed."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as otel
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from ucxkv._version import __version__
from ucxkv.datadist import LlmDataDist
from ucxkv.errors import LlmError
from ucxkv.feeder import Feeder
from ucxkv.types import CacheIndex, TransferReport

if TYPE_CHECKING:
    from ucxkv.transfers import Transfer

# How late an event of a transfer that nobody waits for may be.
_LOOK_SECONDS = 0.002
_STOP_SECONDS = 1.0
_NS = 1_000_000_000

_WAITED_FOR = ("pull_kv_cache", "pull_kv_blocks", "push_kv_cache", "push_kv_blocks")
_COPIES = ("copy_kv_cache", "copy_kv_blocks")


def trace(engine: LlmDataDist, tracer_provider: TracerProvider | None = None) -> Tracing:
    """Make a span of each transfer that `engine` begins from now on, until the result is closed.

    Spans are named as the method, such as "pull_kv_blocks", their parent is the caller's current
    span, and they end with the transfer, whether or not anybody waits for it.  Attributes:
    `ucxkv.cluster` and `ucxkv.peer` (cluster ids), `ucxkv.peer.address`, `ucxkv.cache` (the peer's
    cache), and of a success `ucxkv.bytes`, `ucxkv.spans` and `ucxkv.path`; a failure has its
    exception and its status.  Each layer, in their order, is an event "layer" with `ucxkv.layer`,
    counted from 0: exact while a caller waits, otherwise at most 2 ms late.

    `tracer_provider` None: the global one.  Transfers whose span is not sampled cost nothing more.
    """
    provider = tracer_provider or otel.get_tracer_provider()
    return Tracing(engine, provider.get_tracer("ucxkv", __version__))


class Tracing:
    """The tracing of one engine; as a context manager it is closed at the end of the block."""

    def __init__(self, engine: LlmDataDist, tracer: Tracer) -> None:
        self._engine = weakref.ref(engine)
        self._cluster_id = engine.cluster_id
        self._tracer = tracer
        self._feeder = Feeder(f"ucxkv-{engine.cluster_id}-tracing")
        self._watched: set[_Watched] = set()
        if any(name in vars(engine) for name in (*_WAITED_FOR, *_COPIES)):
            raise LlmError(f"{engine!r} is traced already")
        for name in _WAITED_FOR:
            self._replace(name, self._attended)
            self._replace(f"{name}_async", self._unattended)
        for name in _COPIES:
            self._replace(name, self._plain)

    def close(self) -> None:
        """No more spans; those of transfers that still run end here.  Again is no error."""
        engine = self._engine()
        if engine is not None:
            for name in (*_WAITED_FOR, *(f"{one}_async" for one in _WAITED_FOR), *_COPIES):
                vars(engine).pop(name, None)
        self._feeder.stop(_STOP_SECONDS)
        for watched in list(self._watched):
            watched.leave()

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- what stands in the place of the engine's methods ----------------------------------------

    def _replace(self, name: str, through: Callable[..., Any]) -> None:
        engine = self._engine()
        method = getattr(LlmDataDist, name)

        # It must not keep the engine alive, whose attribute it becomes.
        @functools.wraps(method)
        def traced(*args: Any, **kwargs: Any) -> Any:
            span = self._begin(name.removesuffix("_async"), (*args, *kwargs.values()))
            call = functools.partial(method, self._engine(), *args, **kwargs)
            if not span.is_recording():
                return call()
            return through(name, span, call, args, kwargs)

        setattr(engine, name, traced)

    def _begin(self, name: str, given: tuple[Any, ...]) -> Span:
        attributes: dict[str, int] = {"ucxkv.cluster": self._cluster_id}
        for value in given:
            if isinstance(value, CacheIndex):
                attributes["ucxkv.peer"] = value.cluster_id
                attributes["ucxkv.cache"] = value.cache_id
        kind = SpanKind.INTERNAL if name in _COPIES else SpanKind.CLIENT
        return self._tracer.start_span(name, kind=kind, attributes=attributes)

    def _plain(self, name: str, span: Span, call: Callable[[], Any], *_: Any) -> Any:
        try:
            report = call()
        except BaseException as error:
            _failed(span, error)
            raise
        _succeeded(span, report)
        return report

    def _attended(
        self, name: str, span: Span, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            transfer = getattr(LlmDataDist, f"{name}_async")(self._engine(), *args, **kwargs)
            try:
                for layer in transfer.layers():
                    span.add_event("layer", {"ucxkv.layer": layer})
                report = transfer.result()
            except LlmError:
                raise
            except BaseException:
                transfer._abort("its caller was interrupted")
                raise
            finally:
                _say_where(span, transfer)
        except BaseException as error:
            _failed(span, error)
            raise
        _succeeded(span, report)
        return report

    def _unattended(self, name: str, span: Span, call: Callable[[], Any], *_: Any) -> Any:
        began = time.time_ns()
        try:
            transfer = call()
        except BaseException as error:
            _failed(span, error)
            raise
        watched = _Watched(span, transfer, began, self._watched)
        self._watched.add(watched)
        self._feeder.add(watched)
        return transfer


class _Watched:
    """A transfer that its caller need not wait for, looked at until it is over."""

    def __init__(self, span: Span, transfer: Transfer, began: int, among: set[_Watched]) -> None:
        self._span = span
        self._transfer = transfer
        self._began = began
        self._layers = 0
        self._among = among

    def feed(self) -> float | None:
        if not self._transfer.done():
            self._tell_layers(time.time_ns())
            return _LOOK_SECONDS
        _say_where(self._span, self._transfer)
        try:
            report = self._transfer.result()
        except LlmError as error:
            self._tell_layers(time.time_ns())
            _failed(self._span, error)
        else:
            # It may have ended some time before this look.
            ended = self._began + round(report.seconds * _NS)
            self._tell_layers(ended)
            _succeeded(self._span, report, ended)
        self._among.discard(self)
        return None

    def _tell_layers(self, at: int) -> None:
        for layer in range(self._layers, self._transfer.layers_done()):
            self._span.add_event("layer", {"ucxkv.layer": layer}, at)
            self._layers = layer + 1

    def leave(self) -> None:
        """End the span of a transfer that may still be running."""
        self._span.end()
        self._among.discard(self)


def _say_where(span: Span, transfer: Transfer) -> None:
    if transfer._link is not None:
        span.set_attribute("ucxkv.peer.address", transfer._link.address)


def _succeeded(span: Span, report: TransferReport, ended: int | None = None) -> None:
    span.set_attribute("ucxkv.bytes", report.bytes)
    span.set_attribute("ucxkv.spans", report.spans)
    span.set_attribute("ucxkv.path", report.path)
    span.end(ended)


def _failed(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__qualname__)
    if isinstance(error, LlmError):
        span.set_attribute("ucxkv.status", error.status.name)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()
