"""Pushes: the mirror image of pulls, done by the receiver's engine without its application."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import test_blocks

import model
from checks import BASES, FAULTS, STATUS, Fault, call_with, compatible, fault
from children import actions, pushing
from children.pushing import PushCase
from harness import Peer, Proxy, rounds, wait_until
from sleeper import Sleeper

CASES = int(os.environ.get("UCXKV_TEST_CASES", "0")) or rounds(500)
REUSE_ROUNDS = rounds(100)
BATCH = 25
FEATURE_NOT_ENABLED = 0x5010B019

# In this module the "owner" of the pair receives, the "puller" sends: who listened does not matter.


# Random geometry


def random_case(seed: int, form: str) -> PushCase:
    """A push of a slot, of blocks, or of the continuous slot 0 to blocks, that must succeed."""
    rng = random.Random(f"push {form} {seed}")
    blocks = None if form == "slots" else test_blocks.random_case(seed + 100_000, form)
    if blocks is None:
        case = model.random_case(seed + 100_000, budget=2 << 20)
    elif form == "continuous":
        # A push names no source slot.
        case = replace(blocks.case, src=replace(blocks.case.src, slot=0))
        blocks = replace(blocks, case=case)
    else:
        case = blocks.case
    return PushCase(case, blocks, access=rng.choice(["r", "rw", ""]), twin=rng.random() < 0.2)


def run(pair: tuple[Peer, Peer], cases: list[PushCase], path: str) -> list[str]:
    receiver, sender = pair
    problems: list[str] = []
    for first in range(0, len(cases), BATCH):
        batch = cases[first : first + BATCH]
        ids = receiver.call(pushing.open_destinations, batch)
        problems += sender.call(pushing.run_cases, receiver.cluster_id, batch, ids, path)
        problems += receiver.call(pushing.check_destinations)
    return problems


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["slots", *test_blocks.FORMS])
def test_random_geometry(pair: tuple[Peer, Peer], path: str, form: str) -> None:
    problems = run(pair, [random_case(seed, form) for seed in range(CASES)], path)
    assert not problems, f"{len(problems)} problems, the first: {problems[0]}"


# Checks in order

BASE: dict[str, Any] = {
    "cluster_id": 1,
    "src": "kv",
    "src_slot": 0,
    "dst_slot": 0,
    "size": -1,
    "src_layers": (-1, -1),
    "dst_layers": (-1, -1),
    "per_layer": 2,
    "timeout_ms": 5000,
}
SOURCES = {
    "kv": (12, (4, 64), "UINT8"),
    "short": (12, (4, 32), "UINT8"),
    "ten": (10, (4, 64), "UINT8"),
    "other": (12, (4, 64), "INT8"),
}


def mirror(one: Fault) -> Fault:
    """The same fault with the sides exchanged."""
    swapped = {
        key.replace("src", "?").replace("dst", "src").replace("?", "dst"): value
        for key, value in one.changes
    }
    return fault(one.step, one.kind, **swapped)


# A source with short slots fits; a destination with short slots does not.
MIRRORED = [mirror(one) for one in FAULTS if one.changes != (("dst", "short"),)]
PUSH_FAULTS = [*MIRRORED, fault(6, "ParamInvalid", dst_id="short")]


@pytest.fixture(scope="module")
def base(pair: tuple[Peer, Peer]) -> dict[str, Any]:
    receiver, sender = pair
    ids = {}
    for name, shape, access in (
        ("target", (4, 64), "rw"),
        ("private", (4, 64), ""),
        ("gone", (4, 64), "rw"),
        ("short", (4, 32), "rw"),
        ("readable", (4, 64), "r"),
    ):
        ids[name] = receiver.call(actions.make_cache, name, 12, shape, access=access)
    receiver.call(actions.drop_cache, "gone")
    for name, (tensors, shape, data_type) in SOURCES.items():
        sender.call(actions.make_cache, name, tensors, shape, seed=1, data_type=data_type)
    return {**BASE, "dst_id": ids["target"], "ids": ids}


def resolve(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "dst_id": call["ids"].get(call["dst_id"], call["dst_id"])}


def nothing_moved(receiver: Peer) -> bool:
    names = ("target", "private", "short", "readable")
    return all(receiver.call(actions.painted, name, 0x22) for name in names)


def paint_all(receiver: Peer) -> None:
    for name in ("target", "private", "short", "readable"):
        receiver.call(actions.paint, name, 0x22)


@pytest.mark.parametrize("twin", [False, True], ids=["push", "async"])
def test_each_fault(pair: tuple[Peer, Peer], base: dict[str, Any], twin: bool) -> None:
    receiver, sender = pair
    paint_all(receiver)
    calls = [resolve(call_with(base, one)) for one in PUSH_FAULTS]
    outcomes = sender.call(pushing.raw_pushes, calls, twin)
    for one, outcome in zip(PUSH_FAULTS, outcomes, strict=True):
        assert outcome.kind == one.kind, (one.name, outcome)
        assert BASES[one.kind] in outcome.bases
        assert outcome.status == STATUS[one.kind]
        if one.step in (5, 6):
            assert "cluster 1" in outcome.message, (one.name, outcome.message)
    assert nothing_moved(receiver)


def test_the_earlier_of_two_faults_decides(pair: tuple[Peer, Peer], base: dict[str, Any]) -> None:
    receiver, sender = pair
    paint_all(receiver)
    both = compatible(PUSH_FAULTS)
    assert len(both) > 800
    calls = [resolve(call_with(base, *two)) for two in both]
    outcomes = sender.call(pushing.raw_pushes, calls, timeout=60)
    for (first, second), outcome in zip(both, outcomes, strict=True):
        assert outcome.kind == first.kind, (first.name, second.name, outcome)
    assert nothing_moved(receiver)


@pytest.mark.parametrize("twin", [False, True], ids=["push", "async"])
def test_a_cache_that_may_only_be_read(
    pair: tuple[Peer, Peer], base: dict[str, Any], twin: bool
) -> None:
    receiver, sender = pair
    paint_all(receiver)
    call = resolve({**base, "dst_id": "readable"})
    outcome = sender.call(pushing.raw_push, call, twin)
    assert outcome.kind == "FeatureNotEnabled", outcome
    assert outcome.status == FEATURE_NOT_ENABLED
    assert "rw" in outcome.message
    assert nothing_moved(receiver)
    assert sender.call(pushing.raw_push, resolve(base), twin).ok
    assert not nothing_moved(receiver)


# The receiver's part


def test_path(pair: tuple[Peer, Peer], path: str) -> None:
    """The receiver pulls as it would for itself, from what it is allowed to read."""
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", 4, (2, 50_000), access="rw")
    for access, wanted in (("r", path), ("rw", path), ("", "stream")):
        sender.call(actions.make_cache, "from", 4, (2, 50_000), seed=5, access=access)
        # The catalogue is there at the latest after an answer about another cache.
        receiver.call(actions.pull, "into", 2, 10**9, timeout_ms=5000)
        outcome = sender.call(pushing.push, "from", 1, target, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.path == wanted, (access, outcome)
        assert receiver.call(actions.wrong_slots, "into", 5, 0, 50_000) == []
        receiver.call(actions.paint, "into", 0)
        sender.call(actions.drop_cache, "from")
    receiver.call(actions.drop_cache, "into")


SHAPE = 8, (4, 1 << 20)


def test_the_receiver_holds_its_gil(pair: tuple[Peer, Peer]) -> None:
    """Its application takes no part in a push, and none of its threads runs Python."""
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", *SHAPE, access="rw")
    sender.call(actions.make_cache, "from", *SHAPE, seed=3)
    receiver.call(actions.paint, "into", 0)
    asleep = receiver.start_main(actions.hold_gil, 1.5)
    for slot in range(SHAPE[1][0]):
        outcome = sender.call(
            pushing.push, "from", 1, target, src_slot=slot, dst_slot=slot, timeout_ms=1000
        )
        assert outcome.ok, outcome
    assert not asleep.done(), "the pushes took as long as the GIL was held"
    asleep.result()
    assert receiver.call(actions.wrong_tensors, "into", 3) == []
    receiver.call(actions.drop_cache, "into")
    sender.call(actions.drop_cache, "from")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("when", ["before", "amid"])
def test_receiver_stopped_then_quiesced(
    sleeper: Sleeper, pair: tuple[Peer, Peer], when: str
) -> None:
    """The sender's deadline passes while the receiver is stopped, before the offer has come or
    while it is being carried out.  After `quiesce` the slot, used again, keeps its bytes."""
    receiver, sender = pair
    rng = random.Random(7)
    slots, slot_bytes = 4, 256 << 10
    target = receiver.call(actions.make_cache, "into", 16, (slots, slot_bytes), access="rw")
    sender.call(actions.make_cache, "from", 16, (slots, slot_bytes), seed=3)
    kinds = []
    for number in range(REUSE_ROUNDS):
        slot = number % slots
        if when == "before":
            receiver.stop()
        pending = sender.start(
            pushing.push, "from", 1, target, src_slot=slot, dst_slot=slot, timeout_ms=40
        )
        if when == "amid":
            time.sleep(rng.uniform(0, 0.004))
            receiver.stop()
        outcome = pending.result()
        kinds.append(outcome.kind)
        assert outcome.kind in ("ok", "LlmTimeout"), (number, outcome)
        receiver.resume()
        value = 1 + number % 200
        seconds = receiver.call(pushing.quiesce_and_reuse, "into", slot, slot_bytes, value, 1000)
        assert seconds < 0.5 + sleeper.late, (number, seconds)
        if number % 5 == 0:
            time.sleep(0.02)
        assert receiver.call(pushing.slot_holds, "into", slot, slot_bytes, value), number
        # The next push of the same slot is a new one, and welcome.
        if number % 10 == 9:
            outcome = sender.call(
                pushing.push, "from", 1, target, src_slot=slot, dst_slot=slot, timeout_ms=5000
            )
            assert outcome.ok, (number, outcome)
            assert receiver.call(actions.wrong_slot_of, "into", 3, slot, slot_bytes) == []
    if when == "before":
        assert set(kinds) == {"LlmTimeout"}
    else:
        assert "LlmTimeout" in kinds
    receiver.call(actions.drop_cache, "into")
    sender.call(actions.drop_cache, "from")


LARGE = 2, (1, 16 << 20)


def test_quiesce_ends_a_running_push(pair: tuple[Peer, Peer]) -> None:
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", *LARGE, access="rw", aliases=400)
    sender.call(actions.make_cache, "from", *LARGE, seed=1, aliases=400)
    receiver.call(actions.paint, "into", 0)
    sender.call(pushing.begin, "push", "from", 1, target, timeout_ms=20000)
    assert receiver.call(pushing.wait_written, "into", 0)
    receiver.call(pushing.quiesce_and_reuse, "into", 0, LARGE[1][1], 0x5A, 1000)
    outcome = sender.call(actions.finish, "push", 5)
    assert not outcome.ok, outcome
    assert outcome.kind != "LlmTimeout", outcome
    time.sleep(0.3)
    assert receiver.call(actions.painted, "into", 0x5A)
    receiver.call(actions.drop_cache, "into")
    sender.call(actions.drop_cache, "from")


def test_quiesce_leaves_other_slots_alone(pair: tuple[Peer, Peer]) -> None:
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", 8, (2, 4 << 20), access="rw", aliases=8)
    sender.call(actions.make_cache, "from", 8, (2, 4 << 20), seed=1, aliases=8)
    receiver.call(actions.paint, "into", 0)
    sender.call(pushing.begin, "push", "from", 1, target, timeout_ms=20000)
    assert receiver.call(pushing.wait_written, "into", 0)
    receiver.call(pushing.quiesce_and_reuse, "into", 1, 4 << 20, 0x5A, 1000)
    outcome = sender.call(actions.finish, "push", 20)
    assert outcome.ok, outcome
    assert receiver.call(actions.wrong_slot_of, "into", 1, 0, 4 << 20) == []
    assert receiver.call(pushing.slot_holds, "into", 1, 4 << 20, 0x5A)
    for peer, name in ((receiver, "into"), (sender, "from")):
        peer.call(actions.drop_cache, name)
        peer.call(actions.forget_arena, name)


# Endings


@pytest.mark.parametrize("timeout_ms", [1000, 50])
def test_unregister_the_destination(pair: tuple[Peer, Peer], timeout_ms: int) -> None:
    """Its push is fenced at once and fails at the sender; the memory is the application's."""
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", *LARGE, access="rw", aliases=400)
    sender.call(actions.make_cache, "from", *LARGE, seed=1, aliases=400)
    receiver.call(actions.paint, "into", 0)
    sender.call(pushing.begin, "push", "from", 1, target, timeout_ms=20000)
    assert receiver.call(pushing.wait_written, "into", 0)
    seconds, late = receiver.call(actions.drop_beside_sleeper, "into", timeout_ms)
    receiver.call(actions.paint, "into", 0x5A)
    assert seconds <= timeout_ms / 1000 + 0.05 + late
    outcome = sender.call(actions.finish, "push", 5)
    assert outcome.kind == "KvCacheNotExist", outcome
    assert "cluster 1" in outcome.message
    time.sleep(0.2)
    assert receiver.call(actions.painted, "into", 0x5A)
    again = sender.call(pushing.push, "from", 1, target, timeout_ms=2000)
    assert again.kind == "KvCacheNotExist", again
    sender.call(actions.drop_cache, "from")


