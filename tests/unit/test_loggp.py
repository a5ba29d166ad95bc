"""The arithmetic of the model in perf/: what decides a pull's time, and fitting."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


def _loaded() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "perf/common/loggp.py"
    spec = importlib.util.spec_from_file_location("loggp", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["loggp"] = module
    spec.loader.exec_module(module)
    return module


loggp = _loaded()
Part, Path_ = loggp.Part, loggp.Path

# 10 GB/s, a microsecond for each operation that is posted, 4 microseconds to and fro.
WIRE = Path_(
    call=10e-6,
    latency=4e-6,
    owner=Part(),
    wire=Part(byte=1e-10),
    puller=Part(operation=1e-6),
    operation_bytes=1 << 20,
)


def test_large_spans_are_as_fast_as_the_wire() -> None:
    seconds, decides = loggp.predict(WIRE, 1000, 1 << 20)
    assert decides == "wire"
    # The first operation is posted before any byte comes.
    assert seconds == pytest.approx(10e-6 + 1000 * 1048576e-10 + 1e-6)


def test_small_spans_are_as_fast_as_they_are_posted() -> None:
    seconds, decides = loggp.predict(WIRE, 1000, 4096)
    assert decides == "puller"
    assert seconds == pytest.approx(10e-6 + 1000e-6 + 4096e-10)


def test_rails_share_the_bytes_but_not_the_posting() -> None:
    one, _ = loggp.predict(WIRE, 1000, 1 << 20)
    two, decides = loggp.predict(WIRE, 1000, 1 << 20, rails=2)
    assert decides == "wire"
    assert two == pytest.approx(one / 2, rel=0.01)
    assert loggp.predict(WIRE, 1000, 4096, rails=2)[1] == "puller"


@pytest.mark.parametrize(("in_flight", "window"), [(2, 1 << 30), (64, 2 * 65536)])
def test_too_little_in_flight_waits_for_answers(in_flight: int, window: int) -> None:
    """By their number, or by their bytes."""
    slow = replace(WIRE, latency=100e-6, in_flight=in_flight, window=window)
    seconds, decides = loggp.predict(slow, 1000, 65536)
    assert decides == "window"
    one = 100e-6 + 1e-6 + 65536e-10
    assert seconds == pytest.approx(10e-6 + 1000 * one / 2)


def test_links_and_owners_have_a_window_each() -> None:
    slow = replace(WIRE, latency=1e-3, in_flight=1)
    one, _ = loggp.predict(slow, 1024, 65536)
    for spread in ({"links": 4}, {"owners": 4}, {"links": 2, "owners": 2}):
        four, decides = loggp.predict(slow, 1024, 65536, **spread)
        assert decides == "window"
        assert four == pytest.approx(one / 4, rel=0.01)


def test_owners_that_work_share_the_work() -> None:
    busy = replace(WIRE, owner=Part(byte=1e-9), window=64 << 20)
    one, decides = loggp.predict(busy, 1000, 1 << 20)
    assert decides == "owner"
    assert loggp.predict(busy, 1000, 1 << 20, owners=4)[0] == pytest.approx(one / 4, rel=0.02)


def test_processors_that_both_sides_share() -> None:
    both = replace(WIRE, owner=Part(byte=1e-9), puller=Part(byte=1e-9), cores=1)
    seconds, decides = loggp.predict(both, 1000, 1 << 20)
    assert decides == "cores"
    assert seconds == pytest.approx(10e-6 + 2 * 1000 * 1048576e-9, rel=0.01)


def test_a_helper_takes_its_share_of_what_is_beyond() -> None:
    copying = replace(WIRE, wire=Part(), puller=Part(byte=1e-9), window=1 << 30)
    helped = replace(copying, helper=1.0, alone=1 << 20)
    small = 1 << 20
    assert loggp.predict(helped, 1, small)[0] == loggp.predict(copying, 1, small)[0]
    # A mebibyte by itself, the other seven by two.
    assert helped.unhelped(8 << 20) == pytest.approx((1 + 7 / 2) / 8)
    assert loggp.predict(helped, 8, small)[1] == "puller"


def test_operations() -> None:
    """One for each piece of a span, or as many spans in one as it takes."""
    assert loggp.work(WIRE, 10, 4096).operations == 10
    assert loggp.work(WIRE, 10, (1 << 20) + 1).operations == 20
    gathered = replace(WIRE, operation_spans=256)
    assert loggp.work(gathered, 1024, 16).operations == 4
    assert loggp.work(gathered, 1024, 1 << 20).operations == 1024


def test_a_span_costs_whole_pages() -> None:
    paged = replace(WIRE, grain=4096)
    assert loggp.work(paged, 3, 1).rounded_bytes == 3 * 4096
    assert loggp.work(paged, 3, 4097).rounded_bytes == 3 * 8192


def test_a_pull_of_nothing_costs_its_call() -> None:
    assert loggp.predict(WIRE, 0, 4096) == (WIRE.call, "call")


def test_fitting_finds_the_factors_again() -> None:
    rows = [[1, spans, nbytes] for spans in (1, 10, 100) for nbytes in (1e3, 1e5, 1e7)]
    seconds = [
        math.fsum(f * c for f, c in zip((1e-4, 1e-6, 1e-9), row, strict=True)) for row in rows
    ]
    assert loggp.fit(rows, seconds) == pytest.approx([1e-4, 1e-6, 1e-9])


def test_fitting_has_no_negative_factors() -> None:
    factors = loggp.fit([[1, 1], [1, 2], [1, 3]], [3, 2, 1])
    assert min(factors) >= 0
    assert factors[0] > 0
