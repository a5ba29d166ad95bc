"""Prefill and decode halves of a vLLM worker, without vLLM."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from children.actions import Outcome, attempt

if TYPE_CHECKING:
    from child import Context

COMPATIBLE = "x" * 32


def _tensors(tensors: int, blocks: int, block_bytes: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (blocks, block_bytes), np.uint8) for _ in range(tensors)]


# Prefill


def serve(
    ctx: Context, tensors: int, blocks: int, block_bytes: int, seed: int
) -> tuple[int, str, int, int]:
    """Register blocks of random bytes; what a decode engine has to know of this rank."""
    from ucxkv.integrations.vllm.figures import Figures
    from ucxkv.integrations.vllm.handoffs import HandOffs

    arrays = _tensors(tensors, blocks, block_bytes, seed)
    cache = ctx.engine.register_kv_cache(None, arrays)
    ctx.values["arrays"] = arrays
    ctx.values["handoffs"] = HandOffs(ctx.engine, cache, Figures())
    host, port = ctx.engine.listen_address
    return ctx.engine.cluster_id, host, port, cache.cache_id


def hand_off(ctx: Context, request_id: str, seconds: float) -> str:
    (token,) = ctx.values["handoffs"].issue(1)
    ctx.values["handoffs"].begin(request_id, token, seconds)
    return str(token)


def ended(ctx: Context) -> tuple[set[str], dict[str, Any]]:
    """Hand-offs that are over, and what was counted."""
    handoffs = ctx.values["handoffs"]
    return handoffs.ended(), handoffs._figures.take()


def holds(ctx: Context) -> int:
    return int(ctx.engine.stats().holds)


# Decode


def open_pulls(
    ctx: Context,
    tensors: int,
    blocks: int,
    block_bytes: int,
    rank: int = 0,
    **settings: Any,
) -> None:
    from ucxkv import CachePlacement
    from ucxkv.integrations.vllm.figures import Figures
    from ucxkv.integrations.vllm.layout import CacheMemory
    from ucxkv.integrations.vllm.pulls import Pulls
    from ucxkv.integrations.vllm.settings import ConnectorSettings

    arrays = [np.zeros((blocks, block_bytes), np.uint8) for _ in range(tensors)]
    addresses = tuple(array.ctypes.data for array in arrays)
    memory = CacheMemory(addresses, blocks, block_bytes, {}, CachePlacement.HOST)
    cache = ctx.engine.register_kv_cache(memory.description, addresses, access="")
    figures = Figures()
    ctx.values["arrays"] = arrays
    ctx.values["figures"] = figures
    ctx.values["pulls"] = Pulls(
        ctx.engine,
        cache,
        memory,
        rank,
        ConnectorSettings(**settings),
        COMPATIBLE,
        {"block_size": 16},
        figures,
    )


def begin(
    ctx: Context,
    request_id: str,
    ranks: list[tuple[int, str, int, int, str]],
    theirs: list[int],
    ours: list[int],
    layerwise: bool = False,
    compatibility: str = COMPATIBLE,
    factors: dict[str, Any] | None = None,
) -> None:
    from ucxkv.integrations.vllm.params import RankSource, Source
    from ucxkv.integrations.vllm.pulls import Load

    sources = tuple(RankSource(*rank) for rank in ranks)
    source = Source(request_id, compatibility, factors or {}, sources)
    ctx.values["pulls"].begin(Load(request_id, source, tuple(theirs), tuple(ours), layerwise))


def poll(ctx: Context) -> tuple[set[str], set[int]]:
    """Pulls that are over, and blocks that have failed."""
    over = ctx.values["pulls"].poll()
    return over, ctx.values["pulls"].take_failed_blocks()


def finish(ctx: Context, count: int, timeout: float = 20) -> tuple[set[str], set[int]]:
    """Poll until so many pulls are over."""
    deadline = time.monotonic() + timeout
    over: set[str] = set()
    failed: set[int] = set()
    while len(over) < count:
        assert time.monotonic() < deadline, f"only {over} within {timeout} s"
        more = poll(ctx)
        over |= more[0]
        failed |= more[1]
        time.sleep(0.001)
    return over, failed


def wait_pieces(ctx: Context, request_id: str, pieces: int) -> None:
    """Poll until so many transfers of a pull are over."""
    deadline = time.monotonic() + 20
    pull = ctx.values["pulls"]._pulls[request_id]
    while sum(transfer.done() for _, transfer in pull.pieces) < pieces:
        assert time.monotonic() < deadline
        ctx.values["pulls"]._advance(pull)


def cancel(ctx: Context, request_id: str) -> Outcome:
    return attempt(lambda: ctx.values["pulls"].cancel(request_id))


def landed_layers(ctx: Context) -> list[int]:
    """Wait for the layers of layerwise pulls in order; how many had landed at each return."""
    pulls = ctx.values["pulls"]
    counts = []
    for layer in range(len(ctx.values["arrays"])):
        pulls.wait_layer(layer)
        counts.append(
            min(t.layers_done() for pull in pulls._pulls.values() for _, t in pull.pieces)
        )
    pulls.wait_layerwise()
    return counts


def wrong_blocks(
    ctx: Context, seed: int, blocks: int, theirs: list[int], ours: list[int]
) -> set[int]:
    """Of `ours`, those that are not what `serve` with that seed has."""
    arrays = ctx.values["arrays"]
    source = _tensors(len(arrays), blocks, arrays[0].shape[1], seed)
    return {
        mine
        for other, mine in zip(theirs, ours, strict=True)
        if any(not np.array_equal(a[mine], b[other]) for a, b in zip(arrays, source, strict=True))
    }


def content(ctx: Context) -> bytes:
    import hashlib

    digest = hashlib.sha256()
    for array in ctx.values["arrays"]:
        digest.update(array)
    return digest.digest()


def counted(ctx: Context) -> dict[str, Any]:
    return dict(ctx.values["figures"].take())


def close_pulls(ctx: Context) -> None:
    if "pulls" in ctx.values:
        ctx.values["pulls"].close()
