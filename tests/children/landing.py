"""Actions that look at layers while they land."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions
from children.actions import Outcome

if TYPE_CHECKING:
    from child import Context


def reopen(ctx: Context, name: str, tensors: int, shape: tuple[int, ...], seed: int) -> int:
    """Register the arena of `name` again, with the pattern of `seed` in it."""
    if name not in ctx.arenas:
        return actions.make_cache(ctx, name, tensors, shape, seed=seed)
    arena = ctx.arenas[name]
    actions.fill_arena(arena, seed)
    cache = actions.register_arena(ctx, arena, shape)
    ctx.caches[name] = cache
    return int(cache.cache_id)


def drop_and_overwrite(ctx: Context, name: str, delay: float, timeout_ms: int) -> float:
    time.sleep(delay)
    seconds = actions.drop_cache(ctx, name, timeout_ms)
    actions.paint(ctx, name, 0xEE)
    return seconds


def layer_is_right(ctx: Context, name: str, layer: int, seed: int) -> bool:
    raws = ctx.arenas[name].raws()
    return all(
        model.matches(raws[tensor], actions.tensor_seed(seed, tensor))
        for tensor in (2 * layer, 2 * layer + 1)
    )


def watch_layers(ctx: Context, name: str, cluster_id: int, cache_id: int, seed: int) -> Outcome:
    """Look at each layer as soon as it is reported, and at all reported ones again at the end."""
    wrong: list[int] = []
    seen = 0
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    try:
        transfer = ctx.engine.pull_kv_cache_async(*args, **kwargs)
    except LookupError:
        outcome = actions.attempt(lambda: ctx.engine.pull_kv_cache(*args, **kwargs))
        outcome.extra.update(wrong=[], layers=0)
        return outcome
    over = False
    while not over:
        over = transfer.done()
        count = transfer.layers_done()
        wrong += [n for n in range(seen, count) if not layer_is_right(ctx, name, n, seed)]
        seen = max(seen, count)
    outcome = actions.attempt(lambda: transfer.result(20))
    wrong += [n for n in range(seen) if not layer_is_right(ctx, name, n, seed)]
    outcome.extra.update(wrong=wrong, layers=seen)
    return outcome


def iterate_layers(
    ctx: Context, name: str, cluster_id: int, cache_id: int, seed: int
) -> dict[str, Any]:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    transfer = ctx.engine.pull_kv_cache_async(*args, **kwargs)
    order = []
    wrong = []
    for layer in transfer.layers():
        order.append(layer)
        if not layer_is_right(ctx, name, layer, seed):
            wrong.append(layer)
    transfer.result(10)
    return {"order": order, "wrong": wrong, "at end": transfer.layers_done()}


def wait_for_layers(
    ctx: Context, name: str, cluster_id: int, cache_id: int, seed: int
) -> dict[str, Any]:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    transfer = ctx.engine.pull_kv_cache_async(*args, **kwargs)
    wrong = []
    counts = []
    for layer in (0, 1, 15, 31):
        transfer.wait_layer(layer, timeout_ms=10000)
        counts.append(transfer.layers_done())
        if counts[-1] <= layer or not layer_is_right(ctx, name, layer, seed):
            wrong.append(layer)
    transfer.result(10)
    odd = (32, 2**63, 10**400, -1, -(10**400), 1.5, "1", None)
    beyond = [actions.attempt(partial(transfer.wait_layer, i, timeout_ms=100)).kind for i in odd]
    patient = [actions.attempt(partial(transfer.result, timeout)).ok for timeout in (10**400, -1)]
    return {"wrong": wrong, "counts": counts, "beyond": beyond, "patient": patient}


def wait_for_last_layer(
    ctx: Context, name: str, cluster_id: int, cache_id: int, timeout_ms: int
) -> Outcome:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=timeout_ms)
    last = transfer_layers(ctx, name) - 1
    return actions.attempt(lambda: ctx.engine.pull_kv_cache_async(*args, **kwargs).wait_layer(last))


def transfer_layers(ctx: Context, name: str) -> int:
    return int(ctx.caches[name].cache_desc.num_tensors) // 2


def await_pulls(
    ctx: Context, name: str, cluster_id: int, cache_id: int, count: int
) -> dict[str, Any]:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    gone_args, _ = actions.pull_arguments(ctx, name, cluster_id, 10**9)

    async def one() -> str:
        return type(await ctx.engine.pull_kv_cache_async(*args, **kwargs)).__name__

    async def missing() -> str:
        try:
            await ctx.engine.pull_kv_cache_async(*gone_args, **kwargs)
        except Exception as error:
            return type(error).__name__
        return "ok"

    async def run() -> dict[str, Any]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        kinds = await asyncio.gather(*(one() for _ in range(count)))
        gone = await missing()
        ticking.cancel()
        return {"kinds": kinds, "ticks": ticks, "missing": gone}

    return asyncio.run(run())


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Within it this process cannot open anything."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 256), limits[1]))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def await_without_descriptors(
    ctx: Context, name: str, cluster_id: int, cache_id: int, count: int
) -> dict[str, Any]:
    """Await pulls, one that succeeds and one that fails at a time, while no descriptor is free."""
    good, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    bad, _ = actions.pull_arguments(ctx, name, cluster_id, 10**9)

    async def one(args: tuple[Any, ...]) -> str:
        try:
            transfer = ctx.engine.pull_kv_cache_async(*args, **kwargs)
            return type(await asyncio.wait_for(transfer, 10)).__name__
        except Exception as error:
            return type(error).__name__

    async def run() -> dict[str, Any]:
        kinds = []
        with no_descriptor_left():
            for _ in range(count):
                kinds += await asyncio.gather(one(good), one(bad))
            opened = actions.attempt(lambda: os.close(os.dup(0))).kind
        return {"kinds": Counter(kinds), "opened": opened}

    return asyncio.run(run())


# Memory of other kinds


def make_sparse(ctx: Context, name: str, slots: int, slot_bytes: int) -> int:
    """A cache so large that its memory exists only where it is touched."""
    array = np.zeros((slots, slot_bytes), np.uint8)
    ctx.values[f"sparse {name}"] = array
    ctx.caches[name] = ctx.engine.register_kv_cache(None, [array])
    return int(ctx.caches[name].cache_id)


def fill_sparse(ctx: Context, name: str, slot: int, length: int, seed: int) -> None:
    model.fill(ctx.values[f"sparse {name}"][slot, :length], seed)


def sparse_matches(ctx: Context, name: str, slot: int, length: int, seed: int) -> bool:
    return model.matches(ctx.values[f"sparse {name}"][slot, :length], seed)


def sparse_is_zero_around(ctx: Context, name: str, slot: int, length: int) -> bool:
    array = ctx.values[f"sparse {name}"]
    near = 1 << 20
    return not (
        array[slot, length : length + near].any()
        or array[slot - 1, -near:].any()
        or array[slot + 1, :near].any()
        or array[0, :near].any()
    )


def forget_sparse(ctx: Context, name: str) -> None:
    del ctx.values[f"sparse {name}"]


def register_again(ctx: Context, name: str, twin: str, shape: tuple[int, ...]) -> int:
    """Register the arena of a cache a second time."""
    ctx.caches[twin] = actions.register_arena(ctx, ctx.arenas[name], shape)
    return int(ctx.caches[twin].cache_id)


def make_read_only(ctx: Context, name: str, seed: int) -> int:
    array = np.empty((2, 1000), np.uint8)
    model.fill(array.reshape(-1), actions.tensor_seed(seed, 0))
    array.flags.writeable = False
    ctx.caches[name] = ctx.engine.register_kv_cache(None, [array])
    return int(ctx.caches[name].cache_id)


def totals(ctx: Context) -> dict[str, Any]:
    found = ctx.engine.stats()
    return {
        "transfers": found.transfers,
        "bytes": found.bytes,
        "spans": found.spans,
        "failures": {int(status): count for status, count in found.failures.items()},
        "latency": dict(found.latency),
    }
