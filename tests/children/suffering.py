"""What the two processes of the fault matrix do: its operations, and the faults of a process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Any

import model
from children import actions, noticing, pushing
from children.actions import Outcome
from children.landing import layer_is_right, no_descriptor_left
from sleeper import Sleeper

if TYPE_CHECKING:
    from child import Context

BLOCKS = 4
# Any order will do that is not that of memory; blocks keep their numbers, so the pattern fits.
ORDER = [2, 0, 3, 1]
AWAY = 3600  # seconds by which the clock steps
UNAFFORDABLE = 512 << 20
HEADROOM = 24 << 20
CAP_IPC_LOCK = 14


# Caches: each arena is registered as one slot per tensor, and again as blocks.


def make_caches(ctx: Context, name: str, tensors: int, nbytes: int, seed: int) -> tuple[int, int]:
    """Register, in the memory of `name` if there is such, with the pattern of `seed` in it; the
    ids of the cache and of its paged twin."""
    if name not in ctx.arenas:
        ctx.arenas[name] = model.Arena(tensors, nbytes)
        actions.fill_arena(ctx.arenas[name], seed)
    arena = ctx.arenas[name]
    shapes = {name: (1, nbytes), f"{name} paged": (BLOCKS, nbytes // BLOCKS)}
    for key, shape in shapes.items():
        if key not in ctx.caches:
            ctx.caches[key] = actions.register_arena(ctx, arena, shape, access="rw")
    return int(ctx.caches[name].cache_id), int(ctx.caches[f"{name} paged"].cache_id)


def drop(ctx: Context, key: str, timeout_ms: int) -> Outcome:
    cache = ctx.caches.pop(key)
    return actions.attempt(
        lambda: ctx.engine.unregister_kv_cache(cache.cache_id, timeout_ms=timeout_ms)
    )


def unlink(ctx: Context, cluster_id: int, timeout_ms: int) -> Outcome:
    return actions.attempt(lambda: actions.unlink(ctx, cluster_id, timeout_ms))


def finalize(ctx: Context) -> Outcome:
    return actions.attempt(ctx.engine.finalize)


def start_sleepers(ctx: Context) -> None:
    """One on each processor."""
    stack = ctx.values["sleeping"] = contextlib.ExitStack()
    ctx.values["sleepers"] = [stack.enter_context(Sleeper(cpu)) for cpu in os.sched_getaffinity(0)]


def lateness(ctx: Context) -> float:
    """How late a thread that only sleeps has been since this was asked last."""
    late = max(sleeper.late for sleeper in ctx.values["sleepers"])
    for sleeper in ctx.values["sleepers"]:
        sleeper.late = 0.0
    return late


def stop_sleepers(ctx: Context) -> None:
    ctx.values.pop("sleeping").close()


# Operations


def operate(
    ctx: Context,
    operation: str,
    name: str,
    cluster_id: int,
    ids: tuple[int, int],
    *,
    timeout_ms: int,
    seed: int,
    notice: bytes = b"",
    hold: str | None = None,
) -> Outcome:
    """The whole of `name` from, or to, the peer's cache of the same size."""
    if operation == "push":
        return pushing.push(ctx, name, cluster_id, ids[0], timeout_ms=timeout_ms)
    if operation == "blocks":
        outcome = pull_blocks(ctx, name, cluster_id, ids[1], timeout_ms)
    elif operation == "async":
        outcome = pull_layers(ctx, name, cluster_id, ids[0], timeout_ms, seed)
    elif operation == "notice":
        outcome = noticing.pull(ctx, name, cluster_id, ids[0], notice, hold, timeout_ms=timeout_ms)
    else:
        outcome = actions.pull(ctx, name, cluster_id, ids[0], timeout_ms=timeout_ms)
    if outcome.ok:
        outcome.extra["wrong"] = actions.wrong_tensors(ctx, name, seed)
    return outcome


def pull_blocks(
    ctx: Context, name: str, cluster_id: int, cache_id: int, timeout_ms: int
) -> Outcome:
    import ucxkv

    index, cache = ucxkv.CacheIndex(cluster_id, cache_id), ctx.caches[f"{name} paged"]
    return actions.attempt(
        lambda: ctx.engine.pull_kv_blocks(index, cache, ORDER, ORDER, timeout_ms=timeout_ms)
    )


def pull_layers(
    ctx: Context, name: str, cluster_id: int, cache_id: int, timeout_ms: int, seed: int
) -> Outcome:
    """Layer by layer; extra["early"] are layers that were reported before their bytes were here."""
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=timeout_ms)
    early: list[int] = []
    checking = 0.0

    def run() -> Any:
        nonlocal checking
        transfer = ctx.engine.pull_kv_cache_async(*args, **kwargs)
        for layer in transfer.layers():
            began = time.monotonic()
            if not layer_is_right(ctx, name, layer, seed):
                early.append(layer)
            checking = time.monotonic() - began
        return transfer.result(20)

    outcome = actions.attempt(run)
    # While a layer is being looked at nobody hears that the transfer is over.
    outcome.ended -= checking
    outcome.extra["early"] = early
    return outcome


def wait_written(ctx: Context, name: str, tensor: int, value: int, timeout: float) -> bool:
    """Wait until the front of a tensor is no longer painted."""
    front = ctx.arenas[name].raw(tensor)[:16]
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if (front != value).any():
            return True
        time.sleep(0.0002)
    return False


def hold_all(ctx: Context, name: str) -> str:
    token: str = ctx.engine.hold(ctx.caches[name], None, 60_000).token
    return token


