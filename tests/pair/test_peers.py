"""Caches that only some clusters may see: the others neither hear of them nor get at them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from children import actions, limited, prying, stranger
from harness import Peer, Proxy, wait_until

SHAPE = 4, (2, 10_000)
LISTED, UNLISTED = 2, 3


@pytest.fixture(scope="module")
def trio(path: str) -> Iterator[tuple[Peer, Peer, Peer]]:
    """(owner, a puller that is listed, one that is not), linked."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(LISTED, path=path, name="listed", listen=False) as listed,
        Peer(UNLISTED, path=path, name="unlisted", listen=False) as unlisted,
    ):
        for puller in (listed, unlisted):
            puller.link(owner)
            puller.call(actions.make_cache, "kv", *SHAPE, access="")
        yield owner, listed, unlisted


def test_only_the_listed_pull(trio: tuple[Peer, Peer, Peer]) -> None:
    owner, listed, unlisted = trio
    cache_id = owner.call(limited.make_cache, "mine", *SHAPE, [LISTED], seed=1)
    later = owner.call(limited.make_cache, "ours", *SHAPE, None, seed=2)
    outcome = listed.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.ok, outcome
    assert listed.call(actions.wrong_slots, "kv", 1, 0, 10_000) == []
    outcome = unlisted.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome
    assert unlisted.call(actions.pull, "kv", 1, later, timeout_ms=5000).ok
    assert cache_id in listed.call(limited.known, 1)
    assert cache_id not in unlisted.call(limited.known, 1)
    owner.call(actions.drop_cache, "mine")
    outcome = listed.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome
    owner.call(actions.drop_cache, "ours")


def test_nobody_and_duplicates(trio: tuple[Peer, Peer, Peer]) -> None:
    owner, listed, unlisted = trio
    nobodys = owner.call(limited.make_cache, "nobody's", *SHAPE, [], seed=1)
    many = owner.call(
        limited.make_cache, "many", *SHAPE, [9, LISTED, 1 << 62, LISTED, UNLISTED, 0], seed=1
    )
    for puller in (listed, unlisted):
        outcome = puller.call(actions.pull, "kv", 1, nobodys, timeout_ms=5000)
        assert outcome.kind == "KvCacheNotExist", outcome
        outcome = puller.call(actions.pull, "kv", 1, many, timeout_ms=5000)
        assert outcome.ok, outcome
    for name in ("nobody's", "many"):
        owner.call(actions.drop_cache, name)


def test_allocated(trio: tuple[Peer, Peer, Peer]) -> None:
    owner, listed, unlisted = trio
    cache_id = owner.call(limited.allocate, *SHAPE, [LISTED])
    assert listed.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
    assert listed.call(actions.wrong_slots, "kv", 1, 0, 10_000) == []
    outcome = unlisted.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome


def test_only_the_listed_push(trio: tuple[Peer, Peer, Peer]) -> None:
    owner, listed, unlisted = trio
    cache_id = owner.call(limited.make_cache, "inbox", *SHAPE, [LISTED], seed=1, access="rw")
    for puller in (listed, unlisted):
        puller.call(actions.paint, "kv", 7)
    outcome = unlisted.call(limited.push, "kv", 1, cache_id)
    assert outcome.kind == "KvCacheNotExist", outcome
    assert owner.call(actions.wrong_tensors, "inbox", 1) == []
    outcome = listed.call(limited.push, "kv", 1, cache_id)
    assert outcome.ok, outcome
    assert owner.call(actions.wrong_tensors, "inbox", 1) == [0, 1, 2, 3]
    owner.call(actions.drop_cache, "inbox")


