"""What tests make their children do.  Each function runs in a child and gets its Context first.

The test process imports this module too (to name the functions), so ucxkv is imported only inside
of them: the test itself runs no engine.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from model import Arena, Case
from sleeper import Sleeper

if TYPE_CHECKING:
    from child import Context

ALL = (-1, -1)


@dataclass
class Outcome:
    """How a call ended: "ok" or the name of the exception, and when."""

    kind: str
    bases: tuple[str, ...] = ()
    status: int | None = None
    message: str = ""
    began: float = 0.0
    ended: float = 0.0
    bytes: int = 0
    path: str = ""
    spans: int = 0
    value: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


def attempt(func: Callable[[], Any]) -> Outcome:
    began = time.monotonic()
    try:
        value = func()
    except (Exception, KeyboardInterrupt) as error:
        ended = time.monotonic()
        status = getattr(error, "status", None)
        return Outcome(
            kind=type(error).__name__,
            bases=tuple(base.__name__ for base in type(error).__mro__),
            status=None if status is None else int(status),
            message=str(error),
            began=began,
            ended=ended,
        )
    outcome = Outcome("ok", began=began, ended=time.monotonic())
    if hasattr(value, "spans"):
        outcome.bytes, outcome.path, outcome.spans = value.bytes, value.path, value.spans
    elif isinstance(value, int | float | str | tuple | list | None):
        outcome.value = value
    return outcome


# Engine and links


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def build_engine(cluster_id: int, options: dict[str, Any]) -> Any:
    import ucxkv

    if "tls" in options:
        options = {**options, "tls": ucxkv.Tls(**options["tls"])}
    engine = ucxkv.LlmDataDist(cluster_id, options=ucxkv.Options(**options))
    engine.initialize()
    return engine


def start_engine(ctx: Context, cluster_id: int, options: dict[str, Any]) -> Any:
    records = Records()
    logging.getLogger("ucxkv").addHandler(records)
    ctx.values["log"] = records
    ctx.engine = build_engine(cluster_id, options)
    return ctx.engine.listen_address


def finalize(ctx: Context) -> float:
    began = time.monotonic()
    if ctx.engine is not None:
        ctx.engine.finalize()
    return time.monotonic() - began


def log_lines(ctx: Context, clear: bool = False) -> list[str]:
    lines = list(ctx.values["log"].lines)
    if clear:
        ctx.values["log"].lines.clear()
    return lines


def cluster(cluster_id: int, address: tuple[str, int]) -> Any:
    import ucxkv

    return ucxkv.ClusterInfo(
        remote_cluster_id=cluster_id, remote_ip_infos=[ucxkv.IpInfo(address[0], address[1])]
    )


def link(
    ctx: Context, cluster_id: int, address: tuple[str, int], timeout_ms: int = 5000
) -> list[tuple[int, int, str]]:
    results = ctx.engine.link_llm_clusters([cluster(cluster_id, address)], timeout_ms=timeout_ms)
    return [result_tuple(result) for result in results]


def result_tuple(result: Any) -> tuple[int, int, str]:
    return (result.cluster_id, int(result.status), result.message)


def try_link(
    ctx: Context, targets: Sequence[tuple[int, tuple[str, int]]], timeout_ms: int = 5000
) -> Outcome:
    def run() -> Any:
        clusters = [cluster(number, address) for number, address in targets]
        try:
            return [
                result_tuple(result)
                for result in ctx.engine.link_llm_clusters(clusters, timeout_ms=timeout_ms)
            ]
        except Exception as error:
            failed.extend(result_tuple(result) for result in getattr(error, "results", ()))
            raise

    failed: list[tuple[int, int, str]] = []
    outcome = attempt(run)
    outcome.extra["results"] = failed
    return outcome


def unlink(
    ctx: Context, cluster_id: int, timeout_ms: int = 1000, force: bool = False
) -> list[tuple[int, int, str]]:
    target = cluster(cluster_id, ("127.0.0.1", 1))
    results = ctx.engine.unlink_llm_clusters([target], timeout_ms=timeout_ms, force=force)
    return [result_tuple(result) for result in results]


def links(ctx: Context) -> dict[int, str]:
    """State of each link."""
    return {info.cluster_id: str(info.state) for info in ctx.engine.links()}


def links_text(ctx: Context) -> str:
    return repr(ctx.engine.links())


# Caches


def make_cache(
    ctx: Context,
    name: str,
    tensors: int,
    shape: tuple[int, ...],
    *,
    seed: int | None = None,
    access: str = "r",
    data_type: str = "UINT8",
    aliases: int = 0,
    align: int = 64,
) -> int:
    """Register a guarded arena.  With `aliases`, each tensor is registered so many times: a large
    cache in little memory."""
    nbytes = int(np.prod(shape)) * model.TYPES.get(data_type, 1)
    arena = Arena(tensors, nbytes, align=align)
    if seed is not None:
        fill_arena(arena, seed)
    cache = register_arena(ctx, arena, shape, data_type, access=access, aliases=aliases)
    ctx.arenas[name] = arena
    ctx.caches[name] = cache
    return int(cache.cache_id)


def register_arena(
    ctx: Context,
    arena: Arena,
    shape: tuple[int, ...],
    data_type: str = "UINT8",
    *,
    access: str = "r",
    by_address: bool = False,
    aliases: int = 0,
) -> Any:
    import ucxkv

    tensors: list[Any]
    if by_address or aliases:
        tensors = [arena.address(t) for t in range(len(arena.offsets))] * max(1, aliases)
    else:
        dtype = model.NUMPY.get(data_type, np.uint8)
        tensors = [raw.view(dtype).reshape(shape) for raw in arena.raws()]
    desc = ucxkv.CacheDesc(len(tensors), tuple(shape), ucxkv.DataType[data_type])
    return ctx.engine.register_kv_cache(desc, tensors, access=access)


def fill_arena(arena: Arena, seed: int) -> None:
    for tensor, raw in enumerate(arena.raws()):
        model.fill(raw, tensor_seed(seed, tensor))


def tensor_seed(seed: int, tensor: int) -> int:
    return seed * 1000 + tensor


def refill(ctx: Context, name: str, seed: int) -> None:
    fill_arena(ctx.arenas[name], seed)


def paint(ctx: Context, name: str, value: int) -> None:
    for raw in ctx.arenas[name].raws():
        raw[:] = value


def painted(ctx: Context, name: str, value: int) -> bool:
    """Whether every byte of the tensors has this value, and the guards are whole."""
    arena = ctx.arenas[name]
    return arena.guards_intact() and all(model.is_all(raw, value) for raw in arena.raws())


def wrong_tensors(ctx: Context, name: str, seed: int) -> list[int]:
    """Tensors that do not hold the pattern of `seed`; -1 stands for the guard bytes."""
    arena = ctx.arenas[name]
    wrong = [
        tensor
        for tensor, raw in enumerate(arena.raws())
        if not model.matches(raw, tensor_seed(seed, tensor))
    ]
    return wrong if arena.guards_intact() else [-1, *wrong]


def wrong_slots(ctx: Context, name: str, seed: int, slot: int, slot_bytes: int) -> list[int]:
    """Tensors whose slot does not hold slot 0 of the pattern of `seed`."""
    return [
        tensor
        for tensor, raw in enumerate(ctx.arenas[name].raws())
        if not model.matches(
            raw[slot * slot_bytes : (slot + 1) * slot_bytes], tensor_seed(seed, tensor)
        )
    ]


def wrong_slot_of(ctx: Context, name: str, seed: int, slot: int, slot_bytes: int) -> list[int]:
    """Tensors whose slot does not hold the same slot of the pattern of `seed`."""
    start = slot * slot_bytes
    return [
        tensor
        for tensor, raw in enumerate(ctx.arenas[name].raws())
        if not model.matches(raw[start : start + slot_bytes], tensor_seed(seed, tensor), start)
    ]


def drop_cache(ctx: Context, name: str, timeout_ms: int = 1000) -> float:
    """Unregister; the seconds it took."""
    cache = ctx.caches.pop(name)
    began = time.monotonic()
    ctx.engine.unregister_kv_cache(cache.cache_id, timeout_ms=timeout_ms)
    return time.monotonic() - began


def forget_arena(ctx: Context, name: str) -> None:
    del ctx.arenas[name]
    gc.collect()


# Pulls


def pull_arguments(
    ctx: Context,
    name: str,
    cluster_id: int,
    cache_id: int,
    *,
    src_slot: int = 0,
    dst_slot: int = 0,
    size: int = -1,
    src_layers: tuple[int, int] = ALL,
    dst_layers: tuple[int, int] = ALL,
    per_layer: int = 2,
    timeout_ms: int | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import ucxkv

    ext = ucxkv.KvCacheExtParam(
        src_layer_range=src_layers, dst_layer_range=dst_layers, tensor_num_per_layer=per_layer
    )
    index = ucxkv.CacheIndex(cluster_id, cache_id, src_slot)
    return (index, ctx.caches[name], dst_slot, size, ext), {"timeout_ms": timeout_ms}


def pull(ctx: Context, name: str, cluster_id: int, cache_id: int, **more: Any) -> Outcome:
    args, kwargs = pull_arguments(ctx, name, cluster_id, cache_id, **more)
    return attempt(lambda: ctx.engine.pull_kv_cache(*args, **kwargs))


def pull_checked(
    ctx: Context, name: str, cluster_id: int, cache_id: int, seed: int, **more: Any
) -> Outcome:
    """Pull the whole cache; extra["wrong"] are the tensors that then hold other bytes."""
    outcome = pull(ctx, name, cluster_id, cache_id, **more)
    if outcome.ok:
        outcome.extra["wrong"] = wrong_tensors(ctx, name, seed)
    return outcome


def pull_many(
    ctx: Context, name: str, cluster_id: int, cache_id: int, count: int, **more: Any
) -> list[Outcome]:
    return [pull(ctx, name, cluster_id, cache_id, **more) for _ in range(count)]


def pull_beside_sleeper(
    ctx: Context, name: str, cluster_id: int, cache_id: int, *, timeout_ms: int, **more: Any
) -> Outcome:
    """A pull, and a thread that sleeps as long as the pull may take; extra["late"] is how much
    later than asked the sleeper woke."""
    late: list[float] = []
    ready = threading.Event()

    def sleep() -> None:
        ready.set()
        began = time.monotonic()
        time.sleep(timeout_ms / 1000)
        late.append(time.monotonic() - began - timeout_ms / 1000)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    ready.wait()
    outcome = pull(ctx, name, cluster_id, cache_id, timeout_ms=timeout_ms, **more)
    sleeper.join()
    outcome.extra["late"] = late[0]
    return outcome


def drop_beside_sleeper(ctx: Context, name: str, timeout_ms: int) -> tuple[float, float]:
    """Unregister; the seconds taken, and the lateness of a thread that sleeps meanwhile."""
    with Sleeper() as sleeper:
        seconds = drop_cache(ctx, name, timeout_ms)
    return seconds, sleeper.late


def begin(ctx: Context, key: str, name: str, cluster_id: int, cache_id: int, **more: Any) -> None:
    args, kwargs = pull_arguments(ctx, name, cluster_id, cache_id, **more)
    ctx.values[key] = ctx.engine.pull_kv_cache_async(*args, **kwargs)


def progress(ctx: Context, key: str) -> tuple[int, int, bool]:
    transfer = ctx.values[key]
    return transfer.bytes_done, transfer.layers_done(), transfer.done()


def wait_moving(ctx: Context, key: str, least: int = 1, timeout: float = 5.0) -> bool:
    """Wait until so many bytes have landed; False when the transfer has ended before."""
    transfer = ctx.values[key]
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if transfer.done():
            return False
        if transfer.bytes_done >= least:
            return True
        time.sleep(0.0005)
    raise AssertionError(f"nothing moved: {transfer.bytes_done} bytes in {timeout} s")


def finish(ctx: Context, key: str, timeout: float = 20.0) -> Outcome:
    transfer = ctx.values.pop(key)
    return attempt(lambda: transfer.result(timeout))


def cancel(ctx: Context, key: str) -> Outcome:
    return attempt(ctx.values[key].cancel)


def stats(ctx: Context) -> str:
    return repr(ctx.engine.stats())


# Random geometry


def case_shape(side: model.Side) -> tuple[int, ...]:
    item = model.TYPES.get(side.data_type, 1)
    elements = side.slot_bytes // item
    for factor in (7, 5, 3, 2):
        if elements % factor == 0:
            return (side.blocks, elements // factor, factor)
    return (side.blocks, elements)


def open_side(ctx: Context, case: Case, side: model.Side, access: str) -> tuple[Arena, Any]:
    """One side of a case, registered: the source with its pattern, the destination with bytes that
    are nobody's."""
    source = side is case.src
    arena = model.arena_for(case, side, 0 if source else 1)
    for tensor, raw in enumerate(arena.raws()):
        model.fill(raw, model.source_seed(case, tensor) if source else -1 - tensor)
    cache = register_arena(
        ctx,
        arena,
        case_shape(side),
        side.data_type,
        access=access,
        by_address=side.by_address,
    )
    return arena, cache


