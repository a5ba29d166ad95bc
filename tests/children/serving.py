"""Actions of a puller that goes on pulling while something else happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from children import actions

if TYPE_CHECKING:
    from child import Context


def pull_until_told(ctx: Context, name: str, cluster_id: int, cache_id: int) -> dict[str, Any]:
    ctx.stop.clear()
    pulls = 0
    slowest = 0.0
    problems: list[str] = []
    while not ctx.stop.is_set():
        outcome = actions.pull(ctx, name, cluster_id, cache_id)
        slowest = max(slowest, outcome.seconds)
        pulls += 1
        if not outcome.ok:
            problems.append(f"{outcome.kind}: {outcome.message}")
        # Leave the cores to what goes on meanwhile.
        time.sleep(0.002)
    return {"pulls": pulls, "slowest": slowest, "problems": problems[:5]}


def finish(ctx: Context) -> None:
    ctx.stop.set()


def pull_for(ctx: Context, name: str, cluster_id: int, cache_id: int, seconds: float) -> float:
    """Pull again and again; bytes per second."""
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    moved = 0
    began = time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        moved += ctx.engine.pull_kv_cache(*args, **kwargs).bytes
    return moved / (now - began)