def test_who_asks_all_the_same_is_refused_natively() -> None:
    """The peer knows all that the listed are told; its requests and offers are refused by the
    owner's service thread, and nothing of the owner has moved.  Over "stream", since the kernel
    lets processes of one user read each other whatever they have been told."""
    with (
        Peer(1, name="owner") as owner,
        Peer(LISTED, name="listed", listen=False) as listed,
        Peer(UNLISTED, name="unlisted", listen=False) as unlisted,
    ):
        cache_id = owner.call(limited.make_cache, "inbox", *SHAPE, [LISTED], seed=1, access="rw")
        told = owner.call(limited.description, cache_id)
        for puller in (listed, unlisted):
            puller.link(owner)
            puller.call(actions.make_cache, "kv", *SHAPE)
            puller.call(actions.paint, "kv", 7)
        unlisted.call(limited.learn, 1, told)
        outcome = unlisted.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
        assert outcome.kind == "KvCacheNotExist", outcome
        assert unlisted.call(actions.painted, "kv", 7)
        outcome = unlisted.call(limited.push, "kv", 1, cache_id)
        assert outcome.kind == "KvCacheNotExist", outcome
        assert owner.call(actions.wrong_tensors, "inbox", 1) == []
        # The same description serves who is listed.
        listed.call(limited.learn, 1, told)
        assert listed.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        assert listed.call(limited.push, "kv", 1, cache_id).ok


def test_a_restored_connection_tells_no_more() -> None:
    """The catalogue is told again over a new connection: to each its own."""
    with (
        Peer(1, name="owner") as owner,
        Peer(UNLISTED, name="unlisted", listen=False) as unlisted,
    ):
        hidden = owner.call(limited.make_cache, "hidden", *SHAPE, [LISTED], seed=1)
        shown = owner.call(limited.make_cache, "shown", *SHAPE, [UNLISTED], seed=1)
        assert owner.address
        with Proxy(owner.address) as proxy:
            unlisted.link(owner, address=proxy.address)
            unlisted.call(actions.make_cache, "kv", *SHAPE, access="")
            accepted = proxy.accepted
            assert proxy.cut() == 1
            wait_until(lambda: proxy.accepted > accepted, timeout=5)
            assert unlisted.call(actions.pull, "kv", 1, shown, timeout_ms=5000).ok
            outcome = unlisted.call(actions.pull, "kv", 1, hidden, timeout_ms=5000)
            assert outcome.kind == "KvCacheNotExist", outcome
            assert unlisted.call(limited.known, 1) == [shown]


def test_an_owner_pushes_what_it_shows_to_nobody(trio: tuple[Peer, Peer, Peer]) -> None:
    """To push a cache is to show it to whoever is pushed to, for as long as that takes."""
    owner, _, unlisted = trio
    target = unlisted.call(actions.make_cache, "target", *SHAPE, access="rw")
    source = owner.call(limited.make_cache, "source", *SHAPE, [], seed=5)
    outcome = owner.call(limited.push, "source", UNLISTED, target)
    assert outcome.ok, outcome
    assert unlisted.call(actions.wrong_slots, "target", 5, 0, 10_000) == []
    outcome = unlisted.call(actions.pull, "kv", 1, source, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome


def test_only_the_listed_end_a_hold(trio: tuple[Peer, Peer, Peer], path: str) -> None:
    """Its word can be read by every linked peer that has "get"; a notice with it is taken all the
    same, as any other is."""
    owner, _, _ = trio
    owner.call(limited.make_cache, "held", *SHAPE, [LISTED], seed=1)
    token = owner.call(limited.hold, "held")
    with Peer(9, path=path, name="stranger", engine=False) as intruder:
        for count, cluster, outcome in ((1, UNLISTED, None), (2, LISTED, "noticed")):
            plane = owner.call(prying.plane_for, "held", cluster)
            intruder.call(stranger.tell, plane, token)
            wait_until(lambda least=count: owner.call(stranger.told)[0] == least)
            assert owner.call(stranger.told) == (count, outcome)


def test_senseless_lists(trio: tuple[Peer, Peer, Peer]) -> None:
    owner, _, _ = trio
    kinds = owner.call(limited.refused_arguments)
    assert kinds == ["TypeError"] * 8 + ["ParamInvalid"] * 4
