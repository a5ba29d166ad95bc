"""Actions of several threads, or several engines, in one child."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from children import actions, ending

if TYPE_CHECKING:
    from child import Context


def together(jobs: Sequence[Callable[[], str]]) -> list[str]:
    """Run all at once; what they complain of."""
    problems: list[str] = []
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], str]) -> None:
        barrier.wait(10)
        try:
            problem = job()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def pull_at_once(ctx: Context, jobs: Sequence[tuple[str, int, int, int]], count: int) -> list[str]:
    """Each job (destination, cluster, cache, seed) in a thread of its own, `count` times."""

    def job(name: str, cluster_id: int, cache_id: int, seed: int) -> str:
        half = ctx.arenas[name].nbytes // 2
        for number in range(count):
            outcome = actions.pull(ctx, name, cluster_id, cache_id, timeout_ms=20000)
            if not outcome.ok:
                return f"{name}, {number}: {outcome.kind}: {outcome.message}"
            if actions.wrong_slots(ctx, name, seed, 0, half):
                return f"{name}, {number}: wrong bytes"
            for raw in ctx.arenas[name].raws():
                raw[:half] = 0
        return ""

    return together([lambda one=one: job(*one) for one in jobs])


def pull_slots_at_once(
    ctx: Context, name: str, cluster_id: int, cache_id: int, slots: int
) -> list[str]:
    def job(slot: int) -> str:
        outcome = actions.pull(
            ctx, name, cluster_id, cache_id, src_slot=slot, dst_slot=slot, timeout_ms=20000
        )
        return "" if outcome.ok else f"{slot}: {outcome.kind}: {outcome.message}"

    return together([lambda slot=slot: job(slot) for slot in range(slots)])


def mix(ctx: Context, cluster_id: int, cache_id: int, seed: int) -> list[str]:
    def work(number: int) -> str:
        name = f"mix{number}"
        for _ in range(25):
            actions.make_cache(ctx, name, 6, (2, 20_000), access="")
            outcome = actions.pull(ctx, name, cluster_id, cache_id, timeout_ms=20000)
            if not outcome.ok:
                return f"{outcome.kind}: {outcome.message}"
            if actions.wrong_slots(ctx, name, seed, 0, 20_000):
                return "wrong bytes"
            actions.drop_cache(ctx, name)
        return ""

    def ask() -> str:
        for _ in range(100):
            if cluster_id not in {info.cluster_id for info in ctx.engine.links()}:
                return "the link is not listed"
            ctx.engine.stats()
        return ""

    return together([*(lambda n=n: work(n) for n in range(6)), ask, ask])


def two_engines(ctx: Context, path: str, linking: str) -> list[str]:
    """Link two engines of this process, by one or by both at once, and pull both ways."""
    engines = {number: actions.build_engine(number, ending.options_for(path)) for number in (1, 2)}
    problems = []
    try:
        if linking == "one":
            engines[1].link_llm_clusters([actions.cluster(2, engines[2].listen_address)])
        else:
            problems += together(
                [
                    lambda mine=mine, other=other: dial(
                        engines[mine], other, engines[other].listen_address
                    )
                    for mine, other in ((1, 2), (2, 1))
                ]
            )
        for mine, other in ((1, 2), (2, 1)):
            problems += pull_between(engines[mine], engines[other], mine, other)
    finally:
        for engine in engines.values():
            engine.finalize()
    return problems


def dial(engine: Any, cluster_id: int, address: tuple[str, int]) -> str:
    """Links that cross may find the other one's already there."""
    outcome = actions.attempt(
        lambda: engine.link_llm_clusters([actions.cluster(cluster_id, address)], timeout_ms=5000)
    )
    return "" if outcome.ok else f"{outcome.kind}: {outcome.message}"


def pull_between(puller: Any, owner: Any, mine: int, other: int) -> list[str]:
    import ucxkv

    desc = ucxkv.CacheDesc(2, (3, 50_000), ucxkv.DataType.UINT8)
    source = owner.allocate_kv_cache(desc)
    target = puller.allocate_kv_cache(desc, access="")
    problems = []
    for tensor, array in enumerate(source.tensors):
        array[:] = other * 16 + tensor
    puller.pull_kv_cache(ucxkv.CacheIndex(other, source.cache_id, 1), target, 2, timeout_ms=5000)
    for tensor, array in enumerate(target.tensors):
        if not (array[2] == other * 16 + tensor).all() or array[:2].any():
            problems.append(f"wrong bytes from {other} to {mine}")
    owner.unregister_kv_cache(source.cache_id)
    puller.unregister_kv_cache(target.cache_id)
    return problems
