"""The fault matrix: a sample in which any two values of its dimensions come together.

All of it is run by hand: ``python tests/matrix --all``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import suffering
from matrix import cells, rig, runner, wire
from matrix.cells import Cell


@pytest.fixture(scope="module")
def hosts() -> None:
    """There can be two hosts on this machine."""
    obstacle = wire.obstacle()
    if not obstacle:
        return
    if os.environ.get("UCXKV_TEST_HOSTS") == "required":
        pytest.fail(f"two hosts cannot be made here: {obstacle}")
    pytest.skip(f"two hosts cannot be made here: {obstacle}")


@pytest.mark.timeout(400)
def test_sample(hosts: None, tmp_path: Path) -> None:
    sample = cells.pairwise(cells.every_cell())
    clock = None
    if rig.compiler_missing():
        sample = [cell for cell in sample if cell.fault != cells.CLOCK]
    else:
        clock = rig.clock_library(tmp_path)
    results = runner.run(sample, clock, lambda result: None)
    print(runner.table(results))
    assert [result.line() for result in results if result.problems] == []


def test_a_sample_has_every_pair() -> None:
    def pairs(chosen: list[Cell]) -> set[tuple[str, str]]:
        return {
            (one, other)
            for cell in chosen
            for number, one in enumerate(cell)
            for other in cell[number + 1 :]
        }

    everything = cells.every_cell()
    assert pairs(cells.pairwise(everything)) == pairs(everything)


def test_every_cell_says_what_may_come_of_it() -> None:
    for cell in cells.every_cell():
        assert 0 < len(cells.allowed(cell)) < 7, cell
        assert cells.links_allowed(cell), cell


# What the matrix has found, apart from its own cells.


@pytest.fixture(scope="module")
def streaming(hosts: None) -> Iterator[rig.Rig]:
    with rig.Rig("stream", None) as made:
        yield made


def test_a_host_that_vanishes_holds_nothing_up(streaming: rig.Rig) -> None:
    """A connection is lost and cannot be made again: each call has its deadline all the same, and
    when the host is back the link needs nobody."""
    for _ in range(2):
        streaming.wire.weather = wire.Weather(loss=1.0)
        assert streaming.cut(cells.CUT_DATA)
        for _ in range(3):
            streaming.lateness()
            outcome = streaming.small_pull(timeout_ms=150)
            assert outcome.kind == "LlmTimeout", outcome
            assert outcome.seconds < 0.15 + rig.OVER_SECONDS + streaming.lateness(), outcome
        streaming.wire.weather = wire.FAIR
        outcome = streaming.small_pull(timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []


@pytest.mark.parametrize("operation", [cells.PULL, cells.PUSH])
def test_what_a_lost_connection_has_not_delivered_is_asked_for_again(
    streaming: rig.Rig, operation: str
) -> None:
    """Only the caller knows that a connection is no more.  UCX says that what the peer sends over
    it is sent; when the peer hears the truth, it has forgotten what it was."""
    for _ in range(3):
        streaming.wire.weather = wire.Weather(ends_lost=True)
        assert streaming.cut(cells.CUT_DATA)
        pending = streaming.start_small(operation, timeout_ms=5000)
        time.sleep(0.3)
        streaming.wire.weather = wire.FAIR
        outcome = pending.result(rig.HANG_SECONDS)
        assert outcome.ok, outcome


def test_a_worker_that_went_deaf_for_want_of_descriptors_is_replaced(streaming: rig.Rig) -> None:
    """UCX stops listening when it cannot accept: as long as connections last nobody notices; then
    the link goes down with its cause, and the next one works."""
    peer, caller = streaming.pair
    assert peer.address
    ports = peer.side(suffering.listening_ports)
    assert ports
    assert peer.side(suffering.afflict, cells.DESCRIPTORS) == ""
    caller.side(suffering.knock, peer.address[0], ports)
    peer.side(suffering.relieve)
    assert peer.side(suffering.listening_ports) == []
    outcome = streaming.small_pull(timeout_ms=5000)
    assert outcome.ok, outcome
    assert streaming.cut(cells.CUT_DATA)
    outcome = streaming.small_pull(timeout_ms=5000)
    assert outcome.kind in ("NotYetLink", "LlmError"), outcome
    assert "takes no connections" in outcome.message, outcome
    caller.link(peer)
    outcome = streaming.small_pull(timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
