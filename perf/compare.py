"""ucxkv and its peers, on the same work, in turns.

Each contender is two processes on this host.  They are given a work (W1: 64 tensors of 2 MiB; W2:
64 tensors, 64 scattered blocks of 32 KiB of each; W3: 61 tensors, 256 scattered blocks of 4 KiB;
4K: one block of 4 KiB, again and again; 4K-now: the same, 2 ms after the last), then each pulls it
in every round, in turns, while all others are stopped: some wait by spinning.  After each turn
every byte is looked at, outside the timed part.  One that fails at a work has no figures for it.

    python perf/compare.py [--setup nixl mooncake] [--only NAME ...] [--rounds N] [--json FILE]

--setup installs peers from their packages, each in a virtual environment of its own under
$XDG_CACHE_HOME/ucxkv-perf; what is not there is said to be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from common import records, terminal
from common.calls import CallError
from common.cpu import cpu_seconds
from common.environment import environment
from common.quantiles import median, quantile
from common.workers import Worker
from peers import environments
from peers.contenders import CONTENDERS, Contender
from peers.works import TINY_WORKS, WORKS, Work
from rich.progress import Progress

_IDLE_SECONDS = 1.0


class Pair:
    """The two processes of a contender, with a work; stopped unless it is their turn."""

    def __init__(self, contender: Contender, work: Work) -> None:
        self.contender = contender
        self.work = work
        self.figure: records.Record = {
            "kind": "compare",
            **_identity(contender),
            "work": work.name,
            "bytes": work.bytes,
            "spans": work.spans,
            "seconds": [],
            "owner_cpu": [],
            "puller_cpu": [],
        }
        with contextlib.ExitStack() as stack:
            self.owner, self.puller = (
                stack.enter_context(
                    Worker(
                        f"{contender.module}:{side}",
                        name=f"{contender.name} {role}",
                        python=contender.python(),
                        environment=contender.environment,
                        **contender.arguments,
                    )
                )
                for role, side in (("owner", contender.owner), ("puller", contender.puller))
            )
            offer = self.owner.call("open")
            self.puller.call("open", offer=offer)
            offer = self.owner.call("prepare", work=asdict(work))
            self.puller.call("prepare", work=asdict(work), offer=offer)
            for side in (self.owner, self.puller):
                side.suspend()
            self._stack = stack.pop_all()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run, alone."""
        for side in (self.owner, self.puller):
            side.resume()
        try:
            yield
        finally:
            for side in (self.owner, self.puller):
                side.suspend()

    def pull(self) -> None:
        """Pull the work as often as it wants to be pulled in one turn."""
        count = self.work.count
        # What being stopped has cooled down is warm again afterwards.
        self.puller.call("measure", count=1)
        self.puller.call("clear")
        before = cpu_seconds(self.owner.pid)
        result = self.puller.call("measure", count=count, timeout=120)
        owner_cpu = cpu_seconds(self.owner.pid) - before
        self.puller.call("check")
        self.figure["seconds"] += result["seconds"]
        self.figure["owner_cpu"].append(owner_cpu / count)
        self.figure["puller_cpu"].append(result["cpu"] / count)

    def check(self) -> None:
        """Whether nothing else was written in all rounds."""
        self.puller.call("check", everywhere=True)

    def idle(self, seconds: float) -> records.Record:
        """Cores that both sides use while nothing is asked of them."""
        pids = (self.owner.pid, self.puller.pid)
        before = sum(map(cpu_seconds, pids))
        time.sleep(seconds)
        cores = (sum(map(cpu_seconds, pids)) - before) / seconds
        return {"kind": "idle", **_identity(self.contender), "cores": cores}

    def close(self) -> None:
        """End both processes."""
        self._stack.close()


class Round:
    """The contenders that have a work in hand; one that fails takes part in it no longer."""

    def __init__(self, contenders: Iterable[Contender], work: Work) -> None:
        self.work = work
        self.pairs: list[Pair] = []
        self.failed: list[records.Record] = []
        for contender in contenders:
            if work.name in contender.works:
                try:
                    self.pairs.append(Pair(contender, work))
                except CallError as error:
                    self._fail(contender, error)

    def _fail(self, contender: Contender, error: CallError) -> None:
        print(f"{contender.name}, {self.work.name}: {error}", file=sys.stderr)
        self.failed.append(
            {"kind": "missing", **_identity(contender), "work": self.work.name}
            | {"reason": _summary(error)}
        )

    def _turn(self, pair: Pair, job: Callable[[Pair], None]) -> None:
        try:
            with pair.turn():
                job(pair)
        except CallError as error:
            self._fail(pair.contender, error)
            self.pairs.remove(pair)
            pair.close()

    def run(self, rounds: int, bar: Progress) -> None:
        """Each in turns, so many times, in an order that changes."""
        task = bar.add_task(self.work.name, total=rounds)
        order = random.Random(self.work.name)
        for _ in range(rounds):
            for pair in order.sample(self.pairs, len(self.pairs)):
                self._turn(pair, Pair.pull)
            bar.advance(task)
        for pair in list(self.pairs):
            self._turn(pair, Pair.check)
        bar.remove_task(task)

    def idle(self, seconds: float) -> list[records.Record]:
        """What each costs while it does nothing."""
        found = []
        for pair in self.pairs:
            if not pair.contender.own_loop:
                with pair.turn():
                    found.append(pair.idle(seconds))
        return found

    def close(self) -> None:
        """End all processes."""
        for pair in self.pairs:
            pair.close()