@pytest.mark.parametrize("timeout_ms", [1000, 50])
def test_unregister_the_source(pair: tuple[Peer, Peer], timeout_ms: int) -> None:
    """The push fails at the sender, whatever the receiver has got of it."""
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", *LARGE, access="rw", aliases=400)
    sender.call(actions.make_cache, "from", *LARGE, seed=1, aliases=400)
    receiver.call(actions.paint, "into", 0)
    waiting = sender.start(pushing.push, "from", 1, target, timeout_ms=20000)
    assert receiver.call(pushing.wait_written, "into", 0)
    seconds, late = sender.call(actions.drop_beside_sleeper, "from", timeout_ms)
    sender.call(actions.paint, "from", 0xEE)
    assert seconds <= timeout_ms / 1000 + 0.05 + late
    outcome = waiting.result(5)
    assert outcome.kind == "KvCacheNotExist", outcome
    receiver.call(actions.drop_cache, "into")
    sender.call(actions.forget_arena, "from")


def test_deadline(sleeper: Sleeper, pair: tuple[Peer, Peer]) -> None:
    """A push too large for its deadline: on time, and a later one succeeds without relinking."""
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "into", *LARGE, access="rw", aliases=400)
    sender.call(actions.make_cache, "from", *LARGE, seed=1, aliases=400)
    small = receiver.call(actions.make_cache, "small", 2, (1, 1000), access="rw")
    sender.call(actions.make_cache, "few", 2, (1, 1000), seed=2)
    for _ in range(3):
        outcome = sender.call(pushing.push, "from", 1, target, timeout_ms=300)
        assert outcome.kind == "LlmTimeout", outcome
        assert 0.3 <= outcome.seconds < 0.6 + sleeper.late
        assert sender.call(pushing.push, "few", 1, small, timeout_ms=5000).ok
        assert receiver.call(actions.wrong_tensors, "small", 2) == []
        receiver.call(actions.paint, "small", 0)
    for peer, names in ((receiver, ("into", "small")), (sender, ("from", "few"))):
        for name in names:
            peer.call(actions.drop_cache, name)


