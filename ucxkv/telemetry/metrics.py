"""The figures of this process's engines as metrics for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as Base

from ucxkv.errors import LlmError
from ucxkv.figures import FAILURES, LINK_STATES, Figures, Totals, figures_of
from ucxkv.running import open_engines

if TYPE_CHECKING:
    from ucxkv.datadist import LlmDataDist

_Labels: TypeAlias = list[str]

# The engine counts latencies in steps that never cross a power of two of nanoseconds, so that these
# bounds (8 microseconds to 69 seconds) cut its counts exactly.
_BOUNDS = [(1 << power) * 1e-9 for power in range(13, 37)]


class Collector(Base):
    """Gives Prometheus the figures of engines, when it asks for them.

    `engines` None: of all that are open in this process at that time.  One that has been finalized
    has no figures, and of several with one cluster id the newest has.  The label `cluster` is the
    engine's own cluster id, `peer` that of the other end of a link.  What is counted of a link
    begins anew when it is made anew; the engine's own counts go on.

    `links` False: only the engines' own metrics and the number of links by state.  Each link has
    some 50 series, which may be too much where an engine has a thousand.
    """

    def __init__(self, engines: Iterable[LlmDataDist] | None = None, *, links: bool = True) -> None:
        self._engines = None if engines is None else list(engines)
        self._links = links

    def _figures(self) -> list[Figures]:
        if self._engines is None:
            found = [figures_of(running) for running in open_engines()]
        else:
            found = []
            for engine in self._engines:
                try:
                    found.append(figures_of(engine._engine()))
                except LlmError:
                    continue
        newest = {one.cluster_id: one for one in sorted(found, key=lambda one: one.started)}
        return [newest[cluster_id] for cluster_id in sorted(newest)]

    def describe(self) -> list[Metric]:
        """The metrics without their values, which a registry wants to know."""
        return list(families([], self._links))

    def collect(self) -> Iterator[Metric]:
        """The metrics, as they are now."""
        return families(self._figures(), self._links)


def families(engines: list[Figures], links: bool = True) -> Iterator[Metric]:
    """The metrics of these engines, with those of each of their links or without."""
    info = GaugeMetricFamily(
        "ucxkv_engine_info",
        "Constant 1: what an open engine says of itself.",
        labels=["cluster", "role", "version", "ucx", "address"],
    )
    for one in engines:
        info.add_metric([str(one.cluster_id), one.role, one.version, one.ucx, one.address], 1)
    yield info
    yield from _gauges(engines)
    own = [([str(one.cluster_id)], one.totals) for one in engines]
    yield from _transfers("ucxkv", "of an engine", ["cluster"], own)
    yield _by_state(engines)
    if not links:
        return
    of_links = [
        ([str(one.cluster_id), str(link.cluster_id)], link.totals)
        for one in engines
        for link in one.links
    ]
    yield from _transfers("ucxkv_link", "over a present link", ["cluster", "peer"], of_links)
    yield from _links(engines)


def _gauges(engines: list[Figures]) -> Iterator[Metric]:
    for name, meaning, value in (
        ("start_time_seconds", "When the engine was opened, since the epoch.", "started"),
        ("transfers_running", "Transfers that have not ended.", "running"),
        ("caches", "Registered caches.", "caches"),
        ("registered_bytes", "Bytes of registered caches.", "registered_bytes"),
        (
            "pinned_bytes",
            "Bytes of caches that UCX has mapped for one-sided reads, which RDMA pins.",
            "pinned_bytes",
        ),
        ("holds", "Active holds.", "holds"),
        ("notices_queued", "Notices that wait for the application.", "notices_queued"),
        ("notices_waiting", "Notices that wait for room in the queue.", "notices_waiting"),
    ):
        gauge = GaugeMetricFamily(f"ucxkv_{name}", meaning, labels=["cluster"])
        for one in engines:
            gauge.add_metric([str(one.cluster_id)], getattr(one, value))
        yield gauge
    for name, meaning, value in (
        ("notices_received", "Notices of peers.", "notices_received"),
        ("dropped_messages", "Data-plane messages that named no link.", "dropped"),
    ):
        counter = CounterMetricFamily(f"ucxkv_{name}", meaning, labels=["cluster"])
        for one in engines:
            counter.add_metric([str(one.cluster_id)], getattr(one, value))
        yield counter


def _transfers(
    prefix: str, whose: str, labels: _Labels, counted: list[tuple[_Labels, Totals]]
) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        f"{prefix}_transfers",
        f"Transfers {whose} that have ended, failed ones included.",
        labels=labels,
    )
    spans = CounterMetricFamily(
        f"{prefix}_transfer_spans",
        f"Contiguous pieces that successful transfers {whose} have moved.",
        labels=labels,
    )
    moved = CounterMetricFamily(
        f"{prefix}_transfer_bytes",
        f"Bytes {whose}: pulled by path get or stream, pushed, and streamed to pullers.",
        labels=[*labels, "kind"],
    )
    failures = CounterMetricFamily(
        f"{prefix}_transfer_failures",
        f"Transfers {whose} that did not succeed.",
        labels=[*labels, "status"],
    )
    took = HistogramMetricFamily(
        f"{prefix}_transfer_duration_seconds",
        f"From call to end of successful transfers {whose}.",
        labels=labels,
    )
    for key, totals in counted:
        ended.add_metric(key, totals.transfers)
        spans.add_metric(key, totals.spans)
        for kind in ("get", "stream", "pushed", "served"):
            moved.add_metric([*key, kind], getattr(totals, f"bytes_{kind}"))
        for status in FAILURES:
            # At 0 too: a series that begins with its first failure has not grown by it.
            failures.add_metric([*key, status], totals.failures.get(status, 0))
        took.add_metric(key, _buckets(totals), totals.latency_sum)
    yield from (ended, spans, moved, failures, took)


def _buckets(totals: Totals) -> list[tuple[str, float]]:
    latency = iter(totals.latency)
    value, count = next(latency, (math.inf, 0))
    passed = 0
    buckets: list[tuple[str, float]] = []
    for bound in _BOUNDS:
        while value < bound:
            passed += count
            value, count = next(latency, (math.inf, 0))
        buckets.append((repr(bound), passed))
    buckets.append(("+Inf", sum(count for _, count in totals.latency)))
    return buckets


def _by_state(engines: list[Figures]) -> Metric:
    gauge = GaugeMetricFamily("ucxkv_links", "Links by their state.", labels=["cluster", "state"])
    for one in engines:
        for state in LINK_STATES:
            count = sum(link.state == state for link in one.links)
            gauge.add_metric([str(one.cluster_id), state], count)
    return gauge


def _links(engines: list[Figures]) -> Iterator[Metric]:
    usable = GaugeMetricFamily(
        "ucxkv_link_up",
        "1 where transfers can begin (up or repairing), otherwise 0.",
        labels=["cluster", "peer"],
    )
    info = GaugeMetricFamily(
        "ucxkv_link_info",
        "Constant 1: where a link goes, and how.",
        labels=["cluster", "peer", "address", "state", "path", "transports"],
    )
    for one in engines:
        cluster = str(one.cluster_id)
        for link in one.links:
            peer = str(link.cluster_id)
            usable.add_metric([cluster, peer], float(link.state in ("up", "repairing")))
            transports = ",".join(link.transports)
            info.add_metric([cluster, peer, link.address, link.state, link.path, transports], 1)
    yield from (usable, info)
