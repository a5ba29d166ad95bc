"""What a child tells of itself to those who watch it: metrics, traces, figures."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from children.actions import Outcome, attempt

if TYPE_CHECKING:
    from child import Context


def metrics(ctx: Context, own: bool = False, links: bool = True) -> str:
    """The text that Prometheus would get, of all engines of the process or of `own` alone."""
    from prometheus_client import CollectorRegistry, generate_latest

    from ucxkv import telemetry

    registry = CollectorRegistry()
    registry.register(telemetry.Collector([ctx.engine] if own else None, links=links))
    return generate_latest(registry).decode()


def serve_metrics(ctx: Context) -> int:
    """Serve them as an application does; the port."""
    from prometheus_client import CollectorRegistry, start_http_server

    from ucxkv import telemetry

    registry = CollectorRegistry()
    registry.register(telemetry.Collector())
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    ctx.values["server"] = (server, thread)
    return int(server.server_port)


def stop_serving(ctx: Context) -> None:
    server, thread = ctx.values.pop("server")
    server.shutdown()
    server.server_close()
    thread.join(5)


def figures(ctx: Context) -> dict[str, Any]:
    import msgspec

    from ucxkv.figures import figures_of

    return dict(msgspec.to_builtins(figures_of(ctx.engine._engine())))


def has_loaded(ctx: Context, package: str) -> bool:
    import sys

    return any(name == package or name.startswith(f"{package}.") for name in sys.modules)


def begin_tracing(ctx: Context, ratio: float = 1.0) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    from ucxkv import telemetry

    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=TraceIdRatioBased(ratio))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    ctx.values["exporter"] = exporter
    ctx.values["provider"] = provider
    ctx.values["tracing"] = telemetry.trace(ctx.engine, provider)


def trace_again(ctx: Context) -> Outcome:
    from ucxkv import telemetry

    return attempt(lambda: telemetry.trace(ctx.engine, ctx.values["provider"]))


def end_tracing(ctx: Context) -> list[str]:
    """Close it; the names of the threads that are left of it, and of the methods still replaced."""
    ctx.values.pop("tracing").close()
    ctx.values.pop("provider").shutdown()
    left = [one.name for one in threading.enumerate() if one.name.endswith("-tracing")]
    return left + [name for name in vars(ctx.engine) if name.endswith(("_cache", "_async"))]


def spans(ctx: Context, name: str, least: int = 1) -> list[dict[str, Any]]:
    """The spans of that name that have ended, as soon as they are so many."""
    import time

    exporter = ctx.values["exporter"]
    end = time.monotonic() + 5
    while True:
        found = [span for span in exporter.get_finished_spans() if span.name == name]
        if len(found) >= least or time.monotonic() > end:
            break
        time.sleep(0.01)
    exporter.clear()
    return [
        {
            "attributes": dict(span.attributes),
            "status": span.status.status_code.name,
            "description": span.status.description or "",
            "events": [(one.name, dict(one.attributes), one.timestamp) for one in span.events],
            "start": span.start_time,
            "end": span.end_time,
            "parent": None if span.parent is None else span.parent.span_id,
            "kind": span.kind.name,
        }
        for span in found
    ]


def pull_within_a_span(ctx: Context, **arguments: Any) -> tuple[int, Outcome]:
    from children import actions

    tracer = ctx.values["provider"].get_tracer("test")
    with tracer.start_as_current_span("request") as span:
        outcome = actions.pull(ctx, **arguments)
        return span.get_span_context().span_id, outcome


def forgotten_pull(ctx: Context, name: str, cluster_id: int, cache_id: int) -> None:
    """Begin a pull, and let go of it."""
    import ucxkv

    index = ucxkv.CacheIndex(cluster_id, cache_id)
    ctx.engine.pull_kv_cache_async(index, ctx.caches[name], timeout_ms=5000)


def layered_push(ctx: Context, name: str, cluster_id: int, cache_id: int) -> Outcome:
    """A push whose layers are ready one by one, the last one first."""
    import ucxkv

    index = ucxkv.CacheIndex(cluster_id, cache_id)
    push = ctx.engine.push_kv_cache_async(
        ctx.caches[name], index, layer_ready=True, timeout_ms=5000
    )
    for layer in reversed(range(4)):
        push.layer_ready(layer)
    return attempt(push.result)


def copy(ctx: Context, name: str) -> Outcome:
    cache = ctx.caches[name]
    return attempt(lambda: ctx.engine.copy_kv_cache(cache, cache, 0, 1))


def scrape_while_ending(ctx: Context, rounds: int) -> list[str]:
    """Open and close engines while their metrics are asked for all the time; what went wrong."""
    import ucxkv
    from ucxkv.figures import figures_of

    problems: list[str] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            try:
                metrics(ctx)
            except Exception as error:
                problems.append(repr(error))
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for number in range(rounds):
            options = ucxkv.Options(listen="127.0.0.1:0")
            with (
                ucxkv.LlmDataDist(100 + number, options=options) as first,
                ucxkv.LlmDataDist(200 + number) as second,
            ):
                assert first.listen_address
                host, port = first.listen_address
                cluster = ucxkv.ClusterInfo(first.cluster_id, [ucxkv.IpInfo(host, port)])
                second.link_llm_clusters([cluster], timeout_ms=5000)
                running = first._engine()
            # Whoever had begun to look may still do so.
            figures_of(running)
    finally:
        over.set()
        thread.join()
    return problems