def open_sources(ctx: Context, cases: Sequence[Case]) -> list[int]:
    opened = [(case, *open_side(ctx, case, case.src, "r")) for case in cases]
    ctx.values["sources"] = opened
    return [int(cache.cache_id) for _, _, cache in opened]


def close_sources(ctx: Context) -> list[str]:
    """Unregister them; what has changed in them meanwhile."""
    problems = []
    for case, arena, cache in ctx.values.pop("sources"):
        ctx.engine.unregister_kv_cache(cache.cache_id)
        whole = arena.guards_intact() and all(
            model.matches(raw, model.source_seed(case, tensor))
            for tensor, raw in enumerate(arena.raws())
        )
        if not whole:
            problems.append(f"the source has changed: {case}")
    return problems


def after(arena: Arena, model_pull: Callable[[list[model.Bytes]], None]) -> model.Bytes:
    """What `arena` has to hold, guard bytes included, when the model has done its pull there."""
    expected = arena.buffer.copy()
    model_pull([expected[offset : offset + arena.nbytes] for offset in arena.offsets])
    return expected


def difference(arena: Arena, expected: model.Bytes) -> str:
    if model.equal(arena.buffer, expected):
        return ""
    wrong = np.flatnonzero(arena.buffer != expected)
    return f"{len(wrong)} wrong bytes, the first at {wrong[0]} of {arena.offsets}"


