"""Pushes: what the sender does, and how the receiver looks at what has come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import model
from children import actions, blocks, crowd
from children.actions import ALL, Outcome
from children.blocks import BlockCase
from model import Bytes

if TYPE_CHECKING:
    from child import Context


@dataclass
class PushCase:
    """A push of a slot, or of blocks where `blocks` is set; `access` is that of the source."""

    case: model.Case
    blocks: BlockCase | None
    access: str
    twin: bool

    @property
    def moved(self) -> int:
        return self.case.moved if self.blocks is None else self.blocks.moved

    def do(self, destination: list[Bytes]) -> None:
        """Do to `destination` what the push must do."""
        if self.blocks is None:
            model.model_pull(self.case, destination)
        else:
            blocks.model_pull(self.blocks, destination)


def open_destinations(ctx: Context, cases: Sequence[PushCase]) -> list[int]:
    opened = []
    for push in cases:
        arena, cache = actions.open_side(ctx, push.case, push.case.dst, "rw")
        opened.append((push, arena, cache, actions.after(arena, push.do)))
    ctx.values["destinations"] = opened
    return [int(cache.cache_id) for _, _, cache, _ in opened]


def check_destinations(ctx: Context) -> list[str]:
    """Compare the memory with the model's, guard bytes included; unregister afterwards."""
    problems = []
    for push, arena, cache, expected in ctx.values.pop("destinations"):
        problem = actions.difference(arena, expected)
        if problem:
            problems.append(f"{problem}: {push}")
        ctx.engine.unregister_kv_cache(cache.cache_id)
    return problems


def run_cases(
    ctx: Context, cluster_id: int, cases: Sequence[PushCase], cache_ids: Sequence[int], path: str
) -> list[str]:
    def run(push: PushCase, cache_id: int) -> str:
        return run_case(ctx, cluster_id, push, cache_id, path)

    return actions.problems_of(run, cases, cache_ids)


