"""Pulls, blocks, pushes and layers over rc_verbs leave exactly the right bytes."""

from __future__ import annotations

import pytest
import test_blocks
import test_push

import model
from children import actions, blocks, landing, pushing
from harness import Peer, rounds

pytestmark = [pytest.mark.rdma("rc"), pytest.mark.timeout(600)]

CASES = rounds(30)
BATCH = 10
LAYERS = 32


def test_pulls_of_random_geometry(ends: tuple[Peer, Peer]) -> None:
    owner, puller = ends
    problems: list[str] = []
    for first in range(0, CASES, BATCH):
        batch = [model.random_case(seed, 1 << 18) for seed in range(first, first + BATCH)]
        ids = owner.call(actions.open_sources, batch)
        problems += puller.call(actions.run_cases, owner.cluster_id, batch, ids, "get")
        problems += owner.call(actions.close_sources)
    assert problems == []


@pytest.mark.parametrize("form", test_blocks.FORMS)
def test_pulls_of_random_blocks(ends: tuple[Peer, Peer], form: str) -> None:
    owner, puller = ends
    batch = [test_blocks.random_case(seed, form) for seed in range(BATCH)]
    ids = owner.call(actions.open_sources, [one.case for one in batch])
    problems = puller.call(blocks.run_cases, owner.cluster_id, batch, ids, "get")
    assert problems + owner.call(actions.close_sources) == []


@pytest.mark.parametrize("form", ["slots", *test_blocks.FORMS])
def test_pushes_of_random_geometry(ends: tuple[Peer, Peer], form: str) -> None:
    receiver, sender = ends
    batch = [test_push.random_case(seed, form) for seed in range(BATCH)]
    ids = receiver.call(pushing.open_destinations, batch)
    problems = sender.call(pushing.run_cases, receiver.cluster_id, batch, ids, "get")
    assert problems + receiver.call(pushing.check_destinations) == []


def test_layers_as_they_land(ends: tuple[Peer, Peer]) -> None:
    owner, puller = ends
    cache = 2 * LAYERS, (1, 16 << 10)
    cache_id = owner.call(actions.make_cache, "kv", *cache, seed=9)
    puller.call(actions.make_cache, "kv", *cache, access="")
    found = puller.call(landing.iterate_layers, "kv", 1, cache_id, 9)
    assert found == {"order": list(range(LAYERS)), "wrong": [], "at end": LAYERS}
    for peer in ends:
        peer.call(actions.drop_cache, "kv")


def test_pulls_that_are_awaited(ends: tuple[Peer, Peer]) -> None:
    owner, puller = ends
    cache_id = owner.call(actions.make_cache, "kv", 4, (2, 5000), seed=3)
    puller.call(actions.make_cache, "kv", 4, (2, 5000), access="")
    puller.call(landing.await_pulls, "kv", 1, cache_id, 8)
    assert puller.call(actions.wrong_slots, "kv", 3, 0, 5000) == []
    for peer in ends:
        peer.call(actions.drop_cache, "kv")
