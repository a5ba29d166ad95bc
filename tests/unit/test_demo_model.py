"""The demo's transformer against a slow one that computes each number by its definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ucxkv.demo.caches import CachedSequence, KvCache, PagedKvCache
from ucxkv.demo.model import ModelConfig, Transformer, attend, rms_norm, rope, rope_tables

SMALL = ModelConfig(layers=3, dim=48, heads=6, kv_heads=2, ffn=40, max_tokens=64, seed=7)
PROMPT = b"Once upon a time, a cache"


def slow_norm(x: np.ndarray, gains: np.ndarray) -> np.ndarray:
    return x / math.sqrt(sum(v * v for v in x) / len(x) + 1e-5) * gains


def slow_rope(head: np.ndarray, position: int) -> np.ndarray:
    width = len(head)
    turned = np.empty(width)
    for i in range(width // 2):
        angle = position * 10_000 ** (-2 * i / width)
        a, b = head[i], head[i + width // 2]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + width // 2] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def slow_logits(model: Transformer, tokens: list[int]) -> np.ndarray:
    """Logits after the last of `tokens`, one position, head and neuron at a time, in float64."""
    config = model.config
    width, shared = config.head_dim, config.heads // config.kv_heads
    rows = [model.embedding[token].astype(np.float64) for token in tokens]
    for weights in model.layers:
        normed = [slow_norm(x, weights.attention_norm) for x in rows]
        keys = [(x @ weights.key.astype(np.float64)).reshape(-1, width) for x in normed]
        keys = [np.array([slow_rope(h, p) for h in heads]) for p, heads in enumerate(keys)]
        values = [(x @ weights.value.astype(np.float64)).reshape(-1, width) for x in normed]
        after = []
        for position, x in enumerate(rows):
            query = (normed[position] @ weights.query.astype(np.float64)).reshape(-1, width)
            mixed = []
            for head in range(config.heads):
                turned = slow_rope(query[head], position)
                scores = [
                    turned @ keys[seen][head // shared] / math.sqrt(width)
                    for seen in range(position + 1)
                ]
                weighed = [math.exp(score - max(scores)) for score in scores]
                mixed.append(
                    sum(w * values[seen][head // shared] for seen, w in enumerate(weighed))
                    / sum(weighed)
                )
            x = x + np.concatenate(mixed) @ weights.output.astype(np.float64)
            inner = slow_norm(x, weights.ffn_norm)
            gate = inner @ weights.gate.astype(np.float64)
            gate = np.array([g / (1 + math.exp(-g)) for g in gate])
            up = inner @ weights.up.astype(np.float64)
            after.append(x + (gate * up) @ weights.down.astype(np.float64))
        rows = after
    return slow_norm(rows[-1], model.final_norm) @ model.head.astype(np.float64)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(SMALL)


def generate(
    model: Transformer, sequence: CachedSequence, first: int, position: int, count: int
) -> list[int]:
    tokens = [first]
    for step in range(count):
        tokens.append(model.decode(tokens[-1], position + step, sequence))
    return tokens


def copied(cache: KvCache, slot: int, tokens: int) -> KvCache:
    """What a pull of the prompt's bytes makes of an empty cache."""
    other = KvCache(SMALL, 1)
    for source, target in zip(cache.tensors, other.tensors, strict=True):
        size = tokens * SMALL.token_bytes
        target[0].reshape(-1).view(np.uint8)[:size] = source[slot].reshape(-1).view(np.uint8)[:size]
    return other


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, kv_heads=6),
        replace(SMALL, kv_heads=1),
        replace(SMALL, layers=1, heads=1, kv_heads=1, seed=1),
    ],
    ids=["grouped", "every head its own", "one for all", "single head"],
)
def test_tokens_and_logits_are_those_of_the_definition(config: ModelConfig) -> None:
    model = Transformer(config)
    cache = KvCache(config, 1)
    tokens = list(PROMPT)
    for step in range(4):
        if step == 0:
            token = model.prefill(PROMPT, cache.slot(0))
        else:
            token = model.decode(tokens[-1], len(tokens) - 1, cache.slot(0))
        logits = slow_logits(model, tokens)
        assert logits[token] >= logits.max() - 1e-4
        tokens.append(token)


def test_keys_and_values_are_those_of_the_definition(model: Transformer) -> None:
    cache = KvCache(SMALL, 1)
    model.prefill(PROMPT, cache.slot(0))
    weights = model.layers[0]
    for position, token in enumerate(PROMPT):
        normed = slow_norm(model.embedding[token].astype(np.float64), weights.attention_norm)
        key = (normed @ weights.key.astype(np.float64)).reshape(SMALL.kv_heads, -1)
        value = (normed @ weights.value.astype(np.float64)).reshape(SMALL.kv_heads, -1)
        turned = [slow_rope(head, position) for head in key]
        np.testing.assert_allclose(cache.keys[0][0, position], turned, atol=1e-5)
        np.testing.assert_allclose(cache.values[0][0, position], value, atol=1e-5)