def notices(ctx: Context) -> list[bytes]:
    return [bytes(notice.data) for notice in ctx.engine.notices(timeout_ms=0)]


def quiesce_and_paint(ctx: Context, name: str, value: int) -> Outcome:
    """Take the destination back, if it is still registered, and give it another use."""
    outcome = Outcome("ok")
    for key in (name, f"{name} paged"):
        if outcome.ok and key in ctx.caches:
            cache = ctx.caches[key]
            outcome = actions.attempt(lambda c=cache: ctx.engine.quiesce(c, timeout_ms=5000))
    actions.paint(ctx, name, value)
    return outcome


def reopen(ctx: Context, listen: str) -> None:
    """Initialize the engine again, after finalize."""
    import dataclasses

    ctx.caches.clear()
    ctx.engine.initialize(dataclasses.replace(ctx.engine._options, listen=listen))


# Faults of the process.  Each returns what is wrong with how it took hold, "" if nothing is.


def afflict(ctx: Context, fault: str) -> str:
    stack = ctx.values["affliction"] = contextlib.ExitStack()
    return _FAULTS[fault](ctx, stack)


def relieve(ctx: Context) -> None:
    stack = ctx.values.pop("affliction", None)
    if stack is not None:
        stack.close()


def _full_disk(ctx: Context, stack: contextlib.ExitStack) -> str:
    """Whatever is printed or logged finds no room."""
    full = os.open("/dev/full", os.O_WRONLY)
    stack.callback(os.close, full)
    for fd in (1, 2):
        saved = os.dup(fd)
        os.dup2(full, fd)
        stack.callback(os.close, saved)
        stack.callback(os.dup2, saved, fd)
    handler = logging.FileHandler("/dev/full", delay=True)
    logger = logging.getLogger("ucxkv")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)

    def undo() -> None:
        logger.removeHandler(handler)
        logger.setLevel(level)
        with contextlib.suppress(OSError):
            handler.close()

    stack.callback(undo)
    try:
        os.write(2, b"?")
    except OSError as error:
        return "" if error.errno == errno.ENOSPC else str(error)
    return "the disk is not full"


def _no_descriptors(ctx: Context, stack: contextlib.ExitStack) -> str:
    stack.enter_context(no_descriptor_left())
    try:
        os.close(os.dup(0))
    except OSError as error:
        return "" if error.errno == errno.EMFILE else str(error)
    return "there is a descriptor"


def _no_memory(ctx: Context, stack: contextlib.ExitStack) -> str:
    """What an application asks the engine for is not to be had."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + HEADROOM, limits[1]))
    stack.callback(resource.setrlimit, resource.RLIMIT_AS, limits)
    return _allocating(ctx, UNAFFORDABLE, "LlmOutOfMemory")


def _no_locked_memory(ctx: Context, stack: contextlib.ExitStack) -> str:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    stack.callback(resource.setrlimit, resource.RLIMIT_MEMLOCK, limits)
    libc = ctypes.CDLL(None, use_errno=True)
    # Of this thread only, which is the one that registers.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        return "the capabilities cannot be read"
    stack.callback(libc.capset, header, (ctypes.c_uint32 * 6)(*sets))
    sets[0] &= ~(1 << CAP_IPC_LOCK)
    libc.capset(header, sets)
    page = ctypes.create_string_buffer(resource.getpagesize())
    if libc.mlock(page, len(page)) == 0:
        return "memory can still be locked"
    return _allocating(ctx, 1 << 20, "ok")


def _allocating(ctx: Context, nbytes: int, expected: str) -> str:
    """Have the engine allocate a cache, and give it back; what is wrong with how that ended."""
    import ucxkv

    def run() -> None:
        desc = ucxkv.CacheDesc(1, (1, nbytes), ucxkv.DataType.UINT8)
        cache = ctx.engine.allocate_kv_cache(desc)
        cache.tensors[0][...] = 1
        ctx.engine.unregister_kv_cache(cache.cache_id)

    outcome = actions.attempt(run)
    return "" if outcome.kind == expected else f"allocating: {outcome.kind}: {outcome.message}"


def _clock_step(ctx: Context, stack: contextlib.ExitStack) -> str:
    step = ctypes.c_long.in_dll(ctypes.CDLL(None), "clock_step_seconds")
    stack.callback(setattr, step, "value", 0)
    before = time.time()
    step.value = AWAY
    return "" if time.time() - before > AWAY - 60 else "the clock has not stepped"


_FAULTS = {
    "full disk for logs": _full_disk,
    "no descriptors": _no_descriptors,
    "no memory to register": _no_memory,
    "RLIMIT_MEMLOCK": _no_locked_memory,
    "clock steps": _clock_step,
}


def listening_ports(ctx: Context) -> list[int]:
    """The ports at which this process listens, its engine's own excepted."""
    from ucxkv.ears import listening_at

    host, engine = ctx.engine.listen_address
    return [port for port in listening_at(host).values() if port != engine]


def knock(ctx: Context, host: str, ports: list[int]) -> None:
    """Connect to them, whatever comes of it."""
    for port in ports:
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((host, port), timeout=5),
        ):
            time.sleep(0.2)


def cut(ctx: Context, control: list[int], which: str) -> int:
    """Shut connections down: those with one of the ports `control`, the others, or both."""
    controls = {"control cut": (True,), "data cut": (False,), "both cut": (True, False)}[which]
    return noticing.shut_down(lambda ports: bool(ports & set(control)) in controls)
