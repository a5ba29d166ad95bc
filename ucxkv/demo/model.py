"""A decoder-only transformer in NumPy: RMSNorm, RoPE, grouped-query attention, SwiGLU.

It is small and its weights are random, but the arithmetic is that of the models whose caches this
library moves, and so are the caches (see `caches`).  Tokens are bytes.

A prompt goes through layer by layer, in chunks of positions; every later token goes through by
itself.  Both use `_layer`, so two processes with the same weights, the same split into chunks
and the same number of BLAS threads compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ucxkv.demo.caches import Array, CachedSequence, KvCache

VOCABULARY = 256
PREFILL_CHUNK = 256
ITEM_BYTES = np.dtype(np.float32).itemsize

_ROPE_BASE = 10_000.0
# Random queries and keys attend to everything alike, and then the tokens hardly depend on the
# cache; queries this much larger attend to a few positions, as trained models do.
_SHARPNESS = np.float32(4)
_NORM_EPSILON = np.float32(1e-5)


def _nothing_to_wait_for(_layer: int) -> None:
    return None


def _nobody_to_tell(_done: int, _total: int) -> None:
    return None


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model; ValueError where they do not fit together."""

    layers: int = 8
    dim: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    max_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "kv_heads", "ffn", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must not be negative")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(
                f"heads are {self.head_dim} wide (dim {self.dim} / {self.heads} heads), "
                "but RoPE turns pairs: the width must be even"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def weights(self) -> int:
        """How many weights the model has."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        return self.layers * layer + 2 * VOCABULARY * self.dim + self.dim

    @property
    def token_bytes(self) -> int:
        """What one token takes in one tensor of the cache."""
        return self.kv_heads * self.head_dim * ITEM_BYTES

    def cache_bytes(self, slots: int) -> int:
        return 2 * self.layers * slots * self.max_tokens * self.token_bytes


@dataclass(frozen=True)
class LayerWeights:
    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    ffn_norm: Array
    gate: Array
    up: Array
    down: Array


def _gains(random: np.random.Generator, dim: int) -> Array:
    return 1 + 0.1 * random.standard_normal(dim, np.float32)


def _matrix(random: np.random.Generator, rows: int, columns: int) -> Array:
    matrix = random.standard_normal((rows, columns), np.float32)
    matrix *= np.float32(rows**-0.5)
    return matrix


def rms_norm(x: Array, gains: Array) -> Array:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + _NORM_EPSILON)
    result: Array = x / scale * gains
    return result


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def rope_tables(positions: int, head_dim: int) -> tuple[Array, Array]:
    """Cosines and sines, of shape (positions, head_dim / 2)."""
    frequencies = _ROPE_BASE ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x: Array, cosines: Array, sines: Array) -> Array:
    """Turn x of shape (tokens, heads, head_dim); element i pairs with i + head_dim / 2."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    cos, sin = cosines[:, None, :], sines[:, None, :]
    result: Array = np.concatenate((left * cos - right * sin, left * sin + right * cos), axis=-1)
    return result


def attend(query: Array, keys: Array, values: Array) -> Array:
    """Causal attention of the last positions over all of them.

    query is (tokens, heads, head_dim); keys and values are (positions, kv_heads, head_dim), and
    the queries are those of the last `tokens` positions.
    """
    tokens, heads, head_dim = query.shape
    positions, kv_heads, _ = keys.shape
    shared = heads // kv_heads
    # Head h reads KV head h // shared, so the heads of one KV head make one matrix product.
    grouped: Array = query.reshape(tokens, kv_heads, shared, head_dim).transpose(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, shared * tokens, head_dim)
    scores = grouped @ keys.transpose(1, 2, 0)
    scores *= np.float32(head_dim**-0.5)
    if tokens > 1:
        recent = scores.reshape(kv_heads, shared, tokens, positions)[..., positions - tokens :]
        recent[..., np.triu(np.ones((tokens, tokens), dtype=np.bool_), 1)] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = (scores @ values.transpose(1, 0, 2)).reshape(kv_heads, shared, tokens, head_dim)
    result: Array = mixed.transpose(2, 0, 1, 3).reshape(tokens, heads * head_dim)
    return result


