"""A peer that asks for more of a cache than it is offered, and the pushes it tries to profit from.

The numbers of pushes are small counters, so what asks tries them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from children.stranger import HEAD, REQUEST, REQUEST_MESSAGE, Sender
from model import Arena

if TYPE_CHECKING:
    from child import Context

ATTEMPTS = range(1, 32)
INDICES = range(4)


class Ask(NamedTuple):
    """What a request names of a cache."""

    first: int
    tensors: int
    block: int
    length: int
    blocks: Sequence[int] | None = None
    total: int | None = None  # number of blocks, where it is not that of `blocks`


def ask(ctx: Context, plane: dict[str, Any], asks: Sequence[Ask]) -> None:
    """Request each as the answer to every push there may be."""
    sender = Sender(plane["address"])
    cache = plane["cache"]
    number = 1000
    for one in asks:
        payload = b"".join(block.to_bytes(4, "little") for block in one.blocks or ())
        count = one.total or len(one.blocks or (0,))
        for attempt in ATTEMPTS:
            for index in INDICES:
                request = REQUEST.pack(
                    cache["cache_id"],
                    cache["generation"],
                    cache["slot"],
                    one.first,
                    one.tensors,
                    one.blocks is not None,
                    one.block,
                    count,
                    one.length,
                    0,
                    attempt << 32 | index,
                    0,
                    0,
                )
                number += 1
                head = HEAD.pack(plane["slot"], 0, plane["token"], number)
                sender.send(REQUEST_MESSAGE, head + request, payload)
    sender.close()


def plane_for(ctx: Context, name: str, cluster_id: int) -> dict[str, Any]:
    """What a linked peer knows of us, and what it could guess of a cache that it was not told."""
    running = ctx.engine._running
    link = running.links.lookup(cluster_id)
    native = running.catalogue.get(ctx.caches[name].cache_id).native
    return {
        "address": running.native.worker_address(0),
        "slot": link.native.slot,
        "token": link.native.token,
        "cache": {
            "cache_id": ctx.caches[name].cache_id,
            "generation": native.generation,
            "slot": native.slot,
        },
    }


def make_secret(
    ctx: Context, name: str, tensors: int, shape: tuple[int, ...], **allowed: Any
) -> None:
    arena = Arena(tensors, int(np.prod(shape)))
    tensors = [raw.reshape(shape) for raw in arena.raws()]
    ctx.caches[name] = ctx.engine.register_kv_cache(None, tensors, **allowed)
    ctx.arenas[name] = arena


def bytes_served(ctx: Context) -> int:
    return int(ctx.engine.stats().bytes_served)


def push(
    ctx: Context,
    name: str,
    cluster_id: int,
    cache_id: int,
    blocks: tuple[Sequence[int], Sequence[int]] | None,
    withheld: bool,
) -> None:
    """Begin a push of slot 0, or of blocks."""
    import ucxkv

    engine, cache = ctx.engine, ctx.caches[name]
    index = ucxkv.CacheIndex(cluster_id, cache_id)
    layer_ready = True if withheld else None
    ext = ucxkv.KvCacheExtParam(
        src_layer_range=(1, 2), dst_layer_range=(1, 2), tensor_num_per_layer=1
    )
    if blocks is None:
        ctx.values["push"] = engine.push_kv_cache_async(
            cache, index, 0, ext_param=ext, timeout_ms=20_000, layer_ready=layer_ready
        )
    else:
        ctx.values["push"] = engine.push_kv_blocks_async(
            cache, index, *blocks, ext_param=ext, timeout_ms=20_000, layer_ready=layer_ready
        )


def cancel(ctx: Context) -> None:
    ctx.values.pop("push").cancel()
