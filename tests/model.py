"""What a pull must do, in NumPy: patterns, guarded buffers, geometry and the model itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

GUARD = 0xA5
# Pieces of 120 KiB: what NumPy makes of them on the way is too small for malloc to map it anew.
WORDS = 15 << 10
_base = np.random.Generator(np.random.SFC64(20240229)).integers(0, 2**64, WORDS, dtype=np.uint64)
_CHUNK = WORDS * 8


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


def pattern(seed: int, start: int, length: int) -> Bytes:
    """Bytes [start, start + length) of the pattern `seed`."""
    out = np.empty(length, np.uint8)
    done = 0
    while done < length:
        number, skip = divmod(start + done, _CHUNK)
        step = min(_CHUNK - skip, length - done)
        words = -(-(skip + step) // 8)
        piece = _base[:words] + np.uint64(_mix(seed * 0x10001 + number))
        out[done : done + step] = piece.view(np.uint8)[skip : skip + step]
        done += step
    return out


def fill(target: Bytes, seed: int) -> None:
    for start in range(0, len(target), _CHUNK):
        part = target[start : start + _CHUNK]
        part[:] = pattern(seed, start, len(part))


def matches(target: Bytes, seed: int, start: int = 0) -> bool:
    """Whether `target` holds the bytes of pattern `seed` from its byte `start` on."""
    for offset in range(0, len(target), _CHUNK):
        part = target[offset : offset + _CHUNK]
        if not np.array_equal(part, pattern(seed, start + offset, len(part))):
            return False
    return True


def is_all(target: Bytes, value: int) -> bool:
    """Whether every byte of `target` has this value."""
    return all(
        bool((target[start : start + _CHUNK] == value).all())
        for start in range(0, len(target), _CHUNK)
    )


def equal(one: Bytes, other: Bytes) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(one[start : start + _CHUNK], other[start : start + _CHUNK])
        for start in range(0, len(one), _CHUNK)
    )


class Arena:
    """Tensors in one buffer, with guard bytes before, between and behind them."""

    def __init__(
        self,
        tensors: int,
        nbytes: int,
        *,
        align: int = 64,
        rng: random.Random | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.offsets: list[int] = []
        end = 0
        for _ in range(tensors):
            # Odd gaps keep neighbouring tensors from looking like one region.
            end += 64 if rng is None else rng.randint(64, 200)
            end += -end % align
            self.offsets.append(end)
            end += nbytes
        raw = np.full(end + 64 + align, GUARD, np.uint8)
        self.buffer = raw[-int(raw.ctypes.data) % align :]

    def raw(self, tensor: int) -> Bytes:
        offset = self.offsets[tensor]
        return self.buffer[offset : offset + self.nbytes]

    def raws(self) -> list[Bytes]:
        return [self.raw(tensor) for tensor in range(len(self.offsets))]

    def address(self, tensor: int) -> int:
        return int(self.buffer.ctypes.data) + self.offsets[tensor]

    def guards_intact(self) -> bool:
        end = 0
        for offset in self.offsets:
            if not is_all(self.buffer[end:offset], GUARD):
                return False
            end = offset + self.nbytes
        return is_all(self.buffer[end:], GUARD)


TYPES: dict[str, int] = {
    "FLOAT": 4,
    "FLOAT16": 2,
    "BF16": 2,
    "DOUBLE": 8,
    "BOOL": 1,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "FLOAT8_E4M3": 1,
    "FLOAT8_E5M2": 1,
}

# NumPy has no bfloat16 and no 8-bit floats: those caches are registered by address.
NUMPY: dict[str, Any] = {
    "FLOAT": np.float32,
    "FLOAT16": np.float16,
    "DOUBLE": np.float64,
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}


@dataclass
class Side:
    """One cache of a case."""

    tensors: int
    blocks: int
    slot_bytes: int
    data_type: str
    slot: int
    layers: tuple[int, int]
    by_address: bool
    align: int

    @property
    def nbytes(self) -> int:
        return self.blocks * self.slot_bytes


@dataclass
class Case:
    seed: int
    src: Side
    dst: Side
    per_layer: int
    size: int
    note: str = field(default="")

    def pairs(self) -> list[tuple[int, int]]:
        """(source tensor, destination tensor), by SPEC section 3."""
        n = self.per_layer
        if self.src.layers == (-1, -1) and self.dst.layers == (-1, -1):
            return [(t, t) for t in range(self.src.tensors)]
        picked = []
        for side in (self.src, self.dst):
            first, last = side.layers
            if (first, last) == (-1, -1):
                first, last = 0, side.tensors // n - 1
            picked.append(range(first * n, (last + 1) * n))
        assert len(picked[0]) == len(picked[1])
        return list(zip(*picked, strict=True))

    @property
    def length(self) -> int:
        return self.src.slot_bytes if self.size == -1 else self.size

    @property
    def moved(self) -> int:
        return len(self.pairs()) * self.length


def arena_for(case: Case, side: Side, which: int) -> Arena:
    rng = random.Random(case.seed * 2 + which)
    return Arena(side.tensors, side.nbytes, align=side.align, rng=rng)


def source_seed(case: Case, tensor: int) -> int:
    return case.seed * 1000 + tensor


def model_pull(case: Case, destination: list[Bytes]) -> None:
    """Do to `destination` what the pull of `case` must do; the source holds its pattern."""
    length = case.length
    for src, dst in case.pairs():
        data = pattern(source_seed(case, src), case.src.slot * case.src.slot_bytes, length)
        start = case.dst.slot * case.dst.slot_bytes
        destination[dst][start : start + length] = data


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    if high <= low:
        return low
    return min(high, max(low, round(low * (high / low) ** rng.random())))


def random_case(seed: int, budget: int = 4 << 20) -> Case:
    """A pull that must succeed; `budget` bounds the bytes of each side."""
    rng = random.Random(seed)
    mode = rng.choice(["all", "both", "both", "source", "destination"])
    per_layer = rng.choice([1, 2, 2, 3, rng.randint(1, 130)])
    if mode == "all":
        tensors = rng.choice([1, rng.randint(1, 130), rng.randint(1, 8)])
        counts = (tensors, tensors)
        ranges = ((-1, -1), (-1, -1))
    else:
        most = 130 // per_layer
        layers = (rng.randint(1, most), rng.randint(1, most))
        if rng.random() < 0.5:
            layers = (min(layers[0], 4), min(layers[1], 4))
        count = rng.randint(1, min(layers))
        if mode == "source":
            layers = (layers[0], count)
        elif mode == "destination":
            layers = (count, layers[1])
        firsts = [rng.randint(0, side - count) for side in layers]
        spans = [(first, first + count - 1) for first in firsts]
        ranges = (
            (-1, -1) if mode == "destination" else spans[0],
            (-1, -1) if mode == "source" else spans[1],
        )
        # A remainder is allowed only for the default N, on a side whose range is given.
        counts = tuple(
            side * per_layer
            + (1 if per_layer == 2 and given != (-1, -1) and rng.random() < 0.3 else 0)
            for side, given in zip(layers, ranges, strict=True)
        )
    name = rng.choice(list(TYPES))
    item = TYPES[name]
    names = [name, name]
    if item == 1 and rng.random() < 0.3:
        names[rng.randrange(2)] = "UNDEFINED"
    if rng.random() < 0.1:
        budget *= 4
    most_blocks = rng.choice([4, 64])
    blocks = (_log_uniform(rng, 1, most_blocks), _log_uniform(rng, 1, most_blocks))
    # Most slots are small and odd; every fourth case crosses the sizes at which transfers are cut.
    slots = []
    for count, number in zip(counts, blocks, strict=True):
        room = max(1, budget // (count * number * item))
        low = room // 2 if rng.random() < 0.25 else 1
        slots.append(item * _log_uniform(rng, max(1, low), room))
    if rng.random() < 0.4:
        slots = [min(slots)] * 2
    if rng.random() < 0.5 and slots[0] <= slots[1]:
        size = -1
    else:
        size = rng.choice([1, rng.randint(1, min(slots)), _log_uniform(rng, 1, min(slots))])
    sides = []
    for index in range(2):
        by_address = names[index] not in NUMPY or rng.random() < 0.3
        if names[index] == "UNDEFINED":
            by_address = False
        sides.append(
            Side(
                tensors=counts[index],
                blocks=blocks[index],
                slot_bytes=slots[index],
                data_type=names[index],
                slot=rng.randrange(blocks[index]),
                layers=ranges[index],
                by_address=by_address,
                align=item,
            )
        )
    return Case(seed, sides[0], sides[1], per_layer, size, note=mode)
