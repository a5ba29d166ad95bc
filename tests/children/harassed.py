"""The victim of malice.py: caches between walls, and an application that goes on using them."""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions

if TYPE_CHECKING:
    from child import Context

PAGE = mmap.PAGESIZE
NOT_ALLOWED = 0
# Not ASCII, unlike all that a peer may see.
SECRET = 0xEE
# (tensors, blocks, bytes of each) and how it is registered.
CACHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "readable": ((4, 8, 512), {"access": "r"}),
    "inbox": ((4, 8, 512), {"access": "rw"}),
    "large": ((2, 3, 300_000), {"access": "rw"}),
    "friends": ((4, 1, 50_000), {"access": "r", "peers": [2]}),
    "hidden": ((4, 8, 512), {"access": "rw", "peers": [3]}),
    "private": ((4, 8, 512), {"access": ""}),
    "outgoing": ((4, 8, 512), {"access": ""}),
    "sink": ((4, 8, 512), {"access": ""}),
    "wide sink": ((2, 2, 300_000), {"access": ""}),
}
PUBLIC = ("readable", "inbox", "large")
# Blocks of "outgoing" that are pushed, and of the sinks that are pulled into: the others are ours.
USED = {"outgoing": 4, "sink": 4, "wide sink": 1}


class Walled:
    """Tensors in memory of their own, with pages before and behind that nothing may touch; those
    of even number end where the wall begins, the others begin where it ends."""

    def __init__(self, tensors: int, blocks: int, length: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        size = blocks * length
        pages = -(-size // PAGE)
        self.maps = [mmap.mmap(-1, (pages + 2) * PAGE) for _ in range(tensors)]
        self.inner = []
        self.tensors = []
        for number, one in enumerate(self.maps):
            whole = np.frombuffer(one, np.uint8)
            for wall in (0, (pages + 1) * PAGE):
                place = ctypes.c_void_p(int(whole.ctypes.data) + wall)
                if libc.mprotect(place, ctypes.c_size_t(PAGE), NOT_ALLOWED):
                    raise OSError(ctypes.get_errno(), "mprotect")
            inner = whole[PAGE : (pages + 1) * PAGE]
            inner[:] = SECRET
            start = len(inner) - size if number % 2 == 0 else 0
            self.inner.append(inner)
            self.tensors.append(inner[start : start + size].reshape(blocks, length))


def build(ctx: Context) -> dict[str, dict[str, Any]]:
    """Register them all; what may be guessed of each."""
    found = {}
    for name, ((tensors, blocks, length), how) in CACHES.items():
        walled = Walled(tensors, blocks, length)
        for number, tensor in enumerate(walled.tensors):
            seen = tensor if name in PUBLIC else tensor[: USED.get(name, 0)]
            if name == "friends":
                model.fill(tensor[0], actions.tensor_seed(1, number))
            elif name not in ("sink", "wide sink"):
                plain = model.pattern(number, 0, seen.size) & 0x7F
                seen[:] = plain.reshape(seen.shape)
        cache = ctx.engine.register_kv_cache(None, walled.tensors, **how)
        ctx.caches[name] = cache
        ctx.values[name] = walled
        native = ctx.engine._running.catalogue.get(cache.cache_id).native
        found[name] = {
            "cache_id": cache.cache_id,
            "generation": native.generation,
            "slot": native.slot,
            "num_tensors": tensors,
            "blocks": blocks,
            "block_bytes": length,
        }
    ctx.values["before"] = {
        name: [inner.copy() for inner in ctx.values[name].inner] for name in CACHES
    }
    return found


def changed(ctx: Context) -> list[str]:
    """What was written that may not be."""
    problems = []
    for name in CACHES:
        walled, before = ctx.values[name], ctx.values["before"][name]
        for number, (inner, old) in enumerate(zip(walled.inner, before, strict=True)):
            now = inner.copy()
            tensor = walled.tensors[number]
            offset = int(tensor.ctypes.data - inner.ctypes.data)
            writable = 0
            if name in ("inbox", "large"):
                writable = tensor.size
            elif "sink" in name:
                writable = USED[name] * tensor.shape[1]
            now[offset : offset + writable] = old[offset : offset + writable]
            if not np.array_equal(now, old):
                problems.append(f"{name}, tensor {number}: {np.flatnonzero(now != old)[:4]}")
    return problems


def suffer(ctx: Context, evil: int, ids: Sequence[int], seed: int) -> dict[str, Any]:
    """Use the link to the malicious peer, whose caches are `ids`, until told to stop; how calls
    have ended."""
    import ucxkv

    rng = random.Random(seed)
    small, wide = ids
    ends: Counter[str] = Counter()
    problems: list[str] = []
    engine = ctx.engine
    ctx.stop.clear()
    number = 0
    while not ctx.stop.is_set():
        number += 1
        timeout = rng.choice([1, 20, 60, 100])
        block = rng.randrange(USED["sink"])
        blocks = rng.sample(range(USED["sink"]), rng.randint(1, 3))
        index = ucxkv.CacheIndex(evil, small, rng.randrange(8))
        kind = rng.choice(["pull", "pull", "wide", "blocks", "push", "push blocks", "layered"])
        try:
            if number % 50 == 0:
                engine.quiesce(ctx.caches["inbox"], rng.choice([None, blocks]), timeout_ms=timeout)
            elif kind == "pull":
                told = rng.choice([None, None, b"told"])
                engine.pull_kv_cache(
                    index, ctx.caches["sink"], block, timeout_ms=timeout, notice=told
                )
            elif kind == "wide":
                index = ucxkv.CacheIndex(evil, wide, rng.randrange(2))
                engine.pull_kv_cache(index, ctx.caches["wide sink"], 0, timeout_ms=timeout)
            elif kind == "blocks":
                engine.pull_kv_blocks(
                    index, ctx.caches["sink"], blocks, sorted(blocks), timeout_ms=timeout
                )
            elif kind == "push":
                engine.push_kv_cache(ctx.caches["outgoing"], index, block, timeout_ms=timeout)
            elif kind == "push blocks":
                engine.push_kv_blocks(
                    ctx.caches["outgoing"], index, blocks, blocks, timeout_ms=timeout
                )
            else:
                transfer = engine.push_kv_cache_async(
                    ctx.caches["outgoing"], index, block, timeout_ms=timeout, layer_ready=True
                )
                for layer in range(2):
                    transfer.layer_ready(layer)
                transfer.result()
            ends[f"{kind}: ok"] += 1
        except ucxkv.LlmError as error:
            ends[f"{kind}: {type(error).__name__}"] += 1
        except Exception as error:
            problems.append(f"{kind}: {type(error).__name__}: {error}")
        for _ in zip(range(100), engine.notices(timeout_ms=0.01), strict=False):
            ends["notice"] += 1
        time.sleep(0.0005)
    return {"ends": dict(ends), "problems": problems[:5]}


def finish(ctx: Context) -> None:
    ctx.stop.set()
