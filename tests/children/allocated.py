"""Caches in memory of the library's own, which peers on the host can map."""

from __future__ import annotations

import os
import random
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions

if TYPE_CHECKING:
    from child import Context


def make(
    ctx: Context, name: str, tensors: int, shape: tuple[int, ...], seed: int, access: str = "r"
) -> int:
    import ucxkv

    desc = ucxkv.CacheDesc(tensors, shape, ucxkv.DataType.UINT8)
    cache = ctx.engine.allocate_kv_cache(desc, access=access)
    for tensor, array in enumerate(cache.tensors):
        model.fill(array.reshape(-1), actions.tensor_seed(seed, tensor))
    ctx.caches[name] = cache
    return int(cache.cache_id)


def drop(ctx: Context, name: str) -> None:
    ctx.engine.unregister_kv_cache(ctx.caches.pop(name).cache_id)


def descriptors() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sum("memfd:ucxkv" in link for link in links)


def mappings(ctx: Context) -> tuple[int, int]:
    """Mappings of such memory in this process, and descriptors of it."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:ucxkv" in line for line in maps), descriptors()


def lonely_pipe(ctx: Context) -> int:
    """The reading end of a named pipe that nobody will ever write to."""
    if "pipe" not in ctx.values:
        with tempfile.TemporaryDirectory() as folder:
            place = os.path.join(folder, "pipe")
            os.mkfifo(place)
            ctx.values["pipe"] = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    return int(ctx.values["pipe"])


def without_seals(ctx: Context, fault: str) -> None:
    """What is allocated from now on can be shortened, or is said to be another file or place."""
    from ucxkv import datadist, tensors

    made, sealed = tensors.allocate, tensors._sealed_file

    def unsealed(length: int) -> int:
        fd = os.memfd_create("ucxkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, length)
        return fd

    def allocate(desc: Any) -> Any:
        arrays, shared = made(desc)
        assert shared is not None
        changes = {
            "another inode": {"inode": shared.inode + 1},
            "another descriptor": {"fd": 0},
            "no descriptor": {"fd": 987_654},
            "a pipe without a writer": {"fd": lonely_pipe(ctx)},
            "longer": {"length": shared.length + (1 << 30)},
            "shorter": {"length": 4096},
            "elsewhere": {"base": shared.base + (1 << 40)},
        }
        return arrays, shared._replace(**changes.get(fault, {}))

    ctx.values["right"] = (made, sealed)
    if fault == "no seals":
        tensors._sealed_file = unsealed
    elif fault == "none":
        tensors._sealed_file = lambda length: None
    else:
        datadist.allocate = allocate


def with_seals(ctx: Context) -> None:
    from ucxkv import datadist, tensors

    datadist.allocate, tensors._sealed_file = ctx.values.pop("right")


def fork_and_exit(ctx: Context) -> int:
    """A child that shares all memory, lets go of it all and ends."""
    pid = os.fork()
    if pid == 0:
        ctx.caches.clear()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reuse_again_and_again(ctx: Context, tensors: int, shape: tuple[int, ...], count: int) -> float:
    """Allocate, announce, unregister under the readers, and write over it at once."""
    from children.reuse import Board

    board = Board(ctx.fds["board"])
    rng = random.Random(2)
    slowest = 0.0
    for number in range(count):
        cache_id = make(ctx, "again", tensors, shape, number)
        arrays = ctx.caches["again"].tensors
        board.announce(cache_id, number)
        time.sleep(rng.uniform(0, 0.006))
        began = time.monotonic()
        drop(ctx, "again")
        slowest = max(slowest, time.monotonic() - began)
        for array in arrays:
            array[:] = 0xEE
        del array, arrays
    board.announce(-1, 0)
    return slowest


def slot_sums(ctx: Context, name: str, slot: int) -> list[int]:
    return [int(array[slot].astype(np.int64).sum()) for array in ctx.caches[name].tensors]
