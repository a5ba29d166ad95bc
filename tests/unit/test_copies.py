"""Copies inside one engine: against a NumPy model, their checks in order, their memory held."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ucxkv
from harness import rounds
from ucxkv import Cache, CacheDesc, DataType, KvCacheExtParam, LlmDataDist
from ucxkv.blocks import BlockList
from ucxkv.copy import Copy
from ucxkv.errors import KvCacheNotExist, LlmError, ParamInvalid

ALL = (-1, -1)
GUARD = 0xA5

Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module")
def engine() -> Iterator[LlmDataDist]:
    with LlmDataDist(1) as opened:
        yield opened


class Memory:
    """A cache whose tensors lie in one buffer with guard bytes between them."""

    def __init__(
        self,
        engine: LlmDataDist,
        tensors: int,
        blocks: int,
        block_bytes: int,
        seed: int,
        gap: int = 64,
    ) -> None:
        self.engine = engine
        self.blocks = blocks
        self.nbytes = blocks * block_bytes
        self.buffer = np.full(gap + tensors * (self.nbytes + gap), GUARD, np.uint8)
        self.offsets = [gap + t * (self.nbytes + gap) for t in range(tensors)]
        fresh = np.random.default_rng(seed).integers(0, 256, self.buffer.size, np.uint8)
        for offset in self.offsets:
            self.buffer[offset : offset + self.nbytes] = fresh[offset : offset + self.nbytes]
        self.cache = engine.register_kv_cache(
            None, [self.tensor(t).reshape(blocks, block_bytes) for t in range(tensors)]
        )

    def tensor(self, number: int, buffer: Bytes | None = None) -> Bytes:
        whole = self.buffer if buffer is None else buffer
        return whole[self.offsets[number] : self.offsets[number] + self.nbytes]

    def close(self) -> None:
        self.engine.unregister_kv_cache(self.cache.cache_id)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def random_layers(rng: random.Random) -> tuple[tuple[int, int], dict[str, Any], list[Any]]:
    """Numbers of tensors, the layer ranges, and the pairs of tensors they select."""
    n = rng.choice([1, 2, 2, 3])
    if rng.random() < 0.4:
        tensors = rng.randint(1, 7)
        ext = {"tensor_num_per_layer": n}
        return (tensors, tensors), ext, [(t, t) for t in range(tensors)]
    sides = rng.randint(1, 4), rng.randint(1, 4)
    count = rng.randint(1, min(sides))
    firsts = [rng.randint(0, side - count) for side in sides]
    ranges = [(first, first + count - 1) for first in firsts]
    pairs = [(firsts[0] * n + t, firsts[1] * n + t) for t in range(count * n)]
    ext = {
        "src_layer_range": ranges[0],
        "dst_layer_range": ranges[1],
        "tensor_num_per_layer": n,
    }
    return (sides[0] * n, sides[1] * n), ext, pairs


def check(engine: LlmDataDist, seed: int, as_blocks: bool) -> None:
    """One random copy, from one cache to another or within one, against the model."""
    rng = random.Random(seed)
    counts, ext, pairs = random_layers(rng)
    within = rng.random() < 0.3
    blocks = rng.randint(1, 12), rng.randint(1, 12)
    size = rng.choice([1, rng.randint(1, 40), rng.randint(1, 3000)])
    sizes = size, size + rng.choice([0, 0, rng.randint(0, 9)])
    source = Memory(engine, counts[0], blocks[0], sizes[0], seed, gap=rng.choice([0, 1, 64]))
    target = source
    if within:
        blocks, sizes = (blocks[0],) * 2, (size,) * 2
        pairs = [(t, t) for t in range(counts[0])]
        ext = {"tensor_num_per_layer": ext["tensor_num_per_layer"]}
    else:
        target = Memory(engine, counts[1], blocks[1], sizes[1], seed + 1, gap=rng.choice([0, 64]))
    before = source.buffer.copy()
    expected = target.buffer.copy()
    offset, length = 0, sizes[0]
    if as_blocks:
        # Within one cache no block may be on both sides.
        shuffled = rng.sample(range(blocks[1]), blocks[1])
        cut = rng.randint(0, blocks[1])
        targets = shuffled[cut:]
        usable = shuffled[:cut] if within else list(range(blocks[0]))
        sources = [rng.choice(usable) for _ in targets] if usable else []
        targets = targets[: len(sources)]
        if rng.random() < 0.3:
            sources.sort()
            targets.sort()
        chosen = list(zip(sources, targets, strict=True))
    else:
        sources, targets = [rng.randrange(blocks[0])], [rng.randrange(blocks[1])]
        if within and blocks[0] > 1:
            targets = [(sources[0] + rng.randint(1, blocks[0] - 1)) % blocks[0]]
        chosen = list(zip(sources, targets, strict=True))
        offset = rng.choice([0, rng.randrange(sizes[0])])
        length = rng.choice([sizes[0] - offset, rng.randint(1, sizes[0] - offset)])
    for one, other in pairs:
        for a, b in chosen:
            data = source.tensor(one, before)[a * sizes[0] + offset :][:length]
            target.tensor(other, expected)[b * sizes[1] + offset :][:length] = data
    param = KvCacheExtParam(**ext)
    try:
        if not as_blocks:
            whole = length == sizes[0] - offset and rng.random() < 0.5
            arguments = (sources[0], targets[0], offset, -1 if whole else length, param)
            if within and sources == targets:
                with pytest.raises(ParamInvalid, match="reads"):
                    engine.copy_kv_cache(source.cache, target.cache, *arguments)
                assert np.array_equal(source.buffer, before)
                return
            report = engine.copy_kv_cache(source.cache, target.cache, *arguments)
        elif rng.random() < 0.5:
            mapping: dict[int, list[int]] = {}
            for a, b in chosen:
                mapping.setdefault(a, []).append(b)
            report = engine.copy_kv_blocks(source.cache, target.cache, mapping, ext_param=param)
        else:
            report = engine.copy_kv_blocks(source.cache, target.cache, sources, targets, param)
    finally:
        for memory in {id(source): source, id(target): target}.values():
            memory.close()
    assert np.array_equal(target.buffer, expected)
    if not within:
        assert np.array_equal(source.buffer, before)
    assert report.path == "copy"
    assert report.bytes == len(pairs) * len(chosen) * length
    assert (report.spans > 0) == (report.bytes > 0)
    assert report.spans <= len(pairs) * len(chosen)


@pytest.mark.parametrize("as_blocks", [False, True], ids=["slot", "blocks"])
def test_random_geometry(engine: LlmDataDist, as_blocks: bool) -> None:
    for seed in range(rounds(500)):
        try:
            check(engine, seed, as_blocks)
        except BaseException as error:
            error.args = (f"seed {seed}: {error}",)
            raise


# Overlaps


@given(data=st.data())
@hypothesis_settings(max_examples=300, deadline=None)
def test_overlaps(engine: LlmDataDist, data: st.DataObject) -> None:
    """Caches that share memory: a copy is refused exactly if a byte would be read and written."""
    memory = np.zeros(400, np.uint8)
    base = memory.ctypes.data
    sides = []
    tensors = data.draw(st.integers(1, 3), "tensors")
    sizes = data.draw(st.tuples(st.integers(1, 9), st.integers(0, 3)), "sizes")
    for block_bytes in (sizes[0], sizes[0] + sizes[1]):
        blocks = data.draw(st.integers(1, 6), "blocks")
        room = 400 - blocks * block_bytes
        starts = data.draw(
            st.lists(st.integers(0, room), min_size=tensors, max_size=tensors), "starts"
        )
        cache = engine.register_kv_cache(
            CacheDesc(tensors, (blocks, block_bytes), DataType.UINT8),
            [base + start for start in starts],
        )
        chosen = data.draw(st.permutations(range(blocks)), "order")
        sides.append((cache, starts, block_bytes, chosen))
    count = data.draw(st.integers(0, min(len(side[3]) for side in sides)), "count")
    touched = []
    for _, starts, block_bytes, chosen in sides:
        touched.append(
            {
                start + block * block_bytes + byte
                for start in starts
                for block in chosen[:count]
                for byte in range(sizes[0])
            }
        )
    native = [engine._engine().catalogue.get(side[0].cache_id).native for side in sides]
    copy = Copy(
        *native,
        src_first=0,
        dst_first=0,
        tensors=tensors,
        block_len=sizes[0],
        src_blocks=BlockList(np.array(sides[0][3][:count], np.uint32)),
        dst_blocks=BlockList(np.array(sides[1][3][:count], np.uint32)),
    )
    assert copy.total == tensors * count * sizes[0]
    assert copy.overlaps() == bool(touched[0] & touched[1])
    for cache, *_ in sides:
        engine.unregister_kv_cache(cache.cache_id)


def test_what_is_refused_for_overlapping(engine: LlmDataDist) -> None:
    with Memory(engine, 4, 6, 10, 1) as memory:
        before = memory.buffer.copy()
        cache = memory.cache
        for lists in (([0], [0]), ([0, 1], [1, 2]), ([0, 1], [1, 0]), ({3: [4, 5], 5: [1]}, None)):
            with pytest.raises(ParamInvalid, match="reads"):
                engine.copy_kv_blocks(cache, cache, *lists)
        with pytest.raises(ParamInvalid, match="reads"):
            engine.copy_kv_cache(cache, cache, 2, 2, 3, 1)
        assert np.array_equal(memory.buffer, before)
        # The same block of another layer is another place.
        layers = KvCacheExtParam((0, 0), (1, 1))
        assert engine.copy_kv_blocks(cache, cache, [0, 1], [1, 0], layers).bytes == 40
        assert engine.copy_kv_cache(cache, cache, 2, 2, ext_param=layers).bytes == 20
        for t in (0, 1):
            source, target = (memory.tensor(k).reshape(6, 10) for k in (t, t + 2))
            assert np.array_equal(target[[1, 0, 2]], source[[0, 1, 2]])


# Arguments


@pytest.mark.parametrize("kind", [*"bhilqBHILQ", ">i4", ">u8", "strided", "tuple", "range"])
def test_kinds_of_lists(engine: LlmDataDist, kind: str) -> None:
    def lists(numbers: list[int]) -> Any:
        if kind == "tuple":
            return tuple(numbers)
        if kind == "range":
            return range(numbers[0], numbers[-1] + 1)
        if kind == "strided":
            return np.repeat(np.array(numbers), 3)[::3]
        return np.array(numbers, kind)

    with Memory(engine, 1, 8, 4, 2) as source, Memory(engine, 1, 8, 4, 3) as target:
        sources, targets = [1, 2, 3], [5, 6, 7]
        engine.copy_kv_blocks(source.cache, target.cache, lists(sources), lists(targets))
        assert np.array_equal(
            target.tensor(0).reshape(8, 4)[targets], source.tensor(0).reshape(8, 4)[sources]
        )
        engine.copy_kv_blocks(source.cache, target.cache, {7: lists(targets[:2])})
        assert (target.tensor(0).reshape(8, 4)[5:7] == source.tensor(0).reshape(8, 4)[7]).all()


def test_mixed_types_in_a_mapping(engine: LlmDataDist) -> None:
    with Memory(engine, 1, 8, 4, 2) as source, Memory(engine, 1, 8, 4, 3) as target:
        mapping = {np.int8(1): np.array([2], np.uint64), 3: [4], 5: (), 6: range(2)}
        assert engine.copy_kv_blocks(source.cache, target.cache, mapping).bytes == 16
        assert engine.copy_kv_blocks(source.cache, target.cache, {}).bytes == 0
        assert engine.copy_kv_blocks(source.cache, target.cache, {1: []}).bytes == 0
        assert engine.copy_kv_blocks(source.cache, target.cache, [], []).bytes == 0
        with pytest.raises(ParamInvalid):
            engine.copy_kv_blocks(
                source.cache, target.cache, {1: np.array([2**64 - 1], np.uint64), 2: [1]}
            )


BAD_TYPES = [
    {"src": 5},
    {"src": None},
    {"dst": {"cache_id": 1}},
    {"src": Cache(cache_id="1")},  # type: ignore[arg-type]
    {"ext": (0, 1)},
    {"ext": KvCacheExtParam(src_layer_range=(0, "1"))},  # type: ignore[arg-type]
    {"src_slot": 1.0},
    {"dst_slot": "1"},
    {"offset": 0.0},
    {"offset": True},
    {"size": None},
    {"src_blocks": None},
    {"dst_blocks": None},
    {"src_blocks": 3},
    {"src_blocks": "12"},
    {"src_blocks": [0.5]},
    {"src_blocks": np.zeros((1, 1), int)},
    {"dst_blocks": np.zeros(1)},
    {"src_blocks": {0: 1}, "dst_blocks": None},
    {"src_blocks": {"a": [1]}, "dst_blocks": None},
    {"src_blocks": {0: [1]}},
]
BAD_VALUES = [
    {"src_slot": -1},
    {"dst_slot": -1},
    {"offset": -1},
    {"size": 0},
    {"size": -2},
    {"ext": KvCacheExtParam(src_layer_range=(1, 0))},
    {"ext": KvCacheExtParam(tensor_num_per_layer=0)},
    {"src_blocks": [-1]},
    {"dst_blocks": [2**32]},
    {"src_blocks": [0, 1]},
    {"src_blocks": [0, 0], "dst_blocks": [1, 1]},
    {"src_blocks": {0: [1], 1: [1]}, "dst_blocks": None},
]
UNKNOWN = [{"src": Cache(cache_id=98765)}, {"dst": Cache(cache_id=98765)}]
BAD_GEOMETRY = [
    {"src_slot": 4},
    {"dst_slot": 4},
    {"size": 65},
    {"offset": 64},
    {"offset": 1, "size": 64},
    {"offset": 2**62, "size": 2**62},
    {"ext": KvCacheExtParam((0, 6), (0, 6))},
    {"ext": KvCacheExtParam((0, 0), (0, 1))},
    {"dst": "short"},
    {"dst": "ten"},
    {"dst": "other"},
    {"dst": "readonly"},
    {"src_blocks": [4]},
    {"dst_blocks": [4]},
]
STEPS = [
    (TypeError, BAD_TYPES),
    (ParamInvalid, BAD_VALUES),
    (KvCacheNotExist, UNKNOWN),
    (ParamInvalid, BAD_GEOMETRY),
]
OF_SLOTS = {"src_slot", "dst_slot", "offset", "size"}
OF_BLOCKS = {"src_blocks", "dst_blocks"}


def test_checks_in_order(engine: LlmDataDist) -> None:
    """Each fault alone, and each two of different steps, of which the earlier decides."""
    shapes = {"kv": (12, 64), "dst": (12, 64), "short": (12, 32), "ten": (10, 64)}
    arrays = {
        name: [np.full((4, size), 7, np.uint8) for _ in range(count)]
        for name, (count, size) in shapes.items()
    }
    arrays["other"] = [np.full((4, 64), 7, np.int8) for _ in range(12)]
    arrays["readonly"] = [np.full((4, 64), 7, np.uint8) for _ in range(12)]
    for array in arrays["readonly"]:
        array.flags.writeable = False
    caches: dict[Any, Any] = {
        name: engine.register_kv_cache(None, tensors) for name, tensors in arrays.items()
    }
    right: dict[str, Any] = {
        "src": caches["kv"],
        "dst": caches["dst"],
        "src_slot": 0,
        "dst_slot": 0,
        "offset": 0,
        "size": -1,
        "src_blocks": [0],
        "dst_blocks": [0],
        "ext": KvCacheExtParam(),
    }

    def attempt(fault: dict[str, Any], blocks: bool) -> type[BaseException] | None:
        call = {**right, **fault}
        target = call["dst"]
        if isinstance(target, str):
            target = caches[target]
        try:
            if blocks:
                engine.copy_kv_blocks(
                    call["src"], target, call["src_blocks"], call["dst_blocks"], call["ext"]
                )
            else:
                engine.copy_kv_cache(
                    call["src"],
                    target,
                    call["src_slot"],
                    call["dst_slot"],
                    call["offset"],
                    call["size"],
                    call["ext"],
                )
        except (TypeError, LlmError) as error:
            return type(error)
        return None

    tried = 0
    for blocks in (False, True):
        foreign = OF_SLOTS if blocks else OF_BLOCKS
        faults = [
            (step, kind, fault)
            for step, (kind, several) in enumerate(STEPS)
            for fault in several
            if not foreign & fault.keys()
        ]
        for step, kind, fault in faults:
            assert attempt(fault, blocks) is kind, fault
            for later, _, other in faults:
                if later > step and not fault.keys() & other.keys():
                    # Unequal lists and their like stand for both.
                    if OF_BLOCKS & fault.keys() and OF_BLOCKS & other.keys():
                        continue
                    assert attempt({**other, **fault}, blocks) is kind, (fault, other)
                    tried += 1
    assert tried > 300
    for tensors in arrays.values():
        assert all((array == 7).all() for array in tensors)
    for cache in caches.values():
        engine.unregister_kv_cache(cache.cache_id)


def test_access_does_not_matter_and_types_may_be_undefined(engine: LlmDataDist) -> None:
    source = [np.arange(8, dtype=np.float32).reshape(2, 4)]
    target = np.zeros((2, 16), np.uint8)
    first = engine.register_kv_cache(None, source, access="")
    desc = CacheDesc(1, (2, 16), DataType.UNDEFINED)
    second = engine.register_kv_cache(desc, [target], access="rw")
    engine.copy_kv_cache(first, second, 1, 0)
    assert np.array_equal(target[0].view(np.float32), source[0][1])
    for cache in (first, second):
        engine.unregister_kv_cache(cache.cache_id)


def test_needs_an_open_engine() -> None:
    engine = LlmDataDist(1)
    for call in (
        lambda: engine.copy_kv_cache(Cache(1), Cache(2)),
        lambda: engine.copy_kv_blocks(Cache(1), Cache(2), [], []),
    ):
        with pytest.raises(LlmError, match="not initialized"):
            call()


# Life


class Large:
    """Two caches between which copies take long, in little memory: tensors are registered often."""

    def __init__(self, engine: LlmDataDist, times: int) -> None:
        self.memory = [np.full((4, 1 << 20), value, np.uint8) for value in (1, 2)]
        self.caches = [
            engine.register_kv_cache(
                CacheDesc(times, (4, 1 << 20), DataType.UINT8), [one.ctypes.data] * times
            )
            for one in self.memory
        ]


@pytest.mark.parametrize("which", [0, 1], ids=["source", "destination"])
def test_unregistered_in_mid_copy(engine: LlmDataDist, which: int) -> None:
    large = Large(engine, 20000)
    caught: list[BaseException] = []
    begun = threading.Event()

    def copy() -> None:
        begun.set()
        try:
            engine.copy_kv_cache(large.caches[0], large.caches[1])
        except KvCacheNotExist as error:
            caught.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    begun.wait()
    time.sleep(0.05)
    began = time.monotonic()
    engine.unregister_kv_cache(large.caches[which].cache_id)
    # From here on the memory is another's: not a byte may be written.
    large.memory[1][:] = 3
    seconds = time.monotonic() - began
    thread.join(20)
    assert not thread.is_alive()
    assert seconds < 1
    assert (large.memory[1] == 3).all()
    assert str(large.caches[which].cache_id) in str(caught[0])
    engine.unregister_kv_cache(large.caches[1 - which].cache_id)


def test_finalized_in_mid_copy() -> None:
    engine = LlmDataDist(1)
    engine.initialize()
    large = Large(engine, 20000)
    ends: list[BaseException] = []

    def copy() -> None:
        try:
            engine.copy_kv_cache(large.caches[0], large.caches[1])
        except LlmError as error:
            ends.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    time.sleep(0.05)
    began = time.monotonic()
    engine.finalize()
    large.memory[1][:] = 3
    assert time.monotonic() - began < 2
    thread.join(20)
    assert len(ends) == 1
    assert (large.memory[1] == 3).all()


def test_interrupted(engine: LlmDataDist) -> None:
    large = Large(engine, 20000)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.copy_kv_cache(large.caches[0], large.caches[1])
    assert time.monotonic() - began < 1
    large.memory[1][:] = 3
    timer.join()
    assert (large.memory[1] == 3).all()
    for cache in large.caches:
        engine.unregister_kv_cache(cache.cache_id)


def test_others_run_meanwhile(engine: LlmDataDist) -> None:
    """The GIL is released: another thread counts on while a long copy runs."""
    large = Large(engine, 2000)
    report: list[ucxkv.TransferReport] = []
    thread = threading.Thread(
        target=lambda: report.append(engine.copy_kv_cache(large.caches[0], large.caches[1]))
    )
    thread.start()
    longest, last = 0.0, time.monotonic()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert report[0].bytes == 2000 << 20
    assert report[0].seconds > 0.05
    assert longest < report[0].seconds / 2
    assert (large.memory[1][0] == 1).all()
    assert (large.memory[1][1:] == 2).all()
    for cache in large.caches:
        engine.unregister_kv_cache(cache.cache_id)


def test_many_threads(engine: LlmDataDist) -> None:
    """Each thread copies among blocks of its own, of caches that all share."""
    with Memory(engine, 4, 64, 100, 5) as source, Memory(engine, 4, 64, 100, 6) as target:

        def work(number: int) -> None:
            mine = np.arange(number * 8, number * 8 + 8)
            rng = np.random.default_rng(number)
            for _ in range(50):
                engine.copy_kv_blocks(source.cache, target.cache, rng.permutation(mine), mine)
            engine.copy_kv_blocks(source.cache, target.cache, mine, mine)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for t in range(4):
            assert np.array_equal(source.tensor(t), target.tensor(t))


def test_lists_are_read_once(engine: LlmDataDist) -> None:
    """An array that changes during the call cannot lead the copy out of its caches."""
    with Memory(engine, 1, 4, 16, 7) as memory, Memory(engine, 1, 4, 16, 8) as other:
        numbers = np.array([0, 1], np.uint32)
        native = [
            engine._engine().catalogue.get(one.cache.cache_id).native for one in (memory, other)
        ]
        copy = Copy(
            *native,
            src_first=0,
            dst_first=0,
            tensors=1,
            block_len=16,
            src_blocks=BlockList(numbers),
            dst_blocks=BlockList(numbers),
        )
        numbers[:] = 2**32 - 1
        assert copy.run() == 1
        assert np.array_equal(other.tensor(0)[:32], memory.tensor(0)[:32])


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": 3},
        {"src_first": 1},
        {"dst_first": 2**32 - 1},
        {"block_len": 17},
        {"offset": 1},
        {"offset": 2**64 - 1},
        {"src_block": 4},
        {"dst_block": 2**63},
        {"dst_blocks": BlockList(np.array([0, 4], np.uint32))},
        {"src_blocks": BlockList(np.array([0, 1], np.uint32))},
        {"src_blocks": BlockList(np.array([2**32])), "dst_blocks": BlockList(np.array([1]))},
    ],
)
def test_the_native_copy_stays_inside(engine: LlmDataDist, change: dict[str, Any]) -> None:
    with Memory(engine, 2, 4, 16, 7) as memory:
        native = engine._engine().catalogue.get(memory.cache.cache_id).native
        right = {"src_first": 0, "dst_first": 0, "tensors": 2, "block_len": 16, "dst_block": 1}
        with pytest.raises(ValueError, match="would leave"):
            Copy(native, native, **{**right, **change})
        assert Copy(native, native, **right).total == 32


def test_an_unregistered_cache_is_not_copied(engine: LlmDataDist) -> None:
    memory = Memory(engine, 1, 4, 16, 7)
    native = engine._engine().catalogue.get(memory.cache.cache_id).native
    copy = Copy(native, native, src_first=0, dst_first=0, tensors=1, block_len=16, dst_block=1)
    before = memory.buffer.copy()
    memory.close()
    assert copy.run() is None
    assert np.array_equal(memory.buffer, before)
    with pytest.raises(KvCacheNotExist):
        engine.copy_kv_cache(memory.cache, memory.cache, 0, 1)


def test_a_million_blocks_are_quick(engine: LlmDataDist) -> None:
    count = 1 << 20
    with Memory(engine, 1, 2 * count, 16, 1) as memory:
        sources = np.arange(0, 2 * count, 2)
        targets = sources + 1
        began = time.monotonic()
        report = engine.copy_kv_blocks(memory.cache, memory.cache, sources[::-1], targets)
        assert time.monotonic() - began < 3
        assert report.spans == count
        blocks = memory.tensor(0).reshape(-1, 16)
        assert np.array_equal(blocks[1::2], blocks[0::2][::-1])