def misreport(report: Any, moved: int, paths: Sequence[str]) -> str:
    """What a report says that is not so."""
    if report.bytes != moved:
        return f"reported {report.bytes} bytes instead of {moved}"
    if report.path not in paths:
        return f"took path {report.path}"
    if bool(report.spans) != bool(moved):
        return f"reported {report.spans} spans"
    return ""


def problems_of(
    run: Callable[[Any, int], str], cases: Sequence[Any], cache_ids: Sequence[int]
) -> list[str]:
    """What `run` says of each case and its cache at the peer, if it says anything."""
    found = [(run(case, cache_id), case) for case, cache_id in zip(cases, cache_ids, strict=True)]
    return [f"{problem}: {case}" for problem, case in found if problem]


def run_cases(
    ctx: Context, cluster_id: int, cases: Sequence[Case], cache_ids: Sequence[int], path: str
) -> list[str]:
    def run(case: Case, cache_id: int) -> str:
        return run_case(ctx, cluster_id, case, cache_id, path)

    return problems_of(run, cases, cache_ids)


def run_case(ctx: Context, cluster_id: int, case: Case, cache_id: int, path: str) -> str:
    import ucxkv

    arena, cache = open_side(ctx, case, case.dst, "")
    expected = after(arena, lambda tensors: model.model_pull(case, tensors))
    try:
        report = ctx.engine.pull_kv_cache(
            ucxkv.CacheIndex(cluster_id, cache_id, case.src.slot),
            cache,
            case.dst.slot,
            case.size,
            ucxkv.KvCacheExtParam(case.src.layers, case.dst.layers, case.per_layer),
            timeout_ms=10000,
        )
    except ucxkv.LlmError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ctx.engine.unregister_kv_cache(cache.cache_id)
    return difference(arena, expected) or misreport(report, case.moved, [path])


