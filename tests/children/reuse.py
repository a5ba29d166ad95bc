"""Actions around memory that is freed and used again, and the board on which it is announced."""

from __future__ import annotations

import mmap
import os
import random
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions, landing

if TYPE_CHECKING:
    from child import Context

TENSORS, SHAPE = 4, (2, 100_000)
TENSOR_BYTES = SHAPE[0] * SHAPE[1]
ENTRY = struct.Struct("<qq")

reopen = landing.reopen


class Board:
    """A page of shared memory with the id of the cache to pull and the seed of its bytes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> Board:
        fd = os.memfd_create("board")
        os.ftruncate(fd, mmap.PAGESIZE)
        board = cls(fd)
        board.announce(-1, 0)
        return board

    def announce(self, cache_id: int, seed: int) -> None:
        # Both copies equal: the reader has not met a writer half way.
        self.map[: ENTRY.size] = ENTRY.pack(cache_id, seed)
        self.map[64 : 64 + ENTRY.size] = ENTRY.pack(cache_id, seed)

    def read(self) -> tuple[int, int]:
        while True:
            second = ENTRY.unpack(self.map[64 : 64 + ENTRY.size])
            first = ENTRY.unpack(self.map[: ENTRY.size])
            if first == second:
                return first

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self.map.close()
        os.close(self.fd)


def register_and_free(ctx: Context, count: int) -> float:
    """Register fresh memory, announce it, unregister it under its readers, unmap it; `count`
    times.  The slowest unregistration."""
    import ucxkv

    board = Board(ctx.fds["board"])
    rng = random.Random(2)
    slowest = 0.0
    desc = ucxkv.CacheDesc(TENSORS, SHAPE, ucxkv.DataType.UINT8)
    for number in range(count):
        memory = mmap.mmap(-1, TENSORS * TENSOR_BYTES)
        whole = np.frombuffer(memory, np.uint8)
        tensors = np.split(whole, TENSORS)
        for tensor, raw in enumerate(tensors):
            model.fill(raw, actions.tensor_seed(number, tensor))
        cache = ctx.engine.register_kv_cache(desc, [raw.reshape(SHAPE) for raw in tensors])
        board.announce(cache.cache_id, number)
        time.sleep(rng.uniform(0, 0.008))
        began = time.monotonic()
        ctx.engine.unregister_kv_cache(cache.cache_id, timeout_ms=1000)
        slowest = max(slowest, time.monotonic() - began)
        whole[:] = 0xEE
        del tensors, raw, whole
        # Fails if the engine still holds an export of the memory.
        memory.close()
    board.announce(-1, 0)
    return slowest


def pull_whatever_is_announced(ctx: Context, cluster_id: int) -> dict[str, Any]:
    board = Board(ctx.fds["board"])
    actions.make_cache(ctx, "kv", TENSORS, SHAPE, access="")
    raws = ctx.arenas["kv"].raws()
    right = gone = 0
    problems: list[str] = []
    ctx.stop.clear()
    while not ctx.stop.is_set():
        cache_id, seed = board.read()
        if cache_id < 0:
            time.sleep(0.001)
            continue
        outcome = actions.pull(
            ctx, "kv", cluster_id, cache_id, src_slot=1, dst_slot=0, timeout_ms=5000
        )
        if outcome.kind == "KvCacheNotExist":
            gone += 1
        elif not outcome.ok:
            problems.append(f"{outcome.kind}: {outcome.message}")
        elif all(
            model.matches(raw[: SHAPE[1]], actions.tensor_seed(seed, tensor), SHAPE[1])
            for tensor, raw in enumerate(raws)
        ):
            right += 1
        else:
            problems.append(f"wrong bytes of cache {cache_id}")
    actions.drop_cache(ctx, "kv")
    return {"right": right, "gone": gone, "problems": problems[:5]}


def finish(ctx: Context) -> None:
    ctx.stop.set()


def unregister_unknown(ctx: Context) -> None:
    ctx.engine.unregister_kv_cache(10**12)
    cache_id = actions.make_cache(ctx, "once", 1, (1, 10))
    ctx.engine.unregister_kv_cache(cache_id)
    ctx.engine.unregister_kv_cache(cache_id)