def run_case(ctx: Context, cluster_id: int, push: PushCase, cache_id: int, path: str) -> str:
    import ucxkv

    case = push.case
    arena, cache = actions.open_side(ctx, case, case.src, push.access)
    before = arena.buffer.copy()
    ext = ucxkv.KvCacheExtParam(case.src.layers, case.dst.layers, case.per_layer)
    index = ucxkv.CacheIndex(cluster_id, cache_id, case.dst.slot)
    engine = ctx.engine
    try:
        if push.blocks is None:
            function = engine.push_kv_cache_async if push.twin else engine.push_kv_cache
            found = function(cache, index, case.src.slot, case.size, ext, timeout_ms=10000)
        else:
            sources = push.blocks.src_blocks
            if sources is not None:
                sources = blocks.as_kind(sources, push.blocks.src_kind)
            targets = blocks.as_kind(push.blocks.dst_blocks, push.blocks.dst_kind)
            function = engine.push_kv_blocks_async if push.twin else engine.push_kv_blocks
            found = function(cache, index, sources, targets, ext, timeout_ms=10000)
        report = found.result(15) if push.twin else found
    except (ucxkv.LlmError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.unregister_kv_cache(cache.cache_id)
    if not model.equal(arena.buffer, before):
        return "the source has changed"
    # Nobody may read a cache of access "" by GET; and an offer may overtake the catalogue, without
    # which there is no GET either.
    paths = (path, "stream") if push.access else ("stream",)
    return actions.misreport(report, push.moved, paths)


# Single pushes


def push_arguments(
    ctx: Context,
    name: str,
    cluster_id: int,
    cache_id: int,
    *,
    src_slot: int = 0,
    dst_slot: int = 0,
    size: int = -1,
    src_layers: tuple[int, int] = ALL,
    dst_layers: tuple[int, int] = ALL,
    per_layer: int = 2,
    timeout_ms: int | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import ucxkv

    ext = ucxkv.KvCacheExtParam(src_layers, dst_layers, per_layer)
    index = ucxkv.CacheIndex(cluster_id, cache_id, dst_slot)
    return (ctx.caches[name], index, src_slot, size, ext), {"timeout_ms": timeout_ms}


def push(ctx: Context, name: str, cluster_id: int, cache_id: int, **more: Any) -> Outcome:
    args, kwargs = push_arguments(ctx, name, cluster_id, cache_id, **more)
    return actions.attempt(lambda: ctx.engine.push_kv_cache(*args, **kwargs))


def begin(ctx: Context, key: str, name: str, cluster_id: int, cache_id: int, **more: Any) -> None:
    """Start a push; actions.finish waits for it."""
    args, kwargs = push_arguments(ctx, name, cluster_id, cache_id, **more)
    ctx.values[key] = ctx.engine.push_kv_cache_async(*args, **kwargs)


def begin_layers(
    ctx: Context, key: str, name: str, cluster_id: int, cache_id: int, **more: Any
) -> None:
    """Start a push all of whose layers are ready."""
    args, kwargs = push_arguments(ctx, name, cluster_id, cache_id, **more)
    ctx.values[key] = ctx.engine.push_kv_cache_async(
        *args, **kwargs, layer_ready=lambda layer: True
    )


def raw_push(ctx: Context, fields: dict[str, Any], twin: bool = False) -> Outcome:
    """A push whose arguments may be of any type (see actions.raw_call)."""
    return actions.raw_call(
        ctx, "push_kv_cache", fields, ("src_slot", "size"), push=True, twin=twin
    )


def raw_pushes(ctx: Context, calls: Sequence[dict[str, Any]], twin: bool = False) -> list[Outcome]:
    return [raw_push(ctx, fields, twin) for fields in calls]


# At the receiver


def wait_written(ctx: Context, name: str, value: int, timeout: float = 5.0) -> bool:
    """Wait until a byte of the first tensor is no longer `value`."""
    raw = ctx.arenas[name].raw(0)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if raw[0] != value:
            return True
        time.sleep(0.0005)
    return False


def quiesce_and_reuse(
    ctx: Context, name: str, slot: int, slot_bytes: int, value: int, timeout_ms: int
) -> float:
    """Give the slot to another use; the seconds that quiesce took."""
    began = time.monotonic()
    ctx.engine.quiesce(ctx.caches[name], slot, timeout_ms=timeout_ms)
    seconds = time.monotonic() - began
    for raw in ctx.arenas[name].raws():
        raw[slot * slot_bytes : (slot + 1) * slot_bytes] = value
    return seconds


def slot_holds(ctx: Context, name: str, slot: int, slot_bytes: int, value: int) -> bool:
    return ctx.arenas[name].guards_intact() and all(
        model.is_all(raw[slot * slot_bytes : (slot + 1) * slot_bytes], value)
        for raw in ctx.arenas[name].raws()
    )


# Many at once


def push_at_once(ctx: Context, jobs: Sequence[tuple[str, int, int, int]], count: int) -> list[str]:
    """Each job (source, cluster, cache, slots) in a thread of its own: its slots in turn, `count`
    times."""

    def job(name: str, cluster_id: int, cache_id: int, slots: int) -> str:
        for number in range(count):
            for slot in range(slots):
                outcome = push(
                    ctx,
                    name,
                    cluster_id,
                    cache_id,
                    src_slot=slot,
                    dst_slot=slot,
                    timeout_ms=20000,
                )
                if not outcome.ok:
                    return f"{name}, {number}: {outcome.kind}: {outcome.message}"
        return ""

    return crowd.together([lambda one=one: job(*one) for one in jobs])


def totals(ctx: Context, cluster_id: int) -> dict[str, Any]:
    """What stats() and links() say has been done, in all and over the link to a cluster."""
    stats = ctx.engine.stats()
    info = next(one for one in ctx.engine.links() if one.cluster_id == cluster_id)
    return {"engine": stats, "of_link": stats.links[cluster_id], "info": info.stats}
