"""Path "get" on one host: batches of spans copied without UCX, and UCX's own GETs beside them."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import model
from children import actions, copying
from harness import Peer, rounds, wait_until

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@contextlib.contextmanager
def linked(direct: bool = True) -> Iterator[tuple[Peer, Peer]]:
    with (
        Peer(1, path="get", name="owner") as owner,
        Peer(2, path="get", name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        if not puller.call(copying.direct, 1):
            pytest.skip("UCX does not use CMA here, or is too old to tell")
        if not direct:
            puller.call(copying.leave_to_ucx, 1)
        yield owner, puller


@pytest.fixture(scope="module", params=[True, False], ids=["copied", "by UCX"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def peers(direct: bool) -> Iterator[tuple[Peer, Peer]]:
    with linked(direct) as both:
        yield both


@pytest.fixture
def fresh() -> Iterator[tuple[Peer, Peer]]:
    """A pair of which the test may kill a part."""
    with linked() as both:
        yield both


def test_who_reads(peers: tuple[Peer, Peer], direct: bool) -> None:
    owner, puller = peers
    cache_id = owner.call(actions.make_cache, "kv", 4, (3, 5000), seed=1)
    puller.call(actions.make_cache, "kv", 4, (3, 5000), access="")
    before = puller.call(copying.bytes_direct, 1)
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert (outcome.kind, outcome.path, outcome.bytes) == ("ok", "get", 20_000)
    assert puller.call(copying.bytes_direct, 1) - before == (20_000 if direct else 0)
    assert puller.call(actions.wrong_slots, "kv", 1, 0, 5000) == []
    for peer in peers:
        peer.call(actions.drop_cache, "kv")


def test_random_geometry(peers: tuple[Peer, Peer]) -> None:
    owner, puller = peers
    rng = random.Random(11)
    for _ in range(rounds(5)):
        cases = [model.random_case(rng.randrange(1 << 30)) for _ in range(40)]
        cache_ids = owner.call(actions.open_sources, cases)
        assert puller.call(actions.run_cases, 1, cases, cache_ids, "get") == []
        assert owner.call(actions.close_sources) == []


@pytest.mark.parametrize("size", [1, 4095, 255 * 4096, (1 << 20) + 1, (5 << 20) + 3])
def test_sizes_around_a_batch(peers: tuple[Peer, Peer], size: int) -> None:
    owner, puller = peers
    cache_id = owner.call(actions.make_cache, "kv", 3, (1, size), seed=4)
    puller.call(actions.make_cache, "kv", 3, (1, size), access="", align=1)
    for per_layer in (1, 3):
        puller.call(actions.paint, "kv", 0)
        outcome = puller.call(
            actions.pull_checked, "kv", 1, cache_id, 4, per_layer=per_layer, timeout_ms=10000
        )
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []
    for peer in peers:
        peer.call(actions.drop_cache, "kv")


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_memory_never_touched(peers: tuple[Peer, Peer], shared: bool) -> None:
    """The kernel has given it no pages yet; it reads as zeros."""
    owner, puller = peers
    cache_id = owner.call(copying.make_untouched, "kv", 3, 3 << 20, shared)
    puller.call(actions.make_cache, "kv", 3, (1, 3 << 20), access="")
    puller.call(actions.paint, "kv", 1)
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.ok, outcome
    assert puller.call(actions.painted, "kv", 0)
    for peer in peers:
        peer.call(actions.drop_cache, "kv")


def test_stopped_owner(peers: tuple[Peer, Peer]) -> None:
    owner, puller = peers
    cache_id = owner.call(actions.make_cache, "kv", 4, (1, 4 << 20), seed=2)
    puller.call(actions.make_cache, "kv", 4, (1, 4 << 20), access="")
    # Its cache is known only when the owner has had the time to tell.
    assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=10000).ok
    puller.call(actions.paint, "kv", 0)
    with owner.stopped():
        outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 2, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []
        # Nobody waits for this one but the service thread.
        puller.call(actions.paint, "kv", 0)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=5000)
        wait_until(lambda: puller.call(actions.progress, "pull")[2])
        assert puller.call(actions.finish, "pull").ok
        assert puller.call(actions.wrong_tensors, "kv", 2) == []
    for peer in peers:
        peer.call(actions.drop_cache, "kv")


def test_nothing_is_written_after_the_deadline(peers: tuple[Peer, Peer]) -> None:
    owner, puller = peers
    cache_id = owner.call(actions.make_cache, "kv", 2, (1, 16 << 20), seed=1, aliases=500)
    puller.call(actions.make_cache, "kv", 2, (1, 16 << 20), access="", aliases=500)
    for _ in range(5):
        outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=50)
        puller.call(actions.paint, "kv", 0x5A)
        assert outcome.kind == "LlmTimeout", outcome
        time.sleep(0.05)
        assert puller.call(actions.painted, "kv", 0x5A)
    for peer in peers:
        peer.call(actions.drop_cache, "kv")


def test_threads_with_a_pull_each(peers: tuple[Peer, Peer]) -> None:
    owner, puller = peers
    names = ["a", "b", "c"]
    cache_id = owner.call(actions.make_cache, "kv", 6, (1, 3 << 20), seed=3)
    for name in names:
        puller.call(actions.make_cache, name, 6, (1, 3 << 20), access="")
    outcomes = puller.call(copying.pull_in_threads, names, 1, cache_id, 10)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 30, outcomes
    for name in names:
        assert puller.call(actions.wrong_tensors, name, 3) == []
        puller.call(actions.drop_cache, name)
    owner.call(actions.drop_cache, "kv")


def test_threads_that_wait_for_one_pull(peers: tuple[Peer, Peer]) -> None:
    """Each span is copied once, whoever copies it, and the layers come in order."""
    owner, puller = peers
    cache_id = owner.call(actions.make_cache, "kv", 8, (1, 9 << 20), seed=5)
    puller.call(actions.make_cache, "kv", 8, (1, 9 << 20), access="")
    for _ in range(rounds(5)):
        puller.call(actions.paint, "kv", 0)
        before = puller.call(copying.bytes_direct, 1)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
        outcomes = puller.call(copying.wait_in_threads, "pull", 3)
        assert [outcome.kind for outcome in outcomes] == ["ok"] * 3, outcomes
        assert puller.call(actions.wrong_tensors, "kv", 5) == []
        assert puller.call(copying.bytes_direct, 1) - before in (0, 8 * (9 << 20))
    for peer in peers:
        peer.call(actions.drop_cache, "kv")


def test_memory_that_has_gone(peers: tuple[Peer, Peer]) -> None:
    """The owner breaks its promise and takes memory away that is registered: an error, on a link
    that lives on."""
    owner, puller = peers
    cache_id = owner.call(copying.make_mapped, "bad", 4, 2 << 20, 1)
    healthy = owner.call(actions.make_cache, "kv", 4, (1, 2 << 20), seed=2)
    puller.call(actions.make_cache, "kv", 4, (1, 2 << 20), access="")
    owner.call(copying.take_away, "bad")
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
    assert outcome.kind == "LlmError", outcome
    assert outcome.seconds < 4
    outcome = puller.call(actions.pull_checked, "kv", 1, healthy, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    for name in ("bad", "kv"):
        owner.call(actions.drop_cache, name)
    puller.call(actions.drop_cache, "kv")


def test_unregistered_and_unmapped_in_mid_pull(peers: tuple[Peer, Peer]) -> None:
    """What the kernel then says of the memory is no matter: the word tells."""
    owner, puller = peers
    puller.call(actions.make_cache, "kv", 16, (1, 8 << 20), access="")
    kinds = []
    for number in range(rounds(10)):
        cache_id = owner.call(copying.make_mapped, "bad", 16, 8 << 20, number)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
        puller.call(actions.wait_moving, "pull")
        owner.call(copying.unregister_and_unmap, "bad", 1)
        outcome = puller.call(actions.finish, "pull")
        assert outcome.kind in ("ok", "KvCacheNotExist"), outcome
        if outcome.ok:
            assert puller.call(actions.wrong_tensors, "kv", number) == []
        kinds.append(outcome.kind)
    assert "KvCacheNotExist" in kinds
    puller.call(actions.drop_cache, "kv")


def test_part_of_the_memory_has_gone(fresh: tuple[Peer, Peer]) -> None:
    """The kernel reads up to a page that is not there: no pull may take that for success.  (By UCX
    it would be one.)"""
    owner, puller = fresh
    tensors, nbytes = 16, 1 << 20
    cache_id = owner.call(copying.make_mapped, "kv", tensors, nbytes, 6)
    puller.call(actions.make_cache, "kv", tensors, (1, nbytes), access="")
    flickering = owner.start(copying.flicker, "kv", 3.0)
    kinds = set()
    while not flickering.done():
        puller.call(actions.paint, "kv", 0)
        outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 6, timeout_ms=5000)
        assert outcome.kind in ("ok", "LlmError"), outcome
        assert outcome.extra.get("wrong", []) == []
        kinds.add(outcome.kind)
    assert flickering.result() > 100
    assert kinds == {"ok", "LlmError"}
    outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 6, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []


@pytest.mark.parametrize("impostor", [False, True], ids=["nobody", "another process"])
def test_owner_killed_while_the_puller_sleeps(fresh: tuple[Peer, Peer], impostor: bool) -> None:
    """Its process id belongs to nobody when the puller wakes up in mid-pull, or to a process that
    has other bytes at the same addresses."""
    owner, puller = fresh
    if impostor and not os.access(LAST_PID, os.W_OK):
        pytest.skip("process ids cannot be chosen here")
    cache_id = owner.call(actions.make_cache, "kv", 4, (1, 4 << 20), seed=1, aliases=200)
    places = owner.call(copying.places, "kv")
    puller.call(actions.make_cache, "kv", 4, (1, 4 << 20), access="", aliases=200)
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    puller.stop()
    other = None
    try:
        owner.kill()
        if impostor:
            other = taken_over(owner.pid, places)
        puller.resume()
        outcome = puller.call(actions.finish, "pull")
        assert outcome.kind in ("LlmError", "NotYetLink", "KvCacheNotExist"), outcome
        assert impostor or outcome.kind != "KvCacheNotExist", outcome
        assert outcome.ended - outcome.began < 2, outcome
        puller.call(actions.paint, "kv", 0x5A)
        time.sleep(0.2)
        assert puller.call(actions.painted, "kv", 0x5A)
    finally:
        puller.resume()
        if other is not None:
            other.communicate(timeout=10)


def taken_over(pid: int, places: list[tuple[int, int]]) -> subprocess.Popen[str]:
    """A process that has this id and memory at these places."""
    arguments = [f"{start}:{length}" for start, length in places]
    for _ in range(200):
        LAST_PID.write_text(str(pid - 1))
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", copying.IMPOSTOR, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        if process.pid == pid and process.stdout.readline() == "ready\n":
            return process
        process.communicate(timeout=10)
    pytest.skip("the process id, or the addresses, were taken by others")
