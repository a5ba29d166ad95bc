"""Ctrl-C in a blocking pull: answered soon, and fenced."""

from __future__ import annotations

import time

import pytest

from children import actions, interrupting
from harness import Peer, rounds


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
        puller.side(actions.nothing)
        time.sleep(0.05 + delay)
        sent = puller.interrupt()
        outcome = pull.result()
        puller.call(actions.paint, "kv", 0x5A)
    finally:
        owner.resume()
    assert outcome.kind == "KeyboardInterrupt", outcome
    assert outcome.began < sent
    assert 0 < outcome.ended - sent < 0.2, outcome.ended - sent
    time.sleep(1)
    assert puller.call(actions.painted, "kv", 0x5A)
    small = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=2)
    puller.call(actions.make_cache, "small", 2, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 1, small, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
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
