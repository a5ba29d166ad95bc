"""Pushes layer by layer: how the sender says what is ready, and what has come at the receiver."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import model
from children import actions, crowd, ending, pushing
from children.actions import Outcome

if TYPE_CHECKING:
    from child import Context

BLANK = 0x22


class Piece(NamedTuple):
    """Bytes of one tensor that are to be found in another."""

    src_tensor: int
    src_start: int
    dst_tensor: int
    dst_start: int
    length: int


# At the receiver


def difference(ctx: Context, name: str, pieces: Sequence[Piece], seed: int) -> str:
    """Where a cache differs from one that is blank but for these pieces; guard bytes count too."""
    arena = ctx.arenas[name]
    expected = np.full_like(arena.buffer, model.GUARD)
    for offset in arena.offsets:
        expected[offset : offset + arena.nbytes] = BLANK
    for piece in pieces:
        start = arena.offsets[piece.dst_tensor] + piece.dst_start
        source = actions.tensor_seed(seed, piece.src_tensor)
        expected[start : start + piece.length] = model.pattern(
            source, piece.src_start, piece.length
        )
    wrong = np.flatnonzero(arena.buffer != expected)
    return f"{wrong.size} bytes from {wrong[0]} of {arena.offsets}" if wrong.size else ""


def quiesce_and_paint(ctx: Context, name: str, blocks: Any) -> None:
    """Give slots another use; what has landed in the others is painted over as well."""
    ctx.engine.quiesce(ctx.caches[name], blocks, timeout_ms=1000)
    actions.paint(ctx, name, BLANK)


# At the sender


class Flag:
    """An event as a device's are."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class Asked:
    """A function that says which layers are ready, counts how often, and may raise."""

    def __init__(
        self, layers: int, raises_at: int = -1, error: BaseException | None = None
    ) -> None:
        self.over = [False] * layers
        self.raises_at = raises_at
        self.error = error
        self.count = 0

    def __call__(self, layer: int) -> bool:
        self.count += 1
        if layer == self.raises_at and self.over[layer] and self.error is not None:
            raise self.error
        return self.over[layer]


def trigger(way: str, layers: int) -> tuple[Any, Callable[[int], None]]:
    """The argument `layer_ready` of one way, and what says that a layer is ready."""
    if way == "asked":
        asked = Asked(layers)
        return asked, lambda layer: asked.over.__setitem__(layer, True)
    if way == "query":
        flags = [Flag() for _ in range(layers)]
        return flags, lambda layer: setattr(flags[layer], "over", True)
    events: list[Any]
    if way == "asyncio":
        events = [asyncio.Event() for _ in range(layers)]
    elif way == "multiprocessing":
        events = [multiprocessing.Event() for _ in range(layers)]
    else:
        events = [threading.Event() for _ in range(layers)]
    return tuple(events), lambda layer: events[layer].set()


def begin(
    ctx: Context,
    key: str,
    way: str,
    layers: int,
    name: str,
    cluster_id: int,
    cache_id: int,
    *,
    blocks: tuple[Any, Any] | None = None,
    **more: Any,
) -> None:
    """Start a push of which nothing is ready; with `blocks` those are pushed, not a slot."""
    args, kwargs = pushing.push_arguments(ctx, name, cluster_id, cache_id, **more)
    function = ctx.engine.push_kv_cache_async
    if blocks is not None:
        cache, index, _, _, ext = args
        args = (cache, index, *blocks, ext)
        function = ctx.engine.push_kv_blocks_async
    if way == "told":
        transfer = function(*args, layer_ready=True, **kwargs)
        say = transfer.layer_ready
    else:
        ready, say = trigger(way, layers)
        transfer = function(*args, layer_ready=ready, **kwargs)
        ctx.values[f"{key} asked"] = ready
    ctx.values[key] = transfer
    ctx.values[f"{key} say"] = say


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


async def ready_some_day(layer: int) -> bool:
    return True


class Later:
    def __await__(self) -> Generator[None, None, bool]:
        yield
        return True


def ready_later(layer: int) -> Any:
    return Later()


class Nameless(type):
    @property
    def __name__(cls) -> Any:
        return 5


class Misnamed(Exception, metaclass=Nameless):
    pass


