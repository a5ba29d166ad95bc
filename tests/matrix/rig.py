"""Two processes on two hosts, and how a cell of the matrix is run on them.

They are linked, with their caches registered, whenever a cell begins, and again when it is over:
processes are only started anew where the fault has ended them.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from children import actions, suffering
from children.actions import Outcome
from harness import Peer, wait_until
from interpreters import PeerDied, Pending
from matrix import cells
from matrix.cells import Cell
from matrix.wire import FAIR, HOSTS, Weather, Wire

PEER, CALLER = 1, 2
TENSORS = 32
# Long enough to be met in its middle, short enough for hundreds of cells.
BYTES = {"stream": 1 << 19, "get": 1 << 21}
SMALL = 4, 1 << 16
SEED, SMALL_SEED = 7, 8
PAINT = 0x5A

# Deadlines: of what is expected to fail by it, and of what is not.
SHORT_MS, AGAIN_MS, LONG_MS = 300, 150, 10_000
FENCED_MS = {"stream": 60, "get": 6}
LINK_MS, UNLINK_MS, UNREGISTER_MS = 400, 300, 300
FINALIZE_SECONDS = 5.0
# The bound of what a call may take beyond its deadline and the lateness of a thread that sleeps.
OVER_SECONDS = 0.050
# A link that is closed gives its last messages so much longer.
LINGER_SECONDS = 0.100
NOTICED_SECONDS = 1.0
HANG_SECONDS = 20.0

WEATHERS = {
    cells.LOSS: Weather(loss=1.0),
    cells.SOME_LOSS: Weather(loss=0.3),
    cells.DELAY: Weather(delay=0.2, jitter=0.05),
    cells.NARROW: Weather(rate=1e6 / 8),
    cells.REORDERED: Weather(overtaken=0.2),
}
# Of what a process goes through all the same: both of them have it.
AFFLICTIONS = (cells.DISK, cells.DESCRIPTORS, cells.MEMORY, cells.MEMLOCK, cells.CLOCK)


@dataclass
class Result:
    """What has come of a cell; `problems` is empty if it was nothing but what is allowed."""

    cell: Cell
    link: str = ""  # how linking ended, where the fault came before or during it
    outcome: str = ""
    met: bool = True  # whether the fault found the operation running
    over: dict[str, float] = field(default_factory=dict)  # seconds beyond a deadline, by call
    problems: list[str] = field(default_factory=list)
    late: int = 0  # how many of the problems are calls that ended late

    def line(self) -> str:
        link = f"link {self.link}, " if self.link else ""
        late = f" +{max(self.over.values()) * 1e3:.1f} ms" if self.over else ""
        missed = "" if self.met else " (over before the fault)"
        wrong = f"  !! {'; '.join(self.problems)}" if self.problems else ""
        return f"{self.cell}: {link}{self.outcome}{late}{missed}{wrong}"


def clock_library(folder: Path) -> Path:
    """Build what lets the clock of a process step."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library


def compiler_missing() -> bool:
    return shutil.which("cc") is None


class Rig:
    """The wire, the peer and the caller on one path."""

    def __init__(self, path: str, clock: Path | None) -> None:
        self.path = path
        env = {"LD_PRELOAD": str(clock)} if clock is not None else {}
        self.number = 0
        self.ids: dict[str, tuple[int, int]] = {}
        self.pair: list[Peer] = []
        self.wire = Wire()
        try:
            for cluster_id, host, network, name in zip(
                (PEER, CALLER), HOSTS, self.wire.names, ("peer", "caller"), strict=True
            ):
                self.pair.append(
                    Peer(
                        cluster_id,
                        path=path,
                        listen=f"{host}:0",
                        network=network,
                        env=env,
                        fresh=True,
                        name=name,
                    )
                )
            self.peer, self.caller = self.pair
            for one in self.pair:
                self._furnish(one)
            self.caller.link(self.peer)
        except BaseException:
            self.abandon()
            raise

    def _furnish(self, one: Peer) -> None:
        """Its caches, with bytes of ours to be sent or painted over."""
        self._register(one)
        one.call(suffering.start_sleepers)

    def _register(self, one: Peer) -> None:
        for name, (tensors, nbytes), seed in (
            ("kv", (TENSORS, BYTES[self.path]), SEED),
            ("small", SMALL, SMALL_SEED),
        ):
            ids = one.call(suffering.make_caches, name, tensors, nbytes, seed)
            if one is self.peer:
                self.ids[name] = ids

    def close(self) -> None:
        try:
            for one in self.pair:
                one.side(suffering.stop_sleepers)
                one.close()
        finally:
            self.wire.close()

    def abandon(self) -> None:
        for one in self.pair:
            one._abandon()
        self.wire.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def cut(self, which: str) -> int:
        """Shut down the caller's connections of one kind; their number."""
        ports = [one.address[1] for one in self.pair if one.address]
        count: int = self.caller.side(suffering.cut, ports, which)
        return count

    def start_small(self, operation: str, timeout_ms: int) -> Pending:
        """Start an operation of the caller that moves little."""
        return self.caller.start_main(
            suffering.operate,
            operation,
            "small",
            PEER,
            self.ids["small"],
            timeout_ms=timeout_ms,
            seed=SMALL_SEED,
        )

    def small_pull(self, timeout_ms: int) -> Outcome:
        """A pull of little, by the caller."""
        outcome: Outcome = self.start_small(cells.PULL, timeout_ms).result(HANG_SECONDS)
        return outcome

    def lateness(self) -> float:
        """How late a thread of the caller that only sleeps has been since this was asked last."""
        late: float = self.caller.side(suffering.lateness)
        return late

    def run(self, cell: Cell) -> Result:
        """Run a cell.  An exception means that a process has hung or crashed, or that the rig is of
        no use any more."""
        self.number += 1
        result = Result(cell)
        _Run(self, cell, result).go()
        return result


