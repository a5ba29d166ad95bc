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


@dataclass(frozen=True)
class KvCacheExtParam:
    """Which layers take part: inclusive ranges of layer numbers, (-1, -1) for all.

    A layer is `tensor_num_per_layer` consecutive tensors (2: one of keys, one of values).
    """

    src_layer_range: tuple[int, int] = (-1, -1)
    dst_layer_range: tuple[int, int] = (-1, -1)
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
class LinkInfo:
    """One link as it is now.

    `state` is "connecting", "up", "repairing", "reconnecting" or "down"; `path` is what pulls over
    it use, "get" or "stream"; `transports` are UCX transports and devices, such as "tcp/lo".
    """

    cluster_id: int
    address: str
    state: str
    path: str = ""
    transports: tuple[str, ...] = ()
    role: LlmRole | None = None
    error: str = ""


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
class EngineStats:
    """Totals of an engine's transfers since it was initialized.

    `failures` counts those that did not succeed, by Status.  `latency` has quantiles of the time
    from call to end of those that did, in seconds (within 7 %).  `dropped` counts data-plane
    messages that named no link of this engine.

    Each layer of a push begun with `layer_ready` counts as a transfer of its own, from the call to
    the layer's end; when such a push fails, each layer that had not landed is a failure.
    """

    transfers: int
    bytes: int
    spans: int
    failures: Mapping[Status, int]
    latency: Mapping[str, float]
    dropped: int

    @classmethod
    def from_totals(cls, totals: Mapping[str, Any]) -> EngineStats:
        """From the counters of the native engine."""
        failures = {
            Status.FAILED: totals["failed"],
            Status.KV_CACHE_NOT_EXIST: totals["not_exist"],
            Status.TIMEOUT: totals["timeouts"],
            Status.NOT_YET_LINK: totals["not_linked"],
        }
        return cls(
            transfers=totals["transfers"],
            bytes=totals["bytes"],
            spans=totals["spans"],
            failures={status: count for status, count in failures.items() if count},
            latency=_quantiles(totals["latency_ns"]),
            dropped=totals["dropped"],
        )


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
