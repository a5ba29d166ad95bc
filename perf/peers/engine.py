"""ucxkv itself."""

from __future__ import annotations

from typing import Any

import numpy as np

import ucxkv
from peers import sides

_PATIENCE_MS = 30_000


class _Memory(sides.Side):
    """The engine of a side; `allocated`: its caches come from `allocate_kv_cache`."""

    cluster_id: int
    role: ucxkv.LlmRole

    def __init__(self, path: str, allocated: bool = False) -> None:
        self._path = path
        self._allocated = allocated

    def _start(self, listen: str | None) -> None:
        options = ucxkv.Options(
            listen=listen, path=self._path, sync_cache_wait_time_ms=_PATIENCE_MS
        )
        self._engine = ucxkv.LlmDataDist(self.cluster_id, self.role, options)
        self._engine.initialize()

    def _allocate(self) -> list[np.ndarray]:
        if not self._allocated:
            tensors = super()._allocate()
            self._cache = self._engine.register_kv_cache(None, tensors)
            return tensors
        work = self.work
        shape = (work.blocks, work.block_bytes)
        description = ucxkv.CacheDesc(work.tensors, shape, ucxkv.DataType.UINT8)
        self._cache = self._engine.allocate_kv_cache(description)
        return list(self._cache.tensors)

    def close(self) -> None:
        self._engine.finalize()


class Owner(_Memory, sides.Owner):
    cluster_id = 1
    role = ucxkv.LlmRole.PROMPT

    def open(self) -> dict[str, Any]:
        self._start("127.0.0.1:0")
        return {"address": self._engine.listen_address}

    def _map(self) -> dict[str, Any]:
        return {"cache_id": self._cache.cache_id}


class Puller(_Memory, sides.Puller):
    cluster_id = 2
    role = ucxkv.LlmRole.DECODER

    def open(self, offer: dict[str, Any]) -> None:
        self._start(None)
        address = ucxkv.IpInfo(*offer["address"])
        self._engine.link_llm_clusters([ucxkv.ClusterInfo(1, [address])], timeout_ms=_PATIENCE_MS)

    def _map(self, offer: dict[str, Any]) -> None:
        self._source, self._destination = self._blocks()
        self._one = self.work.wanted == 1
        slot = int(self._source[0]) if self._one else 0
        self._index = ucxkv.CacheIndex(1, offer["cache_id"], slot)

    def pull(self) -> None:
        if self._one:
            self._engine.pull_kv_cache(self._index, self._cache, int(self._destination[0]))
        else:
            self._engine.pull_kv_blocks(self._index, self._cache, self._source, self._destination)
