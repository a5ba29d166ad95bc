"""The control connection is cut between living processes: it comes back by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer, Proxy, wait_until
from sleeper import Sleeper

SMALL = 4, (1, 10_000)


@pytest.fixture(params=["the puller dials", "the owner dials"])
def linked(request: pytest.FixtureRequest, path: str) -> Iterator[tuple[Peer, Peer, Proxy]]:
    """(owner, puller, the proxy between them)."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller") as puller,
    ):
        dialler, other = (puller, owner) if "puller" in request.param else (owner, puller)
        assert other.address
        with Proxy(other.address) as proxy:
            dialler.link(other, address=proxy.address)
            yield owner, puller, proxy


def test_pulls_go_on(linked: tuple[Peer, Peer, Proxy]) -> None:
    owner, puller, proxy = linked
    cache_id = owner.call(actions.make_cache, "kv", *SMALL, seed=1)
    puller.call(actions.make_cache, "kv", *SMALL, access="")
    for reset in (False, True, False, True):
        # The other side's news may come a moment later than link() returns on this one.
        outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []
        wait_until(lambda: proxy.connections == 1, timeout=5)
        assert proxy.cut(reset=reset) == 1
        puller.call(actions.paint, "kv", 0)
    assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
    # What is registered after the cut is known too.
    later = owner.call(actions.make_cache, "later", *SMALL, seed=2)
    outcome = puller.call(actions.pull_checked, "kv", 1, later, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []


def test_a_running_pull_is_not_disturbed(linked: tuple[Peer, Peer, Proxy]) -> None:
    owner, puller, proxy = linked
    shape = 4, (1, 16 << 20)
    cache_id = owner.call(actions.make_cache, "kv", *shape, seed=1, aliases=32)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=32)
    puller.call(actions.paint, "kv", 0)
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    moving = puller.call(actions.wait_moving, "pull")
    assert proxy.cut() == 1
    assert moving
    outcome = puller.call(actions.finish, "pull")
    assert outcome.ok, outcome
    assert puller.call(actions.wrong_tensors, "kv", 1) == []
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=10000)
    assert outcome.ok, outcome


def test_registered_and_unregistered_while_cut(linked: tuple[Peer, Peer, Proxy]) -> None:
    """What happened during the cut is made up for: a gone cache is gone, a new one is there."""
    owner, puller, proxy = linked
    gone = owner.call(actions.make_cache, "gone", *SMALL, seed=1)
    puller.call(actions.make_cache, "kv", *SMALL, access="")
    assert puller.call(actions.pull, "kv", 1, gone, timeout_ms=5000).ok
    proxy.refusing = True
    accepted = proxy.accepted
    proxy.cut()
    new = owner.call(actions.make_cache, "new", *SMALL, seed=2)
    owner.call(actions.drop_cache, "gone", 200)
    owner.call(actions.paint, "gone", 0xEE)
    # The first attempts to come back fail.
    wait_until(lambda: proxy.accepted > accepted + 1, timeout=5)
    proxy.refusing = False
    outcome = puller.call(actions.pull_checked, "kv", 1, new, 2, timeout_ms=8000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    outcome = puller.call(actions.pull, "kv", 1, gone, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome


def test_linking_in_vain_while_reconnecting_ends_in_time(
    sleeper: Sleeper,
    linked: tuple[Peer, Peer, Proxy],
) -> None:
    """The peer is stopped, so that the link can neither come back nor be made anew."""
    owner, puller, proxy = linked
    cache_id = owner.call(actions.make_cache, "kv", *SMALL, seed=1)
    puller.call(actions.make_cache, "kv", *SMALL, access="")
    # Where the link was dialled, it dials again by itself, and whoever links waits for that.
    address = proxy.address if proxy.target == owner.address else owner.address
    with owner.stopped():
        assert proxy.cut() == 1
        wait_until(lambda: puller.call(actions.links) == {1: "reconnecting"}, timeout=2)
        for _ in range(3):
            outcome = puller.call(actions.try_link, [(1, address)], timeout_ms=500, timeout=5)
            assert outcome.kind == "LinkFailed", outcome
            assert 0.5 <= outcome.seconds < 1 + sleeper.late, outcome
    # It comes back by itself, or by another call.
    puller.call(actions.try_link, [(1, address)], timeout_ms=5000)
    outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []


@pytest.mark.slow
def test_down_when_it_does_not_come_back() -> None:
    with Peer(1, name="owner") as owner, Peer(2, name="puller") as puller:
        assert owner.address
        cache_id = owner.call(actions.make_cache, "kv", *SMALL, seed=1)
        puller.call(actions.make_cache, "kv", *SMALL, access="")
        with Proxy(owner.address) as proxy:
            puller.link(owner, address=proxy.address)
            proxy.refusing = True
            proxy.cut()
            began = time.monotonic()
            for peer, other in ((puller, 1), (owner, 2)):
                wait_until(
                    lambda peer=peer, other=other: (
                        "down" in peer.call(actions.links).get(other, "down")
                    ),
                    timeout=15,
                    step=0.1,
                )
            assert time.monotonic() - began > 5, "given up too early"
            outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=500)
            assert outcome.kind == "NotYetLink", outcome
            proxy.refusing = False
            puller.link(owner, address=proxy.address)
            outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
            assert outcome.ok, outcome
            assert outcome.extra["wrong"] == []
