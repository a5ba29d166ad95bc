"""Holds at their owner, and pulls that name them while the memory is given another use."""

from __future__ import annotations

import bisect
import os
import pickle
import random
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import model
from children import actions, noticing
from children.actions import Outcome

if TYPE_CHECKING:
    from child import Context


class Sleeper:
    """A thread that sleeps 10 ms again and again; `late` is how much too late it woke at worst."""

    def __init__(self) -> None:
        self.late = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            self.late = max(self.late, time.monotonic() - began - 0.01)

    def __enter__(self) -> Sleeper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


# The owner


def make(ctx: Context, key: str, name: str, part: Any, ttl_ms: float) -> str:
    hold = ctx.engine.hold(ctx.caches[name], part, ttl_ms)
    ctx.values[key] = hold
    return str(hold.token)


def look(ctx: Context, key: str) -> tuple[bool, str | None]:
    hold = ctx.values[key]
    return hold.active, hold.outcome


def part_of(ctx: Context, key: str) -> tuple[int, tuple[int, ...] | None]:
    hold = ctx.values[key]
    return hold.cache_id, hold.blocks


def release(ctx: Context, key: str) -> None:
    ctx.values[key].release()


def wait(ctx: Context, key: str, timeout_ms: float | None) -> Outcome:
    return actions.attempt(lambda: ctx.values[key].wait(timeout_ms))


def wait_beside_sleeper(ctx: Context, key: str, timeout_ms: float | None) -> Outcome:
    """Wait, beside a sleeper; extra["late"] is how much too late that woke at worst."""
    with Sleeper() as sleeper:
        outcome = wait(ctx, key, timeout_ms)
    outcome.extra["late"] = sleeper.late
    return outcome


def wait_and_release(ctx: Context, key: str, ms: float) -> Outcome:
    """Wait without a limit while another thread releases it after `ms`."""
    released: list[float] = []

    def end() -> None:
        time.sleep(ms / 1e3)
        released.append(time.monotonic())
        ctx.values[key].release()

    thread = threading.Thread(target=end)
    thread.start()
    outcome = wait(ctx, key, None)
    thread.join()
    outcome.extra["after"] = outcome.ended - released[0]
    return outcome


def in_block(ctx: Context, name: str) -> list[Any]:
    """Outcomes of holds after the ends of their blocks."""
    engine, cache = ctx.engine, ctx.caches[name]
    with engine.hold(cache, 0, 60_000) as plain:
        inside = plain.outcome
    raised = engine.hold(cache, 0, 60_000)
    error = actions.attempt(lambda: fail_inside(raised))
    with engine.hold(cache, 0, 1) as brief:
        brief.wait()
    return [inside, plain.outcome, raised.outcome, error.kind, brief.outcome]


def fail_inside(hold: Any) -> None:
    with hold:
        raise RuntimeError("in the block")


def try_hold(ctx: Context, name: Any, part: Any, ttl_ms: Any) -> Outcome:
    """A hold of the cache of that name, or of whatever else is given instead."""
    cache = ctx.caches.get(name, name) if isinstance(name, str) else name

    def run() -> str:
        return str(ctx.engine.hold(cache, part, ttl_ms))

    return actions.attempt(run)


def try_unknown(ctx: Context) -> Outcome:
    import ucxkv

    return actions.attempt(lambda: ctx.engine.hold(ucxkv.Cache(cache_id=999_999), 0, 100))


def count(ctx: Context) -> int:
    return int(ctx.engine.stats().holds)


def forged(ctx: Context, token: str, *, slot: int | None = None, word: int | None = None) -> str:
    """That token with another slot or word."""
    from ucxkv.holds import token_of

    known = token_of(token)
    changes = {name: v for name, v in (("slot", slot), ("word", word)) if v is not None}
    return known._replace(**changes).text()


def exhaust(ctx: Context, name: str) -> dict[str, Any]:
    """Take every word there is, twice."""
    cache = ctx.caches[name]

    def fill() -> tuple[list[Any], Outcome]:
        holds: list[Any] = []
        outcome = actions.attempt(lambda: take_all(holds))
        return holds, outcome

    def take_all(holds: list[Any]) -> None:
        while len(holds) < 70_000:
            holds.append(ctx.engine.hold(cache, None, 600_000))

    first, full = fill()
    cache_full = actions.attempt(lambda: actions.make_cache(ctx, "one more", 1, (1, 10)))
    first[1000].release()
    one = actions.attempt(lambda: ctx.engine.hold(cache, 0, 600_000))
    again = actions.attempt(lambda: ctx.engine.hold(cache, 0, 600_000))
    tokens = len({hold.token for hold in first})
    ctx.values["last"] = first[-1]
    held = count(ctx)
    for hold in first[:-1]:
        hold.release()
    return {
        "count": len(first),
        "full": full.kind,
        "cache": cache_full.kind,
        "one": one.kind,
        "again": again.kind,
        "tokens": tokens,
        "held": held,
        "left": count(ctx),
    }


