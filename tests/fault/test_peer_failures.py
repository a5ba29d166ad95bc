"""What libraries of this kind have been seen to do, and what happens here instead.

Each of these is tested more thoroughly elsewhere; here they are in one place, by name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer
from sleeper import Sleeper

# Much more than can be moved before a deadline, in little memory.
SHAPE, ALIASES = (2, (1, 16 << 20)), 400
SMALL = 4, (1, 50_000)
PAINT = 0x5A


@pytest.fixture(scope="module")
def two(path: str) -> Iterator[tuple[Peer, Peer, int]]:
    """(owner, puller, the id of a cache that takes long to pull), linked."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
        puller.call(actions.make_cache, "kv", *SHAPE, access="", aliases=ALIASES)
        puller.call(actions.make_cache, "small", *SMALL, access="")
        yield owner, puller, cache_id


def check_small_pull(owner: Peer, puller: Peer, seed: int) -> None:
    cache_id = owner.call(actions.make_cache, "small", *SMALL, seed=seed)
    outcome = puller.call(
        actions.pull_checked, "small", owner.cluster_id, cache_id, seed, timeout_ms=5000
    )
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    owner.call(actions.drop_cache, "small")


def test_no_buffer_is_overwritten_after_its_caller_gave_up(two: tuple[Peer, Peer, int]) -> None:
    owner, puller, cache_id = two
    outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=100)
    puller.call(actions.paint, "kv", PAINT)
    assert outcome.kind == "LlmTimeout", outcome
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    puller.call(actions.cancel, "pull")
    assert not puller.call(actions.finish, "pull").ok
    puller.call(actions.paint, "kv", PAINT)
    time.sleep(0.3)
    assert puller.call(actions.painted, "kv", PAINT)
    check_small_pull(owner, puller, 2)


def test_every_call_has_a_deadline_of_its_own(
    sleeper: Sleeper, two: tuple[Peer, Peer, int]
) -> None:
    _, puller, cache_id = two
    deadlines = (50, 150, 400)
    pending = [puller.start(actions.pull, "kv", 1, cache_id, timeout_ms=each) for each in deadlines]
    for each, one in zip(deadlines, pending, strict=True):
        outcome = one.result()
        assert outcome.kind == "LlmTimeout", outcome
        assert 0 <= outcome.seconds - each / 1000 < 0.05 + sleeper.late, outcome


def test_the_owner_lives_when_a_peer_reads_what_it_has_freed(path: str) -> None:
    """In the middle of a pull the memory is unregistered and unmapped; the peer then asks again."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        puller.call(actions.make_cache, "kv", *SHAPE, access="", aliases=ALIASES)
        puller.call(actions.make_cache, "small", *SMALL, access="")
        cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
        assert puller.call(actions.wait_moving, "pull")
        owner.call(actions.drop_cache, "kv", 50)
        owner.call(actions.forget_arena, "kv")
        outcome = puller.call(actions.finish, "pull")
        assert outcome.kind == "KvCacheNotExist", outcome
        outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
        assert outcome.kind == "KvCacheNotExist", outcome
        check_small_pull(owner, puller, 3)


def test_a_peer_that_is_restarted_under_its_name_needs_no_clean_up(path: str) -> None:
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.call(actions.make_cache, "small", *SMALL, access="")
        puller.link(owner)
        check_small_pull(owner, puller, 4)
        owner.kill()
        owner.restart()
        puller.link(owner)
        check_small_pull(owner, puller, 5)


def test_errors_name_their_cause(path: str) -> None:
    """Cluster, address, and what happened: nothing that has to be looked up by its number."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1, aliases=ALIASES)
        puller.call(actions.make_cache, "kv", *SHAPE, access="", aliases=ALIASES)
        assert owner.address
        port = str(owner.address[1])
        messages = {"not linked": puller.call(actions.pull, "kv", 1, cache_id).message}
        outcome = puller.call(actions.try_link, [(7, owner.address)])
        assert outcome.kind == "LinkFailed", outcome
        messages["cluster 1 answers here, not cluster 7"] = outcome.message
        puller.link(owner)
        outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=50)
        messages["not complete after 50 ms"] = outcome.message
        outcome = puller.call(actions.pull, "kv", 1, 12345, timeout_ms=5000)
        messages["no cache 12345"] = outcome.message
        puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
        assert puller.call(actions.wait_moving, "pull")
        owner.kill()
        outcome = puller.call(actions.finish, "pull")
    gone = outcome.message
    for cause, message in messages.items():
        assert cause in message, message
        assert "cluster 1" in message, message
        assert "-1" not in message, message
        if cause != "not linked":
            assert port in message, message
    # Which of its connections breaks first is a matter of chance.
    assert "cluster 1" in gone, gone
    assert port in gone, gone
    causes = ("is gone", "reset", "lost", "closed", "cannot be read any more")
    assert any(cause in gone for cause in causes), gone
