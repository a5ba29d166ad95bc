"""Moves LLM KV caches between the processes of disaggregated inference, over UCX."""

from ucxkv import _load as _load

_load.load()

from ucxkv._version import __version__  # noqa: E402
from ucxkv.datadist import LlmDataDist  # noqa: E402
from ucxkv.errors import (  # noqa: E402
    AlreadyLink,
    ExistLink,
    FeatureNotEnabled,
    HoldEnded,
    KvCacheNotExist,
    LinkFailed,
    LlmError,
    LlmOutOfMemory,
    LlmTimeout,
    NotYetLink,
    ParamInvalid,
    Status,
    UnlinkFailed,
)
from ucxkv.holds import Hold  # noqa: E402
from ucxkv.layered import LayeredPush  # noqa: E402
from ucxkv.notices import Notice, Notices  # noqa: E402
from ucxkv.options import Options  # noqa: E402
from ucxkv.tls import Tls  # noqa: E402
from ucxkv.transfers import Transfer  # noqa: E402
from ucxkv.types import (  # noqa: E402
    Cache,
    CacheDesc,
    CacheIndex,
    CachePlacement,
    ClusterInfo,
    DataType,
    EngineStats,
    IpInfo,
    KvCacheExtParam,
    LinkInfo,
    LinkResult,
    LlmRole,
    TransferReport,
    TransferStats,
)

__all__ = [
    "AlreadyLink",
    "Cache",
    "CacheDesc",
    "CacheIndex",
    "CachePlacement",
    "ClusterInfo",
    "DataType",
    "EngineStats",
    "ExistLink",
    "FeatureNotEnabled",
    "Hold",
    "HoldEnded",
    "IpInfo",
    "KvCacheExtParam",
    "KvCacheNotExist",
    "LayeredPush",
    "LinkFailed",
    "LinkInfo",
    "LinkResult",
    "LlmDataDist",
    "LlmError",
    "LlmOutOfMemory",
    "LlmRole",
    "LlmTimeout",
    "NotYetLink",
    "Notice",
    "Notices",
    "Options",
    "ParamInvalid",
    "Status",
    "Tls",
    "Transfer",
    "TransferReport",
    "TransferStats",
    "UnlinkFailed",
    "__version__",
]
