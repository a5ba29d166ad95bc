"""Figures out of the metrics that ucxkv.telemetry.Collector gives to Prometheus.

Only this package's metrics are looked at, whatever else a server has.
"""

from __future__ import annotations

import http.client
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from ucxkv.figures import Figures, LinkFigures, Totals

_SECONDS = 3.0
_LONGEST = 64 << 20
_SAMPLE = re.compile(r"(ucxkv_\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}

_Labels: TypeAlias = dict[str, str]
_Samples: TypeAlias = dict[str, list[tuple[_Labels, float]]]


def scrape(host: str, port: int) -> list[Figures]:
    """The figures of the engines whose metrics are served at http://host:port/metrics.

    Raises OSError where nobody answers, ValueError where there are no such metrics.
    """
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        response = connection.getresponse()
        body = response.read(_LONGEST)
    except http.client.HTTPException as error:
        raise ValueError(f"{host}:{port} serves no metrics: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ValueError(f"{host}:{port}/metrics: {response.status} {response.reason}")
    found = figures_in(body.decode(errors="replace"), time.monotonic())
    if not found:
        raise ValueError(f"{host}:{port}/metrics has no figures of an open engine")
    return found


def figures_in(text: str, at: float) -> list[Figures]:
    """The figures in a text of metrics that was read at the time `at`."""
    samples: _Samples = defaultdict(list)
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is not None:
            name, labels, value = sample.groups()
            samples[name].append((dict(_labels(labels or "")), float(value)))
    return [
        _engine(samples, labels, at)
        for labels, _ in samples["ucxkv_engine_info"]
        if labels.get("cluster", "").isdecimal()
    ]


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)


def _engine(samples: _Samples, info: _Labels, at: float) -> Figures:
    own = {"cluster": info["cluster"]}
    number = int(info["cluster"])
    links = []
    for labels, _ in samples["ucxkv_link_info"]:
        if labels.get("cluster") != info["cluster"] or not labels.get("peer", "").isdecimal():
            continue
        transports = labels.get("transports", "")
        links.append(
            LinkFigures(
                cluster_id=int(labels["peer"]),
                state=labels.get("state", ""),
                address=labels.get("address", ""),
                path=labels.get("path", ""),
                transports=transports.split(",") if transports else [],
                totals=_totals(samples, "ucxkv_link", {**own, "peer": labels["peer"]}),
            )
        )

    def value(name: str) -> int:
        return int(_sum(samples, f"ucxkv_{name}", own))

    return Figures(
        cluster_id=number,
        role=info.get("role", ""),
        at=at,
        version=info.get("version", ""),
        ucx=info.get("ucx", ""),
        address=info.get("address", ""),
        started=_sum(samples, "ucxkv_start_time_seconds", own),
        running=value("transfers_running"),
        totals=_totals(samples, "ucxkv", own),
        links=links,
        caches=value("caches"),
        registered_bytes=value("registered_bytes"),
        pinned_bytes=value("pinned_bytes"),
        holds=value("holds"),
        notices_received=value("notices_received_total"),
        notices_queued=value("notices_queued"),
        notices_waiting=value("notices_waiting"),
        dropped=value("dropped_messages_total"),
    )


def _totals(samples: _Samples, prefix: str, key: _Labels) -> Totals:
    failures = {
        labels["status"]: int(count)
        for labels, count in _of(samples, f"{prefix}_transfer_failures_total", key)
        if count and "status" in labels
    }
    moved = {
        f"bytes_{kind}": int(_sum(samples, f"{prefix}_transfer_bytes_total", {**key, "kind": kind}))
        for kind in ("get", "stream", "pushed", "served")
    }
    took = f"{prefix}_transfer_duration_seconds"
    counted = {
        "transfers": int(_sum(samples, f"{prefix}_transfers_total", key)),
        "spans": int(_sum(samples, f"{prefix}_transfer_spans_total", key)),
        **moved,
        "failures": failures,
        "latency": _latency(_of(samples, f"{took}_bucket", key)),
        "latency_sum": _sum(samples, f"{took}_sum", key),
    }
    return msgspec.convert(counted, Totals)


def _latency(buckets: list[tuple[_Labels, float]]) -> list[tuple[float, int]]:
    """Each count at the middle of its bucket, whose ends are a factor of 2 apart."""
    ends = sorted((float(labels["le"]), count) for labels, count in buckets if "le" in labels)
    found = []
    passed = 0.0
    last = 0.0
    for end, count in ends:
        if count > passed:
            found.append((last if end == float("inf") else end * 0.75, int(count - passed)))
        passed, last = count, end
    return found


def _of(samples: _Samples, name: str, key: _Labels) -> list[tuple[_Labels, float]]:
    return [
        (labels, value)
        for labels, value in samples[name]
        if all(labels.get(one) == wanted for one, wanted in key.items())
    ]


def _sum(samples: _Samples, name: str, key: _Labels) -> float:
    return sum(value for _, value in _of(samples, name, key))
