"""Where the demo's transformer keeps keys and values: in one piece, or in blocks of a pool.

Both caches have two tensors per layer, K and V, and hand out sequences, which are all that the
transformer sees of them: a `Slot` has its tokens one after the other, a `BlockTable` has them in
blocks anywhere in the pool, as a paged cache of a serving engine does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ucxkv.demo.model import ModelConfig

# All of them are float32, which NumPy's stubs lose track of in products.
Array = npt.NDArray[Any]


class CachedSequence(Protocol):
    """The keys and values of one sequence, each (tokens, kv_heads, head_dim) in every layer."""

    def store(self, layer: int, start: int, keys: Array, values: Array) -> None:
        """Put those of the tokens from position `start` on in their places."""

    def load(self, layer: int, end: int) -> tuple[Array, Array]:
        """Keys and values of the first `end` positions."""


class _Tensors:
    """Tensors of K and V for each layer, of shape (slots or blocks, tokens, kv_heads, head_dim)."""

    def __init__(self, config: ModelConfig, pieces: int, tokens: int) -> None:
        shape = (pieces, tokens, config.kv_heads, config.head_dim)
        self.keys: list[Array] = []
        self.values: list[Array] = []
        for _ in range(config.layers):
            # np.zeros would leave the pages to be made by whoever writes first, in mid-measurement.
            self.keys.append(np.full(shape, 0, np.float32))
            self.values.append(np.full(shape, 0, np.float32))

    @property
    def tensors(self) -> list[Array]:
        """K and V of layer 0, K and V of layer 1, ...: the order in which they are registered."""
        return [tensor for pair in zip(self.keys, self.values, strict=True) for tensor in pair]


class KvCache(_Tensors):
    """A continuous cache: `slots` sequences of up to `max_tokens` tokens each."""

    def __init__(self, config: ModelConfig, slots: int) -> None:
        super().__init__(config, slots, config.max_tokens)

    def slot(self, index: int) -> Slot:
        return Slot(self, index)


class Slot:
    """A sequence in one slot of a continuous cache."""

    def __init__(self, cache: KvCache, index: int) -> None:
        self._cache = cache
        self.index = index

    def store(self, layer: int, start: int, keys: Array, values: Array) -> None:
        end = start + len(keys)
        self._cache.keys[layer][self.index, start:end] = keys
        self._cache.values[layer][self.index, start:end] = values

    def load(self, layer: int, end: int) -> tuple[Array, Array]:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return keys[self.index, :end], values[self.index, :end]


class PagedKvCache(_Tensors):
    """A pool of blocks of `block_tokens` tokens, enough for one sequence of `max_tokens`.

    Of every two neighbours in the pool only one is ours, the even one or the odd one (`parity`);
    the other is taken to belong to somebody else.  Ours are handed out in an order that depends on
    `parity` and the model's seed.  So no two blocks of a sequence are adjacent, and two pools of
    different parity have no block number in common.
    """

    def __init__(self, config: ModelConfig, block_tokens: int, parity: int) -> None:
        count = -(-config.max_tokens // block_tokens)
        super().__init__(config, 2 * count, block_tokens)
        self.block_tokens = block_tokens
        order = np.random.default_rng((config.seed, parity)).permutation(count)
        self._free = [2 * int(number) + parity for number in order]

    def allocate(self) -> int:
        """A free block's number; MemoryError if there is none."""
        if not self._free:
            raise MemoryError("the pool has no free block")
        return self._free.pop()

    def sequence(self) -> BlockTable:
        return BlockTable(self)


class BlockTable:
    """A sequence in blocks of a pool; `blocks` are their numbers, in the order of its tokens."""

    def __init__(self, cache: PagedKvCache) -> None:
        self._cache = cache
        self.blocks: list[int] = []

    def reserve(self, tokens: int) -> None:
        """Have blocks for so many tokens."""
        while len(self.blocks) * self._cache.block_tokens < tokens:
            self.blocks.append(self._cache.allocate())

    def store(self, layer: int, start: int, keys: Array, values: Array) -> None:
        self.reserve(start + len(keys))
        number, offset = np.divmod(np.arange(start, start + len(keys)), self._cache.block_tokens)
        block = np.array(self.blocks)[number]
        self._cache.keys[layer][block, offset] = keys
        self._cache.values[layer][block, offset] = values

    def load(self, layer: int, end: int) -> tuple[Array, Array]:
        used = self.blocks[: -(-end // self._cache.block_tokens)]
        keys, values = self._cache.keys[layer][used], self._cache.values[layer][used]
        # Copies of the blocks, side by side: in memory they look as a slot's tokens do, so that
        # attention computes the same bits.
        return (
            keys.reshape(-1, *keys.shape[2:])[:end],
            values.reshape(-1, *values.shape[2:])[:end],
        )
