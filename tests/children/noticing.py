"""Pulls with notices, the owner's ways to take them, and data connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from children import actions
from children.actions import Outcome

if TYPE_CHECKING:
    from child import Context


# The puller


def pull(
    ctx: Context,
    name: str,
    cluster_id: int,
    cache_id: int,
    notice: Any,
    hold: Any = None,
    **more: Any,
) -> Outcome:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, **more)
    return actions.attempt(
        lambda: ctx.engine.pull_kv_cache(*args, notice=notice, hold=hold, **kwargs)
    )


def pull_beside_sleeper(
    ctx: Context, name: str, cluster_id: int, cache_id: int, notice: bytes, timeout_ms: int
) -> Outcome:
    """As actions.pull_beside_sleeper; extra["late"] is the lateness of a sleeper of that time."""
    late: list[float] = []

    def sleep() -> None:
        began = time.monotonic()
        time.sleep(timeout_ms / 1000)
        late.append(time.monotonic() - began - timeout_ms / 1000)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    outcome = pull(ctx, name, cluster_id, cache_id, notice, timeout_ms=timeout_ms)
    sleeper.join()
    outcome.extra["late"] = late[0]
    return outcome


def pull_no_blocks(
    ctx: Context, name: str, cluster_id: int, cache_id: int, notice: bytes, hold: Any = None
) -> Outcome:
    import ucxkv

    return actions.attempt(
        lambda: ctx.engine.pull_kv_blocks(
            ucxkv.CacheIndex(cluster_id, cache_id),
            ctx.caches[name],
            [],
            [],
            notice=notice,
            hold=hold,
            timeout_ms=5000,
        )
    )


def begin(
    ctx: Context,
    key: str,
    name: str,
    cluster_id: int,
    cache_id: int,
    notice: bytes | None,
    hold: str | None = None,
    **more: Any,
) -> None:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, **more)
    ctx.values[key] = ctx.engine.pull_kv_cache_async(*args, notice=notice, hold=hold, **kwargs)


def begin_many(
    ctx: Context, name: str, cluster_id: int, cache_id: int, prefix: str, count: int, **more: Any
) -> None:
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, **more)
    ctx.values[prefix] = [
        ctx.engine.pull_kv_cache_async(*args, notice=f"{prefix}-{number}".encode(), **kwargs)
        for number in range(count)
    ]


def finish_many(ctx: Context, prefix: str) -> list[Outcome]:
    """How each ended; the time is that at which this was seen, in the order of their numbers."""
    return [
        actions.attempt(lambda transfer=transfer: transfer.result(20))
        for transfer in ctx.values.pop(prefix)
    ]


def landed(ctx: Context, prefix: str) -> int:
    """How many of them have all their bytes."""
    return sum(transfer.layers_done() > 0 for transfer in ctx.values[prefix])


@dataclass
class Told:
    """One pull of a storm: what it told, and when it was seen to begin and to be over."""

    notice: bytes
    kind: str
    began: float
    ended: float


def storm(
    ctx: Context,
    name: str,
    cluster_id: int,
    cache_id: int,
    prefix: str,
    count: int,
    width: int,
    timeout_ms: int,
) -> list[Told]:
    """So many pulls with a notice of its own each, `width` of them at a time (0: not async)."""
    args, kwargs = actions.pull_arguments(ctx, name, cluster_id, cache_id, timeout_ms=timeout_ms)
    told: list[Told] = []
    running: deque[tuple[bytes, float, Any]] = deque()

    def end(notice: bytes, began: float, result: Any) -> None:
        outcome = actions.attempt(result)
        told.append(Told(notice, outcome.kind, began, outcome.ended))

    for number in range(count):
        notice = f"{prefix}-{number}".encode()
        began = time.monotonic()
        if not width:
            end(notice, began, lambda n=notice: ctx.engine.pull_kv_cache(*args, notice=n, **kwargs))
            continue
        try:
            transfer = ctx.engine.pull_kv_cache_async(*args, notice=notice, **kwargs)
        except Exception as error:
            told.append(Told(notice, type(error).__name__, began, time.monotonic()))
            time.sleep(0.01)
            continue
        running.append((notice, began, transfer.result))
        if len(running) == width:
            end(*running.popleft())
    while running:
        end(*running.popleft())
    return told


# The data plane


def tcp_connections() -> Iterator[tuple[socket.socket, set[int]]]:
    """Duplicates of this process's TCP connections, and the ports of both ends."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = os.dup(int(entry))
            try:
                known = stat.S_ISSOCK(os.fstat(fd).st_mode)
            except OSError:
                known = False
            if not known:
                os.close(fd)
                continue
            with socket.socket(fileno=fd) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one, {one.getsockname()[1], one.getpeername()[1]}