def test_decoding_step_by_step_equals_computing_everything_again(model: Transformer) -> None:
    cache = KvCache(SMALL, 1)
    tokens = list(PROMPT)
    tokens.append(model.prefill(PROMPT, cache.slot(0)))
    for _ in range(20):
        following = model.decode(tokens[-1], len(tokens) - 1, cache.slot(0))
        again = KvCache(SMALL, 1)
        assert model.prefill(tokens, again.slot(0)) == following
        for ours, theirs in zip(cache.tensors, again.tensors, strict=True):
            np.testing.assert_allclose(
                ours[0, : len(tokens)], theirs[0, : len(tokens)], rtol=1e-4, atol=1e-4
            )
        tokens.append(following)


@pytest.mark.parametrize("chunk", [1, 3, 8, 25, 1000])
def test_chunks_of_any_size_give_the_same_cache(model: Transformer, chunk: int) -> None:
    whole, pieces = KvCache(SMALL, 1), KvCache(SMALL, 1)
    assert model.prefill(PROMPT, whole.slot(0)) == model.prefill(
        PROMPT, pieces.slot(0), chunk=chunk
    )
    for ours, theirs in zip(whole.tensors, pieces.tensors, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_bits(model: Transformer) -> None:
    ours, theirs = KvCache(SMALL, 2), KvCache(SMALL, 1)
    assert model.prefill(PROMPT, ours.slot(1)) == Transformer(SMALL).prefill(PROMPT, theirs.slot(0))
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert one[1].tobytes() == other[0].tobytes()
    other = Transformer(replace(SMALL, seed=8))
    assert not np.array_equal(other.embedding, model.embedding)


def test_a_copied_cache_goes_on_like_the_original(model: Transformer) -> None:
    cache = KvCache(SMALL, 2)
    first = model.prefill(PROMPT, cache.slot(1))
    other = copied(cache, 1, len(PROMPT))
    ours = generate(model, cache.slot(1), first, len(PROMPT), 30)
    assert generate(model, other.slot(0), first, len(PROMPT), 30) == ours


@pytest.mark.parametrize("tensor", range(2 * SMALL.layers))
def test_the_tokens_depend_on_every_tensor_of_the_cache(model: Transformer, tensor: int) -> None:
    cache = KvCache(SMALL, 1)
    first = model.prefill(PROMPT, cache.slot(0))
    damaged = copied(cache, 0, len(PROMPT))
    damaged.tensors[tensor][0, : len(PROMPT)] = 0
    ours = generate(model, cache.slot(0), first, len(PROMPT), 30)
    assert generate(model, damaged.slot(0), first, len(PROMPT), 30) != ours


def test_nothing_of_a_layer_is_read_before_it_was_waited_for(model: Transformer) -> None:
    cache = KvCache(SMALL, 1)
    first = model.prefill(PROMPT, cache.slot(0))
    expected = model.decode(first, len(PROMPT), cache.slot(0))
    late = KvCache(SMALL, 1)
    for tensor in late.tensors:
        tensor[:] = np.nan
    waited = []

    def land(layer: int) -> None:
        waited.append(layer)
        for source, target in ((cache.keys, late.keys), (cache.values, late.values)):
            target[layer][0, : len(PROMPT)] = source[layer][0, : len(PROMPT)]

    assert model.decode(first, len(PROMPT), late.slot(0), land) == expected
    assert waited == [0, 1, 2]


def test_only_the_given_slot_and_positions_are_written(model: Transformer) -> None:
    cache = KvCache(SMALL, 3)
    for tensor in cache.tensors:
        tensor[:] = 77
    first = model.prefill(PROMPT, cache.slot(1))
    model.decode(first, len(PROMPT), cache.slot(1))
    for tensor in cache.tensors:
        assert (tensor[[0, 2]] == 77).all()
        assert (tensor[1, len(PROMPT) + 1 :] == 77).all()
        assert not (tensor[1, : len(PROMPT) + 1] == 77).any()


BLOCK_TOKENS = [1, 3, 8, 16, 25, 100]


@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_a_paged_cache_gives_the_bits_of_a_continuous_one(
    model: Transformer, block_tokens: int
) -> None:
    continuous = KvCache(SMALL, 1).slot(0)
    paged = PagedKvCache(SMALL, block_tokens, parity=1).sequence()
    first = model.prefill(PROMPT, continuous, chunk=10)
    assert model.prefill(PROMPT, paged, chunk=10) == first
    end = SMALL.max_tokens
    expected = generate(model, continuous, first, len(PROMPT), end - len(PROMPT))
    assert generate(model, paged, first, len(PROMPT), end - len(PROMPT)) == expected
    for layer in range(SMALL.layers):
        for ours, theirs in zip(paged.load(layer, end), continuous.load(layer, end), strict=True):
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_copied_blocks_go_on_like_the_original(model: Transformer, block_tokens: int) -> None:
    ours = PagedKvCache(SMALL, block_tokens, parity=1)
    theirs = PagedKvCache(SMALL, block_tokens, parity=0)
    source, target = ours.sequence(), theirs.sequence()
    first = model.prefill(PROMPT, source)
    target.reserve(len(PROMPT))
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        other[target.blocks] = one[source.blocks]
        one[:] = np.nan
    continuous = KvCache(SMALL, 1).slot(0)
    model.prefill(PROMPT, continuous)
    expected = generate(model, continuous, first, len(PROMPT), 30)
    assert generate(model, target, first, len(PROMPT), 30) == expected


def test_blocks_are_scattered_and_differ_between_the_pools() -> None:
    blocks = []
    for parity in (0, 1):
        sequence = PagedKvCache(SMALL, 2, parity).sequence()
        sequence.reserve(SMALL.max_tokens)
        assert len(sequence.blocks) == 32
        assert sequence.blocks != sorted(sequence.blocks)
        used = sorted(sequence.blocks)
        assert min(np.diff(used)) > 1
        blocks.append(used)
    assert not set(blocks[0]) & set(blocks[1])


def test_blocks_are_taken_as_tokens_need_them_and_no_other_is_written(model: Transformer) -> None:
    cache = PagedKvCache(SMALL, 5, parity=0)
    for tensor in cache.tensors:
        tensor[:] = 77
    sequence = cache.sequence()
    first = model.prefill(PROMPT, sequence)
    assert len(sequence.blocks) == 5
    model.decode(first, len(PROMPT), sequence)
    assert len(sequence.blocks) == 6
    others = sorted(set(range(len(cache.keys[0]))) - set(sequence.blocks))
    for tensor in cache.tensors:
        assert (tensor[others] == 77).all()
        assert not (tensor[sequence.blocks[:5]] == 77).any()
        assert not (tensor[sequence.blocks[5], 0] == 77).any()
        assert (tensor[sequence.blocks[5], 1:] == 77).all()


def test_a_pool_has_blocks_for_one_sequence() -> None:
    cache = PagedKvCache(SMALL, 16, parity=0)
    cache.sequence().reserve(SMALL.max_tokens)
    with pytest.raises(MemoryError, match="no free block"):
        cache.sequence().reserve(1)


def test_the_first_bytes_of_a_slot_are_its_first_tokens() -> None:
    cache = KvCache(SMALL, 2)
    tensor = cache.keys[0]
    tensor[1, :5] = 1
    flat = tensor[1].reshape(-1).view(np.uint8)
    assert flat[: 5 * SMALL.token_bytes].view(np.float32).min() == 1
    assert not flat[5 * SMALL.token_bytes :].any()
    assert len(cache.tensors) == 2 * SMALL.layers
    assert cache.tensors[2] is cache.keys[1]
    assert cache.tensors[3] is cache.values[1]
    assert sum(tensor.nbytes for tensor in cache.tensors) == SMALL.cache_bytes(2)


def test_weights_are_counted_as_they_are(model: Transformer) -> None:
    arrays = [model.embedding, model.head, model.final_norm]
    for layer in model.layers:
        arrays.extend(vars(layer).values())
    assert sum(array.size for array in arrays) == SMALL.weights
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


def test_progress_is_told_to_its_end() -> None:
    heard: list[tuple[int, int]] = []
    model = Transformer(SMALL, lambda *told: heard.append(told))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    heard.clear()
    model.prefill(PROMPT, KvCache(SMALL, 1).slot(0), lambda *told: heard.append(told), chunk=10)
    assert heard == [(done, 9) for done in range(1, 10)]


def test_single_pieces() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((4, 8), np.float32)
    gains = random.standard_normal(8, np.float32)
    np.testing.assert_allclose(
        rms_norm(x, gains), [slow_norm(row, gains) for row in x], rtol=1e-5, atol=1e-6
    )
    heads = random.standard_normal((4, 2, 8), np.float32)
    cosines, sines = rope_tables(10, 8)
    turned = rope(heads, cosines[6:], sines[6:])
    expected = [[slow_rope(head, 6 + token) for head in row] for token, row in enumerate(heads)]
    np.testing.assert_allclose(turned, expected, rtol=1e-5, atol=1e-5)
    # With one key there is nothing to choose from.
    value = random.standard_normal((1, 1, 8), np.float32)
    np.testing.assert_allclose(attend(heads[:1], value, value), np.tile(value[0, 0], (1, 2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"dim": -1}, "dim is -1"),
        ({"ffn": 0}, "ffn is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"heads": 7, "kv_heads": 7}, "dim 48 does not divide into 7 heads"),
        ({"kv_heads": 4}, "6 heads do not share 4 KV heads"),
        ({"dim": 18}, "must be even"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_what_does_not_fit_the_cache_is_refused(model: Transformer) -> None:
    cache = KvCache(SMALL, 1)
    for prompt in (b"", bytes(SMALL.max_tokens + 1)):
        with pytest.raises(ValueError, match="1 to 64"):
            model.prefill(prompt, cache.slot(0))
    for position in (-1, SMALL.max_tokens):
        with pytest.raises(ValueError, match="outside 0 to 63"):
            model.decode(0, position, cache.slot(0))
