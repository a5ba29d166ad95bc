"""The owner's process dies: an error that names it, within a second, and a new one takes over."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer, wait_until
from sleeper import Sleeper

GIB = 1 << 30
# So many bytes in 64 MiB of memory: each tensor is registered 16 times.
SHAPE, ALIASES = (4, (1, 16 << 20)), 16


@pytest.fixture(scope="module")
def puller(path: str) -> Iterator[Peer]:
    with Peer(2, path=path, name="puller", listen=False) as peer:
        peer.call(actions.make_cache, "kv", *SHAPE, access="", aliases=ALIASES)
        peer.call(actions.paint, "kv", 0)
        yield peer


@pytest.fixture
def owner(path: str) -> Iterator[Peer]:
    with Peer(71, path=path, name="owner") as peer:
        yield peer


def check_error(outcome: actions.Outcome, owner: Peer) -> None:
    assert outcome.kind in ("LlmError", "NotYetLink"), outcome
    assert "71" in outcome.message, outcome
    assert owner.address
    assert str(owner.address[1]) in outcome.message, outcome


def restart_and_pull(owner: Peer, puller: Peer) -> None:
    """Same port, same id, another process: link and pull, with no clean-up before."""
    owner.restart()
    cache_id = owner.call(actions.make_cache, "small", 4, (1, 100_000), seed=2)
    puller.link(owner)
    puller.call(actions.make_cache, "small", 4, (1, 100_000), access="")
    outcome = puller.call(actions.pull_checked, "small", 71, cache_id, 2, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    puller.call(actions.drop_cache, "small")
    puller.unlink(owner)


def test_killed_before_the_pull(sleeper: Sleeper, owner: Peer, puller: Peer) -> None:
    puller.link(owner)
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
    killed = time.monotonic()
    owner.kill()
    outcome = puller.call(actions.pull, "kv", 71, cache_id, timeout_ms=5000)
    check_error(outcome, owner)
    assert outcome.ended - killed < 1 + sleeper.late, outcome
    wait_until(lambda: "up" not in puller.call(actions.links).get(71, ""), timeout=1)
    restart_and_pull(owner, puller)


def test_killed_during_the_pull(sleeper: Sleeper, owner: Peer, puller: Peer) -> None:
    puller.link(owner)
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
    puller.call(actions.begin, "pull", "kv", 71, cache_id, timeout_ms=30000)
    moving = puller.call(actions.wait_moving, "pull")
    killed = time.monotonic()
    owner.kill()
    assert moving, "the pull was over before the owner could be killed"
    outcome = puller.call(actions.finish, "pull")
    check_error(outcome, owner)
    assert outcome.ended - killed < 1 + sleeper.late, outcome
    puller.call(actions.paint, "kv", 0x5A)
    time.sleep(0.2)
    assert puller.call(actions.painted, "kv", 0x5A)
    restart_and_pull(owner, puller)


def test_killed_while_a_thread_waits(sleeper: Sleeper, owner: Peer, puller: Peer) -> None:
    """The same, in a blocking call, with the owner stopped first so that nothing moves."""
    puller.link(owner)
    cache_id = owner.call(actions.make_cache, "kv", 2, (1, 8 << 20), seed=1, aliases=500)
    puller.call(actions.make_cache, "sink", 2, (1, 8 << 20), access="", aliases=500)
    waiting = puller.start(actions.pull, "sink", 71, cache_id, timeout_ms=30000)
    time.sleep(0.1)
    killed = time.monotonic()
    owner.kill()
    outcome = waiting.result()
    check_error(outcome, owner)
    assert 0 < outcome.ended - killed < 1 + sleeper.late, outcome
    puller.call(actions.drop_cache, "sink")
    restart_and_pull(owner, puller)


def test_killed_after_the_pull(sleeper: Sleeper, owner: Peer, puller: Peer) -> None:
    puller.link(owner)
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
    outcome = puller.call(actions.pull, "kv", 71, cache_id, timeout_ms=30000)
    assert outcome.ok, outcome
    assert outcome.bytes == GIB
    owner.kill()
    assert puller.call(actions.wrong_tensors, "kv", 1) == []
    outcome = puller.call(actions.pull, "kv", 71, cache_id, timeout_ms=5000)
    check_error(outcome, owner)
    assert outcome.seconds < 1 + sleeper.late
    restart_and_pull(owner, puller)


def test_restarted_before_anyone_noticed(owner: Peer, puller: Peer) -> None:
    """The puller is stopped while its peer dies and comes back; the old link is replaced."""
    puller.link(owner)
    with puller.stopped():
        owner.kill()
        owner.restart()
        cache_id = owner.call(actions.make_cache, "small", 4, (1, 1000), seed=3)
    puller.link(owner)
    puller.call(actions.make_cache, "small", 4, (1, 1000), access="")
    outcome = puller.call(actions.pull_checked, "small", 71, cache_id, 3, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    puller.call(actions.drop_cache, "small")
    puller.unlink(owner)


def test_other_peers_do_not_notice(path: str, owner: Peer, puller: Peer) -> None:
    with Peer(72, path=path, name="bystander") as bystander:
        for peer in (owner, bystander):
            puller.link(peer)
        doomed = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
        healthy = bystander.call(actions.make_cache, "kv", *SHAPE, seed=4, aliases=ALIASES)
        puller.call(actions.make_cache, "other", *SHAPE, access="", aliases=ALIASES)
        puller.call(actions.begin, "doomed", "kv", 71, doomed, timeout_ms=30000)
        puller.call(actions.begin, "healthy", "other", 72, healthy, timeout_ms=30000)
        puller.call(actions.wait_moving, "healthy")
        owner.kill()
        outcome = puller.call(actions.finish, "healthy")
        assert outcome.ok, outcome
        assert puller.call(actions.wrong_tensors, "other", 4) == []
        check_error(puller.call(actions.finish, "doomed"), owner)
        puller.call(actions.drop_cache, "other")
        puller.call(actions.forget_arena, "other")
        puller.unlink(bystander)


def test_puller_killed(path: str, owner: Peer) -> None:
    """The owner serves others when a puller dies in mid-pull, and lets its memory go."""
    cache_id = owner.call(actions.make_cache, "kv", 2, (1, 64 << 20), seed=1, aliases=100)
    with Peer(3, path=path, name="victim", listen=False) as victim:
        victim.link(owner)
        victim.call(actions.make_cache, "kv", 2, (1, 64 << 20), access="", aliases=100)
        victim.call(actions.begin, "pull", "kv", 71, cache_id, timeout_ms=30000)
        assert victim.call(actions.wait_moving, "pull")
        victim.kill()
    with Peer(4, path=path, name="next", listen=False) as follower:
        small = owner.call(actions.make_cache, "small", 4, (1, 1000), seed=5)
        follower.link(owner)
        follower.call(actions.make_cache, "small", 4, (1, 1000), access="")
        outcome = follower.call(actions.pull_checked, "small", 71, small, 5, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []
    assert owner.call(actions.drop_cache, "kv", 2000) < 2
