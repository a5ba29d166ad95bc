"""Actions that bring an engine to its end in one way or another."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from children import actions

if TYPE_CHECKING:
    from child import Context


def pull_in_daemon_thread(ctx: Context, name: str, cluster_id: int, cache_id: int) -> None:
    threading.Thread(
        target=actions.pull,
        args=(ctx, name, cluster_id, cache_id),
        kwargs={"timeout_ms": 20000},
        daemon=True,
    ).start()


def options_for(path: str) -> dict[str, Any]:
    return {"listen": "127.0.0.1:0", **({"path": "get"} if path == "get" else {})}


def calls_on(ctx: Context, engine: Any) -> dict[str, str]:
    import ucxkv

    desc = ucxkv.CacheDesc(1, (1, 10), ucxkv.DataType.UINT8)
    calls = {
        "register": lambda: engine.register_kv_cache(desc, [bytearray(10)]),
        "link": lambda: engine.link_llm_clusters([actions.cluster(9, ("127.0.0.1", 9))]),
        "pull": lambda: engine.pull_kv_cache(ucxkv.CacheIndex(1, 1), ucxkv.Cache(cache_id=1)),
    }
    return {name: actions.attempt(call).kind for name, call in calls.items()}


def finalize_twice(ctx: Context) -> dict[str, Any]:
    twice = actions.attempt(ctx.engine.initialize).kind
    ctx.engine.finalize()
    again = actions.attempt(ctx.engine.finalize).kind
    return {
        "initialized twice": twice,
        "again": again,
        "calls": calls_on(ctx, ctx.engine),
        "threads": [name for name in actions.thread_names(ctx) if "ucxkv" in name.lower()],
    }


def run_engine_once(ctx: Context, path: str) -> None:
    engines = [actions.build_engine(number, options_for(path)) for number in (1, 2)]
    engines[0].link_llm_clusters([actions.cluster(2, engines[1].listen_address)])
    engines[0].allocate_kv_cache(allocation())
    for engine in engines:
        engine.finalize()


def allocation() -> Any:
    import ucxkv

    return ucxkv.CacheDesc(2, (4, 100_000), ucxkv.DataType.UINT8)


def context_manager(ctx: Context) -> dict[str, Any]:
    import ucxkv

    with ucxkv.LlmDataDist(1, options=ucxkv.Options(listen="127.0.0.1:0")) as engine:
        inside = engine.listen_address
    after = calls_on(ctx, engine)["register"]
    engine.initialize()
    again = engine.listen_address
    engine.finalize()
    return {"inside": inside, "after": after, "again": again}


def drop_engine(ctx: Context, address: tuple[str, int]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = actions.build_engine(2, {"listen": "127.0.0.1:0"})
        engine.link_llm_clusters([actions.cluster(1, address)], timeout_ms=5000)
        engine.allocate_kv_cache(allocation())
        del engine
        gc.collect()
        end = time.monotonic() + 5
        while len(os.listdir("/proc/self/task")) > 2 and time.monotonic() < end:
            time.sleep(0.05)
            gc.collect()
    return {"warnings": [one.category.__name__ for one in caught]}


def listen_at(ctx: Context, address: tuple[str, int]) -> actions.Outcome:
    return actions.attempt(
        lambda: actions.build_engine(9, {"listen": f"{address[0]}:{address[1]}"}).finalize()
    )


def never_initialized(ctx: Context) -> dict[str, Any]:
    import ucxkv

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = ucxkv.LlmDataDist(1)
        calls = calls_on(ctx, engine)
        engine.finalize()
        del engine
        gc.collect()
    return {"warnings": [str(one.message) for one in caught], "calls": calls}


def finalize_beside_registrations(ctx: Context, path: str, count: int) -> Counter[str]:
    """Finalize an engine, linked to another one, while threads register and unregister caches;
    how often the threads were ended by which error."""
    ends: Counter[str] = Counter()
    rng = random.Random(6)
    for _ in range(count):
        engines = [actions.build_engine(number, options_for(path)) for number in (1, 2)]
        target = actions.cluster(2, engines[1].listen_address)
        engines[0].link_llm_clusters([target], timeout_ms=5000)
        victim = rng.choice(engines)

        def work(engine: Any = victim) -> None:
            outcome = actions.Outcome("ok")
            while outcome.ok:
                outcome = actions.attempt(lambda: register_and_unregister(engine))
            ends[f"{outcome.kind}: {outcome.message}"] += 1

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0, 0.005))
        victim.finalize()
        for thread in threads:
            thread.join()
        for engine in engines:
            engine.finalize()
    return ends


def register_and_unregister(engine: Any) -> None:
    import ucxkv

    desc = ucxkv.CacheDesc(2, (2, 5000), ucxkv.DataType.UINT8)
    cache = engine.register_kv_cache(desc, [bytearray(10_000), bytearray(10_000)])
    engine.unregister_kv_cache(cache.cache_id)


def open_both_ways(
    ctx: Context, tensors: int, shape: tuple[int, ...], aliases: int, seed: int
) -> int:
    """Register a source and a destination, in the same memory each time; the source's id."""
    for name, access in (("from", "r"), ("into", "")):
        if name not in ctx.arenas:
            actions.make_cache(ctx, name, tensors, shape, seed=seed, access=access, aliases=aliases)
        elif name not in ctx.caches:
            ctx.caches[name] = actions.register_arena(
                ctx, ctx.arenas[name], shape, access=access, aliases=aliases
            )
    return int(ctx.caches["from"].cache_id)


def reopen(ctx: Context) -> tuple[str, int]:
    """Finalize the engine and open it again; where it listens then."""
    ctx.engine.finalize()
    ctx.caches.clear()
    ctx.engine.initialize()
    address: tuple[str, int] = ctx.engine.listen_address
    return address
