"""Deadlines: not before, at most 50 ms after, and nothing is written from then on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer, median, wait_until
from sleeper import Sleeper

LATE = 0.050


def check_deadline(outcomes: list[actions.Outcome], seconds: float) -> None:
    """Lower edge exact; upper edge, as a median, in comparison with a thread that only sleeps."""
    for outcome in outcomes:
        assert outcome.kind == "LlmTimeout", outcome
        assert outcome.status == 0x5010B01A
        assert outcome.seconds >= seconds, outcome
    late = [outcome.seconds - seconds - max(0, outcome.extra["late"]) for outcome in outcomes]
    assert median(late) <= LATE, late


@pytest.fixture(scope="module", params=["stream", "emulated"])
def slow_pair(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer]]:
    """Paths on which a stopped owner serves nothing."""
    with (
        Peer(1, path=request.param, name="owner") as owner,
        Peer(2, path=request.param, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        yield owner, puller


def test_stopped_owner(slow_pair: tuple[Peer, Peer]) -> None:
    owner, puller = slow_pair
    tensors, shape = 16, (1, 4 << 20)
    cache_id = owner.call(actions.make_cache, "kv", tensors, shape, seed=1)
    puller.call(actions.make_cache, "kv", tensors, shape, access="")
    with owner.stopped():
        outcomes = [
            puller.call(actions.pull_beside_sleeper, "kv", 1, cache_id, timeout_ms=300)
            for _ in range(5)
        ]
        puller.call(actions.paint, "kv", 0x5A)
    check_deadline(outcomes, 0.3)
    assert "cluster 1" in outcomes[0].message
    assert owner.address
    assert str(owner.address[1]) in outcomes[0].message, "the message names the address"
    time.sleep(2)
    assert puller.call(actions.painted, "kv", 0x5A)
    # No relinking: the link repairs itself.
    outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=10000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    for peer in slow_pair:
        peer.call(actions.drop_cache, "kv")


def test_default_deadline(sleeper: Sleeper, slow_pair: tuple[Peer, Peer]) -> None:
    """Without `timeout_ms` it is Options.sync_cache_wait_time_ms, by default one second."""
    owner, puller = slow_pair
    cache_id = owner.call(actions.make_cache, "kv", 2, (1, 1 << 20), seed=1)
    puller.call(actions.make_cache, "kv", 2, (1, 1 << 20), access="")
    with owner.stopped():
        outcome = puller.call(actions.pull, "kv", 1, cache_id)
    assert outcome.kind == "LlmTimeout", outcome
    assert 1.0 <= outcome.seconds < 1.5 + sleeper.late
    for peer in slow_pair:
        peer.call(actions.drop_cache, "kv")


@pytest.mark.timeout(120)
def test_in_mid_transfer_beside_a_healthy_pull(pair: tuple[Peer, Peer]) -> None:
    """A pull far too large for its deadline, and one of 1 GiB from the same peer that must not
    notice how the first one ends."""
    owner, puller = pair
    large = 16, (1, 64 << 20)
    doomed = 2, (1, 64 << 20)
    healthy_id = owner.call(actions.make_cache, "healthy", *large, seed=2)
    # Each tensor 100 times over: 12.5 GiB to move in 128 MiB of memory.
    doomed_id = owner.call(actions.make_cache, "doomed", *doomed, seed=3, aliases=100)
    puller.call(actions.make_cache, "healthy", *large, access="")
    puller.call(actions.make_cache, "doomed", *doomed, access="", aliases=100)
    outcomes = []
    for _ in range(3):
        puller.call(actions.paint, "healthy", 0)
        losing = puller.start(actions.pull_beside_sleeper, "doomed", 1, doomed_id, timeout_ms=300)
        time.sleep(0.2)
        puller.side(actions.begin, "healthy", "healthy", 1, healthy_id, timeout_ms=30000)
        outcome = losing.result()
        outcomes.append(outcome)
        moved, _, over = puller.side(actions.progress, "healthy")
        puller.side(actions.paint, "doomed", 0x5A)
        done = puller.call(actions.finish, "healthy", 30)
        assert done.ok, done
        assert done.bytes == 1 << 30
        assert not over, "the healthy pull was over before the other one was fenced"
        assert moved < 1 << 30
        assert puller.call(actions.wrong_tensors, "healthy", 2) == []
        time.sleep(0.2)
        assert puller.call(actions.painted, "doomed", 0x5A)
    check_deadline(outcomes, 0.3)
    outcome = puller.call(actions.pull, "healthy", 1, healthy_id, timeout_ms=10000)
    assert outcome.ok, outcome
    for peer in pair:
        for name in ("healthy", "doomed"):
            peer.call(actions.drop_cache, name)
            peer.call(actions.forget_arena, name)


def test_cancel_fences(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    shape = 2, (1, 16 << 20)
    cache_id = owner.call(actions.make_cache, "kv", *shape, seed=3, aliases=200)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=200)
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    puller.call(actions.cancel, "pull")
    outcome = puller.call(actions.finish, "pull", 5)
    assert outcome.kind not in ("ok", "LlmTimeout"), outcome
    puller.call(actions.paint, "kv", 0x5A)
    time.sleep(0.5)
    assert puller.call(actions.painted, "kv", 0x5A)
    small = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=4)
    puller.call(actions.make_cache, "small", 2, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 1, small, 4, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    for peer in pair:
        for name in ("kv", "small"):
            peer.call(actions.drop_cache, name)


def test_many_deadlines_do_not_add_up(slow_pair: tuple[Peer, Peer]) -> None:
    """Pulls that time out at the same moment are each on time, and the link survives them."""
    owner, puller = slow_pair
    cache_id = owner.call(actions.make_cache, "kv", 4, (16, 1 << 18), seed=5)
    puller.call(actions.make_cache, "kv", 4, (16, 1 << 18), access="")
    with owner.stopped():
        pending = [
            puller.start(
                actions.pull_beside_sleeper,
                "kv",
                1,
                cache_id,
                src_slot=slot,
                dst_slot=slot,
                timeout_ms=300,
            )
            for slot in range(16)
        ]
        outcomes = [one.result() for one in pending]
    check_deadline(outcomes, 0.3)
    wait_until(lambda: puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok, timeout=6)
    for peer in slow_pair:
        peer.call(actions.drop_cache, "kv")
