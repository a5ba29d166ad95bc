"""A forked copy of an engine says so when used, and its end does nothing to its parent."""

from __future__ import annotations

import pytest

from children import actions, forking
from harness import Peer


@pytest.mark.parametrize("way", ["exit", "_exit", "finalize", "collect", "exec"])
def test_fork(pair: tuple[Peer, Peer], way: str) -> None:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", 4, (1, 100_000), seed=1)
    puller.call(actions.make_cache, "kv", 4, (1, 100_000), access="")
    assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
    threads = [peer.sample().threads for peer in pair]
    for peer, other in ((puller, 1), (owner, 2)):
        said, code = peer.call(forking.fork, way, other, cache_id)
        assert code == 0, (peer.name, code, said)
        for call, kind, message in said:
            assert kind not in ("ok", "TypeError", "AttributeError"), (call, kind, message)
            assert "fork" in message, (call, kind, message)
        assert said or way in ("_exit", "exec")
    # Both sides work as before.
    puller.call(actions.paint, "kv", 0)
    outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    assert puller.call(actions.links)[1] == "up"
    assert owner.call(actions.links)[2] == "up"
    assert [peer.sample().threads for peer in pair] == threads
    for peer in pair:
        peer.call(actions.drop_cache, "kv")
