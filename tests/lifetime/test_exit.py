"""How an engine ends: by finalize, by collection, by the interpreter's exit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions, ending
from harness import Peer, cpu_seconds, rounds
from sleeper import Sleeper

LARGE = 2, (1, 32 << 20)


@pytest.fixture
def owner(path: str) -> Iterator[Peer]:
    with Peer(1, path=path, name="owner") as peer:
        yield peer


def linked_puller(owner: Peer, path: str, **more: object) -> Peer:
    puller = Peer(2, path=path, name="puller", listen=False, **more)  # type: ignore[arg-type]
    puller.link(owner)
    return puller


def still_serves(owner: Peer, path: str) -> None:
    cache_id = owner.call(actions.make_cache, "small", 2, (1, 1000), seed=5)
    with Peer(3, path=path, name="next", listen=False) as follower:
        follower.link(owner)
        follower.call(actions.make_cache, "small", 2, (1, 1000), access="")
        outcome = follower.call(actions.pull_checked, "small", 1, cache_id, 5, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []


@pytest.mark.parametrize("how", ["async", "thread"])
def test_interpreter_exit_in_mid_pull(owner: Peer, path: str, how: str) -> None:
    """No crash, no hang; without finalize."""
    cache_id = owner.call(actions.make_cache, "kv", *LARGE, seed=1, aliases=200)
    with linked_puller(owner, path, finalize=False, allow="ResourceWarning") as puller:
        puller.call(actions.make_cache, "kv", *LARGE, access="", aliases=200)
        if how == "async":
            puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
            assert puller.call(actions.wait_moving, "pull")
        else:
            puller.call(ending.pull_in_daemon_thread, "kv", 1, cache_id)
            time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    still_serves(owner, path)


def test_finalize_in_mid_pull(owner: Peer, path: str) -> None:
    """The pull of another thread is fenced and raises; finalize is quick."""
    cache_id = owner.call(actions.make_cache, "kv", *LARGE, seed=1, aliases=200)
    with linked_puller(owner, path) as puller:
        puller.call(actions.make_cache, "kv", *LARGE, access="", aliases=200)
        waiting = puller.start(actions.pull, "kv", 1, cache_id, timeout_ms=20000)
        time.sleep(0.1)
        assert puller.call(actions.finalize) < 5
        puller.call(actions.paint, "kv", 0x5A)
        outcome = waiting.result()
        assert not outcome.ok, outcome
        assert outcome.kind in ("LlmError", "NotYetLink", "KvCacheNotExist"), outcome
        time.sleep(0.2)
        assert puller.call(actions.painted, "kv", 0x5A)
        assert puller.call(actions.pull, "kv", 1, cache_id).kind == "LlmError"
    still_serves(owner, path)


def test_finalize_with_a_stopped_peer(owner: Peer, path: str) -> None:
    with linked_puller(owner, path) as puller:
        cache_id = owner.call(actions.make_cache, "kv", 2, (1, 1 << 20), seed=1)
        puller.call(actions.make_cache, "kv", 2, (1, 1 << 20), access="")
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        with owner.stopped():
            began = time.monotonic()
            assert puller.call(actions.finalize) < 5
            assert time.monotonic() - began < 5
    still_serves(owner, path)


def test_finalize_of_the_owner_in_mid_pull(sleeper: Sleeper, path: str) -> None:
    with Peer(2, path=path, name="puller", listen=False) as puller:
        puller.call(actions.make_cache, "kv", *LARGE, access="", aliases=200)
        with Peer(1, path=path, name="owner") as owner:
            puller.link(owner)
            cache_id = owner.call(actions.make_cache, "kv", *LARGE, seed=1, aliases=200)
            puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
            assert puller.call(actions.wait_moving, "pull")
            assert owner.call(actions.finalize) < 5
            ended = time.monotonic()
            outcome = puller.call(actions.finish, "pull")
            assert not outcome.ok, outcome
            assert outcome.ended - ended < 1 + sleeper.late
            assert outcome.kind in ("LlmError", "NotYetLink", "KvCacheNotExist"), outcome


@pytest.mark.parametrize("last", ["finalize", "unlink", "unregister"])
def test_the_owner_ends_with_a_puller_stopped_in_mid_pull(
    sleeper: Sleeper, path: str, last: str
) -> None:
    """Sends to one that does not read hold up nothing for longer than was asked."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", *LARGE, seed=1, aliases=200)
        puller.call(actions.make_cache, "kv", *LARGE, access="", aliases=200)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
        assert puller.call(actions.wait_moving, "pull")
        with puller.stopped():
            began = time.monotonic()
            if last == "finalize":
                assert owner.call(actions.finalize) < 5
            elif last == "unlink":
                owner.unlink(puller, timeout_ms=500, force=True)
                assert time.monotonic() - began < 2
                assert owner.call(actions.drop_cache, "kv", 1000) < 1.2 + sleeper.late
            else:
                assert owner.call(actions.drop_cache, "kv", 300) < 0.5 + sleeper.late
            owner.call(actions.forget_arena, "kv")
            used = cpu_seconds(owner.pid)
            time.sleep(0.5)
            assert cpu_seconds(owner.pid) - used < 0.1, "the owner does not come to rest"
        outcome = puller.call(actions.finish, "pull", 5)
        assert outcome.kind in ("LlmError", "NotYetLink", "KvCacheNotExist"), outcome
        used = cpu_seconds(owner.pid)
        time.sleep(0.5)
        assert cpu_seconds(owner.pid) - used < 0.1, "the owner does not come to rest"


