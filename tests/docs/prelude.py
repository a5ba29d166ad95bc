"""The names that examples in the documentation use without saying where they come from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucxkv import (
    Cache,
    CacheIndex,
    ClusterInfo,
    Hold,
    IpInfo,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Notice,
    Options,
    Transfer,
)

engine: LlmDataDist
prefill: LlmDataDist
decode: LlmDataDist
cache: Cache
ours: Cache
cache_id: int
blocks: Sequence[int]
our_blocks: Sequence[int]
token: str
tensors: list[NDArray[Any]]
host: str
port: int


# Of a model in another library.
model: Any
prompt: Any
cache_of_the_model: Any
told: bytes


def attend(layer: int) -> None: ...
def send_to_decode(token: str | bytes, blocks: Sequence[int]) -> None: ...
def wait_for_decode() -> None: ...
def release_blocks_of(request: bytes) -> None: ...


__all__ = [
    "Any",
    "Cache",
    "CacheIndex",
    "ClusterInfo",
    "Hold",
    "IpInfo",
    "KvCacheExtParam",
    "LlmDataDist",
    "LlmRole",
    "Notice",
    "Options",
    "Transfer",
    "attend",
    "blocks",
    "cache",
    "cache_id",
    "cache_of_the_model",
    "decode",
    "engine",
    "host",
    "model",
    "np",
    "our_blocks",
    "ours",
    "port",
    "prefill",
    "prompt",
    "release_blocks_of",
    "send_to_decode",
    "tensors",
    "token",
    "told",
    "wait_for_decode",
]
