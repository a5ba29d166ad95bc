"""Holds: the bytes of the hold, or HoldEnded, never those of the memory's next use."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from children import actions, holding, noticing
from children.actions import Outcome
from harness import Peer, rounds, wait_until

REUSE_ROUNDS = rounds(200)
SMALL = 4, (4, 1000)
LONG = 60_000
HOLD_ENDED = 0x5010B101
# Two tensors of the source stand for all layers: much to pull, little to fill.
LAYERS, SLOT = 12, 2 << 20


@pytest.fixture(scope="module")
def cache(pair: tuple[Peer, Peer]) -> int:
    owner, puller = pair
    puller.call(actions.make_cache, "kv", *SMALL, access="")
    return int(owner.call(actions.make_cache, "kv", *SMALL, seed=1))


@pytest.fixture(scope="module")
def other(path: str) -> Iterator[tuple[Peer, Peer, int]]:
    """(another owner, with room for one notice, a puller of it, the id of its only cache)."""
    with (
        Peer(1, path=path, name="other owner", options={"notice_queue": 1}) as owner,
        Peer(2, path=path, name="other puller", listen=False) as puller,
    ):
        puller.link(owner)
        puller.call(actions.make_cache, "kv", *SMALL, access="")
        yield owner, puller, owner.call(actions.make_cache, "kv", *SMALL, seed=1)


def pull(puller: Peer, cache_id: int, hold: Any, **more: Any) -> Outcome:
    outcome: Outcome = puller.call(
        noticing.pull, "kv", 1, cache_id, more.pop("notice", None), hold, timeout_ms=5000, **more
    )
    return outcome


def check_ended(outcome: Outcome) -> None:
    assert outcome.kind == "HoldEnded", outcome
    assert outcome.status == HOLD_ENDED
    assert "hold" in outcome.message
    assert "LlmError" in outcome.bases


# How a hold ends


def test_noticed(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", 1, LONG)
    assert owner.call(holding.look, "hold") == (True, None)
    assert pull(puller, cache, token, src_slot=1, notice=b"done").ok
    # It is over when the pull has returned, and when the application has the notice.
    assert owner.call(holding.look, "hold") == (False, "noticed")
    assert owner.call(noticing.take) == [(2, b"done")]
    check_ended(pull(puller, cache, token, src_slot=1, notice=b"again"))
    assert owner.call(noticing.take, 100) == []
    owner.call(holding.release, "hold")
    assert owner.call(holding.look, "hold") == (False, "noticed")
    assert owner.call(holding.wait, "hold", 0).value is True


def test_released(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", [2, 0], LONG)
    for _ in range(2):
        owner.call(holding.release, "hold")
        assert owner.call(holding.look, "hold") == (False, "released")
    check_ended(pull(puller, cache, token))
    assert owner.call(noticing.take) == []


def test_expired(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", None, 200)
    assert pull(puller, cache, token).ok
    assert owner.call(holding.wait, "hold", None).value is True
    assert owner.call(holding.look, "hold") == (False, "expired")
    check_ended(pull(puller, cache, token, notice=b"late"))
    assert owner.call(noticing.take, 100) == []


def test_expired_without_a_look(pair: tuple[Peer, Peer], cache: int) -> None:
    """The engine ends it by itself."""
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", None, 50)
    time.sleep(0.3)
    check_ended(pull(puller, cache, token))
    assert owner.call(holding.count) == 0


def test_expired_while_its_owner_was_stopped(pair: tuple[Peer, Peer], cache: int) -> None:
    """Nothing in the process could run at its time: the first look finds it ended all the same."""
    owner, puller = pair
    for _ in range(rounds(10)):
        token = owner.call(holding.make, "hold", "kv", 0, 40)
        owner.stop()
        looking = owner.start_main(holding.look, "hold")
        time.sleep(0.06)
        owner.resume()
        assert looking.result() == (False, "expired")
        check_ended(pull(puller, cache, token))


def test_unregistered(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    doomed = owner.call(actions.make_cache, "doomed", *SMALL, seed=1)
    token = owner.call(holding.make, "hold", "doomed", None, LONG)
    assert pull(puller, doomed, token).ok
    waiting = owner.start(holding.wait, "hold", None)
    owner.call(actions.drop_cache, "doomed")
    assert waiting.result().value is True
    assert owner.call(holding.look, "hold") == (False, "unregistered")
    outcome = pull(puller, doomed, token)
    assert outcome.kind in ("KvCacheNotExist", "HoldEnded"), outcome
    owner.call(holding.release, "hold")
    assert owner.call(holding.look, "hold") == (False, "unregistered")


def test_unregistered_under_a_pull(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    shape = (1, 16 << 20)
    doomed = owner.call(actions.make_cache, "doomed", 2, shape, aliases=400)
    puller.call(actions.make_cache, "endless", 2, shape, access="", aliases=400)
    token = owner.call(holding.make, "hold", "doomed", None, LONG)
    puller.call(holding.begin_and_move, "endless", 1, doomed, 0, token, 1 << 20)
    owner.call(actions.drop_cache, "doomed", 50)
    outcome = puller.call(actions.finish, "pull")
    assert outcome.kind in ("KvCacheNotExist", "HoldEnded"), outcome
    puller.call(actions.drop_cache, "endless")
    for peer, name in ((owner, "doomed"), (puller, "endless")):
        peer.call(actions.forget_arena, name)


def test_context_manager(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, _ = pair
    ends = owner.call(holding.in_block, "kv")
    assert ends == [None, "released", "released", "RuntimeError", "expired"]


def test_a_full_queue_does_not_keep_it(other: tuple[Peer, Peer, int]) -> None:
    """The notice has come, though the application has not taken those before it."""
    owner, puller, cache_id = other
    assert pull(puller, cache_id, None, notice=b"first").ok
    token = owner.call(holding.make, "hold", "kv", 0, LONG)
    waiting = puller.start(noticing.pull, "kv", 1, cache_id, b"second", token, timeout_ms=20_000)
    wait_until(lambda: owner.call(holding.look, "hold") == (False, "noticed"))
    assert not waiting.done()
    assert owner.call(noticing.take, 500) == [(2, b"first"), (2, b"second")]
    assert waiting.result().ok


def test_finalized(path: str) -> None:
    with Peer(1, path=path, name="owner") as owner:
        owner.call(actions.make_cache, "kv", *SMALL)
        found = owner.call(holding.finalize_under_wait, "kv")
        assert found.pop("seconds") < 3
        assert found == {
            "waited": True,
            "outcome": "unregistered",
            "release": "ok",
            "again": True,
        }


# Waiting


def test_wait(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", 0, LONG)
    for timeout_ms in (0, -1, 1, 150):
        seconds = max(0, timeout_ms) / 1e3
        outcome = owner.call(holding.wait_beside_sleeper, "hold", timeout_ms)
        assert outcome.value is False, outcome
        assert seconds <= outcome.seconds <= seconds + 0.05 + 4 * outcome.extra["late"], outcome
    waiting = owner.start(holding.wait, "hold", None)
    outcome = pull(puller, cache, token, notice=b"go")
    assert outcome.ok, outcome
    waited = waiting.result()
    assert waited.value is True
    assert waited.ended - outcome.ended < 0.5
    owner.call(noticing.take)
    owner.call(holding.make, "hold", "kv", 0, LONG)
    outcome = owner.call(holding.wait_and_release, "hold", 50)
    assert outcome.value is True
    assert outcome.extra["after"] < 0.5
    owner.call(holding.make, "hold", "kv", 0, 150)
    outcome = owner.call(holding.wait_beside_sleeper, "hold", None)
    assert outcome.value is True
    assert outcome.seconds <= 0.2 + 4 * outcome.extra["late"], outcome
    assert owner.call(holding.wait, "hold", "1").kind == "TypeError"


def test_a_signal_ends_a_wait(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, _ = pair
    owner.call(holding.make, "hold", "kv", 0, LONG)
    waiting = owner.start_main(holding.wait, "hold", None)
    time.sleep(0.2)
    sent = owner.interrupt()
    outcome = waiting.result()
    assert outcome.kind == "KeyboardInterrupt", outcome
    assert outcome.ended - sent < 0.5
    assert owner.call(holding.look, "hold") == (True, None)
    owner.call(holding.release, "hold")


def test_many_expire_in_time(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, _ = pair
    found = owner.call(holding.expire_many, "kv", rounds(3000), 1200)
    assert found["samples"] > 20
    assert found["ends"] == {"expired"}
    assert found["early"] == found["wrong"] == 0, found
    assert found["late"] <= 0.05 + 2 * found["sleeper"], found
    assert owner.call(holding.count) == 0


# Tokens and arguments


def test_many_pulls_under_one_hold(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", 3, LONG)
    for _ in range(50):
        assert pull(puller, cache, token, src_slot=3, dst_slot=2).ok
    assert owner.call(holding.look, "hold") == (True, None)
    # An upper-case copy of the text is the same token.
    assert pull(puller, cache, token.upper()).ok
    assert puller.call(noticing.pull_no_blocks, "kv", 1, cache, b"none", token).ok
    assert owner.call(holding.look, "hold") == (False, "noticed")
    assert owner.call(noticing.take) == [(2, b"none")]


def test_a_pull_that_fails_leaves_it(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", None, LONG)
    assert pull(puller, cache, token, src_slot=4, notice=b"x").kind == "ParamInvalid"
    assert pull(puller, cache, token, notice=b"x" * 5000).kind == "ParamInvalid"
    assert pull(puller, 999, token, notice=b"x").kind == "KvCacheNotExist"
    assert owner.call(holding.look, "hold") == (True, None)
    owner.call(holding.release, "hold")
    assert owner.call(noticing.take) == []


def test_tokens_of_something_else(
    pair: tuple[Peer, Peer], cache: int, other: tuple[Peer, Peer, int]
) -> None:
    owner, puller = pair
    owner.call(actions.make_cache, "other", *SMALL)
    of_other = owner.call(holding.make, "hold of other", "other", None, LONG)
    good = owner.call(holding.make, "hold", "kv", None, LONG)
    for _ in range(2):
        check_ended(pull(puller, cache, of_other, notice=b"no"))
        owner.call(actions.drop_cache, "other")
        again, earlier = owner.call(actions.make_cache, "other", *SMALL), of_other
        of_other = owner.call(holding.make, "hold of other", "other", None, LONG)
        check_ended(pull(puller, again, earlier, notice=b"no"))
    of_stranger = other[0].call(holding.make, "hold", "kv", None, LONG)
    check_ended(pull(puller, cache, of_stranger, notice=b"no"))
    other[0].call(holding.release, "hold")
    # Right but for the word.
    check_ended(pull(puller, cache, owner.call(holding.forged, good, word=5), notice=b"no"))
    check_ended(pull(puller, cache, owner.call(holding.forged, good, slot=60_000)))
    assert owner.call(holding.look, "hold") == (True, None)
    assert owner.call(holding.look, "hold of other") == (True, None)
    assert pull(puller, cache, good).ok
    assert owner.call(noticing.take, 100) == []
    owner.call(holding.release, "hold")
    owner.call(actions.drop_cache, "other")


def test_tokens_that_are_none(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    good = owner.call(holding.make, "hold", "kv", None, LONG)
    for token in (
        "",
        "no token",
        good[:-1],
        good + "00",
        "0" * 40,
        "é" * 40,
        owner.call(holding.forged, good, slot=0),
        owner.call(holding.forged, good, slot=65_536),
        owner.call(holding.forged, good, slot=2**32 - 1),
        owner.call(holding.forged, good, word=0),
    ):
        outcome = pull(puller, cache, token)
        assert outcome.kind == "ParamInvalid", (token, outcome)
        assert outcome.seconds < 1
    for value in (good.encode(), 7, ("a",)):
        assert pull(puller, cache, value).kind == "TypeError", value
    owner.call(holding.release, "hold")


def test_parts(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, _ = pair
    for part, blocks in (
        (None, None),
        (0, (0,)),
        (3, (3,)),
        ([2, 0, 2], (0, 2)),
        ((1, 3), (1, 3)),
        ([], ()),
    ):
        owner.call(holding.make, "hold", "kv", part, LONG)
        assert owner.call(holding.part_of, "hold") == (cache, blocks)
        owner.call(holding.release, "hold")


def test_arguments(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    before = owner.call(holding.count)
    for part, ttl_ms, kind in (
        (4, 100, "ParamInvalid"),
        (-1, 100, "ParamInvalid"),
        ([0, 4], 100, "ParamInvalid"),
        ([0, -1], 100, "ParamInvalid"),
        (2**40, 100, "ParamInvalid"),
        ("0", 100, "TypeError"),
        (0.0, 100, "TypeError"),
        ([0.5], 100, "TypeError"),
        (True, 100, "TypeError"),
        (0, 0, "ParamInvalid"),
        (0, -5, "ParamInvalid"),
        (0, float("nan"), "ParamInvalid"),
        (0, "100", "TypeError"),
        (0, None, "TypeError"),
    ):
        outcome = owner.call(holding.try_hold, "kv", part, ttl_ms)
        assert outcome.kind == kind, (part, ttl_ms, outcome)
    assert owner.call(holding.try_hold, 5, 0, 100).kind == "TypeError"
    assert owner.call(holding.try_unknown).kind == "KvCacheNotExist"
    # What no peer can pull from needs no hold.
    assert puller.call(holding.try_hold, "kv", 0, 100).kind == "ParamInvalid"
    assert owner.call(holding.count) == before


@pytest.mark.parametrize("ttl_ms", [float("inf"), 1e300, 2**100])
def test_for_ever(pair: tuple[Peer, Peer], cache: int, ttl_ms: float) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", 0, ttl_ms)
    assert pull(puller, cache, token).ok
    assert owner.call(holding.look, "hold") == (True, None)
    owner.call(holding.release, "hold")


def test_no_word_is_left(other: tuple[Peer, Peer, int]) -> None:
    owner, puller, cache_id = other
    found = owner.call(holding.exhaust, "kv", timeout=60)
    assert found == {
        "count": 65_534,
        "full": "LlmOutOfMemory",
        "cache": "LlmOutOfMemory",
        "one": "ok",
        "again": "LlmOutOfMemory",
        "tokens": 65_534,
        "held": 65_534,
        "left": 2,
    }
    assert pull(puller, cache_id, None).ok
    assert owner.call(actions.make_cache, "after", *SMALL) > cache_id
    owner.call(actions.drop_cache, "after")


def test_a_forked_child_has_none(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    token = owner.call(holding.make, "hold", "kv", 0, LONG)
    said = owner.call(holding.use_in_fork, "hold")
    assert len(said) == 6
    assert {kind for _, kind in said} == {"LlmError"}, said
    assert owner.call(holding.look, "hold") == (True, None)
    assert pull(puller, cache, token).ok
    owner.call(holding.release, "hold")


# Memory that is used again


@pytest.fixture(scope="module")
def reused(pair: tuple[Peer, Peer]) -> Iterator[int]:
    """A cache of 48 MiB a slot in 8 MiB of memory, and a destination that has all its own."""
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "reused", 2, (2, SLOT), aliases=LAYERS)
    puller.call(actions.make_cache, "reused", 2 * LAYERS, (1, SLOT), access="")
    puller.call(actions.paint, "reused", 0)
    yield cache_id
    for peer in pair:
        peer.call(actions.drop_cache, "reused")
        peer.call(actions.forget_arena, "reused")


@pytest.mark.timeout(120)
def test_the_slot_is_used_again(pair: tuple[Peer, Peer], reused: int) -> None:
    """While a peer, slow or stopped, pulls it: also under a newer hold."""
    owner, puller = pair
    rng = random.Random(8)
    kinds: Counter[str] = Counter()
    partly = 0
    for number in range(REUSE_ROUNDS):
        way = rng.choice(("release", "wait", "look"))
        stop, newer, slot = rng.random() < 0.5, rng.random() < 0.5, rng.randrange(2)
        seed = number % 3
        ttl = LONG if way == "release" else rng.uniform(5, 40)
        token = owner.call(holding.offer, "reused", slot, seed, ttl)
        least = rng.randrange(1, LAYERS * 2 * SLOT * 3 // 4)
        puller.call(holding.begin_and_move, "reused", 1, reused, slot, token, least)
        if stop:
            puller.stop()
        ended = owner.call(holding.end_and_reuse, "reused", slot, way, newer)
        if stop:
            puller.resume()
        outcome = puller.call(holding.finish_checked, "reused", seed)
        what = (number, way, stop, newer, slot, outcome)
        assert ended == ("released" if way == "release" else "expired"), what
        assert outcome.kind in ("ok", "HoldEnded"), what
        assert outcome.extra["wrong"] == [], what
        kinds[outcome.kind] += 1
        partly += not outcome.ok and outcome.extra["layers"] > 0
        if newer:
            assert owner.call(holding.look, "newer") == (True, None)
            owner.call(holding.release, "newer")
    assert kinds["HoldEnded"] > REUSE_ROUNDS // 4, kinds
    assert partly > REUSE_ROUNDS // 10, "no pull had come far enough to report a layer"


@pytest.mark.timeout(120)
def test_a_notice_ends_it_under_another_pull(pair: tuple[Peer, Peer], reused: int) -> None:
    """Who names a hold can end it: a pull that still runs gets HoldEnded, never the next bytes."""
    owner, puller = pair
    puller.call(actions.make_cache, "second", 2 * LAYERS, (1, SLOT), access="")
    kinds: Counter[str] = Counter()
    for number in range(rounds(20)):
        token = owner.call(holding.offer, "reused", 1, number, LONG)
        puller.call(holding.begin_and_move, "reused", 1, reused, 1, token, 1)
        assert puller.call(
            noticing.pull,
            "second",
            1,
            reused,
            b"mine",
            token,
            src_slot=1,
            size=1000,
            timeout_ms=10_000,
        ).ok
        assert owner.call(holding.end_and_reuse, "reused", 1, "", True) == "noticed"
        outcome = puller.call(holding.finish_checked, "reused", number)
        assert outcome.kind in ("ok", "HoldEnded"), outcome
        assert outcome.extra["wrong"] == [], outcome
        kinds[outcome.kind] += 1
        owner.call(holding.release, "newer")
        assert owner.call(noticing.take, 0) == [(2, b"mine")]
    assert kinds["HoldEnded"], kinds
    puller.call(actions.drop_cache, "second")
    puller.call(actions.forget_arena, "second")


def test_data_connections_broken_under_a_hold(pair: tuple[Peer, Peer], reused: int) -> None:
    """What is asked for again after the repair needs the hold again."""
    owner, puller = pair
    assert owner.address
    rng = random.Random(9)
    for number in range(rounds(20)):
        token = owner.call(holding.offer, "reused", 0, number, LONG)
        least = rng.randrange(1, LAYERS * SLOT)
        puller.call(holding.begin_and_move, "reused", 1, reused, 0, token, least)
        rng.choice(pair).call(noticing.break_data, [owner.address[1]])
        if number % 2:
            owner.call(holding.end_and_reuse, "reused", 0, "release", False)
        outcome = puller.call(holding.finish_checked, "reused", number)
        assert outcome.kind in (("ok", "HoldEnded") if number % 2 else ("ok",)), outcome
        assert outcome.extra["wrong"] == [], outcome
        owner.call(holding.release, "hold")
