"""Steps 1 to 3 of a pull's checks, which need neither a link nor a peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from checks import BASES, LOCAL_FAULTS, STATUS, TYPE_FAULTS, VALUE_FAULTS, call_with, compatible
from children import actions
from harness import Peer

BASE: dict[str, Any] = {
    "cluster_id": 1,
    "src_id": 1,
    "src_slot": 0,
    "dst": "kv",
    "dst_slot": 0,
    "size": -1,
    "src_layers": (-1, -1),
    "dst_layers": (-1, -1),
    "per_layer": 2,
    "timeout_ms": None,
}
FAULTS = [*TYPE_FAULTS, *VALUE_FAULTS, *LOCAL_FAULTS]


@pytest.fixture(scope="module")
def alone() -> Iterator[Peer]:
    with Peer(2, listen=False) as peer:
        peer.call(actions.make_cache, "kv", 12, (4, 64), access="")
        peer.call(actions.paint, "kv", 0x11)
        yield peer


@pytest.mark.parametrize("twin", [False, True], ids=["pull", "async"])
def test_each_fault(alone: Peer, twin: bool) -> None:
    calls = [call_with(BASE, fault) for fault in FAULTS]
    outcomes = alone.call(actions.raw_pulls, calls, twin)
    for fault, outcome in zip(FAULTS, outcomes, strict=True):
        assert outcome.kind == fault.kind, (fault.name, outcome)
        assert BASES[fault.kind] in outcome.bases
        assert outcome.status == STATUS[fault.kind]
    assert alone.call(actions.painted, "kv", 0x11)


def test_the_earlier_of_two_faults_decides(alone: Peer) -> None:
    both = compatible(FAULTS)
    assert len(both) > 300
    outcomes = alone.call(actions.raw_pulls, [call_with(BASE, *pair) for pair in both])
    for (first, second), outcome in zip(both, outcomes, strict=True):
        assert outcome.kind == first.kind, (first.name, second.name, outcome)
    assert alone.call(actions.painted, "kv", 0x11)


def test_no_link(alone: Peer) -> None:
    outcome = alone.call(actions.raw_pull, BASE)
    assert outcome.kind == "NotYetLink", outcome
    assert "1" in outcome.message
    assert outcome.seconds < 0.5


def test_an_unregistered_destination_is_unknown(alone: Peer) -> None:
    cache_id = alone.call(actions.make_cache, "gone", 12, (4, 64))
    alone.call(actions.drop_cache, "gone")
    outcome = alone.call(actions.raw_pull, {**BASE, "dst_id": cache_id})
    assert outcome.kind == "KvCacheNotExist", outcome
    assert str(cache_id) in outcome.message


def test_only_the_id_of_the_destination_is_read(alone: Peer) -> None:
    """A Cache built from the id alone passes the check, whatever else it says."""
    cache_id = alone.call(actions.make_cache, "again", 12, (4, 64))
    outcome = alone.call(actions.raw_pull, {**BASE, "dst_id": cache_id})
    assert outcome.kind == "NotYetLink", outcome
    alone.call(actions.drop_cache, "again")