def expire_many(ctx: Context, name: str, number: int, longest_ms: float) -> dict[str, Any]:
    """Holds with random times, looked at by their number, which does not end any, and directly."""
    rng = random.Random(6)
    cache = ctx.caches[name]
    wrong = 0
    times = []
    seen: list[tuple[float, int, float]] = []
    with Sleeper() as sleeper:
        for _ in range(number):
            ttl = rng.uniform(longest_ms / 4, longest_ms)
            before = time.monotonic()
            hold = ctx.engine.hold(cache, None, ttl)
            times.append((before + ttl / 1e3, time.monotonic() + ttl / 1e3, hold))
        end = max(latest for _, latest, _ in times) + 0.2
        while time.monotonic() < end:
            before = time.monotonic()
            left = count(ctx)
            seen.append((before, left, time.monotonic()))
            time.sleep(0.002)
            if len(seen) % 10 == 0:
                earliest, latest, hold = rng.choice(times)
                before = time.monotonic()
                active = hold.active
                wrong += active and latest < before
                wrong += not active and earliest > time.monotonic()
    earliest_ends = sorted(earliest for earliest, _, _ in times)
    latest_ends = sorted(latest for _, latest, _ in times)
    early = 0
    late = 0.0
    for before, left, after in seen:
        early += left < number - bisect.bisect(earliest_ends, after)
        # So many have ended: the next of them was due then.
        if left:
            late = max(late, before - latest_ends[number - left])
    return {
        "early": early,
        "late": late,
        "wrong": wrong,
        "samples": len(seen),
        "sleeper": sleeper.late,
        "ends": {hold.outcome for _, _, hold in times},
    }


def finalize_under_wait(ctx: Context, name: str) -> dict[str, Any]:
    """Finalize while a thread waits for the end of a hold without a limit."""
    hold = ctx.engine.hold(ctx.caches[name], None, 600_000)
    ended: list[tuple[bool, float]] = []
    thread = threading.Thread(target=lambda: ended.append((hold.wait(), time.monotonic())))
    thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    ctx.engine.finalize()
    thread.join(5)
    return {
        "waited": ended[0][0],
        "seconds": ended[0][1] - began,
        "outcome": hold.outcome,
        "release": actions.attempt(hold.release).kind,
        "again": hold.wait(1000),
    }


def use_in_fork(ctx: Context, key: str) -> list[tuple[str, str]]:
    """What a forked child is told of its parent's hold; it ends without the interpreter's exit."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        hold = ctx.values[key]
        calls = {
            "outcome": lambda: hold.outcome,
            "active": lambda: hold.active,
            "release": hold.release,
            "wait": lambda: hold.wait(10),
            "block": lambda: hold.__exit__(None, None, None),
            "hold": lambda: ctx.engine.hold(next(iter(ctx.caches.values())), None, 100),
        }
        said = [(name, actions.attempt(call).kind) for name, call in calls.items()]
        del hold, calls
        ctx.values.clear()
        os.write(writer, pickle.dumps(said))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found: list[tuple[str, str]] = pickle.load(pipe)
    os.waitpid(pid, 0)
    return found


# Memory that is used again.  The source's two tensors stand for all layers, so that a pull takes
# a while and giving the memory another use does not.


def offer(ctx: Context, name: str, slot: int, seed: int, ttl_ms: float) -> str:
    """Fill a slot, and hold it."""
    for tensor, raw in enumerate(slot_raws(ctx, name, slot)):
        model.fill(raw, actions.tensor_seed(seed, tensor))
    return make(ctx, "hold", name, slot, ttl_ms)


def slot_raws(ctx: Context, name: str, slot: int) -> list[Any]:
    blocks = ctx.caches[name].cache_desc.shape[0]
    return [raw.reshape(blocks, -1)[slot] for raw in ctx.arenas[name].raws()]


def end_and_reuse(ctx: Context, name: str, slot: int, way: str, newer: bool) -> str:
    """End the hold in that way, then give the slot another use, perhaps under a newer hold."""
    hold = ctx.values["hold"]
    if way == "release":
        hold.release()
    elif way == "wait":
        assert hold.wait(10_000)
    elif way == "look":
        while hold.active:
            pass
    outcome = str(hold.outcome)
    if newer:
        make(ctx, "newer", name, slot, 60_000)
    for raw in slot_raws(ctx, name, slot):
        raw[:] = 0xEE
    return outcome


def begin_and_move(
    ctx: Context, name: str, cluster_id: int, cache_id: int, slot: int, hold: str, least: int
) -> None:
    """Start a pull and wait until so much has landed, or it is over."""
    noticing.begin(
        ctx,
        "pull",
        name,
        cluster_id,
        cache_id,
        None,
        hold,
        src_slot=slot,
        timeout_ms=20_000,
    )
    transfer = ctx.values["pull"]
    end = time.monotonic() + 10
    while transfer.bytes_done < least and not transfer.done() and time.monotonic() < end:
        time.sleep(0.0002)


def finish_checked(ctx: Context, name: str, seed: int) -> Outcome:
    """Its end; extra["wrong"] are reported layers, all of them if it succeeded, with other bytes
    than those of the hold."""
    transfer = ctx.values["pull"]
    outcome = actions.finish(ctx, "pull")
    layers = transfer.layers_done()
    raws = ctx.arenas[name].raws()
    outcome.extra["layers"] = layers
    outcome.extra["wrong"] = [
        layer
        for layer in range(layers)
        for tensor in (2 * layer, 2 * layer + 1)
        if not model.matches(raws[tensor], actions.tensor_seed(seed, tensor % 2))
    ]
    if outcome.ok and 2 * layers != len(raws):
        outcome.extra["wrong"].append(-1)
    return outcome
