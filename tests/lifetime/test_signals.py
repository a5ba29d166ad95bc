"""Ctrl-C in a blocking call: answered soon, and nothing is left half done."""

from __future__ import annotations

import time

import pytest

from children import actions, interrupting
from harness import Peer, Pending, rounds, wait_until
from sleeper import Sleeper


def interrupted(peer: Peer, call: Pending, delay: float) -> None:
    """Interrupt a call that waits in the peer's main thread."""
    peer.side(actions.nothing)
    time.sleep(delay)
    with Sleeper() as sleeper:
        sent = peer.interrupt()
        outcome = call.result()
    assert outcome.kind == "KeyboardInterrupt", outcome
    assert outcome.began < sent
    assert 0 < outcome.ended - sent < 0.2 + sleeper.late, (outcome.ended - sent, sleeper.late)


@pytest.mark.parametrize("delay", [0.0, 0.3], ids=["at once", "while asleep"])
def test_keyboard_interrupt(pair: tuple[Peer, Peer], path: str, delay: float) -> None:
    owner, puller = pair
    # On "get" the owner cannot hold up a pull: there it is one that takes seconds by its size.
    aliases = 500 if path == "get" else 1
    shape = 2, (1, 16 << 20)
    cache_id = owner.call(actions.make_cache, "kv", *shape, seed=1, aliases=aliases)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=aliases)
    owner.stop()
    try:
        pull = puller.start_main(actions.pull, "kv", 1, cache_id, timeout_ms=20000)
        interrupted(puller, pull, 0.05 + delay)
        puller.call(actions.paint, "kv", 0x5A)
    finally:
        owner.resume()
    small = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=2)
    puller.call(actions.make_cache, "small", 2, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 1, small, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    # What the owner had to say of the first pull, it has said before this one.
    time.sleep(0.1)
    assert puller.call(actions.painted, "kv", 0x5A)
    for peer in pair:
        for name in ("kv", "small"):
            peer.call(actions.drop_cache, name)


def test_interrupted_at_any_moment(pair: tuple[Peer, Peer]) -> None:
    """Wherever in the call the signal arrives: once KeyboardInterrupt is out, nothing writes."""
    owner, puller = pair
    shape = 2, (1, 4 << 20)
    cache_id = owner.call(actions.make_cache, "kv", *shape, seed=1, aliases=1000)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=1000)
    result = puller.call(interrupting.interrupt_pulls, "kv", 1, cache_id, rounds(100), timeout=60)
    assert result["written after"] == []
    assert result["interrupted"] > rounds(100) // 2, result
    assert set(result["kinds"]) <= {"KeyboardInterrupt"}, result
    small = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=2)
    puller.call(actions.make_cache, "small", 2, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 1, small, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    for peer in pair:
        for name in ("kv", "small"):
            peer.call(actions.drop_cache, name)


def begin_a_pull_that_lasts(pair: tuple[Peer, Peer]) -> int:
    """32 GiB, of which one byte has moved at least; the source's id."""
    owner, puller = pair
    shape = 2, (1, 16 << 20)
    cache_id: int = owner.call(actions.make_cache, "kv", *shape, seed=1, aliases=1000)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=1000)
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    return cache_id


@pytest.mark.parametrize("who", ["owner", "puller"])
def test_interrupted_unlinking(pair: tuple[Peer, Peer], who: str) -> None:
    """It waits for a transfer: what was begun is ended without waiting any longer, and the two
    can link again."""
    owner, puller = pair
    peer, other = (owner, puller) if who == "owner" else (puller, owner)
    cache_id = begin_a_pull_that_lasts(pair)
    interrupted(peer, peer.start_main(interrupting.unlink, other.cluster_id, 15000), 0.1)
    outcome = puller.call(actions.finish, "pull", 2)
    assert outcome.kind in ("LlmError", "NotYetLink"), outcome
    for one, another in (pair, pair[::-1]):
        wait_until(lambda one=one, another=another: gone(one, another), timeout=2)
    puller.link(owner)
    small = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=2)
    puller.call(actions.make_cache, "small", 2, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 1, small, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    assert puller.call(actions.pull, "kv", 1, cache_id, size=1, timeout_ms=5000).ok
    for one in pair:
        for name in ("kv", "small"):
            one.call(actions.drop_cache, name)


def gone(peer: Peer, other: Peer) -> bool:
    return peer.call(actions.links).get(other.cluster_id, "down") == "down"


def test_interrupted_unregistration(pair: tuple[Peer, Peer]) -> None:
    """It waits for a pull of the memory, which is then given back without waiting any longer."""
    owner, puller = pair
    cache_id = begin_a_pull_that_lasts(pair)
    interrupted(owner, owner.start_main(interrupting.drop_cache, "kv", 15000), 0.1)
    owner.call(actions.paint, "kv", 0xEE)
    outcome = puller.call(actions.finish, "pull", 2)
    assert outcome.kind == "KvCacheNotExist", outcome
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome
    small = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=2)
    puller.call(actions.make_cache, "small", 2, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 1, small, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    for peer in pair:
        peer.call(actions.drop_cache, "small")
    puller.call(actions.drop_cache, "kv")
