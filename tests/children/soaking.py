"""One process's part of the soak (see soak.py): a station and a lane for each process it is linked
to, whose peer, link or own engine may go away under them.

Before the soak harms a pair it *shakes* it, at both ends: from then on calls may fail there, and
the lane stops at the first that does.  Bytes count all the same: what a failed call may have
written is painted, and has to stay as it was painted.
"""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from children import actions
from children.both_ways import (
    KINDS,
    PATIENT_MS,
    WORK,
    Gone,
    Lane,
    Move,
    Station,
    Wrong,
    WrongBytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from child import Context

# Beyond its deadline a call is late, and this much later it is taken for hung.
SLACK_SECONDS = 5.0
# Between what a call may have written and the look at whether anything was written later.
LATE_SECONDS = 0.2


class End(Station):
    """One end of a pair."""

    def __init__(self, ctx: Context, other: int, wire: int) -> None:
        super().__init__(ctx, other, 1, (ctx.engine.cluster_id, other), wire)
        self.shaken_at: float | None = None

    def alive(self) -> bool:
        """Whether transfers run, or peers are served, over the link."""
        link = self.engine._running.links.lookup(self.other)
        return bool(link is not None and (link.native.pulls or link.native.serving))

    def close(self) -> None:
        """Give up all that there is for the pair."""
        owned = [*self.sources.values(), *self.private.values(), *self.extra.values()]
        owned += [box for inbox in self.inboxes for box in inbox.values()]
        owned += [sink for lane in self.lanes for sink in lane.sinks.values()]
        self.wire.close()
        # A lane may have been stopped between two registrations; a finalized engine has none.
        for hold in self.holds.values():
            with contextlib.suppress(llm_error()):
                hold.release()
        for one in owned:
            with contextlib.suppress(llm_error()):
                one.drop(1000)
        # Lanes refer to their station: what waits for a collection would look like a leak.
        self.lanes.clear()


def llm_error() -> type[Exception]:
    import ucxkv

    return ucxkv.LlmError


class SoakLane(Lane):
    """A lane that survives what is done to its pair."""

    station: End

    def __init__(self, station: End, peers: dict[str, Any]) -> None:
        super().__init__(station, 0, peers)
        self.work = ""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.moves: list[tuple[str, Move]] = []
        self.transfers: list[Any] = []
        self.latencies: list[tuple[float, float]] = []
        self.longest = 0.0
        self.after_fault = 0.0

    def run(self, end: float, seed: int) -> None:
        self.rng.seed(f"{seed} {self.engine.cluster_id} {self.other}")
        while time.monotonic() < end and not self.problems and self.station.shaken_at is None:
            if not self.one():
                break

    def one(self) -> bool:
        """A piece of work; whether the lane can go on."""
        self.work = self.rng.choices(list(WORK), WORK.values())[0]
        self.moves.clear()
        self.transfers.clear()
        before = self.outcomes.total()
        began = time.monotonic()
        try:
            getattr(self, self.work)()
        except WrongBytes as error:
            return self.wrong(error)
        except (Wrong, Gone, llm_error()) as error:
            shaken_at = self.station.shaken_at
            if shaken_at is None:
                return self.wrong(error)
            self.after_fault = max(self.after_fault, time.monotonic() - shaken_at)
            self.outcomes[self.work, "disturbed"] += 1
            self.recover()
            return False
        except Exception as error:
            return self.wrong(error)
        took = time.monotonic() - began
        self.longest = max(self.longest, took)
        if self.work == "pull":
            self.latencies.append((began, took))
        if self.outcomes.total() == before:
            self.outcomes[self.work, "ok"] += 1
        return True

    def wrong(self, error: Exception) -> bool:
        kind = "WRONG BYTES: " if isinstance(error, WrongBytes) else ""
        self.outcomes[self.work, "WRONG"] += 1
        self.problems.append(
            f"{kind}lane {self.engine.cluster_id} to {self.other}, {self.work}:"
            f" {type(error).__name__}: {error}"
        )
        return False

    def recover(self) -> None:
        """Wait for what still runs, and take back all that the work may have written."""
        for transfer in self.transfers:
            with contextlib.suppress(llm_error()):
                transfer.result(PATIENT_MS / 1e3 + SLACK_SECONDS)
        try:
            for kind, move in self.moves:
                self.failed(kind, move.patches)
        except WrongBytes as error:
            self.wrong(error)

    def pulling(
        self, kind: str, cache_id: int, move: Move, *, wait: bool = False, **more: Any
    ) -> Any:
        self.moves.append((kind, move))
        found = super().pulling(kind, cache_id, move, wait=wait, **more)
        if not wait:
            self.transfers.append(found)
        return found

    def pushing(
        self, source: str, kind: str, move: Move, *, wait: bool = False, **more: Any
    ) -> Any:
        found = super().pushing(source, kind, move, wait=wait, **more)
        if not wait:
            self.transfers.append(found)
        return found

    def outcome(self, name: str, allowed: tuple[str, ...], call: Callable[[], Any]) -> bool:
        try:
            call()
        except llm_error() as error:
            if type(error).__name__ not in allowed:
                raise
            self.outcomes[self.work, type(error).__name__] += 1
            return False
        self.outcomes[self.work, "ok"] += 1
        return True

    def look(self) -> None:
        states = {info.cluster_id: info.state for info in self.engine.links()}
        if states.get(self.other) not in ("up", "repairing", "reconnecting"):
            raise Wrong(f"links {states}")
        self.engine.stats()


class Soak:
    """What a process has."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.ends: dict[int, End] = {}
        self.listeners: dict[int, socket.socket] = {}

    def take_notices(self, seconds: float) -> None:
        for notice in self.ctx.engine.notices(timeout_ms=seconds * 1e3):
            end = self.ends.get(notice.cluster_id)
            if end is not None:
                end.notices.append(notice.data)

    def drain(self, stop: threading.Event) -> None:
        # The engine may be finalized meanwhile.
        with contextlib.suppress(llm_error()):
            while not stop.is_set():
                self.take_notices(0.05)

    def traffic(self, seconds: float, seed: int) -> dict[str, Any]:
        lanes: list[Any] = [lane for end in self.ends.values() for lane in end.lanes]
        stop = threading.Event()
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=lane.run, args=(until, seed)) for lane in lanes]
        drain = threading.Thread(target=self.drain, args=(stop,))
        for thread in (drain, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        drain.join()
        outcomes: Counter[tuple[str, str]] = Counter()
        for lane in lanes:
            outcomes.update(lane.outcomes)
            lane.outcomes.clear()
        found = {
            "outcomes": dict(outcomes),
            "problems": [problem for lane in lanes for problem in lane.problems],
            "latencies": [pair for lane in lanes for pair in lane.latencies],
            "longest": max((lane.longest for lane in lanes), default=0.0),
            "after fault": max((lane.after_fault for lane in lanes), default=0.0),
        }
        for lane in lanes:
            lane.latencies.clear()
            lane.problems.clear()
            lane.longest = lane.after_fault = 0.0
        return found


def _soak(ctx: Context) -> Soak:
    found = ctx.values.get("soak")
    if found is None:
        found = ctx.values["soak"] = Soak(ctx)
    return found


def listen(ctx: Context, other: int) -> int:
    """Where the other end of a pair finds this one's wire."""
    server = _soak(ctx).listeners[other] = socket.create_server(("127.0.0.1", 0))
    return int(server.getsockname()[1])


def open_end(ctx: Context, other: int, port: int | None) -> dict[str, Any]:
    """Open this end of a pair: its wire, and its caches, whose ids are returned."""
    soak = _soak(ctx)
    if port is None:
        with soak.listeners.pop(other) as server:
            server.settimeout(10)
            wire, _ = server.accept()
            wire.settimeout(None)
    else:
        wire = socket.create_connection(("127.0.0.1", port), timeout=10)
        wire.settimeout(None)
    soak.ends[other] = End(ctx, other, wire.detach())
    return soak.ends[other].ids()


def open_lane(ctx: Context, other: int, peers: dict[str, Any]) -> None:
    end = _soak(ctx).ends[other]
    end.lanes = [SoakLane(end, peers)]


def shake(ctx: Context, other: int) -> None:
    _soak(ctx).ends[other].shaken_at = time.monotonic()


def traffic(ctx: Context, seconds: float, seed: int) -> dict[str, Any]:
    return _soak(ctx).traffic(seconds, seed)


def at_rest(ctx: Context) -> str:
    """What still runs, if anything does."""
    soak = _soak(ctx)
    soak.take_notices(0.001)
    busy = [end.other for end in soak.ends.values() if end.alive()]
    stats = ctx.engine.stats()
    held = sum(len(end.holds) for end in soak.ends.values())
    if busy or stats.notices_queued or stats.holds > held:
        return f"busy with {busy}, {stats.notices_queued} notices, {stats.holds} holds of {held}"
    return ""


def wrong(ctx: Context) -> list[str]:
    """What has changed that should not have."""
    name = ctx.engine.cluster_id
    time.sleep(LATE_SECONDS)
    return [
        f"WRONG BYTES: {name} with {end.other}: {problem}"
        for end in _soak(ctx).ends.values()
        for problem in end.wrong()
    ]


def compare(ctx: Context, other: int) -> dict[str, Any]:
    """What the other end of a pair that was not shaken is to be compared with: inboxes as they are
    here and as they must be there, notices that have come and those that were sent."""
    end = _soak(ctx).ends[other]
    (lane,) = end.lanes
    found = {
        "inboxes": {kind: box.digests() for kind, box in end.inboxes[0].items()},
        "pushed": {kind: image.digests() for kind, image in lane.inboxes.items()},
        "notices": list(end.notices),
        "told": (list(lane.told), list(lane.perhaps_told)),
    }
    end.notices.clear()
    lane.told.clear()
    # They may come as late as in the next round, but not later.
    lane.perhaps_told = lane.perhaps_told[-20:]
    return found


def close_end(ctx: Context, other: int) -> None:
    _soak(ctx).ends.pop(other).close()
    gc.collect()


def caches(ctx: Context) -> tuple[int, int]:
    """Those that there are, and those that there should be."""
    of_one = len(KINDS) * 4
    found = len(ctx.engine._running.catalogue.snapshot())
    extra = sum(len(end.extra) for end in _soak(ctx).ends.values())
    return found, of_one * len(_soak(ctx).ends) + extra


def set_role(ctx: Context, seed: int) -> str:
    """Another role, all links being down."""
    import ucxkv

    role = random.Random(seed).choice(list(ucxkv.LlmRole))
    return actions.attempt(lambda: ctx.engine.set_role(role)).kind


def reopen(ctx: Context) -> tuple[str, int]:
    """A finalized engine is opened again."""
    ctx.engine.initialize()
    address: tuple[str, int] = ctx.engine.listen_address
    return address
