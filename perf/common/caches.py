"""An engine with caches of known bytes: the side that is pulled from, and the side that pulls."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import ucxkv
from common import memory
from common.calls import Caller
from common.cpu import cpu_seconds
from common.workers import Worker

_PATIENCE_MS = 60_000
_CONNECTING_SECONDS = 30.0
OWNER, PULLER = 1, 2


class Engine:
    """An engine and its caches, by name; a worker process can serve it, or a node for another."""

    def __init__(
        self,
        cluster_id: int = OWNER,
        listen: str | None = "127.0.0.1:0",
        path: str = "auto",
    ) -> None:
        self.caches: dict[str, ucxkv.Cache] = {}
        self.tensors: dict[str, list[np.ndarray]] = {}
        self._wants_get = path == "get"
        options = ucxkv.Options(listen=listen, path=path, sync_cache_wait_time_ms=_PATIENCE_MS)
        role = ucxkv.LlmRole.PROMPT if cluster_id == OWNER else ucxkv.LlmRole.DECODER
        self.engine = ucxkv.LlmDataDist(cluster_id, role, options)
        self.engine.initialize()

    def address(self) -> tuple[str, int] | None:
        """Where it listens."""
        return self.engine.listen_address

    def add(
        self, name: str, tensors: int, blocks: int, block_bytes: int, kind: str, filled: bool
    ) -> int:
        """Make a cache of `kind` "ordinary" or "huge" (from `allocate_kv_cache`); its number."""
        if kind == "huge":
            shape = (blocks, block_bytes)
            description = ucxkv.CacheDesc(tensors, shape, ucxkv.DataType.UINT8)
            cache = self.engine.allocate_kv_cache(description)
            self.tensors[name] = list(cache.tensors)
        else:
            self.tensors[name] = memory.tensors_of(tensors, blocks, block_bytes, huge=False)
            cache = self.engine.register_kv_cache(None, self.tensors[name])
        self.caches[name] = cache
        if filled:
            memory.fill(self.tensors[name])
        return cache.cache_id

    def remove(self, name: str) -> None:
        """Unregister a cache, and give its memory back."""
        self.engine.unregister_kv_cache(self.caches.pop(name).cache_id)
        del self.tensors[name]

    def link(self, address: tuple[str, int], cluster_id: int = OWNER) -> float:
        """Link to an engine; seconds that it took."""
        start = time.perf_counter()
        peer = ucxkv.ClusterInfo(cluster_id, [ucxkv.IpInfo(*address)])
        self.engine.link_llm_clusters([peer], timeout_ms=_PATIENCE_MS)
        seconds = time.perf_counter() - start
        # Where RDMA connects slowly a link is up before it is known that GETs reach the peer.
        end = time.monotonic() + _CONNECTING_SECONDS
        while self._wants_get and self._path_to(cluster_id) != "get" and time.monotonic() < end:
            time.sleep(0.01)
        return seconds

    def _path_to(self, cluster_id: int) -> str:
        links = self.engine.links()
        return next((link.path for link in links if link.cluster_id == cluster_id), "")

    def cpu(self) -> float:
        """CPU seconds of this process."""
        return cpu_seconds(os.getpid())

    def links(self) -> list[dict[str, Any]]:
        """Path and transports of each link."""
        return [
            {"path": link.path, "transports": list(link.transports)} for link in self.engine.links()
        ]

    def close(self) -> None:
        """Close the engine."""
        self.engine.finalize()


@contextlib.contextmanager
def linked(owner: Caller | Worker, paths: Sequence[str]) -> Iterator[dict[str, Engine]]:
    """An engine of this process for each path, linked to the owner; closed at the end."""
    address = owner.call("address")
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for number, path in enumerate(dict.fromkeys(paths)):
            engine = Engine(PULLER + number, listen=None, path=path)
            engines[path] = stack.enter_context(contextlib.closing(engine))
            engine.link(address)
        yield engines


@contextlib.contextmanager
def pair(paths: Sequence[str]) -> Iterator[tuple[Worker, dict[str, Engine]]]:
    """An owner in a process of its own, and an engine here for each path, linked to it."""
    with Worker("common.caches:Engine", name="owner") as owner, linked(owner, paths) as engines:
        yield owner, engines
