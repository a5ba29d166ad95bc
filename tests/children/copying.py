"""Actions around pulls whose bytes are copied by process_vm_readv, batch by batch."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions
from children.actions import Outcome

if TYPE_CHECKING:
    from child import Context

PROT_NONE = 0

# Maps zeros, or 0xEE, at given places of its own, tells that it has, and waits for its end.
IMPOSTOR = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
for place in sys.argv[1:]:
    start, length = map(int, place.split(":"))
    # PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    if libc.mmap(start, length, 3, 0x100022, -1, 0) != start:
        print("taken", flush=True)
        sys.exit()
    ctypes.memset(start, 0xEE, length)
print("ready", flush=True)
sys.stdin.read()
"""


def native(ctx: Context, cluster_id: int) -> Any:
    return ctx.engine._running.links.lookup(cluster_id).native


def direct(ctx: Context, cluster_id: int) -> bool:
    return bool(native(ctx, cluster_id).direct)


def leave_to_ucx(ctx: Context, cluster_id: int) -> None:
    native(ctx, cluster_id).direct = False


def bytes_direct(ctx: Context, cluster_id: int) -> int:
    return int(native(ctx, cluster_id).totals()["bytes_direct"])


def places(ctx: Context, name: str) -> list[tuple[int, int]]:
    """Where the table of generation words and the memory of a cache lie, in whole pages."""
    arena = ctx.arenas[name]
    table = ctx.engine._running.native.words_address
    start = int(arena.buffer.ctypes.data)
    end = start + arena.buffer.nbytes
    start -= start % mmap.PAGESIZE
    return [(table, 1 << 19), (start, end - start + -(end - start) % mmap.PAGESIZE)]


def make_mapped(ctx: Context, name: str, tensors: int, nbytes: int, seed: int) -> int:
    """Register memory that is mapped for this cache alone."""
    memory = mmap.mmap(-1, tensors * nbytes)
    for tensor, raw in enumerate(np.split(np.frombuffer(memory, np.uint8), tensors)):
        model.fill(raw, actions.tensor_seed(seed, tensor))
    return _register(ctx, name, memory, tensors)


def make_untouched(ctx: Context, name: str, tensors: int, nbytes: int, shared: bool) -> int:
    """Register memory that has been mapped and not touched."""
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    return _register(ctx, name, mmap.mmap(-1, tensors * nbytes, flags=flags), tensors)


def _register(ctx: Context, name: str, memory: mmap.mmap, tensors: int) -> int:
    import ucxkv

    raws = np.split(np.frombuffer(memory, np.uint8), tensors)
    desc = ucxkv.CacheDesc(tensors, (1, raws[0].nbytes), ucxkv.DataType.UINT8)
    cache = ctx.engine.register_kv_cache(desc, [raw.reshape(1, -1) for raw in raws])
    ctx.values[name] = memory
    ctx.caches[name] = cache
    return int(cache.cache_id)


def _mapping(ctx: Context, name: str) -> tuple[int, int]:
    whole = np.frombuffer(ctx.values[name], np.uint8)
    return int(whole.ctypes.data), whole.nbytes


def take_away(ctx: Context, name: str) -> None:
    """Make the memory of a registered cache inaccessible, as no owner may."""
    start, length = _mapping(ctx, name)
    protect(start, length, PROT_NONE)


def protect(start: int, length: int, prot: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(length), prot):
        raise OSError(ctypes.get_errno(), "mprotect")


def flicker(ctx: Context, name: str, seconds: float) -> int:
    """Make the last page of the memory inaccessible for moments, again and again; how often."""
    start, length = _mapping(ctx, name)
    last = start + length - mmap.PAGESIZE
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        protect(last, mmap.PAGESIZE, PROT_NONE)
        time.sleep(0.0001)
        protect(last, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        time.sleep(0.001)
        count += 1
    return count


def unregister_and_unmap(ctx: Context, name: str, timeout_ms: int) -> None:
    actions.drop_cache(ctx, name, timeout_ms)
    take_away(ctx, name)


def pull_in_threads(
    ctx: Context, names: list[str], cluster_id: int, cache_id: int, rounds: int
) -> list[Outcome]:
    """Blocking pulls into one destination each, from as many threads at once."""
    outcomes: list[Outcome] = []
    gate = threading.Barrier(len(names))

    def run(name: str) -> None:
        gate.wait()
        for _ in range(rounds):
            outcomes.append(actions.pull(ctx, name, cluster_id, cache_id, timeout_ms=20000))

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def wait_in_threads(ctx: Context, key: str, count: int) -> list[Outcome]:
    """Several threads wait for one transfer, all of them copying for it."""
    transfer = ctx.values.pop(key)
    outcomes: list[Outcome] = []

    def run() -> None:
        outcomes.append(actions.attempt(lambda: transfer.result(20)))

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
