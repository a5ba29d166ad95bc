"""Actions that do the same thing many times, and count what is left of it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from children import actions

if TYPE_CHECKING:
    from child import Context


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
