"""Memory is unregistered, freed and used again while peers read it, or write into it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from children import actions, reuse
from harness import Peer, rounds, wait_until
from sleeper import Sleeper

LOOP_ROUNDS = rounds(500)
STOP_ROUNDS = rounds(50)
UNREGISTER_MS = 50


@pytest.fixture(scope="module")
def sharing(path: str) -> Iterator[tuple[Peer, Peer, reuse.Board]]:
    """A linked pair, and a shared board on which the owner announces its caches."""
    with ExitStack() as stack:
        board = stack.enter_context(reuse.Board.create())
        owner = stack.enter_context(Peer(1, path=path, name="owner", fds={"board": board.fd}))
        puller = stack.enter_context(
            Peer(2, path=path, name="puller", listen=False, fds={"board": board.fd})
        )
        puller.link(owner)
        yield owner, puller, board


def forget(peer: Peer, name: str) -> None:
    peer.call(actions.drop_cache, name)
    peer.call(actions.forget_arena, name)


@pytest.mark.timeout(180)
def test_unregister_free_and_reuse(
    sleeper: Sleeper, sharing: tuple[Peer, Peer, reuse.Board]
) -> None:
    """The memory is unmapped between two registrations; each pull has the bytes of the cache it
    names, or KvCacheNotExist."""
    owner, puller, _ = sharing
    pulling = puller.start(reuse.pull_whatever_is_announced, 1)
    slowest = owner.call(reuse.register_and_free, LOOP_ROUNDS, timeout=120)
    puller.side(reuse.finish)
    result = pulling.result()
    assert result["problems"] == [], result
    assert result["right"] > 0
    assert result["gone"] > 0, "no pull met an unregistered cache: the test has shown nothing"
    assert slowest < 1.05 + sleeper.late


@pytest.mark.timeout(180)
def test_puller_stopped_in_mid_pull(sharing: tuple[Peer, Peer, reuse.Board]) -> None:
    """It sleeps through the unregistration and the new use of the memory."""
    owner, puller, _ = sharing
    rng = random.Random(3)
    tensors, shape = 16, (1, 8 << 20)
    puller.call(actions.make_cache, "kv", tensors, shape, access="")
    puller.call(actions.paint, "kv", 0)
    kinds = []
    for number in range(STOP_ROUNDS):
        seed = number % 5
        cache_id = owner.call(reuse.reopen, "kv", tensors, shape, seed)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=30000)
        puller.call(actions.wait_moving, "pull", rng.randrange(1, 64 << 20))
        puller.stop()
        seconds, late = owner.call(actions.drop_beside_sleeper, "kv", UNREGISTER_MS)
        owner.call(actions.paint, "kv", 0xEE)
        owner.call(reuse.reopen, "kv", tensors, shape, seed + 100)
        puller.resume()
        outcome = puller.call(actions.finish, "pull", 20)
        kinds.append(outcome.kind)
        assert seconds <= UNREGISTER_MS / 1000 + 0.050 + late, (number, seconds, late)
        assert outcome.kind in ("ok", "KvCacheNotExist"), (number, outcome)
        if outcome.ok:
            assert puller.call(actions.wrong_tensors, "kv", seed) == [], (number, outcome)
        owner.call(actions.drop_cache, "kv")
    assert kinds.count("KvCacheNotExist") > STOP_ROUNDS // 4, kinds
    forget(puller, "kv")
    owner.call(actions.forget_arena, "kv")


def test_a_running_pull_may_end_within_the_timeout(
    sharing: tuple[Peer, Peer, reuse.Board],
) -> None:
    owner, puller, _ = sharing
    tensors, shape = 16, (1, 8 << 20)
    cache_id = owner.call(actions.make_cache, "kv", tensors, shape, seed=1)
    puller.call(actions.make_cache, "kv", tensors, shape, access="")
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    owner.call(actions.drop_cache, "kv", 10_000)
    owner.call(actions.paint, "kv", 0xEE)
    outcome = puller.call(actions.finish, "pull")
    assert outcome.ok, outcome
    assert puller.call(actions.wrong_tensors, "kv", 1) == []
    forget(puller, "kv")


def test_a_running_pull_is_ended_at_the_timeout(
    sharing: tuple[Peer, Peer, reuse.Board],
) -> None:
    owner, puller, _ = sharing
    cache_id = owner.call(actions.make_cache, "kv", 2, (1, 16 << 20), seed=1, aliases=400)
    puller.call(actions.make_cache, "kv", 2, (1, 16 << 20), access="", aliases=400)
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    seconds, late = owner.call(actions.drop_beside_sleeper, "kv", UNREGISTER_MS)
    outcome = puller.call(actions.finish, "pull")
    assert outcome.kind == "KvCacheNotExist", outcome
    assert str(cache_id) in outcome.message
    assert seconds <= UNREGISTER_MS / 1000 + 0.050 + late
    forget(puller, "kv")


def test_unregister_the_destination(sharing: tuple[Peer, Peer, reuse.Board]) -> None:
    """The transfer into it is fenced, and another one from the same peer goes on."""
    owner, puller, _ = sharing
    doomed = owner.call(actions.make_cache, "doomed", 2, (1, 16 << 20), seed=1, aliases=400)
    healthy = owner.call(actions.make_cache, "healthy", 4, (1, 64 << 20), seed=2)
    puller.call(actions.make_cache, "doomed", 2, (1, 16 << 20), access="", aliases=400)
    puller.call(actions.make_cache, "healthy", 4, (1, 64 << 20), access="")
    puller.call(actions.begin, "doomed", "doomed", 1, doomed, timeout_ms=20000)
    waiting = puller.start(actions.pull, "doomed", 1, doomed, timeout_ms=20000)
    puller.call(actions.begin, "healthy", "healthy", 1, healthy, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "doomed")
    time.sleep(0.02)
    seconds, late = puller.call(actions.drop_beside_sleeper, "doomed", 1000)
    puller.call(actions.paint, "doomed", 0x5A)
    assert seconds <= 1 + 0.05 + late
    for outcome in (puller.call(actions.finish, "doomed", 5), waiting.result()):
        assert outcome.kind == "KvCacheNotExist", outcome
    outcome = puller.call(actions.finish, "healthy")
    assert outcome.ok, outcome
    assert puller.call(actions.wrong_tensors, "healthy", 2) == []
    time.sleep(0.3)
    assert puller.call(actions.painted, "doomed", 0x5A)
    forget(puller, "healthy")
    for name in ("doomed", "healthy"):
        forget(owner, name)


def test_an_unknown_id_is_no_error(sharing: tuple[Peer, Peer, reuse.Board]) -> None:
    owner, _, _ = sharing
    owner.call(reuse.unregister_unknown)


def test_ids_are_never_used_again(sharing: tuple[Peer, Peer, reuse.Board]) -> None:
    owner, puller, _ = sharing
    first = owner.call(actions.make_cache, "kv", 2, (1, 100), seed=1)
    owner.call(actions.drop_cache, "kv")
    second = owner.call(actions.make_cache, "kv", 2, (1, 100), seed=2)
    puller.call(actions.make_cache, "kv", 2, (1, 100), access="")
    assert first != second
    outcome = puller.call(actions.pull, "kv", 1, first, timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome
    assert puller.call(actions.pull, "kv", 1, second, timeout_ms=5000).ok
    forget(puller, "kv")
    forget(owner, "kv")


def test_peers_learn_of_it(sleeper: Sleeper, sharing: tuple[Peer, Peer, reuse.Board]) -> None:
    """After the owner's call has returned, no pull of the old id succeeds, not even one that
    begins at once, and none waits for its deadline."""
    owner, puller, _ = sharing
    puller.call(actions.make_cache, "kv", 2, (1, 100), access="")
    for number in range(20):
        cache_id = owner.call(actions.make_cache, "kv", 2, (1, 100), seed=number)
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        owner.call(actions.drop_cache, "kv")
        outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
        assert outcome.kind == "KvCacheNotExist", outcome
        assert outcome.seconds < 1 + sleeper.late
    wait_until(lambda: "up" in puller.call(actions.links)[1], timeout=5)
    forget(puller, "kv")
