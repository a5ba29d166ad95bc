"""Actions that do the same thing many times, and count what is left of it."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from children import actions

if TYPE_CHECKING:
    from child import Context


class MallocInfo(ctypes.Structure):
    """struct mallinfo of glibc: bytes in use are `uordblks`, those of mappings `hblkhd`."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def link_pull_unlink(
    ctx: Context, cluster_id: int, address: tuple[str, int], cache_id: int, count: int
) -> None:
    if "sink" not in ctx.caches:
        actions.make_cache(ctx, "sink", 4, (2, 1000), access="")
    for _ in range(count):
        actions.link(ctx, cluster_id, address)
        outcome = actions.pull(ctx, "sink", cluster_id, cache_id, timeout_ms=5000)
        if not outcome.ok:
            raise RuntimeError(f"{outcome.kind}: {outcome.message}")
        actions.unlink(ctx, cluster_id)
    if actions.wrong_slots(ctx, "sink", 1, 0, 1000):
        raise RuntimeError("wrong bytes")


def objects(ctx: Context) -> dict[str, int]:
    gc.collect()
    counts = Counter(
        f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects()
    )
    return dict(counts)


def exports(ctx: Context) -> dict[str, Any]:
    import ucxkv

    memory = bytearray(4096)
    array = np.zeros((4, 100), np.uint8)
    references = sys.getrefcount(array)
    desc = ucxkv.CacheDesc(1, (4, 1024), ucxkv.DataType.UINT8)
    first = ctx.engine.register_kv_cache(desc, [memory])
    second = ctx.engine.register_kv_cache(
        ucxkv.CacheDesc(1, (4, 100), ucxkv.DataType.UINT8), [array]
    )
    held = False
    try:
        memory.append(0)
    except BufferError:
        held = True
    held = held and sys.getrefcount(array) > references
    ctx.engine.unregister_kv_cache(first.cache_id)
    ctx.engine.unregister_kv_cache(second.cache_id)
    del first, second
    gc.collect()
    released = True
    try:
        memory.append(0)
    except BufferError:
        released = False
    return {
        "held": held,
        "released": released,
        "references": sys.getrefcount(array) - references,
    }


def register_unregister(ctx: Context, count: int) -> None:
    for _ in range(count):
        actions.make_cache(ctx, "again", 8, (2, 1000))
        actions.drop_cache(ctx, "again")
        del ctx.arenas["again"]


def fail(ctx: Context, cluster_id: int, cache_id: int, count: int) -> None:
    if "sink" not in ctx.caches:
        actions.make_cache(ctx, "sink", 4, (2, 1000), access="")
    ctx.values["errors"] = Counter()
    for _ in range(count):
        for outcome in (
            actions.pull(ctx, "sink", cluster_id, cache_id, src_slot=5),
            actions.pull(ctx, "sink", cluster_id, cache_id, size=-7),
            actions.pull(ctx, "sink", cluster_id, 10**9),
            actions.pull(ctx, "sink", 999, cache_id),
            actions.try_link(ctx, [(5, ("127.0.0.1", 1))], timeout_ms=500),
            actions.attempt(lambda: ctx.engine.register_kv_cache(None, [object()])),
        ):
            if outcome.ok:
                raise RuntimeError("this had to fail")


def cycle_engines(ctx: Context, options: dict[str, Any], count: int) -> None:
    for _ in range(count):
        engines = [actions.build_engine(number, options) for number in (1, 2)]
        engines[0].link_llm_clusters([actions.cluster(2, engines[1].listen_address)])
        for engine in engines:
            engine.finalize()
    del engines, engine
    gc.collect()


def spend_lists(
    ctx: Context, cluster_id: int, address: tuple[str, int], cache_id: int, path: str, count: int
) -> int:
    """Transfers of long lists of blocks that end in every way, the last with their engine.

    Returns the bytes that the allocator has given away and not got back: what it keeps for later
    varies by more than a few lists.
    """
    import ucxkv

    blocks = 200_000
    sources, targets = np.arange(blocks)[::-1], np.arange(blocks)
    index, elsewhere = ucxkv.CacheIndex(cluster_id, cache_id), ucxkv.CacheIndex(999, cache_id)
    tensor = np.zeros((blocks, 16), np.uint8)
    options = {"path": path} if path == "get" else {}
    for _ in range(count):
        engine = actions.build_engine(3, options)
        engine.link_llm_clusters([actions.cluster(cluster_id, address)], timeout_ms=5000)
        cache = engine.register_kv_cache(None, [tensor])
        engine.pull_kv_blocks(index, cache, sources, targets, timeout_ms=20000)
        engine.pull_kv_blocks_async(index, cache, sources, targets).cancel()
        engine.push_kv_blocks_async(cache, index, sources, targets, layer_ready=True).cancel()
        for far, refused in ((elsewhere, targets), (index, targets + 1), (index, targets // 2)):
            outcome = actions.attempt(
                functools.partial(engine.pull_kv_blocks, far, cache, sources, refused)
            )
            if outcome.kind not in ("NotYetLink", "ParamInvalid"):
                raise RuntimeError(f"{outcome.kind}: {outcome.message}")
        running = [
            engine.pull_kv_blocks_async(index, cache, sources, targets),
            engine.push_kv_blocks_async(cache, index, sources, targets, layer_ready=True),
        ]
        engine.finalize()
        for transfer in running:
            if not transfer.done():
                raise RuntimeError("a transfer has outlived its engine")
    del running, transfer, engine, cache
    gc.collect()
    info = ctypes.CDLL(None).mallinfo
    info.restype = MallocInfo
    found = info()
    return int(found.uordblks + found.hblkhd)
