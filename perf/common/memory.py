"""Memory for caches, and bytes in it that tell where they belong.

No more than NumPy, since peers run in virtual environments of their own.
"""

from __future__ import annotations

import mmap

import numpy as np

_HUGE_PAGE = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def tensors_of(count: int, blocks: int, block_bytes: int, huge: bool) -> list[np.ndarray]:
    """Zeroed arrays of shape (blocks, block_bytes), each in a mapping of its own.

    Ordinary memory is kept from huge pages, which NumPy asks for by itself for large arrays.
    """
    return [_mapped(blocks * block_bytes, huge).reshape(blocks, block_bytes) for _ in range(count)]


def _mapped(nbytes: int, huge: bool) -> np.ndarray:
    mapping = mmap.mmap(-1, nbytes + (_HUGE_PAGE if huge else 0), flags=_PRIVATE)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE if huge else 0
    return whole[start : start + nbytes]


def _words(block_bytes: int) -> np.ndarray:
    return np.arange(block_bytes // 8, dtype=np.uint64) * np.uint64(_MULTIPLIER)


def _first_words(tensor: int, blocks: np.ndarray, block_bytes: int) -> np.ndarray:
    words = blocks.astype(np.uint64) * np.uint64(block_bytes // 8)
    start = np.uint64((tensor + 1) * 0xD1B54A32D192ED03 & _MASK)
    return words * np.uint64(_MULTIPLIER) + start


def fill(tensors: list[np.ndarray]) -> None:
    """Give each 8 bytes of each tensor a value that no other place of the cache has."""
    for number, tensor in enumerate(tensors):
        blocks, block_bytes = _as_blocks(tensor).shape
        first = _first_words(number, np.arange(blocks), block_bytes)
        _as_blocks(tensor).view(np.uint64)[:] = first[:, None] + _words(block_bytes)


def check(
    tensors: list[np.ndarray], source: np.ndarray, destination: np.ndarray, first: int = 0
) -> None:
    """Whether blocks `destination` hold what `fill` gave blocks `source`; ValueError if not.

    `first` is the number that the source has for the first of these tensors.
    """
    for number, tensor in enumerate(tensors, first):
        words = _as_blocks(tensor).view(np.uint64)
        template = _words(words.shape[1] * 8)
        starts = _first_words(number, source, words.shape[1] * 8)
        for start, block in zip(starts, destination.tolist(), strict=True):
            if not np.array_equal(words[block], template + start):
                raise ValueError(f"wrong bytes in tensor {number}, block {block}")


def check_untouched(tensors: list[np.ndarray], destination: np.ndarray) -> None:
    """Whether all blocks but `destination` are zero; ValueError if not."""
    for number, tensor in enumerate(tensors):
        touched = _as_blocks(tensor).any(axis=1)
        touched[destination] = False
        if touched.any():
            raise ValueError(f"tensor {number}: bytes were written outside the destination")


def clear(tensors: list[np.ndarray], destination: np.ndarray) -> None:
    """Zero the destination blocks, so that the next pull cannot pass by what the last one left."""
    for tensor in tensors:
        _as_blocks(tensor)[destination] = 0


def _as_blocks(tensor: np.ndarray) -> np.ndarray:
    blocks = tensor.shape[0]
    return tensor.reshape(blocks, -1).view(np.uint8)


def scattered(count: int, blocks: int, seed: int) -> np.ndarray:
    """Numbers of `count` of `blocks` blocks in no order, no two of them neighbours.

    All of them, in order, where there are not twice as many as are wanted.
    """
    if 2 * count > blocks:
        return np.arange(count)
    return np.random.default_rng(seed).permutation(blocks // 2)[:count] * 2
