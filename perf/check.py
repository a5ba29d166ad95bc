"""Whether what is installed here meets the targets, which are ratios measured in one run.

    python perf/check.py [--json RESULTS ...] [--quick]

Without --json it runs compare.py, fairness.py, call_cost.py, registration.py and scale.py first,
which takes a quarter of an hour; with it, it reads what they wrote.  --quick runs them with few
rounds.  To be run by hand, on a machine that does nothing else.  Each target holds, is missed, or
is not measurable here: something that it is measured against is missing.  "TCP W1: times NIXL" is
how many times as fast as NIXL; "growth" is that of a time from the fewest to the most caches,
divided by that of their number.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import call_cost
import compare
import fairness
import registration
import scale
from common import records, terminal
from common.quantiles import median, quantile


@dataclass(frozen=True)
class Verdict:
    """`value` and the bound it should keep, None where there is nothing to tell from."""

    name: str
    value: float | None
    bound: str
    holds: bool


class Results:
    """Records, found by what they are about."""

    def __init__(self, found: Sequence[records.Record]) -> None:
        self._records = found

    def of(self, kind: str, **wanted: object) -> list[records.Record]:
        """All of a kind with these values."""
        return [
            record
            for record in self._records
            if record["kind"] == kind
            and all(record.get(name) == value for name, value in wanted.items())
        ]

    def seconds(self, peer: str, work: str, share: float = 0.5) -> float | None:
        """A quantile of what a contender took for a work."""
        found = self.of("compare", peer=peer, work=work)
        return quantile(found[-1]["seconds"], share) if found and found[-1]["seconds"] else None

    def faster(self, ours: str, theirs: str, work: str, share: float = 0.5) -> float | None:
        """How many times as fast one contender is as another."""
        a, b = self.seconds(ours, work, share), self.seconds(theirs, work, share)
        return b / a if a and b else None

    def cpu(self, peer: str, work: str, side: str) -> float | None:
        """Median of the CPU seconds of one side of a contender."""
        found = self.of("compare", peer=peer, work=work)
        return median(found[-1][f"{side}_cpu"]) if found and found[-1]["seconds"] else None

    def idle(self, peer: str) -> float | None:
        """Cores that a contender uses while it does nothing."""
        found = self.of("idle", peer=peer)
        return found[-1]["cores"] if found else None


def _least(name: str, value: float | None, bound: float) -> Verdict:
    return Verdict(name, value, f">= {bound:g}", value is not None and value >= bound)


def _most(name: str, value: float | None, bound: float) -> Verdict:
    return Verdict(name, value, f"<= {bound:g}", value is not None and value <= bound)


def _tcp(results: Results) -> Iterable[Verdict]:
    for work, theirs, label, bound in (
        ("W1", "nixl-tcp", "NIXL", 4.0),
        ("W1", "iperf3", "iperf3", 1.0),
        ("W2", "nixl-tcp", "NIXL", 4.0),
        ("W2", "sockets", "sockets", 1.3),
        ("W3", "nixl-tcp", "NIXL", 6.0),
        ("W3", "sockets", "sockets", 1.6),
        ("4K-now", "sockets", "sockets", 2.0),
    ):
        yield _least(f"TCP {work}: times {label}", results.faster("stream", theirs, work), bound)
    for work in ("4K", "4K-now"):
        tail = results.seconds("stream", work, 0.99)
        yield _most(f"TCP {work}: p99, ms", tail and tail * 1e3, 1.0)


def _host(results: Results) -> Iterable[Verdict]:
    for work, theirs, label, bound in (
        ("W1", "bare-get-cma", "bare ucp_get_nbx", 0.95),
        ("W2", "vm-readv", "process_vm_readv", 0.95),
        ("W2", "nixl-host", "NIXL", 2.5),
        ("W3", "vm-readv", "process_vm_readv", 1.1),
        ("W3", "nixl-host", "NIXL", 4.0),
        ("4K-now", "nixl-host", "NIXL", 1.0),
    ):
        yield _least(f"Host {work}: times {label}", results.faster("get", theirs, work), bound)
    yield _least(
        "Host W1: huge pages, times ordinary", results.faster("get-allocated", "get", "W1"), 1.5
    )


def _cpu(results: Results) -> Iterable[Verdict]:
    owner, puller = (results.cpu("get", "W1", side) for side in ("owner", "puller"))
    share = None if owner is None or not puller else owner / puller
    yield _most("CPU W1, get: owner to puller", share, 0.01)
    for work in ("W1", "W2", "W3"):
        sides = [
            results.cpu(peer, work, side)
            for peer in ("stream", "nixl-tcp")
            for side in ("owner", "puller")
        ]
        if None in sides:
            ratio = None
        else:
            ours, theirs = sides[0] + sides[1], sides[2] + sides[3]
            ratio = ours / theirs
        yield _most(f"CPU {work}, stream: to NIXL", ratio, 0.5)
    for peer in ("get", "stream"):
        yield _most(f"Idle, {peer}: cores", results.idle(peer), 0.01)


def _scale(results: Results) -> Iterable[Verdict]:
    for path in ("get", "stream"):
        crowd = results.of("scale", path=path, links=64)
        together = crowd[-1]["together"] if crowd else None
        total = sum(together) / median(crowd[-1]["alone"]) if together else None
        yield _least(f"64 links, {path}: all to one alone", total, 0.9)
        spread = max(together) / min(together) if together and min(together) else None
        yield _most(f"64 links, {path}: fastest to slowest", spread, 2.0)
        many = results.of("scale", path=path, links=512)
        memory = many[-1]["owner_bytes_per_link"] / 2**20 if many else None
        yield _most(f"512 links, {path}: owner's MiB each", memory, 1.0)
        setup = median(many[-1]["setup"]) * 1e3 if many else None
        yield _most(f"512 links, {path}: set-up p50, ms", setup, 20.0)
        for what in ("register", "link", "first_pull"):
            yield _most(
                f"Caches, {path}: {what}, growth",
                _growth(results.of("many_caches", path=path), what),
                1.25,
            )


def _growth(found: Sequence[records.Record], what: str) -> float | None:
    """How much more a figure grows than the number of caches, from the fewest to the most."""
    if len({record["caches"] for record in found}) < 2:
        return None
    ordered = sorted(found, key=lambda record: record["caches"])
    few, many = ordered[0], ordered[-1]
    return float((many[what] / few[what]) / (many["caches"] / few["caches"]))


def _python(results: Results) -> Iterable[Verdict]:
    for path in ("get", "stream"):
        for record in results.of("call", path=path, blocks=256):
            ratio = median(record["call"]) / median(record["bare"]) if record["bare"] else None
            yield _most(f"Call, {path}: to bare Cython", ratio, 2.0)
        for record in results.of("gil", path=path):
            held = median(record["held"]) / median(record["seconds"])
            yield _most(f"GIL, {path}: share of a pull", held, 0.01)


def _fairness(results: Results) -> Iterable[Verdict]:
    for path in ("get", "stream"):
        for record in results.of("fairness", path=path):
            beside = record["beside"]
            bound = 3 * median(record["alone"]) + median(record["unit"])
            ratio = median(beside) / bound if beside else None
            yield _most(f"Small beside huge, {path}: to bound", ratio, 1.0)


_GROUPS: tuple[Callable[[Results], Iterable[Verdict]], ...] = (
    _tcp,
    _host,
    _cpu,
    _scale,
    _python,
    _fairness,
)


def verdicts(found: Sequence[records.Record]) -> list[Verdict]:
    """What these records say about every target."""
    results = Results(found)
    return [verdict for group in _GROUPS for verdict in group(results)]


def _row(verdict: Verdict) -> list[str]:
    if verdict.value is None:
        return [verdict.name, "-", verdict.bound, "not measurable"]
    return [
        verdict.name,
        f"{verdict.value:.3g}",
        verdict.bound,
        "holds" if verdict.holds else "missed",
    ]


def measured(folder: Path, quick: bool) -> list[Path]:
    """Run every script that a target needs; where their results are."""
    # Each with its arguments for a short run and for a long one.
    scripts: tuple[tuple[str, Callable[[Sequence[str]], int], list[str], list[str]], ...] = (
        ("compare", compare.main, ["--rounds", "5"], []),
        ("fairness", fairness.main, ["--rounds", "3"], []),
        ("call_cost", call_cost.main, ["--rounds", "30"], []),
        ("registration", registration.main, ["--rounds", "5"], []),
        ("scale", scale.main, ["--seconds", "2"], []),
    )
    files = []
    for name, run, short, long in scripts:
        file = folder / f"{name}.json"
        run(["--json", str(file), *(short if quick else long)])
        files.append(file)
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", nargs="+", type=Path, help="what the other scripts have written")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = options.json or measured(Path(folder), options.quick)
        found = verdicts(records.read(files))
    rows = [_row(verdict) for verdict in found]
    out = terminal.console()
    out.print(terminal.table("Targets", ["", "measured", "target", ""], rows))
    missed = sum(verdict.value is not None and not verdict.holds for verdict in found)
    unknown = sum(verdict.value is None for verdict in found)
    out.print(f"{len(found) - missed - unknown} hold, {missed} missed, {unknown} not measurable")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