class Transformer:
    """A model with random weights that depend on `config` alone.

    `told(done, total)` hears how far the weights are.
    """

    def __init__(
        self, config: ModelConfig, told: Callable[[int, int], None] = _nobody_to_tell
    ) -> None:
        self.config = config
        random = np.random.default_rng(config.seed)
        inner = config.heads * config.head_dim
        inner_kv = config.kv_heads * config.head_dim
        self.embedding = random.standard_normal((VOCABULARY, config.dim), np.float32)
        self.layers: list[LayerWeights] = []
        for index in range(config.layers):
            self.layers.append(
                LayerWeights(
                    attention_norm=_gains(random, config.dim),
                    query=_SHARPNESS * _matrix(random, config.dim, inner),
                    key=_matrix(random, config.dim, inner_kv),
                    value=_matrix(random, config.dim, inner_kv),
                    output=_matrix(random, inner, config.dim),
                    ffn_norm=_gains(random, config.dim),
                    gate=_matrix(random, config.dim, config.ffn),
                    up=_matrix(random, config.dim, config.ffn),
                    down=_matrix(random, config.ffn, config.dim),
                )
            )
            told(index + 1, config.layers)
        self.final_norm = _gains(random, config.dim)
        self.head = _matrix(random, config.dim, VOCABULARY)
        self._cosines, self._sines = rope_tables(config.max_tokens, config.head_dim)

    def warm_up(self) -> None:
        """Let BLAS start its threads and the weights come into memory, outside any measurement."""
        self.prefill(bytes(min(8, self.config.max_tokens)), KvCache(self.config, 1).slot(0))

    def prefill(
        self,
        prompt: Iterable[int],
        sequence: CachedSequence,
        told: Callable[[int, int], None] = _nobody_to_tell,
        chunk: int = PREFILL_CHUNK,
    ) -> int:
        """Fill `sequence` with keys and values of `prompt`; returns the token that follows.

        `told(done, total)` hears of each chunk of each layer.
        """
        tokens = np.array(list(prompt), np.intp)
        if not 0 < len(tokens) <= self.config.max_tokens:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but must have 1 to {self.config.max_tokens}"
            )
        x: Array = self.embedding[tokens]
        starts = range(0, len(tokens), chunk)
        for index in range(self.config.layers):
            for number, start in enumerate(starts, 1):
                x[start : start + chunk] = self._layer(
                    index, x[start : start + chunk], start, sequence
                )
                told(index * len(starts) + number, self.config.layers * len(starts))
        return self._choose(x[-1:])

    def decode(
        self,
        token: int,
        position: int,
        sequence: CachedSequence,
        wait_layer: Callable[[int], object] = _nothing_to_wait_for,
    ) -> int:
        """Put `token` at `position` of `sequence`; returns the token that follows.

        `wait_layer(i)` is called before anything of layer i is read, so that decoding may begin
        while later layers of the cache are still on their way.
        """
        if not 0 <= position < self.config.max_tokens:
            raise ValueError(f"position {position} is outside 0 to {self.config.max_tokens - 1}")
        x: Array = self.embedding[np.array([token])]
        for index in range(self.config.layers):
            wait_layer(index)
            x = self._layer(index, x, position, sequence)
        return self._choose(x)

    def _layer(self, index: int, x: Array, start: int, sequence: CachedSequence) -> Array:
        config, weights = self.config, self.layers[index]
        end = start + len(x)
        cosines, sines = self._cosines[start:end], self._sines[start:end]
        normed = rms_norm(x, weights.attention_norm)
        query = (normed @ weights.query).reshape(len(x), config.heads, config.head_dim)
        key = (normed @ weights.key).reshape(len(x), config.kv_heads, config.head_dim)
        value = (normed @ weights.value).reshape(key.shape)
        sequence.store(index, start, rope(key, cosines, sines), value)
        mixed = attend(rope(query, cosines, sines), *sequence.load(index, end))
        x = x + mixed @ weights.output
        normed = rms_norm(x, weights.ffn_norm)
        result: Array = x + (silu(normed @ weights.gate) * (normed @ weights.up)) @ weights.down
        return result

    def _choose(self, x: Array) -> int:
        logits = rms_norm(x, self.final_norm) @ self.head
        return int(np.argmax(logits[-1]))