def compare(
    contenders: Sequence[Contender], works: Sequence[Work], rounds: int, idle_seconds: float
) -> list[records.Record]:
    """Everything that is there, with every work."""
    results: list[records.Record] = []
    present = []
    for contender in contenders:
        reason = contender.why_not()
        if reason:
            results.append({"kind": "missing", **_identity(contender), "reason": reason})
        else:
            present.append(contender)
    with terminal.progress() as bar:
        for work in works:
            this = Round(present, work)
            try:
                this.run(rounds, bar)
                if work is works[0]:
                    results += this.idle(idle_seconds)
            finally:
                this.close()
            results += [*this.failed, *(pair.figure for pair in this.pairs)]
    return results


def _identity(contender: Contender) -> records.Record:
    return {
        "peer": contender.name,
        "label": contender.label,
        "between": contender.kind,
        "own_loop": contender.own_loop,
    }


def _summary(error: CallError) -> str:
    """The line of an error that says most: the last one of the traceback."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
    named = [line for line in lines if "Error" in line]
    return f"failed: {(named or lines)[-1]}"[:200]


def _cell(figures: dict[tuple[str, str], records.Record], peer: str, work: Work) -> str:
    figure = figures.get((peer, work.name))
    if figure is None or not figure["seconds"]:
        return "-"
    if work.latency:
        seconds = figure["seconds"]
        if figure["own_loop"]:
            return f"{median(seconds) * 1e6:.0f}"
        return f"{median(seconds) * 1e6:.0f} / {quantile(seconds, 0.99) * 1e6:.0f}"
    return terminal.rate(work.bytes, median(figure["seconds"]))


def _cpu_cell(figure: records.Record | None) -> str:
    if figure is None:
        return "-"
    per_gib = 2**30 / figure["bytes"]
    owner, puller = (median(figure[side]) * per_gib for side in ("owner_cpu", "puller_cpu"))
    if figure["own_loop"]:
        return f"{owner + puller:.2f}"
    return f"{owner:.2f} + {puller:.2f}"


def tables(results: Sequence[records.Record], works: Sequence[Work]) -> Iterable[object]:
    """The tables of a run, one for each way that two ends can be connected."""
    figures = {(r["peer"], r["work"]): r for r in results if r["kind"] == "compare"}
    idle = {r["peer"]: f"{r['cores']:.2f}" for r in results if r["kind"] == "idle"}
    absent = [r for r in results if r["kind"] == "missing"]
    for kind, title in (("host", "Same host"), ("tcp", "TCP, loopback")):
        rows, ratios = [], []
        group = [contender for contender in CONTENDERS if contender.kind == kind]
        ours = group[0].name
        for contender in group:
            if not any(peer == contender.name for peer, _ in figures):
                continue
            label = contender.label + (" *" if contender.own_loop else "")
            cells = [_cell(figures, contender.name, work) for work in works]
            cpu = _cpu_cell(figures.get((contender.name, "W1")))
            rows.append([label, *cells, cpu, idle.get(contender.name, "-")])
            pairs = [
                (figures.get((ours, w.name)), figures.get((contender.name, w.name))) for w in works
            ]
            ratios.append(
                [label]
                + [
                    f"{median(b['seconds']) / median(a['seconds']):.2f}" if a and b else "-"
                    for a, b in pairs
                ]
            )
        if not rows:
            continue
        names = [work.name for work in works]
        yield terminal.table(
            f"{title}: W in GB/s, medians; 4K in µs, p50 / p99",
            ["", *names, "CPU s/GiB", "idle"],
            rows,
        )
        if any(peer == ours for peer, _ in figures):
            title = f"How many times as fast {group[0].label} is"
            yield terminal.table(title, ["than", *names], ratios)
    if any(record["own_loop"] for record in figures.values()):
        yield "* its own memory and loop, data not checked (ucx_perftest: ucp_am_bw)"
    yield "CPU: owner + puller, in W1.  idle: cores that both use while nothing is asked."
    for record in absent:
        yield " ".join(
            filter(None, ("missing:", record["peer"], record.get("work"), f"({record['reason']})"))
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setup", nargs="+", choices=sorted(environments.PACKAGES), default=[])
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--work", nargs="+", choices=[work.name for work in WORKS], default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    parser.add_argument("--tiny", action="store_true", help="a small size, to try the script out")
    parser.add_argument("--list", action="store_true", help="list the peers, and end")
    options = parser.parse_args(arguments)
    out = terminal.console()
    if options.list:
        for contender in CONTENDERS:
            state = contender.why_not() or "ready"
            out.print(f"{contender.name:14} {contender.kind:5} {contender.label:28} {state}")
        return 0
    for name in options.setup:
        out.print(f"installing {', '.join(environments.PACKAGES[name])} ...")
        environments.set_up(name)
    works = [
        work
        for work in (TINY_WORKS if options.tiny else WORKS)
        if options.work is None or work.name in options.work
    ]
    wanted = [contender for contender in CONTENDERS if contender.name in options.only]
    machine = environment()
    idle_seconds = 0.1 if options.tiny else _IDLE_SECONDS
    results = [machine, *compare(wanted, works, options.rounds, idle_seconds)]
    records.write(options.json, results)
    for part in tables(results, works):
        out.print(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
