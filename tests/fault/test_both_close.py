"""Both sides close at about the same moment, each under the other's stream."""

from __future__ import annotations

import random
import time

import pytest

from children import actions, ending
from harness import Peer, cpu_seconds, rounds

ROUNDS = rounds(100)
# Far more to move than can be over before the link is closed.
SHAPE, ALIASES = (2, (1, 16 << 20)), 50
ENDINGS = ("ok", "LlmError", "NotYetLink", "KvCacheNotExist")


@pytest.mark.timeout(180)
def test_both_close_under_streams(path: str) -> None:
    """By unlinking and by finalizing in turn: nobody crashes or spins, every transfer ends, and the
    two link again each time."""
    rng = random.Random(8)
    with Peer(1, path=path, name="first") as first, Peer(2, path=path, name="second") as second:
        two = (first, second)
        ways = (two, two[::-1])
        for number in range(ROUNDS + 1):
            sources = {
                peer: peer.call(ending.open_both_ways, *SHAPE, ALIASES, peer.cluster_id)
                for peer in two
            }
            dialler, listener = rng.choice(ways)
            dialler.link(listener)
            if number == ROUNDS:
                break
            for peer, other in ways:
                peer.call(
                    actions.begin,
                    "pull",
                    "into",
                    other.cluster_id,
                    sources[other],
                    timeout_ms=20000,
                )
            time.sleep(rng.uniform(0, 0.02))
            unlinking = number % 2 == 0
            if unlinking:
                closing = [
                    peer.start(actions.unlink, other.cluster_id, force=True) for peer, other in ways
                ]
            else:
                closing = [peer.start(ending.reopen) for peer in two]
            for peer, one in zip(two, closing, strict=True):
                found = one.result(10)
                if not unlinking:
                    peer.address = found
                outcome = peer.call(actions.finish, "pull", 5)
                assert outcome.kind in ENDINGS, (number, peer.name, outcome)
        used = [cpu_seconds(peer.pid) for peer in two]
        time.sleep(0.5)
        for peer, before in zip(two, used, strict=True):
            assert cpu_seconds(peer.pid) - before < 0.1, f"{peer.name} does not come to rest"
        for peer, other in ways:
            peer.call(actions.paint, "into", 0)
            outcome = peer.call(
                actions.pull, "into", other.cluster_id, sources[other], timeout_ms=20000
            )
            assert outcome.ok, outcome
            assert peer.call(actions.wrong_tensors, "into", other.cluster_id) == []
