"""Memory registered with UCX, as stats() tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ucxkv import CacheDesc

if TYPE_CHECKING:
    from child import Context


def registered(ctx: Context) -> dict[str, Any]:
    found = ctx.engine.stats()
    return {
        "regions": found.registered_regions,
        "bytes": found.registered_bytes,
        "seconds": found.registration_seconds,
    }


def register(ctx: Context, tensors: int, tensor_bytes: int, gap: int) -> int:
    """Register tensors of one allocation with so many bytes between them; the cache's id."""
    step = tensor_bytes + gap
    memory = np.ones(tensors * step, np.uint8)
    views = [
        memory[i * step : i * step + tensor_bytes].reshape(1, tensor_bytes) for i in range(tensors)
    ]
    return ctx.engine.register_kv_cache(CacheDesc.from_tensors(views), views).cache_id


def unregister(ctx: Context, cache_id: int) -> None:
    ctx.engine.unregister_kv_cache(cache_id)