def break_data(ctx: Context, control: Collection[int]) -> int:
    """Shut the TCP connections of UCX down, which have none of these ports; their number."""
    return shut_down(lambda ports: not ports & set(control))


def shut_down(chosen: Callable[[set[int]], bool]) -> int:
    """Shut the TCP connections down whose ports are chosen; their number."""
    count = 0
    for one, ports in tcp_connections():
        if chosen(ports):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


# The owner


def take(ctx: Context, timeout_ms: float | None = 0, count: int = -1) -> list[tuple[int, bytes]]:
    """Notices until none has come for that time, or until there are so many."""
    taken: list[tuple[int, bytes]] = []
    while len(taken) != count:
        notice = next(ctx.engine.notices(timeout_ms), None)
        if notice is None:
            break
        taken.append((notice.cluster_id, notice.data))
    return taken


def collect(ctx: Context, quiet_ms: int = 300) -> list[tuple[int, bytes]]:
    """Notices until `end_collecting`, and then until none has come for so long."""
    ctx.stop.clear()
    taken: list[tuple[int, bytes]] = []
    while not ctx.stop.is_set():
        taken += [(one.cluster_id, one.data) for one in ctx.engine.notices(50)]
    return taken + [(one.cluster_id, one.data) for one in ctx.engine.notices(quiet_ms)]


def end_collecting(ctx: Context) -> None:
    ctx.stop.set()


def counts(ctx: Context) -> tuple[int, int, int]:
    """Notices received, queued and waiting."""
    stats = ctx.engine.stats()
    return stats.notices_received, stats.notices_queued, stats.notices_waiting


def iterate(ctx: Context, timeout_ms: float) -> Outcome:
    """Iterate in vain: extra["taken"], and how much later than asked a sleeper woke."""
    began = time.monotonic()
    time.sleep(timeout_ms / 1e3)
    late = time.monotonic() - began - timeout_ms / 1e3
    outcome = actions.attempt(lambda: [one.data for one in ctx.engine.notices(timeout_ms)])
    outcome.extra["late"] = late
    return outcome


def try_notices(ctx: Context, timeout_ms: Any) -> Outcome:
    return actions.attempt(lambda: list(ctx.engine.notices(timeout_ms)))


def next_within(ctx: Context, timeout_ms: float) -> tuple[int, bytes] | None:
    notice = next(ctx.engine.notices(timeout_ms), None)
    return None if notice is None else (notice.cluster_id, notice.data)


def iterate_in_tasks(
    ctx: Context, tasks: int, count: int, timeout_ms: float, descriptors: bool
) -> dict[str, Any]:
    """Several tasks share the queue until `count` have come in all, and two are cancelled on their
    way.  Without `descriptors` the process has none left meanwhile."""

    async def run() -> None:
        async def watch(number: int) -> None:
            async for notice in ctx.engine.notices(timeout_ms):
                taken.append(notice.data)
                shares[number] += 1
                await asyncio.sleep(0)

        running = [asyncio.create_task(watch(number)) for number in range(tasks)]
        doomed = [asyncio.create_task(watch(tasks + number)) for number in range(2)]
        await asyncio.sleep(0.05)
        for task in doomed:
            task.cancel()
        for task in doomed:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        ctx.values["tasks run"] = True
        end = time.monotonic() + 15
        while len(taken) < count and time.monotonic() < end:
            await asyncio.sleep(0.005)
        await asyncio.gather(*running)

    taken: list[bytes] = []
    shares = [0] * (tasks + 2)
    spent: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.new_event_loop()
    try:
        if not descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
            with contextlib.suppress(OSError):
                while True:
                    spent.append(os.dup(0))
        loop.run_until_complete(run())
    finally:
        for fd in spent:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loop.close()
        ctx.values["tasks run"] = False
    return {"taken": taken, "shares": shares}