def test_finalize_twice_and_use_after(path: str) -> None:
    with Peer(1, path=path) as peer:
        peer.call(actions.make_cache, "kv", 2, (1, 100))
        found = peer.call(ending.finalize_twice)
        assert found["again"] == "ok"
        assert found["initialized twice"] == "LlmError"
        for call, kind in found["calls"].items():
            assert kind not in ("ok", "AttributeError", "TypeError"), (call, kind)
        # What it held is the application's again.
        assert found["threads"] == []


def test_finalize_gives_everything_back(path: str) -> None:
    with Peer(1, path=path, engine=False) as peer:
        peer.call(ending.run_engine_once, path)
        before = peer.sample()
        peer.call(ending.run_engine_once, path)
        after = peer.sample()
        assert after.fds == before.fds, (before, after)
        assert after.threads == before.threads == 2, (before, after)


def test_context_manager_and_restart(path: str) -> None:
    """`with` does both; the object can be initialized again, as another incarnation."""
    with Peer(1, path=path, engine=False) as peer:
        found = peer.call(ending.context_manager)
        assert found["inside"] is not None
        assert found["after"] == "LlmError", found
        assert found["again"] is not None


def test_dropped_engine(owner: Peer, path: str) -> None:
    """Collected without finalize: a ResourceWarning, and nothing is left of it."""
    with Peer(2, path=path, engine=False) as peer:
        first = peer.call(ending.drop_engine, owner.address)
        assert "ResourceWarning" in first["warnings"], first
        before = peer.sample()
        second = peer.call(ending.drop_engine, owner.address)
        assert "ResourceWarning" in second["warnings"], second
        after = peer.sample()
        assert after.threads == before.threads == 2, (before, after)
        assert after.fds <= before.fds, (before, after)
    still_serves(owner, path)


def test_never_initialized(path: str) -> None:
    """An object that has not begun can be dropped in silence, and says what it lacks."""
    with Peer(1, path=path, engine=False) as peer:
        found = peer.call(ending.never_initialized)
        assert found["warnings"] == []
        for call, kind in found["calls"].items():
            assert kind not in ("ok", "AttributeError"), (call, kind)


@pytest.mark.timeout(180)
def test_finalize_beside_registrations(path: str) -> None:
    """Of other threads: each of their calls succeeds or says that the engine is closed."""
    with Peer(1, path=path, engine=False) as peer:
        ends = peer.call(ending.finalize_beside_registrations, path, rounds(100), timeout=120)
        assert ends.total() == 3 * rounds(100)
        assert {text.partition(":")[0] for text in ends} == {"LlmError"}, ends
