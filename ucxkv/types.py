"""The values that go in and out of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from ucxkv.errors import Status


class LlmRole(IntEnum):
    """What an engine does in its deployment; told to peers, otherwise without effect."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class CachePlacement(IntEnum):
    """Where a cache's memory is."""

    HOST = 0
    DEVICE = 1


class DataType(Enum):
    """Element type of a cache; `itemsize` is its size in bytes (0 for UNDEFINED)."""

    UNDEFINED = ("undefined", 0)
    FLOAT = ("float32", 4)
    FLOAT16 = ("float16", 2)
    BF16 = ("bfloat16", 2)
    DOUBLE = ("float64", 8)
    BOOL = ("bool", 1)
    INT8 = ("int8", 1)
    INT16 = ("int16", 2)
    INT32 = ("int32", 4)
    INT64 = ("int64", 8)
    UINT8 = ("uint8", 1)
    UINT16 = ("uint16", 2)
    UINT32 = ("uint32", 4)
    UINT64 = ("uint64", 8)
    FLOAT8_E4M3 = ("float8_e4m3", 1)
    FLOAT8_E5M2 = ("float8_e5m2", 1)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.value[1])


@dataclass(frozen=True)
class CacheDesc:
    """Geometry of a cache: `num_tensors` tensors of one `shape` and type.

    shape[0] is the number of batch slots, or of blocks.  `placement` None: found out from the
    tensors.
    """

    num_tensors: int
    shape: tuple[int, ...]
    data_type: DataType = DataType.UNDEFINED
    placement: CachePlacement | None = None

    @classmethod
    def from_tensors(cls, tensors: Iterable[Any]) -> CacheDesc:
        """The description of these arrays.

        Raises ParamInvalid if they differ in shape or type, TypeError for what is no tensor.
        """
        from ucxkv.tensors import resolve

        return resolve(list(tensors), None)[1]


@dataclass
class Cache:
    """A registered cache: its number, its tensors' addresses and its geometry.

    `tensors` holds the arrays where the library allocated the memory, otherwise nothing.
    """

    cache_id: int = -1
    tensor_addrs: tuple[int, ...] = ()
    cache_desc: CacheDesc | None = None
    tensors: tuple[Any, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class CacheIndex:
    """One slot of a peer's cache."""

    cluster_id: int
    cache_id: int
    batch_index: int = 0


ALL_LAYERS = (-1, -1)


@dataclass(frozen=True)
class KvCacheExtParam:
    """Which layers take part: inclusive ranges of layer numbers, (-1, -1) for all.

    A layer is `tensor_num_per_layer` consecutive tensors (2: one of keys, one of values).
    """

    src_layer_range: tuple[int, int] = ALL_LAYERS
    dst_layer_range: tuple[int, int] = ALL_LAYERS
    tensor_num_per_layer: int = 2


@dataclass(frozen=True)
class IpInfo:
    """A listener's address: an IPv4 or IPv6 address or a host name, and a port."""

    ip: str
    port: int


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster to link to.

    The addresses are tried in order.  `remote_role` and `local_ip_infos` may be left out: a given
    role must be the one the peer has, and the first local address is where the connection is made
    from.
    """

    remote_cluster_id: int
    remote_ip_infos: Sequence[IpInfo] = ()
    remote_role: LlmRole | None = None
    local_ip_infos: Sequence[IpInfo] = ()


@dataclass(frozen=True)
class LinkResult:
    """How linking or unlinking one cluster went."""

    cluster_id: int
    status: Status
    message: str = ""


@dataclass(frozen=True)
class TransferReport:
    """What a transfer has moved: bytes, seconds, its path and its spans.

    The path is "get" or "stream", or "copy" within one engine.
    """

    bytes: int
    seconds: float
    path: str
    spans: int


@dataclass(frozen=True)
class TransferStats:
    """Totals of ended transfers.

    `transfers` counts them all, `failures` those that did not succeed, by Status; the others are in
    `spans`, in the bytes that were pulled by path "get" or "stream" or pushed, and in `latency`:
    quantiles ("p50", "p90", "p99") of the time from call to end in seconds, within 7 %.
    `bytes_served` were streamed to peers that pulled from here; what they read by path "get"
    nobody here can count.

    Each layer of a push begun with `layer_ready` counts as a transfer of its own, from the call to
    the layer's end; when such a push fails, each layer that had not landed is a failure.
    """

    transfers: int = 0
    spans: int = 0
    bytes_get: int = 0
    bytes_stream: int = 0
    bytes_pushed: int = 0
    bytes_served: int = 0
    failures: Mapping[Status, int] = field(default_factory=dict)
    latency: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All that was pulled and pushed."""
        return self.bytes_get + self.bytes_stream + self.bytes_pushed


@dataclass(frozen=True)
class LinkInfo:
    """One link as it is now.

    `state` is "connecting", "up", "repairing", "reconnecting" or "down"; `path` is what pulls over
    it use, "get" or "stream"; `transports` are UCX transports and devices, such as "tcp/lo", of
    which UCX 1.13 tells nothing.
    """

    cluster_id: int
    address: str
    state: str
    path: str = ""
    transports: tuple[str, ...] = ()
    role: LlmRole | None = None
    error: str = ""
    stats: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True)
class EngineStats(TransferStats):
    """Totals of an engine since it was initialized, those of links that have gone included.

    `links` has the totals of each present link, by cluster.  Of the notices that have come,
    `notices_received` in all, `notices_queued` wait for the application and `notices_waiting` for
    room in the queue: then the pulls of their peers wait too.  `holds` counts the active ones.
    `dropped` counts data-plane messages that named no link of this engine.

    `registered_regions` and `registered_bytes` are the memory that is registered with UCX for GETs
    now: RDMA devices pin all of it.  Tensors that touch share a region, and memory that is in two
    caches counts twice.  `registration_seconds` is all that registering has taken so far.
    """

    links: Mapping[int, TransferStats] = field(default_factory=dict)
    notices_received: int = 0
    notices_queued: int = 0
    notices_waiting: int = 0
    holds: int = 0
    dropped: int = 0
    registered_regions: int = 0
    registered_bytes: int = 0
    registration_seconds: float = 0.0


def transfer_totals(counted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TransferStats from what the native engine has counted."""
    names = ("transfers", "spans", "bytes_get", "bytes_stream", "bytes_pushed", "bytes_served")
    return {
        **{name: counted[name] for name in names},
        "failures": {Status(status): count for status, count in counted["failures"].items()},
        "latency": _quantiles(counted["latency_ns"]),
    }


def _quantiles(histogram: Mapping[float, int]) -> dict[str, float]:
    total = sum(histogram.values())
    quantiles: dict[str, float] = {}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        passed = 0
        for value in sorted(histogram):
            passed += histogram[value]
            if passed >= share * total:
                quantiles[name] = value * 1e-9
                break
    return quantiles