@pytest.mark.parametrize("victim", ["receiver", "sender"])
def test_a_process_dies(sleeper: Sleeper, path: str, victim: str) -> None:
    with (
        Peer(71, path=path, name="receiver") as receiver,
        Peer(2, path=path, name="sender", listen=False) as sender,
        Peer(3, path=path, name="next", listen=False) as follower,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", *LARGE, access="rw", aliases=400)
        small = receiver.call(actions.make_cache, "small", 2, (1, 1000), access="rw")
        sender.call(actions.make_cache, "from", *LARGE, seed=1, aliases=400)
        receiver.call(actions.paint, "into", 0)
        sender.call(pushing.begin, "push", "from", 71, target, timeout_ms=30000)
        assert receiver.call(pushing.wait_written, "into", 0)
        killed = time.monotonic()
        if victim == "receiver":
            receiver.kill()
            outcome = sender.call(actions.finish, "push", 5)
            assert outcome.kind in ("LlmError", "NotYetLink"), outcome
            assert "71" in outcome.message
            assert outcome.ended - killed < 1 + sleeper.late
            return
        sender.kill()
        # The receiver's engine ends what it was doing for the dead, and is there for others.
        wait_until(lambda: receiver.call(actions.links).get(2) != "up", timeout=1)
        receiver.call(pushing.quiesce_and_reuse, "into", 0, LARGE[1][1], 0x5A, 1000)
        time.sleep(0.2)
        assert receiver.call(actions.painted, "into", 0x5A)
        follower.link(receiver)
        follower.call(actions.make_cache, "few", 2, (1, 1000), seed=2)
        assert follower.call(pushing.push, "few", 71, small, timeout_ms=5000).ok
        assert receiver.call(actions.wrong_tensors, "small", 2) == []
        assert receiver.call(actions.drop_cache, "into") < 1 + sleeper.late


# Many at once


@pytest.mark.timeout(120)
def test_both_directions_from_many_threads(pair: tuple[Peer, Peer]) -> None:
    slots = 3
    jobs: dict[Peer, list[tuple[str, int, int, int]]] = {pair[0]: [], pair[1]: []}
    sizes = [1000 * 7**number % 300_000 + 1 for number in range(8)]
    for sender, receiver in (pair, pair[::-1]):
        for number, size in enumerate(sizes):
            seed = sender.cluster_id * 10 + number
            target = receiver.call(
                actions.make_cache, f"into{number}", 6, (slots, size), access="rw"
            )
            receiver.call(actions.paint, f"into{number}", 0)
            sender.call(actions.make_cache, f"from{number}", 6, (slots, size), seed=seed)
            jobs[sender].append((f"from{number}", receiver.cluster_id, target, slots))
    running = [peer.start(pushing.push_at_once, jobs[peer], 10) for peer in pair]
    for one in running:
        assert one.result(60) == []
    for sender, receiver in (pair, pair[::-1]):
        for number in range(8):
            seed = sender.cluster_id * 10 + number
            assert receiver.call(actions.wrong_tensors, f"into{number}", seed) == []
            receiver.call(actions.drop_cache, f"into{number}")
            sender.call(actions.drop_cache, f"from{number}")


@pytest.mark.parametrize("layered", [False, True], ids=["whole", "layered"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same cache", "another cache"])
def test_a_push_that_waits_for_its_link_is_older_than_a_quiesce(
    path: str, layered: bool, elsewhere: bool
) -> None:
    """Who has called before the receiver's `quiesce` does not write after it, though nothing had
    been offered yet: the control connection was lost, and the push waited for it."""
    with (
        Peer(1, path=path, name="receiver") as receiver,
        Peer(2, path=path, listen=False, name="sender") as sender,
        Proxy(receiver.address) as proxy,
    ):
        sender.link(receiver, address=proxy.address)
        cache_id = receiver.call(actions.make_cache, "kv", 2, (2, 1000), access="rw")
        receiver.call(actions.make_cache, "other", 2, (2, 1000), access="rw")
        sender.call(actions.make_cache, "kv", 2, (2, 1000), seed=1)
        assert sender.call(pushing.push, "kv", 1, cache_id, timeout_ms=10_000).ok
        proxy.refusing = True
        proxy.cut()
        wait_until(lambda: sender.call(actions.links) != {1: "up"})
        begin = pushing.begin_layers if layered else pushing.begin
        sender.call(begin, "late", "kv", 1, cache_id, timeout_ms=20_000, per_layer=1)
        receiver.call(
            pushing.quiesce_and_reuse, "other" if elsewhere else "kv", 0, 1000, 0xEE, 5000
        )
        proxy.refusing = False
        outcome = sender.call(actions.finish, "late")
        assert outcome.ok is elsewhere, outcome
        assert elsewhere or "quiesced" in str(outcome)
        if not elsewhere:
            assert receiver.call(pushing.slot_holds, "kv", 0, 1000, 0xEE)
        assert sender.call(pushing.push, "kv", 1, cache_id, timeout_ms=10_000).ok
