"""Spans against a NumPy model that writes down the address of every single byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucxkv.spans import Side, expand, pairs

Addresses = NDArray[np.uint64]
ENDLESS = 1 << 62


@dataclass
class Plan:
    """Arguments of a Side, and the model of it."""

    addrs: list[int]
    first: int
    count: int
    stride: int
    block_len: int
    blocks: list[int] | None
    block: int

    def side(self) -> Side:
        return Side(
            self.addrs,
            self.first,
            self.count,
            self.stride,
            self.block_len,
            self.blocks,
            self.block,
        )

    def stream(self) -> Addresses:
        blocks = [self.block] if self.blocks is None else self.blocks
        tensors = np.array(self.addrs[self.first : self.first + self.count], np.uint64)
        starts = np.array(blocks, np.uint64) * np.uint64(self.stride)
        bytes_of_block = np.arange(self.block_len, dtype=np.uint64)
        cube = tensors[:, None, None] + starts[None, :, None] + bytes_of_block[None, None, :]
        return cube.reshape(-1)


@st.composite
def plans(draw: st.DrawFn, count: int | None = None, tensor_bytes: int | None = None) -> Plan:
    """A side; with the number of tensors and the bytes taken of each one given, one that fits."""
    if count is None:
        count = draw(st.integers(0, 5))
    first = draw(st.integers(0, 3))
    if tensor_bytes is None:
        block_len = draw(st.integers(1, 20))
        n_blocks = draw(st.integers(0, 8))
    else:
        block_len = draw(
            st.sampled_from([n for n in range(1, tensor_bytes + 1) if tensor_bytes % n == 0])
        )
        n_blocks = tensor_bytes // block_len
    stride = block_len + draw(st.sampled_from([0, 0, 0, 1, 7, 100]))
    addrs = draw(
        st.lists(st.integers(0, 2**47), min_size=first + count, max_size=first + count + 2)
    )
    blocks: list[int] | None
    if n_blocks == 1 and draw(st.booleans()):
        blocks = None
    elif draw(st.booleans()):
        # Runs of neighbours, as a paged cache has them.
        start = draw(st.integers(0, 50))
        blocks = list(range(start, start + n_blocks))
        for _ in range(draw(st.integers(0, 2))):
            if n_blocks > 1:
                a, b = draw(st.integers(0, n_blocks - 1)), draw(st.integers(0, n_blocks - 1))
                blocks[a], blocks[b] = blocks[b], blocks[a]
    else:
        blocks = draw(st.lists(st.integers(0, 30), min_size=n_blocks, max_size=n_blocks))
    return Plan(addrs, first, count, stride, block_len, blocks, draw(st.integers(0, 1000)))


@st.composite
def both_sides(draw: st.DrawFn) -> tuple[Plan, Plan]:
    count = draw(st.integers(0, 4))
    tensor_bytes = draw(st.sampled_from([1, 2, 6, 12, 30, 64, 97]))
    return (
        draw(plans(count=count, tensor_bytes=tensor_bytes)),
        draw(plans(count=count, tensor_bytes=tensor_bytes)),
    )


def spread(spans: list[tuple[int, int]]) -> Addresses:
    parts = [np.uint64(addr) + np.arange(length, dtype=np.uint64) for addr, length in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


limits = st.one_of(st.just(ENDLESS), st.integers(1, 60))


@settings(max_examples=400, deadline=None)
@given(plan=plans(), limit=limits, share=st.floats(0, 1))
def test_expand(plan: Plan, limit: int, share: float) -> None:
    stream = plan.stream()
    offset = round(share * len(stream))
    runs = expand(plan.side(), offset, limit)
    assert all(1 <= length <= limit for _, length in runs)
    assert np.array_equal(spread(runs), stream[offset:])


@settings(max_examples=400, deadline=None)
@given(plan=plans())
def test_neighbours_come_out_as_one_run(plan: Plan) -> None:
    """Within a tensor no run ends where the next one begins."""
    if plan.block_len != plan.stride:
        return
    end = plan.count and len(plan.stream()) // plan.count
    done = 0
    for (addr, length), (following, _) in zip(runs := expand(plan.side()), runs[1:], strict=False):
        done += length
        if done % end:
            assert addr + length != following


@settings(max_examples=400, deadline=None)
@given(sides=both_sides(), limit=limits, share=st.floats(0, 1))
def test_pairs(sides: tuple[Plan, Plan], limit: int, share: float) -> None:
    source, destination = sides
    streams = source.stream(), destination.stream()
    offset = round(share * len(streams[0]))
    spans = pairs(source.side(), destination.side(), offset, limit)
    assert all(1 <= length <= limit for _, _, length in spans)
    assert np.array_equal(spread([(src, n) for src, _, n in spans]), streams[0][offset:])
    assert np.array_equal(spread([(dst, n) for _, dst, n in spans]), streams[1][offset:])


def test_a_slot_of_each_tensor() -> None:
    side = Side([1000, 5000, 9000], 1, 2, 100, 30, None, 7)
    assert expand(side) == [(5700, 30), (9700, 30)]
    assert expand(side, 10) == [(5710, 20), (9700, 30)]
    assert expand(side, 59) == [(9729, 1)]
    assert expand(side, 60) == []


def test_whole_slots_of_different_sides() -> None:
    source = Side([1000], 0, 1, 10, 10, [3, 4, 5, 9])
    destination = Side([7000], 0, 1, 40, 40, None, 2)
    assert pairs(source, destination) == [(1030, 7080, 30), (1090, 7110, 10)]


def test_a_million_blocks_in_a_row_are_one_span() -> None:
    side = Side([0], 0, 1, 4096, 4096, list(range(1_000_000)))
    assert expand(side) == [(0, 4096 * 1_000_000)]


def test_addresses_at_the_end_of_the_range() -> None:
    """Nothing overflows for the largest tensors that an address space has room for."""
    side = Side([2**62], 0, 1, 2**40, 2**40, None, 2**20 - 1)
    assert expand(side, 2**40 - 1) == [(2**62 + 2**60 - 1, 1)]


def test_sides_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        pairs(Side([0], 0, 1, 10, 10), Side([0], 0, 1, 10, 9))


@pytest.mark.parametrize(("first", "count"), [(0, 3), (2, 1), (-1, 1), (1, -1)])
def test_tensors_out_of_range(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="range"):
        Side([0, 100], first, count, 10, 10)