def tasks_run(ctx: Context) -> bool:
    return bool(ctx.values.get("tasks run"))


def poll_descriptor(ctx: Context, count: int) -> dict[str, Any]:
    """Take notices whenever select() says so; whether it says so without any in the end."""
    notices = ctx.engine.notices(0)
    taken: list[bytes] = []
    same = notices.fileno() == notices.fileno()
    while len(taken) < count and select.select([notices], [], [], 5)[0]:
        taken.append(next(notices).data)
    empty = not select.select([notices], [], [], 0)[0]
    return {"taken": taken, "empty": empty, "same": same}


def finalize_beside_calls(ctx: Context, rounds: int) -> list[str]:
    """Finalize engines while their notices are iterated over and their descriptors asked for; what
    went wrong."""
    import ucxkv

    problems: list[str] = []

    def iterate(waiting: Any) -> None:
        for _ in waiting:
            pass

    def look(engine: Any) -> None:
        while True:
            iterate(engine.notices(0.5))

    def ask(engine: Any) -> None:
        while True:
            engine.notices().fileno()

    def run(function: Callable[[Any], None], subject: Any) -> None:
        try:
            function(subject)
        except ucxkv.LlmError as error:
            if not str(error).endswith(("not initialized", "was finalized")):
                problems.append(f"{function.__name__}: {error}")
        except BaseException as error:
            problems.append(f"{function.__name__}: {error!r}")

    for number in range(rounds):
        engine = ucxkv.LlmDataDist(50 + number)
        engine.initialize()
        calls = [(iterate, engine.notices()), (look, engine), (ask, engine)]
        threads = [threading.Thread(target=run, args=call) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(number % 5 * 0.001)
        engine.finalize()
        for thread in threads:
            thread.join(3)
        problems += [f"{thread} goes on" for thread in threads if thread.is_alive()]
    return problems


def finalize_under_iterators(ctx: Context) -> dict[str, Any]:
    """Finalize while a thread, a task and a select() wait for notices without a limit."""
    ended: dict[str, float] = {}

    def thread() -> None:
        for _ in engine.notices():
            pass
        ended["thread"] = time.monotonic()

    def loop() -> None:
        async def run() -> None:
            async for _ in engine.notices():
                pass

        asyncio.run(run())
        ended["task"] = time.monotonic()

    def poll() -> None:
        kept_open = engine.notices()
        select.select([kept_open], [], [])
        ended["poll"] = time.monotonic()

    engine = ctx.engine
    kept = engine.notices(100)
    polled = engine.notices(None)
    polled.fileno()
    threads = [threading.Thread(target=target) for target in (thread, loop, poll)]
    for one in threads:
        one.start()
    time.sleep(0.2)
    began = time.monotonic()
    engine.finalize()
    for one in threads:
        one.join(5)
    after = {
        "kept": actions.attempt(lambda: list(kept)).kind,
        "polled": actions.attempt(lambda: list(polled)).kind,
        "readable": bool(select.select([polled], [], [], 0)[0]),
        "fileno": actions.attempt(kept.fileno).kind,
        "new": actions.attempt(engine.notices).kind,
    }
    return {"ended": {name: at - began for name, at in ended.items()}, "after": after}


def take_in_fork(ctx: Context) -> list[tuple[str, str, str]]:
    """What a forked child is told when it asks for its parent's notices."""
    import pickle
    import warnings

    notices = ctx.engine.notices(0)
    notices.fileno()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        calls = {"next": lambda: list(notices), "notices": lambda: list(ctx.engine.notices(0))}
        said = []
        for name, call in calls.items():
            outcome = actions.attempt(call)
            said.append((name, outcome.kind, outcome.message))
        os.write(writer, pickle.dumps(said))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pickle.load(pipe)
    os.waitpid(pid, 0)
    return said


def watch_counts(ctx: Context) -> tuple[int, int, int]:
    """Read the counters without a pause until `end_collecting`: the largest `queued` and `waiting`
    there were, and how often they were read."""
    most_queued = most_waiting = reads = 0
    while not ctx.stop.is_set():
        _, queued, waiting = counts(ctx)
        most_queued = max(most_queued, queued)
        most_waiting = max(most_waiting, waiting)
        reads += 1
    return most_queued, most_waiting, reads