class _Run:
    """One cell, from a healthy pair to a healthy pair."""

    def __init__(self, rig: Rig, cell: Cell, result: Result) -> None:
        self.rig, self.cell, self.result = rig, cell, result
        self.wire, self.peer, self.caller = rig.wire, rig.peer, rig.caller
        self.into = self.peer if cell.pushes else self.caller
        self.notice = f"cell {rig.number}".encode()
        self.also: Pending | None = None  # the call that is under way beside the operation
        self.struck_at = 0.0
        self.timeout_ms = LONG_MS
        if cell.point == cells.FENCE:
            self.timeout_ms = FENCED_MS[cell.path]
        elif cell.fault in cells.STRANGLING and not cell.alone:
            self.timeout_ms = SHORT_MS

    def go(self) -> None:
        self._prepare()
        linked = True
        if self.cell.point in cells.UNLINKED:
            linked = self._link_under_fault()
        elif self.cell.point == cells.IDLE:
            self._strike()
        outcome = self._operate()
        self._judge(outcome, linked)
        if linked and self.cell.fault in cells.STRANGLING and self.also is None:
            self._try_again()
        if self.into is self.caller:
            self.caller.side(actions.paint, "kv", PAINT)
        self._heal()
        self._finish_also()
        self._take_back(outcome)
        quiet_since = time.monotonic()
        self._restore()
        self._good_operation()
        time.sleep(max(0.0, quiet_since + 0.1 - time.monotonic()))
        self._expect(self.into.side(actions.painted, "kv", PAINT), "late bytes, or guards broken")
        for one in (self.peer, self.caller):
            one.side(suffering.lateness)
            self._quiet(one)

    def _expect(self, good: object, problem: str) -> None:
        if not good:
            self.result.problems.append(problem)

    # -- before -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        source = self.caller if self.cell.pushes else self.peer
        source.side(actions.refill, "kv", SEED)
        self.into.side(actions.paint, "kv", PAINT)
        if self.cell.point in cells.UNLINKED:
            self.caller.unlink(self.peer)
        self.hold = None
        if self.cell.operation == cells.NOTICE:
            self.hold = self.peer.side(suffering.hold_all, "kv")
        for one in (self.peer, self.caller):
            one.side(suffering.lateness)

    def _link_under_fault(self) -> bool:
        hello = self.cell.point == cells.HELLO
        if hello:
            # The connection is there, and the first that is said over it is on its way.
            assert self.peer.address
            self.wire.hold_from_word_to(self.peer.address[1])
        else:
            self._strike()
        timeout_ms = LONG_MS if cells.links_allowed(self.cell) == cells.OK else LINK_MS
        linking = self.caller.start_main(
            actions.try_link, [(PEER, self.peer.address)], timeout_ms=timeout_ms
        )
        if hello:
            self._until(lambda: self.wire.held)
            self._strike()
            self.wire.release()
        outcome = linking.result(HANG_SECONDS)
        self.result.link = outcome.kind
        self._expect(outcome.kind in cells.links_allowed(self.cell), f"linking: {outcome.message}")
        self._over("link", self.caller, outcome, timeout_ms)
        return outcome.ok

    # -- the fault --------------------------------------------------------------------------------

    def _strike(self) -> None:
        fault = self.cell.fault
        self.struck_at = time.monotonic()
        if fault == cells.KILL:
            self.peer.kill()
        elif fault == cells.STOP:
            self.peer.stop()
        elif fault in cells.CUTS:
            done = self.rig.cut(fault)
            # What is being closed may be closed already.
            closing = self.cell.point in (cells.UNLINK, cells.FINALIZE)
            self._expect(done or closing, "nothing was cut")
        elif fault in WEATHERS:
            self.wire.weather = WEATHERS[fault]
        else:
            for one in (self.peer, self.caller):
                problem = one.side(suffering.afflict, fault)
                if self.cell.point == cells.FINALIZE and one is self.peer:
                    # What the engine lets go of meanwhile is there to be had.
                    continue
                self._expect(not problem, f"{fault} at the {one.name}: {problem}")

    def _heal(self) -> None:
        fault = self.cell.fault
        if fault == cells.STOP:
            self.peer.resume()
        elif fault in AFFLICTIONS:
            for one in (self.peer, self.caller):
                one.side(suffering.relieve)
        self.wire.weather = FAIR

    # -- the operation ----------------------------------------------------------------------------

    def _operate(self) -> Outcome:
        point = self.cell.point
        crossing = not self.cell.alone
        if point in (cells.FIRST_BYTE, cells.FENCE) and crossing:
            self.wire.hold()
        began = time.monotonic()
        pending = self._start("kv", self.rig.ids["kv"], self.timeout_ms, SEED)
        if point == cells.FIRST_BYTE and crossing:
            self._until(lambda: self.wire.held, 0.1)
        elif point == cells.FENCE:
            time.sleep(max(0.0, began + self.timeout_ms / 1e3 - time.monotonic()))
        elif point not in (cells.BEFORE_LINK, cells.HELLO, cells.IDLE, cells.FIRST_BYTE):
            tensor = TENSORS - 2 if point == cells.LAST_LAYER else TENSORS // 2
            self.into.side(suffering.wait_written, "kv", tensor, PAINT, 5.0)
            self._start_also()
        if point not in (*cells.UNLINKED, cells.IDLE):
            self._strike()
            self.wire.release()
        outcome: Outcome = pending.result(HANG_SECONDS)
        self.result.met = outcome.ended > self.struck_at
        return outcome

    def _try_again(self) -> None:
        """While the fault lasts, and the link is being repaired, the next call has its deadline."""
        outcome = self._start("small", self.rig.ids["small"], AGAIN_MS, SMALL_SEED).result(
            HANG_SECONDS
        )
        ends = cells.OK if self.cell.alone else cells.OK | cells.TIMEOUT
        self._expect(outcome.kind in ends, f"the next: {outcome.kind}: {outcome.message}")
        if outcome.kind == "LlmTimeout":
            self._over(f"{self.cell.operation}, the next", self.caller, outcome, AGAIN_MS)

    def _start(self, name: str, ids: tuple[int, int], timeout_ms: int, seed: int) -> Pending:
        return self.caller.start_main(
            suffering.operate,
            self.cell.operation,
            name,
            PEER,
            ids,
            timeout_ms=timeout_ms,
            seed=seed,
            notice=self.notice if name == "kv" else self.notice + b", another",
            hold=self.hold if name == "kv" else None,
        )

    def _start_also(self) -> None:
        point = self.cell.point
        if point == cells.UNLINK:
            self.also = self.caller.start(suffering.unlink, PEER, UNLINK_MS)
        elif point == cells.UNREGISTER:
            key = "kv paged" if self.cell.operation == cells.BLOCKS else "kv"
            self.also = self.peer.start(suffering.drop, key, UNREGISTER_MS)
        elif point == cells.FINALIZE:
            self.also = self.peer.start(suffering.finalize)

    def _until(self, condition: Callable[[], object], timeout: float = 2.0) -> None:
        end = time.monotonic() + timeout
        while not condition() and time.monotonic() < end:
            time.sleep(0.0005)

    # -- what came of it --------------------------------------------------------------------------

    def _judge(self, outcome: Outcome, linked: bool) -> None:
        cell = self.cell
        self.result.outcome = outcome.kind
        ends = cells.allowed(cell, linked=linked)
        self._expect(outcome.kind in ends, f"{sorted(ends)} expected: {outcome.message}")
        self._expect(not outcome.extra.get("wrong"), f"wrong bytes: {outcome.extra.get('wrong')}")
        self._expect(not outcome.extra.get("early"), f"early layers: {outcome.extra.get('early')}")
        if outcome.kind == "LlmTimeout":
            self._over(cell.operation, self.caller, outcome, self.timeout_ms)
        elif cell.fault == cells.KILL and outcome.began < self.struck_at < outcome.ended:
            taken = outcome.ended - self.struck_at - self.caller.side(suffering.lateness)
            self._expect(taken < NOTICED_SECONDS, f"the death was noticed after {taken:.2f} s")
        if not outcome.ok:
            self._expect(f"cluster {PEER}" in outcome.message, f"no cluster: {outcome.message}")

    def _over(self, what: str, one: Peer, outcome: Outcome, timeout_ms: int) -> None:
        """Note how far beyond its deadline a call ended, less the lateness of a sleeper there."""
        over = outcome.seconds - timeout_ms / 1e3 - one.side(suffering.lateness)
        if over > 0:
            self.result.over[what] = over
            limit = OVER_SECONDS + (LINGER_SECONDS if what == "unlink" else 0.0)
            self.result.late += over > limit
            self._expect(
                over <= limit,
                f"{what} {over * 1e3:.0f} ms over its deadline: {outcome.message}",
            )

    def _finish_also(self) -> None:
        if self.also is None:
            return
        try:
            outcome = self.also.result(HANG_SECONDS)
        except PeerDied:
            return
        point, stopped = self.cell.point, self.cell.fault == cells.STOP
        if point == cells.UNLINK:
            self._expect(outcome.kind in ("ok", "UnlinkFailed"), f"unlinking: {outcome}")
            self._over("unlink", self.caller, outcome, UNLINK_MS)
            return
        self._expect(outcome.ok, f"{point}: {outcome}")
        if stopped:
            return
        if point == cells.UNREGISTER:
            self._over("unregister", self.peer, outcome, UNREGISTER_MS)
        else:
            self._expect(outcome.seconds < FINALIZE_SECONDS, f"finalize: {outcome.seconds} s")

    def _take_back(self, outcome: Outcome) -> None:
        """Give the destination of a push another use; look at it first, if it succeeded."""
        if self.into is self.caller or self.peer.killed:
            return
        if outcome.ok:
            wrong = self.peer.side(actions.wrong_tensors, "kv", SEED)
            self._expect(not wrong, f"wrong bytes: {wrong}")
        if self.cell.point == cells.FINALIZE:
            self.peer.side(actions.paint, "kv", PAINT)
            return
        quiesced = self.peer.side(suffering.quiesce_and_paint, "kv", PAINT)
        self._expect(quiesced.ok, f"quiesce: {quiesced}")

    # -- afterwards -------------------------------------------------------------------------------

    def _restore(self) -> None:
        """What a user has to do after this fault, and no more."""
        if self.cell.operation == cells.NOTICE and not self.peer.killed:
            self._check_notices()
        closed = self.cell.point in (cells.UNLINK, cells.FINALIZE)
        if self.cell.fault == cells.KILL:
            self.peer.restart()
            self.rig._furnish(self.peer)
            if self.cell.pushes:
                self.peer.side(actions.paint, "kv", PAINT)
            closed = True
        elif self.cell.point == cells.FINALIZE:
            assert self.peer.address
            self.peer.call(suffering.reopen, "{}:{}".format(*self.peer.address))
            self.rig._register(self.peer)
        elif self.cell.point == cells.UNREGISTER:
            self.rig._register(self.peer)
        if closed or self.result.link not in ("", "ok"):
            self.caller.link(self.peer)

    def _check_notices(self) -> None:
        if self.cell.point == cells.FINALIZE:
            return
        told = self.peer.side(suffering.notices).count(self.notice)
        least = 1 if self.result.outcome == "ok" else 0
        self._expect(least <= told <= 1, f"told {told} times, {self.result.outcome}")

    def _good_operation(self) -> None:
        source = self.caller if self.cell.pushes else self.peer
        source.side(actions.refill, "small", SMALL_SEED)
        self.into.side(actions.paint, "small", 0)
        outcome = self._start("small", self.rig.ids["small"], LONG_MS, SMALL_SEED).result(
            HANG_SECONDS
        )
        self._expect(outcome.ok, f"afterwards: {outcome.kind}: {outcome.message}")
        self._expect(not outcome.extra.get("wrong"), "wrong bytes afterwards")
        if self.cell.pushes:
            wrong = self.peer.side(actions.wrong_tensors, "small", SMALL_SEED)
            self._expect(not wrong, "wrong bytes pushed afterwards")
        elif self.cell.operation == cells.NOTICE:
            told = self.notice + b", another" in self.peer.side(suffering.notices)
            self._expect(told, "no notice afterwards")
        wait_until(lambda: self.caller.side(actions.links) == {PEER: "up"}, timeout=5)

    def _quiet(self, one: Peer) -> None:
        """Nothing that went wrong was the library's own fault."""
        lines = [
            line
            for line in one.side(actions.log_lines, clear=True)
            if line.startswith(("ERROR", "CRITICAL"))
        ]
        self._expect(not lines, f"the {one.name} logged {lines[:3]}")
