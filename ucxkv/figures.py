"""The figures of one engine at one moment, as they are shown, sent and exported."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ucxkv._version import __version__
from ucxkv.errors import Status
from ucxkv.netif import endpoint

if TYPE_CHECKING:
    from ucxkv.running import Running

# Those that a transfer which has begun can end with.
FAILURES = (
    Status.FAILED.name,
    Status.KV_CACHE_NOT_EXIST.name,
    Status.NOT_YET_LINK.name,
    Status.FEATURE_NOT_ENABLED.name,
    Status.TIMEOUT.name,
    Status.OUT_OF_MEMORY.name,
    Status.HOLD_ENDED.name,
)
LINK_STATES = ("connecting", "up", "repairing", "reconnecting", "down")


class Totals(msgspec.Struct, frozen=True):
    """What has been counted of transfers that have ended.

    Of those that succeeded, `latency` has how many took about so many seconds, ascending, and
    `latency_sum` the seconds that all of them took.
    """

    transfers: int = 0
    spans: int = 0
    bytes_get: int = 0
    bytes_stream: int = 0
    bytes_pushed: int = 0
    bytes_served: int = 0
    failures: dict[str, int] = {}
    latency: list[tuple[float, int]] = []
    latency_sum: float = 0.0

    @property
    def failed(self) -> int:
        """Transfers that did not succeed."""
        return sum(self.failures.values())

    @property
    def pulled(self) -> int:
        """Bytes that came by pulls of ours."""
        return self.bytes_get + self.bytes_stream

    def since(self, earlier: Totals) -> Totals:
        """What has come on top of `earlier`; all of it where the counting began anew."""
        if self.transfers < earlier.transfers or self.bytes_served < earlier.bytes_served:
            return self
        before = dict(earlier.latency)
        latency = [(value, count - before.get(value, 0)) for value, count in self.latency]
        return Totals(
            transfers=self.transfers - earlier.transfers,
            spans=self.spans - earlier.spans,
            bytes_get=self.bytes_get - earlier.bytes_get,
            bytes_stream=self.bytes_stream - earlier.bytes_stream,
            bytes_pushed=self.bytes_pushed - earlier.bytes_pushed,
            bytes_served=self.bytes_served - earlier.bytes_served,
            failures={
                name: count - earlier.failures.get(name, 0)
                for name, count in self.failures.items()
                if count > earlier.failures.get(name, 0)
            },
            latency=[(value, count) for value, count in latency if count],
            latency_sum=self.latency_sum - earlier.latency_sum,
        )

    def quantile(self, share: float) -> float | None:
        """The seconds within which that share of the successful transfers ended; None of none."""
        wanted = share * sum(count for _, count in self.latency)
        passed = 0
        for value, count in self.latency:
            passed += count
            if passed >= wanted:
                return value
        return None


class LinkFigures(msgspec.Struct, frozen=True):
    """One link; `state` is one of LINK_STATES."""

    cluster_id: int
    state: str
    address: str = ""
    path: str = ""
    transports: list[str] = []
    error: str = ""
    totals: Totals = Totals()


class Figures(msgspec.Struct, frozen=True):
    """One engine.

    `at` is a time of a clock that only runs on, in seconds, `started` one since the epoch.
    `registered_bytes` are those of all caches; memory that is registered twice is counted twice.
    `pinned_bytes` are those that UCX has mapped for one-sided reads, which RDMA pins.
    """

    cluster_id: int
    role: str
    at: float
    pid: int = 0
    version: str = ""
    ucx: str = ""
    address: str = ""
    started: float = 0.0
    running: int = 0
    totals: Totals = Totals()
    links: list[LinkFigures] = []
    caches: int = 0
    registered_bytes: int = 0
    pinned_bytes: int = 0
    holds: int = 0
    notices_received: int = 0
    notices_queued: int = 0
    notices_waiting: int = 0
    dropped: int = 0


def figures_of(running: Running) -> Figures:
    """Look at a running engine, from any thread."""
    links = running.links
    counted = running.native.totals()
    entries = running.catalogue.snapshot()
    return Figures(
        cluster_id=running.cluster_id,
        role=links.role.name,
        at=time.monotonic(),
        pid=os.getpid(),
        version=__version__,
        ucx=running.native.ucx_version,
        address=endpoint(*links.listen_address) if links.listen_address else "",
        started=running.started,
        running=counted["running"],
        totals=totals_of(counted),
        links=links.figures(),
        caches=len(entries),
        registered_bytes=sum(
            entry.desc.num_tensors * entry.blocks * entry.block_bytes for entry in entries
        ),
        holds=counted["holds"],
        notices_received=counted["notices_received"],
        notices_queued=counted["notices_queued"],
        notices_waiting=counted["notices_waiting"],
        dropped=counted["dropped"],
        pinned_bytes=sum(entry.native.pinned for entry in entries),
    )


def totals_of(counted: Mapping[str, Any]) -> Totals:
    """Totals of what the native engine has counted."""
    return Totals(
        transfers=counted["transfers"],
        spans=counted["spans"],
        bytes_get=counted["bytes_get"],
        bytes_stream=counted["bytes_stream"],
        bytes_pushed=counted["bytes_pushed"],
        bytes_served=counted["bytes_served"],
        failures={Status(status).name: count for status, count in counted["failures"].items()},
        latency=[(ns * 1e-9, count) for ns, count in sorted(counted["latency_ns"].items())],
        latency_sum=counted["latency_sum_ns"] * 1e-9,
    )