class Untouchable(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("hands off")


ERRORS: dict[str, type[BaseException]] = {
    "ZeroDivisionError": ZeroDivisionError,
    "SystemExit": SystemExit,
    "Unprintable": Unprintable,
    "Misnamed": Misnamed,
    "Untouchable": Untouchable,
}


def begin_raising(
    ctx: Context,
    key: str,
    layers: int,
    at: int,
    error: str,
    name: str,
    cluster_id: int,
    cache_id: int,
) -> None:
    """Start a push whose function raises when layer `at` is ready."""
    args, kwargs = pushing.push_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    asked = Asked(layers, at, ERRORS[error]("this layer could not be computed"))
    ctx.values[f"{key} asked"] = asked
    ctx.values[f"{key} say"] = lambda layer: asked.over.__setitem__(layer, True)
    ctx.values[key] = ctx.engine.push_kv_cache_async(*args, layer_ready=asked, **kwargs)


def say_ready(ctx: Context, key: str, *layers: int) -> None:
    for layer in layers:
        ctx.values[f"{key} say"](layer)


def tell(ctx: Context, key: str, layer: Any) -> Outcome:
    return actions.attempt(lambda: ctx.values[key].layer_ready(layer))


def land(ctx: Context, key: str, layer: int, timeout_ms: int = 5000) -> Outcome:
    """Say that a layer is ready, and wait for it."""
    ctx.values[f"{key} say"](layer)
    return wait_layer(ctx, key, layer, timeout_ms)


def wait_layer(ctx: Context, key: str, layer: int, timeout_ms: int = 5000) -> Outcome:
    return actions.attempt(lambda: ctx.values[key].wait_layer(layer, timeout_ms))


def look(ctx: Context, key: str) -> dict[str, Any]:
    transfer = ctx.values[key]
    return {
        "done": transfer.done(),
        "layers": transfer.layers_done(),
        "bytes": transfer.bytes_done,
        "results": [kind_of(result) for result in transfer.layer_results()],
        "text": repr(transfer),
    }


def kind_of(result: Any) -> str | int | None:
    """A layer's result: its bytes, the name of its error, or None."""
    if result is None:
        return None
    return type(result).__name__ if isinstance(result, Exception) else int(result.bytes)


def finish(ctx: Context, key: str, timeout: float = 20.0) -> Outcome:
    """Wait for the end: how it ended, by what cause, and with what results of each layer."""
    transfer = ctx.values[key]
    cause: list[str] = []

    def run() -> Any:
        try:
            return transfer.result(timeout)
        except Exception as error:
            kind = type(error.__cause__)
            cause.append(next((name for name, one in ERRORS.items() if one is kind), str(kind)))
            raise

    outcome = actions.attempt(run)
    outcome.extra["cause"] = cause
    outcome.extra["results"] = [kind_of(result) for result in transfer.layer_results()]
    outcome.extra["layers"] = transfer.layers_done()
    outcome.extra["bytes"] = transfer.bytes_done
    return outcome


def times_asked(ctx: Context, key: str) -> int:
    return int(ctx.values[f"{key} asked"].count)


def hold_gil_past_deadline(ctx: Context, key: str, seconds: float) -> bool:
    """Whether the push is over as soon as Python runs again."""
    actions.hold_gil(ctx, seconds)
    return bool(ctx.values[key].done())


def follow(ctx: Context, key: str, order: Sequence[int]) -> list[int]:
    """Say what is ready in this order, with pauses; the layers in the order that they come in."""

    def say() -> None:
        for layer in order:
            time.sleep(0.005)
            ctx.values[f"{key} say"](layer)

    saying = threading.Thread(target=say)
    saying.start()
    seen = list(ctx.values[key].layers())
    saying.join()
    return seen


def raw_push(ctx: Context, layer_ready: Any, fields: dict[str, Any]) -> Outcome:
    """A layered push whose arguments may be of any type; see pushing.raw_push."""
    import ucxkv

    def run() -> Any:
        index = ucxkv.CacheIndex(fields["cluster_id"], fields["dst_id"], fields["dst_slot"])
        cache = ctx.caches[fields["src"]]
        transfer = ctx.engine.push_kv_cache_async(
            cache, index, 0, fields["size"], timeout_ms=2000, layer_ready=layer_ready
        )
        return transfer.result(10)

    return actions.attempt(run)


def raw_push_with_events(ctx: Context, count: int, fields: dict[str, Any]) -> Outcome:
    return raw_push(ctx, [Flag() for _ in range(count)], fields)


# On an event loop


def awaited(
    ctx: Context, layers: int, name: str, cluster_id: int, cache_id: int, give_up: bool
) -> dict[str, Any]:
    """Await a push whose layers a task of the same loop makes ready; or be cancelled meanwhile."""
    args, kwargs = pushing.push_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)

    async def run() -> dict[str, Any]:
        events = [asyncio.Event() for _ in range(layers)]
        transfer = ctx.engine.push_kv_cache_async(*args, layer_ready=events, **kwargs)

        async def compute() -> None:
            for event in events[: layers // 2] if give_up else events:
                await asyncio.sleep(0.005)
                event.set()

        async def wait() -> Any:
            return await transfer

        computing = asyncio.create_task(compute())
        waiting = asyncio.create_task(wait())
        await computing
        if not give_up:
            return {"kind": type(await waiting).__name__, "layers": transfer.layers_done()}
        waiting.cancel()
        cancelled = (await asyncio.gather(waiting, return_exceptions=True))[0]
        return {"kind": type(cancelled).__name__, "done": transfer.done()}

    return asyncio.run(run())


# The feeder


def feeders(ctx: Context) -> list[str]:
    return [name for name in actions.thread_names(ctx) if "feeder" in name]


def feeder_wakes(ctx: Context, seconds: float) -> int:
    """How often the feeder runs within some seconds."""
    task = next(one for one in threading.enumerate() if "feeder" in one.name).native_id
    before = switches(task)
    time.sleep(seconds)
    return switches(task) - before


def switches(task: int | None) -> int:
    with open(f"/proc/self/task/{task}/status") as status:
        return sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)


