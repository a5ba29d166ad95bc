"""Pulls of blocks: against a NumPy model, their arguments and checks, and a million spans."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import checks
import model
from checks import BASES, STATUS, Fault, call_with, compatible, fault
from children import actions, blocks
from children.blocks import BlockCase
from harness import Peer, rounds

CASES = int(os.environ.get("UCXKV_TEST_CASES", "0")) or rounds(500)
BATCH = 25

KINDS = [
    "list",
    "tuple",
    "range",
    "scalars",
    "array.array",
    "memoryview",
    "strided",
    "backwards",
    "column",
    "readonly",
    "unaligned",
    *"bhilqBHILQ",
    ">i2",
    ">i4",
    ">i8",
    ">u2",
    ">u4",
    ">u8",
]


# Random geometry


def some_blocks(rng: random.Random, count: int, blocks: int, *, repeat: bool) -> list[int]:
    """`count` of the blocks, in one of the orders that there are in practice."""
    style = rng.choice(["any", "any", "ascending", "run", "backwards", "runs"])
    if repeat and (style == "any" or count > blocks):
        return [rng.randrange(blocks) for _ in range(count)]
    if style == "run":
        first = rng.randint(0, blocks - count)
        return list(range(first, first + count))
    chosen = rng.sample(range(blocks), count)
    if style == "ascending":
        chosen.sort()
    elif style == "backwards":
        chosen.sort(reverse=True)
    elif style == "runs":
        # Runs of neighbours, put together in any order.
        chosen.sort()
        pieces: list[list[int]] = []
        for block in chosen:
            if pieces and pieces[-1][-1] == block - 1:
                pieces[-1].append(block)
            else:
                pieces.append([block])
        rng.shuffle(pieces)
        chosen = [block for piece in pieces for block in piece]
    return chosen


FORMS = ["paged", "continuous"]


def random_case(seed: int, form: str) -> BlockCase:
    """A pull of blocks that must succeed, from blocks or from a continuous slot."""
    rng = random.Random(f"{form} {seed}")
    case = model.random_case(seed, budget=1 << 20)
    src, dst = case.src, case.dst
    small, large = sorted((src.slot_bytes, dst.slot_bytes))
    if form == "continuous":
        item = dst.align
        block = item * rng.randint(1, max(1, min(small // item, 300)))
        count = rng.choice([0, 1, dst.blocks, *[rng.randint(1, dst.blocks)] * 7])
        # The slot may be longer than what is taken of it.
        slot = block * max(count, 1) + item * rng.choice([0, 0, rng.randint(1, 20)])
        src, dst = replace(src, slot_bytes=slot), replace(dst, slot_bytes=block)
        sources = None
    else:
        src = replace(src, slot_bytes=small)
        dst = replace(dst, slot_bytes=rng.choice([small, small, large]))
        count = rng.choice([0, 1, dst.blocks, *[rng.randint(1, dst.blocks)] * 7])
        sources = some_blocks(rng, count, src.blocks, repeat=True)
    return BlockCase(
        case=replace(case, src=src, dst=dst, size=-1),
        src_blocks=sources,
        dst_blocks=some_blocks(rng, count, dst.blocks, repeat=False),
        src_kind=rng.choice(KINDS),
        dst_kind=rng.choice(KINDS),
        twin=rng.random() < 0.2,
    )


def run(pair: tuple[Peer, Peer], cases: list[BlockCase], path: str) -> list[str]:
    owner, puller = pair
    problems: list[str] = []
    for first in range(0, len(cases), BATCH):
        batch = cases[first : first + BATCH]
        ids = owner.call(actions.open_sources, [one.case for one in batch])
        problems += puller.call(blocks.run_cases, owner.cluster_id, batch, ids, path)
        problems += owner.call(actions.close_sources)
    return problems


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS)
def test_random_geometry(pair: tuple[Peer, Peer], path: str, form: str) -> None:
    problems = run(pair, [random_case(seed, form) for seed in range(CASES)], path)
    assert not problems, f"{len(problems)} problems, the first: {problems[0]}"


@pytest.mark.parametrize("form", FORMS)
def test_the_random_cases_are_what_they_should_be(form: str) -> None:
    cases = [random_case(seed, form) for seed in range(500)]
    assert {one.src_kind for one in cases} == {one.dst_kind for one in cases} == set(KINDS)
    assert {one.src_blocks is None for one in cases} == {form == "continuous"}
    assert sum(not one.dst_blocks for one in cases) > 20
    assert sum(len(one.dst_blocks) > 8 for one in cases) > 60
    assert sum(one.dst_blocks != sorted(one.dst_blocks) for one in cases) > 60
    assert sum(one.case.src.layers != one.case.dst.layers for one in cases) > 100
    shorter = [one for one in cases if one.case.src.slot_bytes < one.case.dst.slot_bytes]
    assert len(shorter) > 50 if form == "paged" else not shorter


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lists(pair: tuple[Peer, Peer], path: str, kind: str) -> None:
    """Each kind on both sides, in the same caches."""
    base = next(
        one
        for one in (random_case(seed, "paged") for seed in range(1000))
        if one.case.src.blocks > 9 and one.case.dst.blocks > 9
    )
    cases = [
        replace(base, src_blocks=src, dst_blocks=dst, src_kind=kind, dst_kind=kind)
        for src, dst in (([], []), ([3], [5]), ([1, 2, 3, 4], [9, 7, 5, 3]), ([8, 8], [0, 1]))
    ]
    assert run(pair, cases, path) == []


# Checks


BASE: dict[str, Any] = {
    "cluster_id": 1,
    "src_slot": 0,
    "dst": "kv",
    "src_blocks": [0, 1],
    "dst_blocks": [2, 3],
    "src_layers": (-1, -1),
    "dst_layers": (-1, -1),
    "per_layer": 2,
    "timeout_ms": 5000,
}
DESTINATIONS = {
    "kv": (12, (4, 64), "UINT8"),
    "short": (12, (4, 32), "UINT8"),
    "ten": (10, (4, 64), "UINT8"),
    "other": (12, (4, 64), "INT8"),
    "few": (12, (2, 64), "UINT8"),
    "quarter": (12, (4, 16), "UINT8"),
}


def of_blocks(one: Fault) -> bool:
    """Whether it is a fault here too: the slot of a source that is not continuous is not looked
    at."""
    changed = {key for key, _ in one.changes}
    return not one.keys & {"size", "dst_slot"} and not (one.step == 6 and changed == {"src_slot"})


FAULTS = [
    *filter(of_blocks, checks.FAULTS),
    fault(1, "TypeError", src_blocks=0),
    fault(1, "TypeError", src_blocks="01"),
    fault(1, "TypeError", src_blocks=[0.0, 1.0]),
    fault(1, "TypeError", src_blocks=[[0, 1]]),
    fault(1, "TypeError", src_blocks=["0", "1"]),
    fault(1, "TypeError", src_blocks=[None, 1]),
    fault(1, "TypeError", src_blocks=np.zeros(2)),
    fault(1, "TypeError", src_blocks=np.zeros(2, bool)),
    fault(1, "TypeError", src_blocks={0: 1, 1: 2}),
    fault(1, "TypeError", dst_blocks=None),
    fault(1, "TypeError", dst_blocks=2),
    fault(1, "TypeError", dst_blocks=np.zeros((2, 1), int)),
    fault(1, "TypeError", dst_blocks=np.array(3)),
    fault(1, "TypeError", dst_blocks=[(2,), (3, 4)]),
    fault(2, "ParamInvalid", src_blocks=[0, -1]),
    fault(2, "ParamInvalid", src_blocks=[0, 2**32]),
    fault(2, "ParamInvalid", src_blocks=np.array([0, 2**64 - 1], np.uint64)),
    fault(2, "ParamInvalid", src_blocks=[0, 1, 2]),
    fault(2, "ParamInvalid", src_blocks=[]),
    fault(2, "ParamInvalid", dst_blocks=[-1, 2]),
    fault(2, "ParamInvalid", dst_blocks=[3, 3]),
    fault(2, "ParamInvalid", dst_blocks=[2**40, 3]),
    fault(2, "ParamInvalid", dst_blocks=[3]),
    fault(6, "ParamInvalid", src_blocks=[0, 4]),
    fault(6, "ParamInvalid", src_blocks=[2**32 - 1, 0]),
    fault(6, "ParamInvalid", dst_blocks=[4, 0]),
    fault(6, "ParamInvalid", dst_blocks=[0, 2**32 - 1]),
    fault(6, "ParamInvalid", dst="few"),
    # A continuous source: its slot, and more blocks than the slot has bytes for.
    fault(6, "ParamInvalid", src_blocks=None, src_slot=4),
    fault(6, "ParamInvalid", src_blocks=None),
    fault(6, "ParamInvalid", src_blocks=None, dst="quarter", dst_blocks=range(5)),
]


@pytest.fixture(scope="module")
def base(pair: tuple[Peer, Peer]) -> dict[str, Any]:
    owner, puller = pair
    source = owner.call(actions.make_cache, "kv", 12, (4, 64), seed=1)
    private = owner.call(actions.make_cache, "private", 12, (4, 64), seed=2, access="")
    gone = owner.call(actions.make_cache, "gone", 12, (4, 64), seed=3)
    owner.call(actions.drop_cache, "gone")
    for name, (tensors, shape, data_type) in DESTINATIONS.items():
        puller.call(actions.make_cache, name, tensors, shape, data_type=data_type, access="")
        puller.call(actions.paint, name, 0x22)
    return {**BASE, "src_id": source, "ids": {"private": private, "gone": gone}}


def resolved(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "src_id": call["ids"].get(call["src_id"], call["src_id"])}


def nothing_moved(puller: Peer) -> bool:
    return all(puller.call(actions.painted, name, 0x22) for name in DESTINATIONS)


@pytest.mark.parametrize("twin", [False, True], ids=["pull", "async"])
def test_each_fault(pair: tuple[Peer, Peer], base: dict[str, Any], twin: bool) -> None:
    _, puller = pair
    calls = [resolved(call_with(base, one)) for one in FAULTS]
    outcomes = puller.call(blocks.raw_pulls, calls, twin, timeout=60)
    wrong = [
        (one.name, outcome)
        for one, outcome in zip(FAULTS, outcomes, strict=True)
        if outcome.kind != one.kind
    ]
    assert wrong == []
    for one, outcome in zip(FAULTS, outcomes, strict=True):
        assert BASES[one.kind] in outcome.bases
        assert outcome.status == STATUS[one.kind]
        if one.step in (5, 6):
            assert "cluster 1" in outcome.message, (one.name, outcome.message)
    assert nothing_moved(puller)


def telling(first: Fault, second: Fault) -> bool:
    """Whether both are faults in one call, of two steps: lists are faulty by each other."""
    lists = {"src_blocks", "dst_blocks"} <= first.keys | second.keys
    return first.step < second.step and (first.step == 1 or not lists)


def test_the_earlier_of_two_faults_decides(pair: tuple[Peer, Peer], base: dict[str, Any]) -> None:
    _, puller = pair
    both = [two for two in compatible(FAULTS) if telling(*two)]
    assert len(both) > 500
    calls = [resolved(call_with(base, *two)) for two in both]
    outcomes = puller.call(blocks.raw_pulls, calls, timeout=60)
    for (first, second), outcome in zip(both, outcomes, strict=True):
        assert outcome.kind == first.kind, (first.name, second.name, outcome)
    assert nothing_moved(puller)


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({}, 12 * 2 * 64),
        ({"src_blocks": [], "dst_blocks": []}, 0),
        ({"src_blocks": (), "dst_blocks": np.zeros(0)}, 0),
        ({"src_blocks": None, "dst_blocks": []}, 0),
        ({"src_blocks": [3, 3], "dst_blocks": [0, 3]}, 12 * 2 * 64),
        ({"src_slot": 2**40}, 12 * 2 * 64),
        ({"src_blocks": None, "dst_blocks": [1]}, 12 * 64),
        ({"src_blocks": None, "src_slot": 3, "dst": "quarter", "dst_blocks": [3, 0, 1]}, 12 * 48),
        ({"dst": "few", "dst_blocks": [1, 0]}, 12 * 2 * 64),
        ({"src_layers": (5, 5), "dst_layers": (0, 0)}, 2 * 2 * 64),
    ],
)
def test_what_is_allowed(
    pair: tuple[Peer, Peer], base: dict[str, Any], changes: dict[str, Any], moved: int
) -> None:
    """The nearest neighbours of the faults are none."""
    _, puller = pair
    outcome = puller.call(blocks.raw_pull, {**base, **changes})
    for name in DESTINATIONS:
        puller.call(actions.paint, name, 0x22)
    assert outcome.ok, outcome
    assert outcome.bytes == moved


def test_an_empty_pull_is_checked_like_any_other(
    pair: tuple[Peer, Peer], base: dict[str, Any]
) -> None:
    _, puller = pair
    empty = {**base, "src_blocks": [], "dst_blocks": []}
    unknown = {**empty, "src_id": checks.UNKNOWN_REMOTE}
    assert puller.call(blocks.raw_pull, unknown).kind == "KvCacheNotExist"
    assert puller.call(blocks.raw_pull, {**empty, "dst": "ten"}).kind == "ParamInvalid"


# Many blocks


def test_neighbours_become_one_span(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "many", 2, (1000, 64), seed=8)
    puller.call(actions.make_cache, "many", 2, (1000, 64), access="")
    call = {
        **BASE,
        "src_id": cache_id,
        "dst": "many",
        "src_blocks": range(1000),
        "dst_blocks": range(1000),
    }
    whole = puller.call(blocks.raw_pull, call)
    wrong = puller.call(actions.wrong_tensors, "many", 8)
    # Every second neighbour is missing: nothing can be merged.
    call.update(src_blocks=range(0, 1000, 2), dst_blocks=range(1, 1000, 2))
    single = puller.call(blocks.raw_pull, call)
    for peer in pair:
        peer.call(actions.drop_cache, "many")
    assert wrong == []
    assert (whole.bytes, whole.spans) == (128_000, 2)
    assert (single.bytes, single.spans) == (64_000, 1000)


@pytest.mark.parametrize("reuse", [False, True], ids=["kept", "reused"])
def test_lists_longer_than_a_message(pair: tuple[Peer, Peer], reuse: bool) -> None:
    """Two tensors, 60,000 blocks each, in random order on both sides.

    What becomes of the lists after the call is the caller's affair.
    """
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "many", 2, (60_000, 24), seed=9)
    puller.call(actions.make_cache, "many", 2, (60_000, 24), access="")
    outcome = puller.call(
        blocks.pull_permuted, "many", 1, cache_id, 9, reuse=reuse, timeout_ms=20000
    )
    for peer in pair:
        peer.call(actions.drop_cache, "many")
    assert outcome.ok, outcome
    assert outcome.bytes == 2 * 60_000 * 24
    assert outcome.extra["wrong"] == []


def test_lists_are_gone_before_a_layer_is_ready(pair: tuple[Peer, Peer]) -> None:
    """The layers of a push share them, and have them until the last has landed."""
    sender, receiver = pair
    sender.call(actions.make_cache, "many", 3, (60_000, 24), seed=11)
    cache_id = receiver.call(actions.make_cache, "many", 3, (60_000, 24), access="rw")
    outcome = sender.call(blocks.push_permuted_layers, "many", 2, cache_id, timeout_ms=20000)
    wrong = receiver.call(blocks.wrong_permuted, "many", 11)
    for peer in pair:
        peer.call(actions.drop_cache, "many")
    assert outcome.ok, outcome
    assert outcome.bytes == 3 * 60_000 * 24
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_million_spans(pair: tuple[Peer, Peer], path: str) -> None:
    owner, puller = pair
    shape = (2_000_000, 16)
    cache_id = owner.call(actions.make_cache, "million", 1, shape, seed=10)
    puller.call(actions.make_cache, "million", 1, shape, access="")
    puller.call(actions.paint, "million", 0)
    owner.call(blocks.watch_memory)
    outcome = puller.call(
        blocks.pull_alternate, "million", 1, cache_id, 10, timeout_ms=60000, timeout=90
    )
    owners = owner.call(blocks.extra_memory)
    for peer in pair:
        peer.call(actions.drop_cache, "million")
        peer.call(actions.forget_arena, "million")
    assert outcome.ok, outcome
    share = outcome.extra["planning"] / outcome.seconds
    print(
        f"{path}: {outcome.seconds:.3f} s, {share:.1%} of it planning, extra memory"
        f" {outcome.extra['memory'] >> 20} MiB and {owners >> 20} MiB at the owner"
    )
    assert outcome.bytes == 16_000_000
    assert outcome.spans == 1_000_000
    assert outcome.extra["wrong"] == 0
    assert outcome.extra["outside"] == 0
    assert owners < 200 << 20
    assert outcome.extra["memory"] < 200 << 20