# The process itself


def busy(ctx: Context, seconds: float, interval: float) -> int:
    """A pure-Python loop that gives the GIL away only every `interval` seconds."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    count = 0
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            count += 1
    finally:
        sys.setswitchinterval(before)
    return count


def hold_gil(ctx: Context, seconds: float) -> None:
    """Sleep with the GIL held: nothing in this process runs Python meanwhile."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def begin_and_hold_gil(
    ctx: Context, name: str, cluster_id: int, cache_id: int, seconds: float
) -> dict[str, Any]:
    """Start a pull, keep the GIL for a while, and see how far it has come."""
    args, kwargs = pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=5000)
    transfer = ctx.engine.pull_kv_cache_async(*args, **kwargs)
    hold_gil(ctx, seconds)
    found = {"done": transfer.done(), "bytes": transfer.bytes_done}
    transfer.result(5)
    return found


def thread_names(ctx: Context) -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def native_threads(ctx: Context) -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return sorted(names)


def nothing(ctx: Context) -> None:
    """Answer."""


def collect(ctx: Context) -> int:
    return gc.collect()


def come_to_rest(ctx: Context) -> bool:
    """Drop all that a test has left; whether none of its threads runs any more."""
    ctx.engine = None
    ctx.caches.clear()
    ctx.arenas.clear()
    records = ctx.values.pop("log", None)
    if records is not None:
        logging.getLogger("ucxkv").removeHandler(records)
    ctx.values.clear()
    ctx.stop.clear()
    gc.collect()
    # The main thread, and the one that reads the commands.
    return len(os.listdir("/proc/self/task")) == 2


