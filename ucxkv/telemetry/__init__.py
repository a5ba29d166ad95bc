"""What operators watch: metrics for Prometheus, and traces for OpenTelemetry.

Nothing here is loaded, and an engine does nothing for it, before it is asked for.  The packages
come with ``pip install 'ucxkv[telemetry]'``.

    REGISTRY.register(ucxkv.telemetry.Collector())  # prometheus_client's, or a registry of yours
    tracing = ucxkv.telemetry.trace(engine)         # a span for each transfer, until it is closed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucxkv.telemetry.metrics import Collector as Collector
    from ucxkv.telemetry.tracing import Tracing as Tracing
    from ucxkv.telemetry.tracing import trace as trace

__all__ = ["Collector", "Tracing", "trace"]

_HOMES = {"Collector": "metrics", "Tracing": "tracing", "trace": "tracing"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        home = import_module(f"ucxkv.telemetry.{_HOMES[name]}")
    except ImportError as error:
        raise ImportError(
            f"ucxkv.telemetry.{name} needs packages that are not installed ({error}):"
            " pip install 'ucxkv[telemetry]'"
        ) from error
    return getattr(home, name)
