"""ucxkv and its peers, on the same work, in turns.

Each contender is two processes on this host.  They are given a work (W1: 64 tensors of 2 MiB; W2:
64 tensors, 64 scattered blocks of 32 KiB of each; W3: 61 tensors, 256 scattered blocks of 4 KiB;
4K: one block of 4 KiB, again and again; 4K-now: the same, 2 ms after the last), then each pulls it
in every round, in turns, while all others are stopped: some wait by spinning.  After each turn
every byte is looked at, outside the timed part.

    python perf/compare.py [--setup nixl mooncake] [--only NAME ...] [--rounds N] [--json FILE]

--setup installs peers from their packages, each in a virtual environment of its own under
$XDG_CACHE_HOME/ucxkv-perf; what is not there is said to be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Iterable, Sequence
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
    """The two processes of a contender; stopped unless it is their turn."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        with contextlib.ExitStack() as stack:
            self._sides = [
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
            ]
            self.owner, self.puller = self._sides
            offer = self.owner.call("open")
            self.owner.call("accept", answer=self.puller.call("open", offer=offer))
            self._stack = stack.pop_all()

    @contextlib.contextmanager
    def turn(self):
        """Let it run, alone."""
        for side in self._sides:
            side.resume()
        try:
            yield
        finally:
            for side in self._sides:
                side.suspend()

    def prepare(self, work: Work) -> None:
        offer = self.owner.call("prepare", work=asdict(work))
        self.puller.call("prepare", work=asdict(work), offer=offer)

    def release(self) -> None:
        self.puller.call("release")
        self.owner.call("release")

    def pull(self, work: Work) -> tuple[list[float], float, float]:
        """Seconds of each pull; CPU seconds of the owner and of the puller for one."""
        self.puller.call("clear")
        # What being stopped has cooled down is warm again afterwards.
        self.puller.call("measure", count=1)
        self.puller.call("clear")
        before = cpu_seconds(self.owner.pid)
        result = self.puller.call("measure", count=work.count, timeout=120)
        owner_cpu = cpu_seconds(self.owner.pid) - before
        self.puller.call("check")
        return result["seconds"], owner_cpu / work.count, result["cpu"] / work.count

    def idle_cores(self, seconds: float) -> float:
        """Cores that both sides use while nothing is asked of them."""
        before = sum(cpu_seconds(side.pid) for side in self._sides)
        time.sleep(seconds)
        return (sum(cpu_seconds(side.pid) for side in self._sides) - before) / seconds

    def close(self) -> None:
        for side in self._sides:
            side.resume()
        self._stack.close()


class Comparison:
    """The contenders that run here, and what has become of the others."""

    def __init__(self, contenders: Iterable[Contender]) -> None:
        self.pairs: list[Pair] = []
        self.missing: list[records.Record] = []
        self.figures: list[records.Record] = []
        for contender in contenders:
            reason = contender.why_not()
            if reason:
                self._leave_out(contender, reason)
                continue
            try:
                pair = Pair(contender)
            except CallError as error:
                self._leave_out(contender, _summary(error))
                continue
            with pair.turn():
                self.pairs.append(pair)

    def _leave_out(self, contender: Contender, reason: str) -> None:
        self.missing.append({"kind": "missing", **_identity(contender), "reason": reason})

    def _drop(self, pair: Pair, error: CallError) -> None:
        """A contender that has failed takes part no longer."""
        print(f"{pair.contender.name}: {error}", file=sys.stderr)
        self._leave_out(pair.contender, _summary(error))
        self.pairs.remove(pair)
        pair.close()

    def run(self, work: Work, rounds: int, bar: Progress) -> None:
        """Every contender in turns, `rounds` times."""
        taking_part = [pair for pair in self.pairs if work.name in pair.contender.works]
        task = bar.add_task(work.name, total=rounds * len(taking_part))
        figures = {
            pair.contender.name: {
                "kind": "compare",
                **_identity(pair.contender),
                "work": work.name,
                "bytes": work.bytes,
                "spans": work.spans,
                "seconds": [],
                "owner_cpu": [],
                "puller_cpu": [],
            }
            for pair in taking_part
        }
        for pair in list(taking_part):
            self._try(pair, taking_part, lambda pair: pair.prepare(work))
        order = random.Random(work.name)
        for _ in range(rounds):
            for pair in order.sample(taking_part, len(taking_part)):

                def one(pair: Pair) -> None:
                    figure = figures[pair.contender.name]
                    seconds, owner_cpu, puller_cpu = pair.pull(work)
                    figure["seconds"] += seconds
                    figure["owner_cpu"].append(owner_cpu)
                    figure["puller_cpu"].append(puller_cpu)

                self._try(pair, taking_part, one)
                bar.advance(task)
        for pair in list(taking_part):

            def finish(pair: Pair) -> None:
                pair.puller.call("check", everywhere=True)
                pair.release()

            self._try(pair, taking_part, finish)
        bar.remove_task(task)
        self.figures += [figures[pair.contender.name] for pair in taking_part]

    def _try(self, pair: Pair, taking_part: list[Pair], job) -> None:
        try:
            with pair.turn():
                job(pair)
        except CallError as error:
            taking_part.remove(pair)
            self._drop(pair, error)

    def idle(self, seconds: float) -> None:
        """What each costs while it does nothing."""
        for pair in self.pairs:
            if pair.contender.own_loop:
                continue
            with pair.turn():
                cores = pair.idle_cores(seconds)
            self.figures.append({"kind": "idle", **_identity(pair.contender), "cores": cores})

    def close(self) -> None:
        for pair in self.pairs:
            pair.close()


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
    absent = {r["peer"]: r["reason"] for r in results if r["kind"] == "missing"}
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
        yield terminal.table(f"How many times as fast {group[0].label} is", ["than", *names], ratios)
    if any(record["own_loop"] for record in figures.values()):
        yield "* after a name: its own memory and loop, data not checked"
    yield "CPU: owner + puller, in W1.  idle: cores that both use while nothing is asked of them."
    for name, reason in absent.items():
        yield f"missing: {name}: {reason}"


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
    comparison = Comparison(wanted)
    try:
        with terminal.progress() as bar:
            for work in works:
                comparison.run(work, options.rounds, bar)
        comparison.idle(0.1 if options.tiny else _IDLE_SECONDS)
    finally:
        comparison.close()
    results = [machine, *comparison.missing, *comparison.figures]
    records.write(options.json, results)
    for part in itertools.chain(tables(results, works)):
        out.print(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
