"""Deadlines, fences and repairs over rc_verbs: stopped and killed peers, a wire that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer, wait_until
from rdma import wire
from rdma.conftest import OWNER, PULLER, End, link

pytestmark = [pytest.mark.rdma("rc"), pytest.mark.timeout(600)]

# Far more than the guest moves in the time it is given.
LARGE = 4, (1, 4 << 20)
ALIASES = 50
SHORT_MS = 700
LATE = 0.050
PAINT = 0x5A


@pytest.fixture(scope="module")
def large(ends: tuple[Peer, Peer]) -> Iterator[int]:
    """A cache at both ends whose pull takes a minute; its id."""
    owner, puller = ends
    cache_id = owner.call(actions.make_cache, "large", *LARGE, seed=3, aliases=ALIASES)
    puller.call(actions.make_cache, "large", *LARGE, access="", aliases=ALIASES)
    yield cache_id
    for peer in ends:
        peer.call(actions.drop_cache, "large")


def check_fenced(puller: Peer, outcome: actions.Outcome) -> None:
    """It ended by its deadline, and what is painted afterwards stays."""
    puller.call(actions.paint, "large", PAINT)
    assert outcome.kind == "LlmTimeout", outcome
    late = outcome.seconds - SHORT_MS / 1000 - max(0, outcome.extra["late"])
    print(f"{late * 1e3:.1f} ms beyond its deadline, besides a sleeper's own lateness")
    assert outcome.seconds >= SHORT_MS / 1000
    time.sleep(3)
    assert puller.call(actions.painted, "large", PAINT)


def check_small_pull(ends: tuple[Peer, Peer], within: float = 60) -> None:
    """The link mends itself: after a while a pull succeeds, with the right bytes."""
    owner, puller = ends
    cache_id = owner.call(actions.make_cache, "kv", 4, (1, 50_000), seed=5)
    puller.call(actions.make_cache, "kv", 4, (1, 50_000), access="")

    def pull() -> actions.Outcome | None:
        outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 5, timeout_ms=5000)
        return outcome if outcome.ok else None

    outcome = wait_until(pull, timeout=within / 10)
    assert outcome.extra["wrong"] == []
    assert outcome.path == "get"
    for peer in ends:
        peer.call(actions.drop_cache, "kv")
        peer.call(actions.forget_arena, "kv")


def test_deadline_with_a_stopped_owner(ends: tuple[Peer, Peer], large: int) -> None:
    owner, puller = ends
    with owner.stopped():
        outcome = puller.call(actions.pull_beside_sleeper, "large", 1, large, timeout_ms=SHORT_MS)
        check_fenced(puller, outcome)
    check_small_pull(ends)


@pytest.mark.slow
def test_port_goes_down(ends: tuple[Peer, Peer], large: int, mended: None) -> None:
    """The owner's port.  With the puller's own, its reconnecting breaks: soft RoCE fails the UD
    queue pair that sends through a port that is down, and UCX 1.13 ends the process over that."""
    _owner, puller = ends
    losing = puller.start(actions.pull_beside_sleeper, "large", 1, large, timeout_ms=SHORT_MS)
    time.sleep(SHORT_MS / 2000)
    wire.cut(OWNER)
    check_fenced(puller, losing.result())
    wire.mend()
    check_small_pull(ends)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["5%", "100%"])
def test_packets_are_lost(ends: tuple[Peer, Peer], large: int, mended: None, loss: str) -> None:
    _owner, puller = ends
    for end in (OWNER, PULLER):
        wire.maltreat(end, "loss", loss)
    outcome = puller.call(actions.pull_beside_sleeper, "large", 1, large, timeout_ms=SHORT_MS)
    check_fenced(puller, outcome)
    if loss == "5%":
        check_small_pull(ends)
    wire.mend()
    check_small_pull(ends)


def test_unregistered_memory_is_refused_by_the_device(ends: tuple[Peer, Peer]) -> None:
    """The puller sleeps through the owner's unregistering and reads on when it wakes."""
    owner, puller = ends
    cache_id = owner.call(actions.make_cache, "gone", *LARGE, seed=4, aliases=ALIASES)
    puller.call(actions.make_cache, "gone", *LARGE, access="", aliases=ALIASES)
    puller.call(actions.begin, "pull", "gone", 1, cache_id, timeout_ms=120_000)
    assert puller.call(actions.wait_moving, "pull", 1 << 16, 60.0)
    with puller.stopped():
        owner.call(actions.drop_cache, "gone")
        owner.call(actions.forget_arena, "gone")
    outcome = puller.call(actions.finish, "pull", 60)
    assert outcome.kind == "KvCacheNotExist", outcome
    puller.call(actions.drop_cache, "gone")
    check_small_pull(ends)


@pytest.mark.slow
def test_unlink_and_link_again(ends: tuple[Peer, Peer]) -> None:
    owner, puller = ends
    puller.unlink(owner, timeout_ms=5000)
    text = link(puller, owner)
    assert "rc_verbs/" in text
    check_small_pull(ends)


@pytest.mark.slow
def test_owner_is_killed_in_mid_pull_and_comes_back() -> None:
    with End(OWNER, fresh=True) as owner, End(PULLER) as puller:
        link(puller, owner)
        cache_id = owner.call(actions.make_cache, "large", *LARGE, seed=3, aliases=ALIASES)
        puller.call(actions.make_cache, "large", *LARGE, access="", aliases=ALIASES)
        puller.call(actions.begin, "pull", "large", 1, cache_id, timeout_ms=120_000)
        assert puller.call(actions.wait_moving, "pull", 1 << 16, 60.0)
        began = time.monotonic()
        owner.kill()
        outcome = puller.call(actions.finish, "pull", 60)
        print(f"{time.monotonic() - began:.1f} s after the kill: {outcome.kind}")
        puller.call(actions.paint, "large", PAINT)
        assert outcome.kind in ("LlmError", "NotYetLink"), outcome
        time.sleep(2)
        assert puller.call(actions.painted, "large", PAINT)
        owner.restart()
        link(puller, owner)
        check_small_pull((owner, puller))
