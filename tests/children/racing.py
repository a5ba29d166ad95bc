"""Actions of children that talk to each other directly, past the test and past the engine."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from children import actions
from model import Arena

if TYPE_CHECKING:
    from child import Context

TENSORS, BLOCKS, SLOT = 4, 3, 1000
NOTE = struct.Struct("<qB")


def announce(ctx: Context, count: int) -> None:
    """Register, say so, wait until it has been pulled, unregister."""
    arena = Arena(TENSORS, BLOCKS * SLOT)
    for number in range(count):
        value = number % 251
        for raw in arena.raws():
            raw[:] = value
        cache = actions.register_arena(ctx, arena, (BLOCKS, SLOT))
        os.write(ctx.fds["wire"], NOTE.pack(cache.cache_id, value))
        os.read(ctx.fds["wire"], 1)
        ctx.engine.unregister_kv_cache(cache.cache_id)


def link_and_announce(ctx: Context, cluster_id: int, address: tuple[str, int], count: int) -> None:
    """Link, say so, wait until the other side has pulled, unlink."""
    arena = Arena(TENSORS, BLOCKS * SLOT)
    cache = actions.register_arena(ctx, arena, (BLOCKS, SLOT))
    for number in range(count):
        value = number % 251
        for raw in arena.raws():
            raw[:] = value
        actions.link(ctx, cluster_id, address)
        os.write(ctx.fds["wire"], NOTE.pack(cache.cache_id, value))
        os.read(ctx.fds["wire"], 1)
        actions.unlink(ctx, cluster_id)
    ctx.engine.unregister_kv_cache(cache.cache_id)


def pull_announced(ctx: Context, cluster_id: int, count: int) -> list[str]:
    actions.make_cache(ctx, "kv", TENSORS, (BLOCKS, SLOT), access="")
    raws = ctx.arenas["kv"].raws()
    problems = []
    for number in range(count):
        cache_id, value = NOTE.unpack(os.read(ctx.fds["wire"], NOTE.size))
        slot = number % BLOCKS
        outcome = actions.pull(
            ctx, "kv", cluster_id, cache_id, src_slot=slot, dst_slot=slot, timeout_ms=5000
        )
        if not outcome.ok:
            problems.append(f"round {number}: {outcome.kind}: {outcome.message}")
        elif not all((raw[slot * SLOT : (slot + 1) * SLOT] == value).all() for raw in raws):
            problems.append(f"round {number}: wrong bytes")
        os.write(ctx.fds["wire"], b"x")
    actions.drop_cache(ctx, "kv")
    return problems
