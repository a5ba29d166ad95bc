"""Many threads pull at once, from one peer and from many; two engines in one process."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from children import actions, crowd, jostling
from harness import SCALE, Peer


def test_from_one_peer(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    jobs = []
    for number in range(8):
        size = 1000 * 7**number % 500_000 + 1
        cache_id = owner.call(actions.make_cache, f"kv{number}", 6, (2, size), seed=number)
        puller.call(actions.make_cache, f"kv{number}", 6, (2, size), access="")
        jobs.append((f"kv{number}", 1, cache_id, number))
    problems = puller.call(crowd.pull_at_once, jobs, 40, timeout=60)
    assert problems == []
    for peer in pair:
        for number in range(8):
            peer.call(actions.drop_cache, f"kv{number}")


def test_from_many_peers(path: str) -> None:
    with ExitStack() as stack:
        puller = stack.enter_context(Peer(2, path=path, name="puller", listen=False))
        owners = [
            stack.enter_context(Peer(10 + number, path=path, name=f"owner {number}"))
            for number in range(3)
        ]
        outcome = puller.call(
            actions.try_link, [(owner.cluster_id, owner.address) for owner in owners]
        )
        assert outcome.ok, outcome
        jobs = []
        for number, owner in enumerate(owners):
            cache_id = owner.call(actions.make_cache, "kv", 6, (2, 300_000), seed=number)
            for copy in range(2):
                name = f"kv{number}.{copy}"
                puller.call(actions.make_cache, name, 6, (2, 300_000), access="")
                jobs.append((name, owner.cluster_id, cache_id, number))
        problems = puller.call(crowd.pull_at_once, jobs, 40, timeout=60)
        assert problems == []


def test_into_one_cache(pair: tuple[Peer, Peer]) -> None:
    """Slots of one destination, filled by as many threads, out of one source."""
    owner, puller = pair
    slots = 16
    cache_id = owner.call(actions.make_cache, "kv", 6, (slots, 30_001), seed=3)
    puller.call(actions.make_cache, "kv", 6, (slots, 30_001), access="")
    problems = puller.call(crowd.pull_slots_at_once, "kv", 1, cache_id, slots)
    assert problems == []
    assert puller.call(actions.wrong_tensors, "kv", 3) == []
    for peer in pair:
        peer.call(actions.drop_cache, "kv")


def test_both_directions(pair: tuple[Peer, Peer]) -> None:
    """One link serves both, whoever listened."""
    jobs = {}
    for peer in pair:
        jobs[peer] = peer.call(actions.make_cache, "mine", 6, (2, 200_000), seed=peer.cluster_id)
        peer.call(actions.make_cache, "theirs", 6, (2, 200_000), access="")
    running = [
        peer.start(
            crowd.pull_at_once, [("theirs", other.cluster_id, jobs[other], other.cluster_id)], 50
        )
        for peer, other in (pair, pair[::-1])
    ]
    for one in running:
        assert one.result(60) == []
    for peer in pair:
        for name in ("mine", "theirs"):
            peer.call(actions.drop_cache, name)


def test_calls_from_many_threads(pair: tuple[Peer, Peer]) -> None:
    """Registering, pulling, asking and unregistering, all at the same time."""
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", 6, (2, 20_000), seed=3)
    problems = puller.call(crowd.mix, 1, cache_id, 3, timeout=60)
    assert problems == []
    owner.call(actions.drop_cache, "kv")


@pytest.mark.parametrize("linking", ["one", "both"])
def test_two_engines_in_one_process(path: str, linking: str) -> None:
    with Peer(1, path=path, engine=False) as peer:
        assert peer.call(crowd.two_engines, path, linking) == []


def test_everything_from_many_threads(path: str) -> None:
    """Registering, linking, pulling, unlinking, closing and opening, in random order: what fails,
    fails with an error of ours, and what succeeds has the right bytes."""
    with Peer(1, path=path, engine=False, fresh=True) as peer:
        found = peer.call(jostling.jostle, path, 8, 2.0 * SCALE, 5, timeout=60 + 4 * SCALE)
    assert found["problems"] == [], found
    for name in ("register", "unregister", "link", "pull", "unlink", "reopen"):
        assert found["outcomes"].get(name), found
