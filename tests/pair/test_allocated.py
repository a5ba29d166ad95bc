"""Memory of the library's own is mapped by pullers of the same host, and read there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from children import actions, allocated, copying, pushing, reuse
from harness import Peer, rounds, wait_until

TENSORS, SHAPE = 3, (4, 300_001)
REUSES = rounds(200)


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer, reuse.Board]]:
    with ExitStack() as stack:
        board = stack.enter_context(reuse.Board.create())
        owner = stack.enter_context(Peer(1, path="get", name="owner", fds={"board": board.fd}))
        puller = stack.enter_context(Peer(2, path="get", name="puller", fds={"board": board.fd}))
        puller.link(owner)
        if not puller.call(copying.direct, 1):
            pytest.skip("processes cannot be read without UCX here")
        yield owner, puller, board


@pytest.fixture
def target(peers: tuple[Peer, Peer, reuse.Board]) -> Iterator[None]:
    _, puller, _ = peers
    puller.call(actions.make_cache, "kv", TENSORS, SHAPE, access="")
    yield
    puller.call(actions.drop_cache, "kv")
    puller.call(actions.forget_arena, "kv")


def pull_right(puller: Peer, cache_id: int, seed: int) -> None:
    puller.call(actions.paint, "kv", 0)
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.ok, outcome
    assert puller.call(actions.wrong_slots, "kv", seed, 0, SHAPE[1]) == []


def test_mapped_as_long_as_it_is_registered(
    peers: tuple[Peer, Peer, reuse.Board], target: None
) -> None:
    owner, puller, _ = peers
    for seed in range(3):
        cache_id = owner.call(allocated.make, "kv", TENSORS, SHAPE, seed)
        pull_right(puller, cache_id, seed)
        pull_right(puller, cache_id, seed)
        # The descriptor is the owner's, and one that its mapping has.
        assert puller.call(allocated.mappings) == (1, 0)
        assert owner.call(allocated.mappings) == (1, 2)
        owner.call(allocated.drop, "kv")
        wait_until(lambda: puller.call(allocated.mappings) == (0, 0))
        wait_until(lambda: owner.call(allocated.mappings) == (0, 0))
        outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
        assert outcome.kind == "KvCacheNotExist"


def test_slots_and_sizes(peers: tuple[Peer, Peer, reuse.Board], target: None) -> None:
    owner, puller, _ = peers
    cache_id = owner.call(allocated.make, "kv", TENSORS, SHAPE, 5)
    for src, dst, size in ((0, 3, -1), (3, 0, 1), (1, 1, 4097), (2, 2, 300_000)):
        puller.call(actions.paint, "kv", 0)
        outcome = puller.call(
            actions.pull, "kv", 1, cache_id, src_slot=src, dst_slot=dst, size=size, timeout_ms=5000
        )
        assert outcome.ok, outcome
        assert outcome.bytes == TENSORS * (SHAPE[1] if size == -1 else size)
        if size == -1:
            puller.call(actions.paint, "kv", 0)
    with owner.stopped():
        pull_right(puller, cache_id, 5)
        # Nobody waits for this one.
        puller.call(actions.paint, "kv", 0)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=5000)
        wait_until(lambda: puller.call(actions.progress, "pull")[2])
        assert puller.call(actions.finish, "pull").ok
        assert puller.call(actions.wrong_slots, "kv", 5, 0, SHAPE[1]) == []
    owner.call(allocated.drop, "kv")


@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "no seals",
        "another inode",
        "another descriptor",
        "no descriptor",
        "a pipe without a writer",
        "longer",
    ],
)
def test_what_cannot_be_mapped_is_read(
    peers: tuple[Peer, Peer, reuse.Board], target: None, fault: str
) -> None:
    owner, puller, _ = peers
    owner.call(allocated.without_seals, fault)
    cache_id = owner.call(allocated.make, "kv", TENSORS, SHAPE, 7)
    owner.call(allocated.with_seals)
    pull_right(puller, cache_id, 7)
    assert puller.call(allocated.mappings)[0] == 0
    owner.call(allocated.drop, "kv")


@pytest.mark.parametrize("fault", ["shorter", "elsewhere"])
def test_tensors_outside_of_it_are_a_contradiction(fault: str) -> None:
    with Peer(1, path="get") as owner, Peer(2, path="get", allow="contradicts") as puller:
        owner.call(allocated.without_seals, fault)
        owner.call(allocated.make, "kv", TENSORS, SHAPE, 7)
        owner.call(allocated.with_seals)
        outcome = puller.call(actions.try_link, [(1, owner.address)], 1000)
        assert outcome.kind == "LinkFailed", outcome
        assert "contradicts itself" in outcome.message


def test_a_forked_child_takes_nothing_away(
    peers: tuple[Peer, Peer, reuse.Board], target: None
) -> None:
    owner, puller, _ = peers
    cache_id = owner.call(allocated.make, "kv", TENSORS, SHAPE, 9)
    assert owner.call(allocated.fork_and_exit) == 0
    pull_right(puller, cache_id, 9)
    owner.call(allocated.drop, "kv")


@pytest.mark.timeout(180)
def test_used_again_at_once(peers: tuple[Peer, Peer, reuse.Board]) -> None:
    """Each pull has the bytes of the cache it names, or KvCacheNotExist."""
    owner, puller, _ = peers
    pulling = puller.start(reuse.pull_whatever_is_announced, 1)
    owner.call(allocated.reuse_again_and_again, reuse.TENSORS, reuse.SHAPE, REUSES, timeout=120)
    puller.side(reuse.finish)
    result = pulling.result()
    assert result["problems"] == [], result
    assert result["right"] > 0
    assert result["gone"] > 0
    wait_until(lambda: puller.call(allocated.mappings) == (0, 0))


def test_pushed_from_and_into(peers: tuple[Peer, Peer, reuse.Board]) -> None:
    owner, puller, _ = peers
    target = owner.call(allocated.make, "into", TENSORS, SHAPE, 1, "rw")
    puller.call(allocated.make, "from", TENSORS, SHAPE, 2)
    outcome = puller.call(pushing.push, "from", 1, target, src_slot=2, dst_slot=1, per_layer=1)
    assert outcome.ok, outcome
    assert owner.call(allocated.slot_sums, "into", 1) == puller.call(allocated.slot_sums, "from", 2)
    assert owner.call(allocated.mappings)[0] == 2
    for peer, name in ((owner, "into"), (puller, "from")):
        peer.call(allocated.drop, name)
