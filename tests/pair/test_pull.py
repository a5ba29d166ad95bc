"""Pulls of random geometry leave exactly the bytes that a NumPy model leaves."""

from __future__ import annotations

import os
from typing import Any

import pytest

import model
from children import actions, landing
from harness import Peer, needs_get, rounds

CASES = int(os.environ.get("UCXKV_TEST_CASES", "0")) or rounds(500)
BATCH = 25


def run(pair: tuple[Peer, Peer], cases: list[model.Case], path: str) -> list[str]:
    owner, puller = pair
    problems: list[str] = []
    for first in range(0, len(cases), BATCH):
        batch = cases[first : first + BATCH]
        ids = owner.call(actions.open_sources, batch)
        problems += puller.call(actions.run_cases, owner.cluster_id, batch, ids, path)
        problems += owner.call(actions.close_sources)
    return problems


@pytest.mark.timeout(300)
def test_random_geometry(pair: tuple[Peer, Peer], path: str) -> None:
    cases = [model.random_case(seed) for seed in range(CASES)]
    problems = run(pair, cases, path)
    assert not problems, f"{len(problems)} problems, the first: {problems[0]}"


def pull_and_drop(
    pair: tuple[Peer, Peer], source: dict[str, Any], seed: int, **more: Any
) -> actions.Outcome:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", seed=seed, **source)
    puller.call(actions.make_cache, "kv", access="", **source)
    outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, seed, timeout_ms=20000, **more)
    for peer in pair:
        peer.call(actions.drop_cache, "kv")
        peer.call(actions.forget_arena, "kv")
    assert outcome.ok, outcome
    return outcome


def test_many_tensors(pair: tuple[Peer, Peer], path: str) -> None:
    """Neither the catalogue entry nor the request fits into one small message."""
    outcome = pull_and_drop(pair, {"tensors": 20_000, "shape": (1, 24)}, 6)
    assert outcome.extra["wrong"] == []
    assert outcome.bytes == 20_000 * 24
    assert outcome.path == path
    assert outcome.spans >= 20_000 if path == "get" else outcome.spans >= 1


def test_more_than_four_gigabytes(pair: tuple[Peer, Peer]) -> None:
    """Each tensor 40 times: every offset of the transfer passes 32 bits."""
    outcome = pull_and_drop(pair, {"tensors": 2, "shape": (1, 64 << 20), "aliases": 40}, 7)
    assert outcome.extra["wrong"] == []
    assert outcome.bytes == 80 * (64 << 20)


def test_a_slot_behind_four_gigabytes(pair: tuple[Peer, Peer]) -> None:
    """Of 6 GiB only the pages of one slot are ever touched."""
    owner, puller = pair
    cache_id = owner.call(landing.make_sparse, "kv", 6, 1 << 30)
    puller.call(landing.make_sparse, "kv", 6, 1 << 30)
    owner.call(landing.fill_sparse, "kv", 5, 1 << 20, 8)
    outcome = puller.call(
        actions.pull, "kv", 1, cache_id, src_slot=5, dst_slot=4, size=1 << 20, timeout_ms=10000
    )
    assert outcome.ok, outcome
    assert puller.call(landing.sparse_matches, "kv", 4, 1 << 20, 8)
    assert puller.call(landing.sparse_is_zero_around, "kv", 4, 1 << 20)
    for peer in pair:
        peer.call(actions.drop_cache, "kv")
        peer.call(landing.forget_sparse, "kv")


def test_memory_registered_twice(pair: tuple[Peer, Peer]) -> None:
    """Two caches of the same memory have lives of their own."""
    owner, puller = pair
    first = owner.call(actions.make_cache, "kv", 4, (2, 5000), seed=9)
    second = owner.call(landing.register_again, "kv", "twin", (2, 5000))
    puller.call(actions.make_cache, "kv", 4, (2, 5000), access="")
    for cache_id in (first, second):
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
    owner.call(actions.drop_cache, "kv")
    puller.call(actions.paint, "kv", 0)
    outcome = puller.call(actions.pull, "kv", 1, first, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome
    assert puller.call(actions.pull, "kv", 1, second, timeout_ms=5000).ok
    assert puller.call(actions.wrong_slots, "kv", 9, 0, 5000) == []
    owner.call(actions.drop_cache, "twin")
    puller.call(actions.drop_cache, "kv")


def test_read_only_memory(pair: tuple[Peer, Peer]) -> None:
    """It can be pulled from, not into."""
    owner, puller = pair
    frozen = {peer: peer.call(landing.make_read_only, "frozen", 3) for peer in pair}
    puller.call(actions.make_cache, "kv", 1, (2, 1000), access="")
    outcome = puller.call(actions.pull_checked, "kv", 1, frozen[owner], 3, size=1000)
    assert outcome.ok, outcome
    assert puller.call(actions.wrong_slots, "kv", 3, 0, 1000) == []
    outcome = puller.call(actions.pull, "frozen", 1, frozen[owner])
    assert outcome.kind == "ParamInvalid", outcome
    puller.call(actions.drop_cache, "kv")
    for peer in pair:
        peer.call(actions.drop_cache, "frozen")


def test_stats(path: str) -> None:
    with Peer(1, path=path) as owner, Peer(2, path=path, listen=False) as puller:
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", 4, (2, 5000), seed=9)
        puller.call(actions.make_cache, "kv", 4, (2, 5000), access="")
        assert puller.call(landing.totals)["transfers"] == 0
        for _ in range(10):
            assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        found = puller.call(landing.totals)
        assert found["transfers"] == 10
        assert found["bytes"] == 10 * 4 * 5000
        assert found["spans"] >= 10
        assert found["failures"] == {}
        assert 0 < found["latency"]["p50"] <= found["latency"]["p99"] < 5
        assert puller.call(actions.pull, "kv", 1, 10**9).kind == "KvCacheNotExist"
        assert owner.call(landing.totals)["transfers"] == 0


def test_auto_takes_get_where_it_can() -> None:
    """And UCXKV_PATH overrides the choice."""
    needs_get()
    for env, wanted in (({}, "get"), ({"UCXKV_PATH": "stream"}, "stream")):
        with (
            Peer(1, path="auto", env=env) as owner,
            Peer(2, path="auto", env=env, listen=False) as puller,
        ):
            puller.link(owner)
            cache_id = owner.call(actions.make_cache, "kv", 2, (1, 8 << 20), seed=9)
            puller.call(actions.make_cache, "kv", 2, (1, 8 << 20), access="")
            outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 9, timeout_ms=5000)
            assert outcome.ok, outcome
            assert outcome.extra["wrong"] == []
            assert outcome.path == wanted