def finalize_amid(ctx: Context, key: str) -> dict[str, Any]:
    """Finalize while layers are not ready; what is left of it."""
    seconds = actions.finalize(ctx)
    outcome = finish(ctx, key)
    told = tell(ctx, key, 0)
    return {"seconds": seconds, "feeders": feeders(ctx), "outcome": outcome, "told": told}


def finalize_from_feeder(ctx: Context, name: str, cluster_id: int, cache_id: int) -> dict[str, Any]:
    """The function that is asked finalizes the engine."""
    args, kwargs = pushing.push_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
    took: list[float] = []

    def ask(layer: int) -> bool:
        took.append(actions.finalize(ctx))
        return True

    transfer = ctx.engine.push_kv_cache_async(*args, layer_ready=ask, **kwargs)
    outcome = actions.attempt(lambda: transfer.result(10))
    end = time.monotonic() + 5
    while feeders(ctx) and time.monotonic() < end:
        time.sleep(0.01)
    return {"took": took, "feeders": feeders(ctx), "outcome": outcome}


def finalize_beside_a_blocked_function(
    ctx: Context, name: str, cluster_id: int, cache_id: int, seconds: float
) -> dict[str, Any]:
    """The function that is asked does not return for some seconds."""
    args, kwargs = pushing.push_arguments(ctx, name, cluster_id, cache_id, timeout_ms=20000)
    asked = threading.Event()

    def ask(layer: int) -> bool:
        asked.set()
        time.sleep(seconds)
        return True

    transfer = ctx.engine.push_kv_cache_async(*args, layer_ready=ask, **kwargs)
    asked.wait(5)
    took = actions.finalize(ctx)
    outcome = actions.attempt(lambda: transfer.result(0))
    end = time.monotonic() + 2 * seconds
    while feeders(ctx) and time.monotonic() < end:
        time.sleep(0.01)
    return {"took": took, "outcome": outcome, "feeders": feeders(ctx)}


