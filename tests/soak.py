"""The soak: two owners and four pullers do everything at once, for as long as you like, while they
are killed, restarted, stopped, unlinked, cut off, and given other roles.

    python tests/soak.py --minutes 60 --seed 1 --plot soak.png --json soak.json

Owners 1 and 2 serve both paths; pullers 11 and 12 have TCP alone, 13 and 14 GET.  Every process
pulls from, pushes to and serves each that it is linked to (see children/soaking.py), and every byte
is compared with a model.  Processes 2, 12 and 14 are killed and restarted; 1, 11 and 13 live
through it all, and must not grow.  Between two rounds everything comes to rest, is compared and
counted, and what was harmed is made anew.

Exits with 1 for a wrong byte, a hang, an error without a cause, or growth.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from children import actions, soaking
from children.both_ways import WORK, check_notices
from harness import Peer, Proxy, sample, wait_until
from interpreters import PeerDied, PeerHung

OWNERS = {1: "auto", 2: "auto"}
PULLERS = {11: "stream", 12: "stream", 13: "get", 14: "get"}
MORTAL = (2, 12, 14)
PAIRS = tuple(itertools.product(PULLERS, OWNERS))
ROUND_SECONDS = 5.0
# Otherwise glibc keeps what the temporary arrays of many threads have needed.
HONEST_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
MEASURES = ("rss", "fds", "threads", "maps")
# A slope counts if its interval is beyond zero, and if it would have been seen: growth during the
# whole of what was measured of more than this (bytes, descriptors, threads, mappings).
LEAST = {"rss": 2 << 20, "fds": 4, "threads": 1, "maps": 20}
# Means of so many stretches of time: unlike single samples they hardly depend on each other.
STRETCHES = 10
# Student's t for STRETCHES - 2 degrees of freedom, 99 % on two sides.
STUDENT = 3.355
WARM_UP_SECONDS = 300.0

Pair = tuple[int, int]


class Failed(Exception):
    """The soak cannot go on."""


class Sampler:
    """Looks at every process once a second."""

    def __init__(self, peers: dict[int, Peer]) -> None:
        self.peers = peers
        self.began = time.monotonic()
        self.samples: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def look(self, number: int, rest: bool) -> None:
        # It may be killed at any moment.
        with contextlib.suppress(Exception):
            peer = self.peers[number]
            found = sample(peer.pid)
            self.samples.append(
                {
                    "time": time.monotonic() - self.began,
                    "process": number,
                    "pid": peer.pid,
                    "rest": rest,
                    **{name: getattr(found, name) for name in MEASURES},
                }
            )

    def _run(self) -> None:
        while not self._stop.wait(1):
            for number in self.peers:
                self.look(number, False)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


class Soak:
    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.rounds = 0
        self.problems: list[str] = []
        self.hangs = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self.fault_times: list[tuple[float, str]] = []
        self.latencies: list[tuple[int, float, float]] = []
        self.longest = 0.0
        self.after_fault = 0.0
        self.shaken: set[Pair] = set()
        self.dead: set[int] = set()
        self.finalized: dict[int, bool] = {}  # whether its process ends too
        self.deck: list[Callable[[], str]] = []
        self.peers = {
            number: stack.enter_context(
                Peer(
                    number,
                    path=path,
                    listen=number in OWNERS,
                    env=HONEST_MALLOC,
                    fresh=True,
                    options={"notice_queue": 64},
                )
            )
            for number, path in {**OWNERS, **PULLERS}.items()
        }
        self.proxies: dict[Pair, Proxy] = {}
        for pair in PAIRS:
            address = self.peers[pair[1]].address
            assert address
            self.proxies[pair] = stack.enter_context(Proxy(address))
        for pair in PAIRS:
            self.open(pair)
        self.sampler = stack.enter_context(Sampler(self.peers))

    # -- pairs ------------------------------------------------------------------------------------

    def open(self, pair: Pair) -> None:
        puller, owner = (self.peers[number] for number in pair)
        owner.ready()
        puller.call(actions.link, pair[1], self.proxies[pair].address, 10_000)
        port = owner.call(soaking.listen, pair[0])
        ours = puller.call(soaking.open_end, pair[1], port)
        theirs = owner.call(soaking.open_end, pair[0], None)
        puller.call(soaking.open_lane, pair[1], theirs)
        owner.call(soaking.open_lane, pair[0], ours)

    def pairs_of(self, number: int) -> list[Pair]:
        return [pair for pair in PAIRS if number in pair]

    def shake(self, *pairs: Pair) -> None:
        for pair in pairs:
            self.shaken.add(pair)
            for number, other in (pair, pair[::-1]):
                if number not in self.dead:
                    self.peers[number].side(soaking.shake, other)

    def unharmed(self, numbers: tuple[int, ...]) -> int | None:
        """One of them of whose pairs none is shaken yet."""
        found = [one for one in numbers if not self.shaken.intersection(self.pairs_of(one))]
        return self.rng.choice(found) if found else None

    # -- what is done to them ---------------------------------------------------------------------

    def kill(self) -> str:
        number = self.unharmed(MORTAL)
        if number is None:
            return ""
        self.shake(*self.pairs_of(number))
        self.dead.add(number)
        self.peers[number].kill()
        return f"killed {number}"

    def finalize(self, restart: bool) -> str:
        number = self.unharmed(MORTAL)
        if number is None:
            return ""
        self.shake(*self.pairs_of(number))
        self.finalized[number] = restart
        self.peers[number].call(actions.finalize)
        return f"finalized {number}"

    def restart(self) -> str:
        return self.finalize(True)

    def reopen(self) -> str:
        return self.finalize(False)

    def unlink(self) -> str:
        pair = self.rng.choice(PAIRS)
        if pair in self.shaken:
            return ""
        self.shake(pair)
        number, other = self.rng.choice([pair, pair[::-1]])
        force = self.rng.random() < 0.5
        self.peers[number].call(actions.unlink, other, 2000, force)
        return f"{number} unlinked {other}"

    def role(self) -> str:
        number = self.unharmed(tuple(PULLERS))
        if number is None:
            return ""
        self.shake(*self.pairs_of(number))
        for _, other in self.pairs_of(number):
            self.peers[number].call(actions.unlink, other, 2000, False)
        kind = self.peers[number].call(soaking.set_role, self.rng.getrandbits(30))
        if kind != "ok":
            self.problems.append(f"set_role of {number}, which has no link: {kind}")
        return f"{number} changed its role"

    def cut(self) -> str:
        pair = self.rng.choice(PAIRS)
        if pair in self.shaken:
            return ""
        self.proxies[pair].cut(reset=self.rng.random() < 0.5)
        return f"cut {pair}"

    def stop(self) -> str:
        number = self.rng.choice(list(self.peers))
        if number in self.dead:
            return ""
        with self.peers[number].stopped():
            time.sleep(self.rng.uniform(0.05, 1.0))
        return f"stopped {number}"

    def fault(self) -> None:
        if not self.deck:
            cuts = [self.cut, self.cut, self.stop, self.stop]
            self.deck = [self.kill, self.kill, self.restart, self.reopen, self.unlink, self.role]
            self.deck += cuts
            self.rng.shuffle(self.deck)
        fault = self.deck.pop()
        text = fault()
        if text:
            self.faults[fault.__name__] += 1
            self.fault_times.append((time.monotonic() - self.sampler.began, text))

    # -- rounds -----------------------------------------------------------------------------------

    def round(self, seconds: float, faults: int) -> None:
        self.rounds += 1
        running = {
            number: peer.start(soaking.traffic, seconds, self.seed * 1000 + self.rounds)
            for number, peer in self.peers.items()
        }
        began = time.monotonic()
        for moment in sorted(self.rng.uniform(0.1, 0.9) * seconds for _ in range(faults)):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            self.fault()
        for number, pending in running.items():
            try:
                self.take(number, pending.result(seconds + 60))
            except PeerHung:
                self.hangs += 1
                raise
            except PeerDied:
                if number not in self.dead:
                    raise
        self.rest()
        self.mend()

    def take(self, number: int, found: dict[str, Any]) -> None:
        self.outcomes.update(found["outcomes"])
        self.problems += found["problems"]
        began = self.sampler.began
        self.latencies += [(number, at - began, took) for at, took in found["latencies"]]
        self.longest = max(self.longest, found["longest"])
        self.after_fault = max(self.after_fault, found["after fault"])

    def rest(self) -> None:
        """Everything stands still: look at it."""
        alive = [number for number in self.peers if number not in self.dead]
        open_ = [number for number in alive if number not in self.finalized]
        for number in open_:
            with contextlib.suppress(AssertionError):
                wait_until(lambda peer=self.peers[number]: not peer.call(soaking.at_rest))
                continue
            busy = self.peers[number].call(soaking.at_rest)
            self.problems.append(f"{number} is not at rest: {busy}")
        looking = [self.peers[number].start(soaking.wrong) for number in alive]
        for one in looking:
            self.problems += one.result()
        for pair in PAIRS:
            if pair not in self.shaken:
                self.compare(pair)
        for pair in self.shaken:
            for number, other in (pair, pair[::-1]):
                if number in alive:
                    self.peers[number].call(soaking.close_end, other)
        for number in open_:
            found, wanted = self.peers[number].call(soaking.caches)
            if found != wanted:
                self.problems.append(f"{number} has {found} caches instead of {wanted}")
            if not self.shaken.intersection(self.pairs_of(number)):
                self.sampler.look(number, True)

    def compare(self, pair: Pair) -> None:
        one, other = (
            self.peers[number].call(soaking.compare, peer) for number, peer in (pair, pair[::-1])
        )
        for near, far, name in ((one, other, pair), (other, one, pair[::-1])):
            if near["pushed"] != far["inboxes"]:
                self.problems.append(f"WRONG BYTES: what {name[0]} has pushed to {name[1]}")
            problem = check_notices(far["notices"], *near["told"], 1)
            if problem:
                self.problems.append(f"from {name[0]} to {name[1]}: {problem}")

    def mend(self) -> None:
        for number in sorted(self.dead):
            self.peers[number].interpreter.check()
            self.peers[number].restart()
        for number, ends in self.finalized.items():
            peer = self.peers[number]
            if ends:
                peer.close()
                peer.restart()
            else:
                address = peer.call(soaking.reopen)
                if number in OWNERS:
                    for pair in self.pairs_of(number):
                        self.proxies[pair].target = tuple(address)
                    peer.address = tuple(address)
        shaken = sorted(self.shaken)
        self.dead.clear()
        self.finalized.clear()
        self.shaken.clear()
        for pair in shaken:
            self.open(pair)


# -- what is shown ---------------------------------------------------------------------------------


def slope(times: list[float], values: list[float]) -> tuple[float, float] | None:
    """Growth per hour and the half of its 99 % interval; None for too few values.

    The line goes through the means of STRETCHES stretches: single samples depend on those before
    them, and would make the interval far too narrow.
    """
    if len(times) < 2 * STRETCHES:
        return None
    x = np.array([part.mean() for part in np.array_split(np.array(times) / 3600, STRETCHES)])
    y = np.array([part.mean() for part in np.array_split(np.array(values), STRETCHES)])
    dx = x - x.mean()
    steep = float((dx * y).sum() / (dx**2).sum())
    left = y - y.mean() - steep * dx
    error = math.sqrt(float((left**2).sum()) / (STRETCHES - 2) / float((dx**2).sum()))
    return steep, STUDENT * error


def slopes(soak: Soak) -> list[tuple[int, str, float, float, float, bool]]:
    """(process, measure, mean, slope an hour, +/-, whether it grows) of those that never die."""
    found = []
    last = max((one["time"] for one in soak.sampler.samples), default=0.0)
    begin = min(WARM_UP_SECONDS, last / 4)
    for number in soak.peers:
        if number in MORTAL:
            continue
        kept = [
            one
            for one in soak.sampler.samples
            if one["process"] == number and one["rest"] and one["time"] >= begin
        ]
        for name in MEASURES:
            values = [float(one[name]) for one in kept]
            fitted = slope([one["time"] for one in kept], values)
            if fitted is None:
                continue
            steep, around = fitted
            growth = steep * (kept[-1]["time"] - kept[0]["time"]) / 3600
            grows = steep - around > 0 and growth > LEAST[name]
            found.append((number, name, float(np.mean(values)), steep, around, grows))
    return found


def report(soak: Soak, seconds: float) -> bool:
    """Print what was done and found; whether all is well."""
    columns = ("ok", "LlmTimeout", "LlmError", "HoldEnded", "KvCacheNotExist", "disturbed")
    heads = ("ok", "late", "ended", "hold", "gone", "disturbed")
    print(f"soak: {seconds:.0f} s, seed {soak.seed}, {soak.rounds} rounds,", end=" ")
    print(f"{soak.outcomes.total()} operations")
    print("faults:", ", ".join(f"{count} {name}" for name, count in sorted(soak.faults.items())))
    print(f"\n{'operation':<16}" + "".join(f"{head:>10}" for head in heads))
    for work in WORK:
        counts = [soak.outcomes[work, column] for column in columns]
        print(f"{work:<16}" + "".join(f"{count or '':>10}" for count in counts))
    totals = [sum(soak.outcomes[work, column] for work in WORK) for column in columns]
    print(f"{'all':<16}" + "".join(f"{count or '':>10}" for count in totals))
    wrong = sum("WRONG BYTES" in problem for problem in soak.problems)
    times = sorted(took for _, _, took in soak.latencies)
    print(f"\nwrong bytes {wrong}, hangs {soak.hangs}, other problems", end=" ")
    print(len(soak.problems) - wrong - soak.hangs)
    if times:
        picked = [times[int(len(times) * part)] * 1e3 for part in (0.5, 0.99)]
        print(f"a pull: median {picked[0]:.2f} ms, 99 % {picked[1]:.1f} ms")
    print(f"longest operation {soak.longest:.2f} s, longest one that a fault ended", end=" ")
    print(f"{soak.after_fault:.2f} s after it")
    found = slopes(soak)
    if found:
        print(f"\n{'process':<9}{'measure':<9}{'mean':>12}{'an hour':>12}{'+/- (99 %)':>12}")
    for number, name, mean, steep, around, grows in found:
        unit = 1 << 20 if name == "rss" else 1
        text = (
            f"{number:<9}{name:<9}{mean / unit:>12.1f}{steep / unit:>+12.2f}{around / unit:>12.2f}"
        )
        print(text + (" MB" if name == "rss" else "") + ("  GROWS" if grows else ""))
    for problem in soak.problems[:20]:
        print(f"! {problem[:2000]}")
    return not soak.problems and not soak.hangs and not any(one[-1] for one in found)


def save(soak: Soak, file: Path) -> None:
    record = {
        "seed": soak.seed,
        "rounds": soak.rounds,
        "problems": soak.problems,
        "hangs": soak.hangs,
        "faults": soak.fault_times,
        "outcomes": [[*key, count] for key, count in sorted(soak.outcomes.items())],
        "slopes": slopes(soak),
        "samples": soak.sampler.samples,
        "latencies": soak.latencies,
    }
    file.write_text(json.dumps(record))


def plot(soak: Soak, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(5, 1, figsize=(10, 14), sharex=True)
    titles = ("memory (MB)", "descriptors", "threads", "mappings")
    colours = dict(zip(soak.peers, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for axis, name, title in zip(axes, MEASURES, titles, strict=False):
        lives: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for one in soak.sampler.samples:
            value = one[name] / (1 << 20) if name == "rss" else one[name]
            lives[one["process"], one["pid"]].append((one["time"] / 60, value))
        shown: set[int] = set()
        for (number, _), points in lives.items():
            label = None if number in shown else f"{number}" + ("" if number in MORTAL else " *")
            shown.add(number)
            axis.plot(
                *zip(*sorted(points), strict=True), color=colours[number], label=label, lw=0.8
            )
        axis.set_ylabel(title)
    axes[0].legend(ncols=6, fontsize="small", title="process (* never restarted)")
    for part, style in ((50, "-"), (99, ":")):
        for number in soak.peers:
            bins: dict[int, list[float]] = defaultdict(list)
            for who, at, took in soak.latencies:
                if who == number:
                    bins[int(at // 10)].append(took * 1e3)
            points = [(at / 6, float(np.percentile(bins[at], part))) for at in sorted(bins)]
            if points:
                axes[4].plot(*zip(*points, strict=True), style, color=colours[number], lw=0.8)
    axes[4].set_yscale("log")
    axes[4].set_ylabel("a pull, 50 % and 99 % (ms)")
    axes[4].set_xlabel("minutes; ticks below: faults")
    places = [at / 60 for at, _ in soak.fault_times]
    axes[4].plot(places, [axes[4].get_ylim()[0]] * len(places), "|", color="black", ms=8)
    figure.suptitle(f"soak, seed {soak.seed}, {soak.rounds} rounds")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def run(
    seconds: float,
    seed: int,
    *,
    round_seconds: float = ROUND_SECONDS,
    faults: int = 2,
    plot_file: Path | None = None,
    json_file: Path | None = None,
) -> bool:
    """Soak, print the report, and say whether all is well."""
    with ExitStack() as stack:
        soak = Soak(seed, stack)
        end = time.monotonic() + seconds
        try:
            while (time.monotonic() < end or soak.rounds < 2) and not soak.problems:
                soak.round(min(round_seconds, max(1.0, end - time.monotonic())), faults)
        except Exception as error:
            soak.problems.append(f"round {soak.rounds}: {type(error).__name__}: {error}")
        well = report(soak, time.monotonic() - soak.sampler.began)
        if json_file is not None:
            save(soak, json_file)
        if plot_file is not None:
            plot(soak, plot_file)
        if not well:
            for peer in soak.peers.values():
                if not peer.killed:
                    peer.interpreter.kill()
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="wants matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE.json")
    asked = parser.parse_args()
    well = run(asked.minutes * 60, asked.seed, plot_file=asked.plot, json_file=asked.json)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