# Checks


def raw_call(
    ctx: Context,
    function: str,
    fields: dict[str, Any],
    names: Sequence[str],
    *,
    push: bool = False,
    twin: bool = False,
) -> Outcome:
    """A transfer whose arguments may be of any type.

    "index", "cache" and "ext" replace whole arguments; the cache of ours is the destination, of a
    push the source: "dst" (or "src") names one and "dst_id" (or "src_id") is an id.  `names` are
    the arguments between the first two and `ext`.
    """
    import ucxkv

    near, far = ("src", "dst") if push else ("dst", "src")

    def run() -> Any:
        index = fields.get("index") or ucxkv.CacheIndex(
            fields["cluster_id"], fields[f"{far}_id"], fields[f"{far}_slot"]
        )
        if "cache" in fields:
            cache = fields["cache"]
        elif f"{near}_id" in fields:
            cache = ucxkv.Cache(cache_id=fields[f"{near}_id"])
        else:
            cache = ctx.caches[fields[near]]
        ext = fields.get("ext") or ucxkv.KvCacheExtParam(
            fields["src_layers"], fields["dst_layers"], fields["per_layer"]
        )
        args = (
            *((cache, index) if push else (index, cache)),
            *(fields[name] for name in names),
            ext,
        )
        if twin:
            begin = getattr(ctx.engine, f"{function}_async")
            return begin(*args, timeout_ms=fields["timeout_ms"]).result(30)
        return getattr(ctx.engine, function)(*args, timeout_ms=fields["timeout_ms"])

    return attempt(run)


def raw_pull(ctx: Context, fields: dict[str, Any], twin: bool = False) -> Outcome:
    return raw_call(ctx, "pull_kv_cache", fields, ("dst_slot", "size"), twin=twin)


def raw_pulls(ctx: Context, calls: Sequence[dict[str, Any]], twin: bool = False) -> list[Outcome]:
    return [raw_pull(ctx, fields, twin) for fields in calls]