def drop_engine_amid(ctx: Context, path: str) -> dict[str, Any]:
    """Forget an engine while one of its pushes waits for its layers."""
    import ucxkv

    receiver, sender = (actions.build_engine(n, ending.options_for(path)) for n in (11, 12))
    receiver_cache = receiver.allocate_kv_cache(ending.allocation(), access="rw")
    sender.link_llm_clusters([actions.cluster(11, receiver.listen_address)], timeout_ms=5000)
    source = sender.allocate_kv_cache(ending.allocation())
    asked = Asked(ending.allocation().num_tensors)
    transfer = sender.push_kv_cache_async(
        source,
        ucxkv.CacheIndex(11, receiver_cache.cache_id),
        timeout_ms=60000,
        layer_ready=asked,
    )
    gone = weakref.ref(sender)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del sender
        gc.collect()
    warned = [one.category.__name__ for one in caught]
    # A warning refers to what it is about.
    caught.clear()
    found = {
        "gone": gone() is None,
        "warnings": warned,
        "outcome": actions.attempt(lambda: transfer.result(5)),
        "feeders": feeders(ctx),
    }
    receiver.finalize()
    return found


# Forks


def tell_in_fork(ctx: Context, key: str) -> tuple[list[tuple[str, str]], int]:
    """What a forked copy gets from a push of its parent's, and its exit status."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        transfer = ctx.values[key]
        calls: dict[str, Callable[[], Any]] = {
            "layer_ready": lambda: transfer.layer_ready(1),
            "wait_layer": lambda: transfer.wait_layer(1, 100),
            "result": lambda: transfer.result(0.1),
            "cancel": transfer.cancel,
        }
        said = [(name, actions.attempt(call).kind) for name, call in calls.items()]
        os.write(writer, pickle.dumps(said))
        os._exit(0)
    os.close(writer)
    data = os.read(reader, 65536)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return pickle.loads(data), os.waitstatus_to_exitcode(status)


# Many threads


def race(
    ctx: Context, layers: int, name: str, cluster_id: int, cache_id: int, rounds: int, seed: int
) -> tuple[list[str], list[str]]:
    """Threads say all layers ready, each in its own order, while one cancels: complaints, and how
    the pushes ended."""
    problems: list[str] = []
    kinds: list[str] = []
    for number in range(rounds):
        rng = random.Random(seed * 1000 + number)
        args, kwargs = pushing.push_arguments(ctx, name, cluster_id, cache_id, timeout_ms=10000)
        transfer = ctx.engine.push_kv_cache_async(*args, layer_ready=True, **kwargs)
        delay = rng.uniform(0, 0.004)

        def say(order: Sequence[int], transfer: Any = transfer) -> str:
            for layer in order:
                transfer.layer_ready(layer)
            return ""

        def cancel(transfer: Any = transfer, delay: float = delay) -> str:
            time.sleep(delay)
            transfer.cancel()
            return "" if transfer.done() else "cancelled, and not done"

        orders = [rng.sample(range(layers), layers) for _ in range(4)]
        problems += crowd.together([*(lambda o=order, s=say: s(o) for order in orders), cancel])
        outcome = actions.attempt(lambda transfer=transfer: transfer.result(0))
        kinds.append(outcome.kind)
        landed = sum(isinstance(kind_of(one), int) for one in transfer.layer_results())
        if outcome.ok != (landed == layers) or landed < transfer.layers_done():
            problems.append(f"{outcome.kind}, {landed} layers landed")
    return problems, kinds


def race_with_finalize(
    ctx: Context, layers: int, name: str, cluster_id: int, cache_id: int, seed: int
) -> tuple[list[str], float]:
    """Threads begin pushes and say their layers ready until the engine is finalized."""
    import ucxkv

    rng = random.Random(seed)
    delay = rng.uniform(0.05, 0.2)
    took: list[float] = []

    def push(ways: Sequence[str]) -> str:
        for number in range(10**6):
            try:
                args, kwargs = pushing.push_arguments(
                    ctx, name, cluster_id, cache_id, timeout_ms=10000
                )
                way = ways[number % len(ways)]
                ready, say = (True, None) if way == "told" else trigger(way, layers)
                transfer = ctx.engine.push_kv_cache_async(*args, layer_ready=ready, **kwargs)
                for layer in range(layers):
                    (say or transfer.layer_ready)(layer)
                transfer.result(15)
            except ucxkv.LlmError:
                return "" if took or closing.is_set() else "failed before the end"
        return "it never ended"

    def finalize() -> str:
        time.sleep(delay)
        closing.set()
        took.append(actions.finalize(ctx))
        return ""

    closing = threading.Event()
    pushes = [lambda w=ways: push(w) for ways in (("told",), ("events",), ("asked", "told"))]
    return crowd.together([*pushes, finalize]), took[0]
