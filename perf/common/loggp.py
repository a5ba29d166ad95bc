"""What a pull should take: costs of a path's parts, and the arithmetic that puts them together.

After LogGP: a latency, and for each part of the path that a byte passes (the owner's processor, the
wire, the puller's processor) a cost per operation and per byte.  Parts work at the same time, so
the slowest of them decides, unless there are too few operations in flight to keep it busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """Seconds that one part of a path is busy for each span, each operation and each byte."""

    span: float = 0.0
    operation: float = 0.0
    byte: float = 0.0

    def busy(self, work: Work) -> float:
        """Seconds for all of a work."""
        return (
            work.spans * self.span
            + work.operations * self.operation
            + work.rounded_bytes * self.byte
        )


@dataclass(frozen=True)
class Path:
    """How a path moves bytes, and what that costs.

    call: seconds of a pull of next to nothing, latency included: the checks, handing it over,
        waking up, and the look at the generation word; another: of each further one at its side.
    latency: seconds from posting an operation without bytes to its completion.
    owner, wire, puller: the parts; `wire` is one rail.
    operation_bytes, operation_spans: the most that one operation takes.
    grain: a span costs as many bytes as it has, rounded up to these (a page, a packet).
    in_flight: operations of one transfer; window: bytes in flight on one link.
    helper: the share of a second processor in the puller's work beyond the first `alone` bytes.
    cores: processors for both sides together; None: each has its own.
    """

    call: float
    latency: float
    owner: Part
    wire: Part
    puller: Part
    operation_bytes: int
    operation_spans: int = 1
    grain: int = 1
    in_flight: int = 64
    window: int = 4 << 20
    helper: float = 0.0
    alone: int = 2 << 20
    cores: int | None = None
    another: float = 0.0

    def unhelped(self, nbytes: int) -> float:
        """The share of the puller's work that its own thread does, or the helper as long."""
        beyond = max(0.0, 1 - self.alone / nbytes)
        return 1 - beyond * self.helper / (1 + self.helper)


@dataclass(frozen=True)
class Work:
    """A pull of spans of one size, in the operations of a path."""

    spans: int
    operations: int
    bytes: int
    rounded_bytes: int


def work(path: Path, spans: int, span_bytes: int) -> Work:
    """The operations for so many spans."""
    total = spans * span_bytes
    if path.operation_spans == 1:
        operations = spans * math.ceil(span_bytes / path.operation_bytes)
    else:
        by_bytes = math.ceil(total / path.operation_bytes)
        operations = max(by_bytes, math.ceil(spans / path.operation_spans))
    rounded = spans * math.ceil(span_bytes / path.grain) * path.grain
    return Work(spans, operations, total, rounded)


def predict(
    path: Path, spans: int, span_bytes: int, *, rails: int = 1, owners: int = 1, links: int = 1
) -> tuple[float, str]:
    """Seconds until one puller has all spans, and which part decides.

    The spans are spread evenly over `owners`, and over `links` to each of them.
    """
    if spans == 0:
        return path.call, "call"
    whole = work(path, spans, span_bytes)
    owner, wire, puller = (part.busy(whole) for part in (path.owner, path.wire, path.puller))
    each = whole.bytes / whole.operations
    in_flight = max(1, min(path.in_flight, int(path.window / each))) * links * owners
    in_flight = min(in_flight, whole.operations)
    # A large operation is split over all rails; of a small one the wire's share is little anyway.
    one = path.latency + (owner + wire / rails + puller) / whole.operations
    parts = {
        "puller": puller * path.unhelped(whole.bytes),
        "owner": owner / owners,
        "wire": wire / rails,
        "window": whole.operations * one / in_flight if whole.operations > in_flight else 0.0,
    }
    if path.cores is not None:
        parts["cores"] = (owner + puller) / path.cores
    slowest = max(parts, key=lambda name: parts[name])
    # The first operation passes every part before the slowest one sets the pace.
    fill = (owner + wire / rails + puller - parts[slowest]) / whole.operations
    calls = path.call + (owners * links - 1) * path.another
    return calls + parts[slowest] + max(0.0, fill), slowest


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Factors of the columns, none negative, with the least squares of the relative errors."""
    table = np.asarray(rows, float)
    measured = np.asarray(seconds, float)
    scaled = table / measured[:, None]
    left = list(range(table.shape[1]))
    factors = np.zeros(table.shape[1])
    while left:
        found, *_ = np.linalg.lstsq(scaled[:, left], np.ones(len(measured)), rcond=None)
        if (found >= 0).all():
            factors[left] = found
            break
        del left[int(found.argmin())]
    return [float(factor) for factor in factors]
