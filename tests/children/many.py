"""Thousands of transfers of one link at a time, of every kind."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import model
from children import actions, pushing

if TYPE_CHECKING:
    from child import Context

KINDS = ["pull", "pull told", "pull cancelled", "push", "push cancelled", "withheld", "dropped"]


def begin(
    ctx: Context, cluster_id: int, source: int, inbox: int, slots: int, seed: int
) -> dict[str, list[int]]:
    """For each slot begin one of KINDS, from or to the same slot of the peer's; the slots of each.

    Pulls go from `source` to "kv", pushes from "out" to `inbox`; those that wait to be cancelled,
    released or dropped are left to `finish`.
    """
    rng = random.Random(seed)
    begun: dict[str, list[int]] = {kind: [] for kind in KINDS}
    running = ctx.values["running"] = {}
    engine = ctx.engine
    for slot in range(slots):
        kind = rng.choice(KINDS)
        places = {"src_slot": slot, "dst_slot": slot, "timeout_ms": 30_000}
        more: dict[str, Any] = {"pull told": {"notice": slot.to_bytes(4, "little")}}.get(kind, {})
        if kind.startswith("pull"):
            args, kwargs = actions.pull_arguments(ctx, "kv", cluster_id, source, **places)
            running[slot] = engine.pull_kv_cache_async(*args, **kwargs, **more)
        else:
            args, kwargs = pushing.push_arguments(ctx, "out", cluster_id, inbox, **places)
            ready = True if kind in ("withheld", "dropped") else None
            running[slot] = engine.push_kv_cache_async(*args, **kwargs, layer_ready=ready)
        begun[kind].append(slot)
    return begun


def finish(ctx: Context, begun: dict[str, list[int]], seed: int) -> dict[str, dict[str, int]]:
    """Release and cancel in any order; how the transfers of each kind have ended."""
    rng = random.Random(seed)
    running = ctx.values.pop("running")
    todo = [
        (kind, slot)
        for kind in ("pull cancelled", "push cancelled", "withheld", "dropped")
        for slot in begun[kind]
    ]
    rng.shuffle(todo)
    for kind, slot in todo:
        if kind == "withheld":
            running[slot].layer_ready(0)
        else:
            running[slot].cancel()
    ends: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, slots in begun.items():
        for slot in slots:
            transfer = running[slot]
            ends[kind][actions.attempt(lambda one=transfer: one.result(30)).kind] += 1
    return {kind: dict(found) for kind, found in ends.items()}


def wrong(ctx: Context, name: str, seed: int, slots: list[int], slot_bytes: int) -> list[int]:
    """Those of the slots that do not hold what the same slots of the other side do."""
    return [
        slot
        for slot in slots
        for tensor, raw in enumerate(ctx.arenas[name].raws())
        if not model.matches(
            raw[slot * slot_bytes : (slot + 1) * slot_bytes],
            actions.tensor_seed(seed, tensor),
            slot * slot_bytes,
        )
    ]


def cache_id(ctx: Context, name: str) -> int:
    return int(ctx.caches[name].cache_id)


def running(ctx: Context, cluster_id: int) -> int:
    """Transfers of ours over the link."""
    return int(ctx.engine._running.links.lookup(cluster_id).native.pulls)
