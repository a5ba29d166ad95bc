"""Every step of a pull's checks between two processes, and every pair of simultaneous errors."""

from __future__ import annotations

from typing import Any

import pytest

from checks import BASES, FAULTS, STATUS, UNKNOWN_REMOTE, call_with, compatible
from children import actions
from harness import Peer
from sleeper import Sleeper

BASE: dict[str, Any] = {
    "cluster_id": 1,
    "src_slot": 0,
    "dst": "kv",
    "dst_slot": 0,
    "size": -1,
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
    "odd": (5, (3, 7), "UINT8"),
    "one": (1, (3, 7), "UINT8"),
    "wide": (12, (2, 80), "UINT8"),
}


@pytest.fixture(scope="module")
def base(pair: tuple[Peer, Peer]) -> dict[str, Any]:
    owner, puller = pair
    source = owner.call(actions.make_cache, "kv", 12, (4, 64), seed=1)
    private = owner.call(actions.make_cache, "private", 12, (4, 64), seed=2, access="")
    gone = owner.call(actions.make_cache, "gone", 12, (4, 64), seed=3)
    owner.call(actions.drop_cache, "gone")
    for name, (tensors, shape, data_type) in DESTINATIONS.items():
        puller.call(actions.make_cache, name, tensors, shape, data_type=data_type, access="")
    return {**BASE, "src_id": source, "ids": {"private": private, "gone": gone}}


def resolve(call: dict[str, Any]) -> dict[str, Any]:
    ids = call["ids"]
    if call["src_id"] in ids:
        return {**call, "src_id": ids[call["src_id"]]}
    return call


def paint_all(puller: Peer) -> None:
    for name in DESTINATIONS:
        puller.call(actions.paint, name, 0x22)


def nothing_moved(puller: Peer) -> bool:
    return all(puller.call(actions.painted, name, 0x22) for name in DESTINATIONS)


@pytest.mark.parametrize("twin", [False, True], ids=["pull", "async"])
def test_each_fault(pair: tuple[Peer, Peer], base: dict[str, Any], twin: bool) -> None:
    _, puller = pair
    paint_all(puller)
    calls = [resolve(call_with(base, fault)) for fault in FAULTS]
    for fault, call in zip(FAULTS, calls, strict=True):
        outcome = puller.call(actions.raw_pull, call, twin)
        assert outcome.kind == fault.kind, (fault.name, outcome)
        assert BASES[fault.kind] in outcome.bases
        assert outcome.status == STATUS[fault.kind]
        if fault.step in (5, 6):
            assert "cluster 1" in outcome.message, (fault.name, outcome.message)
    assert nothing_moved(puller)


def test_the_earlier_of_two_faults_decides(pair: tuple[Peer, Peer], base: dict[str, Any]) -> None:
    _, puller = pair
    paint_all(puller)
    both = compatible(FAULTS)
    assert len(both) > 800
    calls = [resolve(call_with(base, *two)) for two in both]
    outcomes = puller.call(actions.raw_pulls, calls, timeout=60)
    for (first, second), outcome in zip(both, outcomes, strict=True):
        assert outcome.kind == first.kind, (first.name, second.name, outcome)
    assert nothing_moved(puller)


def test_the_messages_tell_the_caches_apart(pair: tuple[Peer, Peer], base: dict[str, Any]) -> None:
    _, puller = pair
    outcome = puller.call(actions.raw_pull, {**base, "src_id": UNKNOWN_REMOTE})
    assert str(UNKNOWN_REMOTE) in outcome.message
    outcome = puller.call(actions.raw_pull, {**base, "src_id": UNKNOWN_REMOTE, "dst_id": 314159})
    assert "314159" in outcome.message
    assert str(UNKNOWN_REMOTE) not in outcome.message


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ((12, (4, 64)), {"per_layer": 5}),
        ((12, (4, 64)), {"per_layer": 13}),
        ((12, (4, 64)), {"dst": "short", "size": 32}),
        ((12, (4, 64)), {"dst": "wide"}),
        ((12, (4, 64)), {"src_layers": (5, 5), "dst_layers": (0, 0)}),
        ((12, (4, 64)), {"src_layers": (0, 0), "dst_layers": (0, 0), "per_layer": 12}),
        ((12, (4, 64)), {"src_layers": (0, 5)}),
        ((12, (4, 64)), {"dst_layers": (0, 5)}),
        ((5, (3, 7)), {"dst": "odd"}),
        ((5, (3, 7)), {"dst": "odd", "src_layers": (1, 1), "dst_layers": (0, 0)}),
        ((1, (3, 7)), {"dst": "one"}),
        ((1, (3, 7)), {"dst": "one", "src_layers": (0, 0), "dst_layers": (0, 0), "per_layer": 1}),
    ],
)
def test_what_is_allowed(
    pair: tuple[Peer, Peer],
    base: dict[str, Any],
    source: tuple[int, tuple[int, ...]],
    changes: dict[str, Any],
) -> None:
    """The nearest neighbours of the geometry faults are no faults."""
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "source", *source, seed=4)
    outcome = puller.call(actions.raw_pull, {**base, "src_id": cache_id, **changes})
    owner.call(actions.drop_cache, "source")
    assert outcome.ok, outcome
    assert outcome.bytes > 0


def test_an_undefined_type_fits_any(pair: tuple[Peer, Peer], base: dict[str, Any]) -> None:
    owner, puller = pair
    cache_id = owner.call(actions.make_cache, "source", 12, (4, 16), seed=4, data_type="FLOAT")
    differs = puller.call(actions.raw_pull, {**base, "src_id": cache_id})
    puller.call(actions.make_cache, "untyped", 12, (4, 64), data_type="UNDEFINED")
    fits = puller.call(actions.raw_pull, {**base, "src_id": cache_id, "dst": "untyped"})
    owner.call(actions.drop_cache, "source")
    wrong = puller.call(actions.wrong_slots, "untyped", 4, 0, 64)
    puller.call(actions.drop_cache, "untyped")
    assert differs.kind == "ParamInvalid", differs
    assert fits.ok, fits
    assert wrong == []


def test_checks_do_not_wait_for_a_stopped_owner(
    sleeper: Sleeper, pair: tuple[Peer, Peer], base: dict[str, Any]
) -> None:
    """All that can be known here is said at once; what only the owner knows costs the deadline."""
    owner, puller = pair
    paint_all(puller)
    faults = [fault for fault in FAULTS if fault.step != 5]
    with owner.stopped():
        for fault in faults:
            outcome = puller.call(actions.raw_pull, resolve(call_with(base, fault)))
            assert outcome.kind == fault.kind, (fault.name, outcome)
            assert outcome.seconds < 1 + sleeper.late, (fault.name, outcome)
        unknown = {**base, "src_id": UNKNOWN_REMOTE, "timeout_ms": 300}
        outcome = puller.call(actions.raw_pull, unknown)
        assert outcome.kind == "LlmTimeout", outcome
        assert outcome.seconds >= 0.3
    assert nothing_moved(puller)
    outcome = puller.call(actions.raw_pull, {**base, "src_id": UNKNOWN_REMOTE})
    assert outcome.kind == "KvCacheNotExist", outcome
