"""A layer is reported done only when its bytes are right, and layers are reported as they land."""

from __future__ import annotations

import random

import pytest

from children import actions, landing
from harness import Peer, rounds
from sleeper import Sleeper

ROUNDS = rounds(200)
LAYERS = 32
SHAPE = 2 * LAYERS, (1, 512 << 10)


@pytest.mark.timeout(180)
def test_owner_unregisters_in_mid_pull(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    rng = random.Random(1)
    puller.call(actions.make_cache, "kv", *SHAPE, access="")
    puller.call(actions.paint, "kv", 0)
    cut_short = succeeded = 0
    for number in range(ROUNDS):
        seed = number % 7
        cache_id = owner.call(landing.reopen, "kv", *SHAPE, seed)
        pull = puller.start(landing.watch_layers, "kv", 1, cache_id, seed)
        owner.call(landing.drop_and_overwrite, "kv", rng.uniform(0, 0.03), rng.choice([1, 5, 20]))
        outcome = pull.result()
        assert outcome.extra["wrong"] == [], (number, outcome)
        assert outcome.kind in ("ok", "KvCacheNotExist"), (number, outcome)
        if outcome.ok:
            assert outcome.extra["layers"] == LAYERS
            succeeded += 1
        elif 0 < outcome.extra["layers"] < LAYERS:
            cut_short += 1
    puller.call(actions.drop_cache, "kv")
    if ROUNDS >= 100:
        assert cut_short > 0, "no pull was cut short in its middle: the test has shown nothing"
        assert succeeded > 0


def test_layers_come_in_order(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=9)
    puller.call(actions.make_cache, "kv", *SHAPE, access="")
    found = puller.call(landing.iterate_layers, "kv", 1, cache_id, 9)
    assert found["order"] == list(range(LAYERS))
    assert found["wrong"] == []
    assert found["at end"] == LAYERS
    for peer in pair:
        peer.call(actions.drop_cache, "kv")


def test_wait_for_a_layer(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=9)
    puller.call(actions.make_cache, "kv", *SHAPE, access="")
    found = puller.call(landing.wait_for_layers, "kv", 1, cache_id, 9)
    assert found["wrong"] == []
    assert found["counts"] == sorted(found["counts"])
    assert found["beyond"] == 5 * ["IndexError"] + 3 * ["TypeError"], found
    assert found["patient"] == [True, True]
    for peer in pair:
        peer.call(actions.drop_cache, "kv")


def test_waiting_for_a_layer_of_a_failed_pull_raises(
    sleeper: Sleeper, pair: tuple[Peer, Peer]
) -> None:
    owner, puller = pair
    shape = 2, (1, 16 << 20)
    cache_id = owner.call(actions.make_cache, "kv", *shape, seed=3, aliases=400)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=400)
    outcome = puller.call(landing.wait_for_last_layer, "kv", 1, cache_id, 300)
    assert outcome.kind == "LlmTimeout", outcome
    assert 0.3 <= outcome.seconds < 1 + sleeper.late
    for peer in pair:
        peer.call(actions.drop_cache, "kv")


def test_await(pair: tuple[Peer, Peer]) -> None:
    """Transfers are awaitable; several on one loop, and the loop runs meanwhile."""
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=9)
    puller.call(actions.make_cache, "kv", *SHAPE, access="")
    found = puller.call(landing.await_pulls, "kv", 1, cache_id, 4)
    assert found["kinds"] == ["TransferReport"] * 4, found
    assert found["ticks"] > 0
    assert found["missing"] == "KvCacheNotExist"
    assert puller.call(actions.wrong_tensors, "kv", 9) == []
    for peer in pair:
        peer.call(actions.drop_cache, "kv")


def test_await_without_a_free_descriptor(path: str) -> None:
    """Awaiting takes a descriptor for each transfer, and does without where there is none."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False, fresh=True) as puller,
    ):
        puller.link(owner)
        # Large enough to be under way when it is awaited.
        shape = 2, (1, 16 << 20)
        cache_id = owner.call(actions.make_cache, "kv", *shape, seed=9, aliases=4)
        puller.call(actions.make_cache, "kv", *shape, access="", aliases=4)
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        puller.call(actions.paint, "kv", 0)
        found = puller.call(landing.await_without_descriptors, "kv", 1, cache_id, 5)
        assert found["opened"] == "OSError"
        assert found["kinds"] == {"TransferReport": 5, "KvCacheNotExist": 5}
        assert puller.call(actions.wrong_tensors, "kv", 9) == []
