"""The owner's application does nothing while its memory is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer

# Seconds for which the GIL is held.
HOLD = 1.5
TENSORS, SHAPE = 8, (4, 1 << 20)


@pytest.fixture(scope="module")
def caches(pair: tuple[Peer, Peer]) -> Iterator[int]:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "kv", TENSORS, SHAPE, seed=7)
    puller.call(actions.make_cache, "kv", TENSORS, SHAPE, access="")
    yield cache_id
    owner.call(actions.drop_cache, "kv")
    puller.call(actions.drop_cache, "kv")


def pull_all_slots(puller: Peer, cache_id: int, timeout_ms: int) -> None:
    puller.call(actions.paint, "kv", 0)
    for slot in range(SHAPE[0]):
        outcome = puller.call(
            actions.pull, "kv", 1, cache_id, src_slot=slot, dst_slot=slot, timeout_ms=timeout_ms
        )
        assert outcome.ok, outcome
        assert outcome.bytes == TENSORS * SHAPE[1]
        # The service threads need a core now and then, the GIL never: far below the time for
        # which it is held here.
        assert outcome.seconds < HOLD / 2, outcome
    assert puller.call(actions.wrong_tensors, "kv", 7) == []


@pytest.mark.parametrize("path", ["get"], indirect=True)
def test_get_from_a_stopped_owner(pair: tuple[Peer, Peer], caches: int) -> None:
    owner, puller = pair
    with owner.stopped():
        pull_all_slots(puller, caches, 1000)


def test_owner_holds_its_gil(pair: tuple[Peer, Peer], caches: int) -> None:
    """No thread of the owner gets to run Python until all pulls are over."""
    owner, puller = pair
    asleep = owner.start_main(actions.hold_gil, HOLD)
    pull_all_slots(puller, caches, 1000)
    assert not asleep.done(), "the pulls took as long as the GIL was held"
    asleep.result()


def test_owner_in_a_busy_loop(pair: tuple[Peer, Peer], caches: int) -> None:
    """The main thread runs pure Python and, but for the interpreter's shortest slices, keeps the
    GIL; the process still answers on its command thread when it gives it away."""
    owner, puller = pair
    loop = owner.start_main(actions.busy, HOLD, 30.0)
    pull_all_slots(puller, caches, 1000)
    assert not loop.done(), "the pulls took as long as the loop"
    assert loop.result() > 100_000


def test_both_in_a_busy_loop(pair: tuple[Peer, Peer], caches: int) -> None:
    """The puller's other threads compete for its GIL at the ordinary interval: a blocking pull
    gives it away while it waits, and needs it back only once."""
    owner, puller = pair
    loops = [peer.start(actions.busy, HOLD, 0.005) for peer in (owner, puller)]
    pull_all_slots(puller, caches, 1000)
    for loop in loops:
        loop.result()


def test_both_hold_their_gil(pair: tuple[Peer, Peer], caches: int) -> None:
    """Between the call and its completion nothing at either end needs Python."""
    owner, puller = pair
    puller.call(actions.paint, "kv", 0)
    asleep = owner.start_main(actions.hold_gil, HOLD)
    progress = puller.call(actions.begin_and_hold_gil, "kv", 1, caches, HOLD / 2)
    assert not asleep.done()
    assert progress["done"], progress
    assert progress["bytes"] == TENSORS * SHAPE[1]
    asleep.result()
    assert puller.call(actions.wrong_slots, "kv", 7, 0, SHAPE[1]) == []
