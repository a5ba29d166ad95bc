"""Caches that are shown to some clusters only, and a peer that has heard of one all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions
from model import Arena

if TYPE_CHECKING:
    from child import Context


def make_cache(
    ctx: Context,
    name: str,
    tensors: int,
    shape: tuple[int, ...],
    peers: Sequence[int] | None,
    *,
    seed: int,
    access: str = "r",
) -> int:
    import ucxkv

    arena = Arena(tensors, int(np.prod(shape)))
    actions.fill_arena(arena, seed)
    arrays = [raw.reshape(shape) for raw in arena.raws()]
    cache = ctx.engine.register_kv_cache(None, arrays, access=access, peers=peers)
    assert cache.cache_desc.data_type is ucxkv.DataType.UINT8
    ctx.arenas[name], ctx.caches[name] = arena, cache
    return int(cache.cache_id)


def allocate(ctx: Context, tensors: int, shape: tuple[int, ...], peers: Sequence[int]) -> int:
    import ucxkv

    desc = ucxkv.CacheDesc(tensors, shape, ucxkv.DataType.UINT8)
    cache = ctx.engine.allocate_kv_cache(desc, peers=peers)
    for number, tensor in enumerate(cache.tensors):
        model.fill(tensor.reshape(-1), actions.tensor_seed(1, number))
    return int(cache.cache_id)


def known(ctx: Context, cluster_id: int) -> list[int]:
    """The caches of a cluster that this engine has been told of."""
    link = ctx.engine._running.links.lookup(cluster_id)
    return sorted(link.remote)


def description(ctx: Context, cache_id: int) -> bytes:
    """What the listed clusters are told of a cache."""
    return bytes(ctx.engine._running.catalogue.get(cache_id).message)


def learn(ctx: Context, cluster_id: int, description: bytes) -> None:
    """Take a description for one that the cluster has told, as a peer that means harm would."""
    import msgspec

    from ucxkv import wire

    table = ctx.engine._running.links
    link = table.lookup(cluster_id)
    told = msgspec.msgpack.decode(description, type=wire.CacheEntry)

    async def insert() -> None:
        link._learn(told)

    table._control.call(insert())


def hold(ctx: Context, name: str) -> tuple[int, int]:
    """Hold a cache; word and slot of the hold."""
    ctx.values["hold"] = held = ctx.engine.hold(ctx.caches[name], None, 600_000)
    return held._native.word, held._native.slot


def push(ctx: Context, name: str, cluster_id: int, cache_id: int) -> Any:
    import ucxkv

    index = ucxkv.CacheIndex(cluster_id, cache_id)
    return actions.attempt(
        lambda: ctx.engine.push_kv_cache(ctx.caches[name], index, timeout_ms=5000)
    )


def refused_arguments(ctx: Context) -> list[str]:
    """The errors that senseless `peers` raise, by both calls."""
    import ucxkv

    desc = ucxkv.CacheDesc(1, (1, 8), ucxkv.DataType.UINT8)
    array = np.zeros((1, 8), np.uint8)
    outcomes = []
    for peers in (3, "12", [1.5], [True], [-1], [1 << 63]):
        outcomes += [
            actions.attempt(lambda p=peers: ctx.engine.register_kv_cache(None, [array], peers=p)),
            actions.attempt(lambda p=peers: ctx.engine.allocate_kv_cache(desc, peers=p)),
        ]
    return [outcome.kind for outcome in outcomes]
