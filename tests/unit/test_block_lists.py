"""Lists of block numbers: whatever integers they are given as, and what is found out about them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.blocks import BlockList
from ucxkv.geometry import block_list

MOST = 2**32 - 1


def made(values: Any) -> BlockList:
    return block_list(values, "blocks")


numbers = st.one_of(
    st.lists(st.integers(0, MOST), max_size=20),
    st.lists(st.integers(0, 200), max_size=20),
    st.lists(st.integers(0, 200), max_size=20).map(sorted),
    st.lists(st.integers(0, 200), max_size=20, unique=True),
    st.lists(st.integers(0, 200), max_size=20, unique=True).map(sorted),
)


@settings(max_examples=400, deadline=None)
@given(values=numbers)
def test_summary(values: list[int]) -> None:
    for given_as in (values, tuple(values), np.array(values, np.uint32)):
        blocks = made(given_as)
        assert len(blocks) == blocks.size == len(values)
        assert blocks.largest == max(values, default=0)
        assert blocks.representable
        assert blocks.distinct is (len(set(values)) == len(values))


DTYPES = [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 3, -2])
def test_every_type_and_stride(dtype: str, step: int) -> None:
    array = np.array([5, 3, 90, 0, 7, 11, 100, 3], dtype)[::step]
    blocks = made(array)
    assert (blocks.size, blocks.largest) == (array.size, array.max())
    assert blocks.representable
    assert blocks.distinct is (len(set(array.tolist())) == array.size)
    array.flags.writeable = False
    assert made(array).largest == array.max()
    misplaced = np.frombuffer(b"." + array.tobytes(), np.uint8)[1:].view(dtype)
    assert made(misplaced).largest == array.max()


@pytest.mark.parametrize(
    "values",
    [
        [-1],
        [0, 5, -1, 9],
        [2**32],
        [2**63 - 1],
        [-(2**63)],
        np.array([2**64 - 1], np.uint64),
        np.array([1, -1], np.int8),
        np.array([1, -1], ">i2"),
        np.array([1, -(2**31)], np.int32),
        [*range(5000), -1],
        [-1, *range(5000)],
    ],
    ids=repr,
)
def test_numbers_that_no_block_has(values: Any) -> None:
    assert not made(values).representable


@pytest.mark.parametrize(
    "values",
    [
        *("12", b"12", 3, 1.5, [0.5], [[1]], [True], [None], {1: 2}, [2**64], ["1"]),
        *(np.array([True]), np.array([1.0]), np.array([1], object), np.array([[1]]), np.array(1)),
    ],
    ids=repr,
)
def test_what_is_no_list(values: Any) -> None:
    with pytest.raises(TypeError):
        made(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True),
        ([0], True),
        ([0, 0], False),
        ([0, 1], True),
        ([1, 0], True),
        ([0, 1, 1], False),
        ([0, 2, 1], True),
        ([5, 0, 5], False),
        ([63, 64, 0, 64], False),
        ([MOST], True),
        ([0, MOST], True),
        ([MOST, 0], True),
        ([MOST, MOST], False),
    ],
)
def test_distinct_at_the_edges(values: list[int], expected: bool) -> None:
    assert made(values).distinct is expected


def test_distinct_finds_one_repetition_in_a_million() -> None:
    """Of a list that ascends everywhere else, wherever in it."""
    ascending = np.arange(0, 2_000_000, 2)
    assert made(ascending).distinct
    for place in (1, 4095, 4096, 500_000, len(ascending) - 1):
        for other in (0, place - 1):
            values = ascending.copy()
            values[place] = values[other]
            assert not made(values).distinct


@pytest.mark.parametrize("values", [range(0), range(3, 40, 4), range(40, 3, -4)], ids=repr)
def test_ranges(values: range) -> None:
    blocks = made(values)
    assert (blocks.size, blocks.largest) == (len(values), max(values, default=0))
    assert blocks.representable
    assert blocks.distinct


def test_it_is_a_copy() -> None:
    array = np.array([3, 1, 2])
    blocks = made(array)
    array[:] = 2
    assert blocks.distinct
    assert blocks.largest == 3


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64, ">i8"])
def test_it_holds_nothing_of_what_it_was_made_from(dtype: Any) -> None:
    array = np.array([3, 1, 2], dtype)
    blocks = made(array)
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is None
    assert blocks.distinct


@pytest.mark.parametrize(
    "array", [np.zeros(2, np.int16), np.zeros((2, 2), np.int64), np.zeros(2), np.zeros(2, ">i8")]
)
def test_only_flat_arrays_of_wide_integers(array: Any) -> None:
    with pytest.raises(ValueError, match="no flat array"):
        BlockList(array)


def test_nothing_leaks() -> None:
    array = np.arange(1_000_000)
    process = psutil.Process()
    for _ in range(5):
        made(array)
    before = process.memory_info().rss
    for _ in range(100):
        made(array)
    gc.collect()
    assert process.memory_info().rss - before < 40 << 20
