"""Many links to one owner: what they move together, how fairly, and what each link costs.

    python perf/scale.py [--links N ...] [--path get stream] [--seconds S] [--json FILE]

The engines that pull are spread over a few processes; the owner is one engine.  Links are made one
after the other (time of each, memory that each adds at the owner and at the pulling side), then one
alone pulls for a while, then all at once, each in a thread of its own; then one alone again.
The pulling side has an engine for each link, whose memory counts there too.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import memory, records, terminal
from common.caches import OWNER, Engine
from common.environment import environment
from common.quantiles import median, quantile
from common.workers import Worker

import ucxkv

_PROCESSES = 8
_TENSORS = 16
_BLOCK_BYTES = 128 << 10
_WARMUP = 0.3


def _resident() -> int:
    """Bytes of this process that are in memory and its own."""
    return int(psutil.Process().memory_info().rss - psutil.Process().memory_info().shared)


class Owner(Engine):
    """The engine that all pull from."""

    def resident(self) -> int:
        """Bytes of its process."""
        return _resident()

    def standing(self) -> int:
        """Number of links that are up."""
        return sum(link.state == "up" for link in self.engine.links())


class Pullers:
    """Some of the engines that pull, each linked to the owner."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def link(self, first_cluster: int, count: int, address: Any, path: str) -> dict[str, Any]:
        """Make so many engines and link each; seconds of each link, bytes that all have added."""
        before = _resident()
        taken = []
        for number in range(count):
            engine = Engine(first_cluster + number, listen=None, path=path)
            self.engines.append(engine)
            taken.append(engine.link(address))
        return {"seconds": taken, "bytes": _resident() - before}

    def prepare(self, remote_id: int) -> None:
        """Give each engine memory to pull into, and pull once."""
        for engine in self.engines:
            engine.add("kv", _TENSORS, 1, _BLOCK_BYTES, "ordinary", filled=False)
            engine.engine.pull_kv_cache(ucxkv.CacheIndex(OWNER, remote_id), engine.caches["kv"])

    def pull(self, remote_id: int, engines: int, start: float, seconds: float) -> list[int]:
        """Pull with the first so many engines, from a time on; bytes that each has moved."""
        moved = [0] * engines
        index = ucxkv.CacheIndex(OWNER, remote_id)

        def run(number: int) -> None:
            engine = self.engines[number]
            cache = engine.caches["kv"]
            while True:
                report = engine.engine.pull_kv_cache(index, cache)
                now = time.monotonic()
                if now >= start + seconds:
                    return
                # Begun before the start or not: as much is missing at the end.
                if now >= start:
                    moved[number] += report.bytes

        threads = [threading.Thread(target=run, args=(n,)) for n in range(engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return moved

    def check(self) -> None:
        """Look at every byte."""
        zero = np.zeros(1, dtype=int)
        for engine in self.engines:
            memory.check(engine.tensors["kv"], zero, zero)

    def close(self) -> None:
        """Close all engines."""
        for engine in self.engines:
            engine.close()


def _pull(
    pullers: Sequence[Worker], engines: Sequence[int], remote_id: int, seconds: float
) -> list[float]:
    """Bytes per second of each link."""
    start = time.monotonic() + _WARMUP
    taking_part = [(worker, count) for worker, count in zip(pullers, engines, strict=True) if count]
    for worker, count in taking_part:
        worker.start("pull", remote_id=remote_id, engines=count, start=start, seconds=seconds)
    moved = [worker.finish("pull", timeout=seconds + 120) for worker, _ in taking_part]
    return [bytes_ / seconds for process in moved for bytes_ in process]


def measure(links: int, path: str, seconds: float) -> records.Record:
    """One record: set-up, memory, what one link moves alone, and all together."""
    shares = [links // _PROCESSES + (n < links % _PROCESSES) for n in range(_PROCESSES)]
    shares = [share for share in shares if share]
    with ExitStack() as stack:
        owner = stack.enter_context(Worker("scale:Owner", name="owner"))
        shape = {"tensors": _TENSORS, "blocks": 1, "block_bytes": _BLOCK_BYTES}
        remote_id = owner.call("add", name="kv", kind="ordinary", filled=True, **shape)
        pullers = [stack.enter_context(Worker("scale:Pullers", name="pullers")) for _ in shares]
        address = owner.call("address")
        before = owner.call("resident")
        made = []
        first = OWNER + 1
        for worker, share in zip(pullers, shares, strict=True):
            arguments = {"first_cluster": first, "count": share, "address": address, "path": path}
            made.append(worker.call("link", timeout=120, **arguments))
            first += share
        standing = owner.call("standing")
        owner_bytes = owner.call("resident") - before
        for worker in pullers:
            worker.call("prepare", remote_id=remote_id)
        only_one = [1, *(0 for _ in shares[1:])]
        alone = _pull(pullers, only_one, remote_id, seconds)
        together = _pull(pullers, shares, remote_id, seconds)
        alone += _pull(pullers, only_one, remote_id, seconds)
        for worker in pullers:
            worker.call("check")
    return {
        "kind": "scale",
        "path": path,
        "links": links,
        "standing": standing,
        "setup": [taken for process in made for taken in process["seconds"]],
        "owner_bytes_per_link": owner_bytes / links,
        "puller_bytes_per_link": sum(process["bytes"] for process in made) / links,
        "alone": alone,
        "together": together,
    }


def _row(record: records.Record) -> list[str]:
    together, alone = record["together"], median(record["alone"])
    setup = record["setup"]
    slowest = min(together)
    return [
        record["path"],
        str(record["links"]),
        f"{alone / 1e9:.2f}",
        f"{sum(together) / 1e9:.2f}",
        f"{sum(together) / alone:.2f}",
        f"{max(together) / slowest:.1f}" if slowest else "-",
        f"{median(setup) * 1e3:.1f} / {quantile(setup, 0.99) * 1e3:.1f}",
        f"{record['owner_bytes_per_link'] / 2**20:.2f}",
        f"{record['puller_bytes_per_link'] / 2**20:.2f}",
    ]


def table(results: Sequence[records.Record]) -> object:
    """One line per number of links and path."""
    columns = ["path", "links", "one GB/s", "all GB/s", "ratio", "max/min", "set-up ms"]
    columns += ["owner MB", "puller MB"]
    title = "Links to one owner; set-up p50 / p99; right: memory of a link"
    return terminal.table(title, columns, [_row(record) for record in results])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", type=int, default=[64, 512], metavar="N")
    parser.add_argument("--path", nargs="+", choices=("get", "stream"), default=["get", "stream"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (5)")
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    machine = environment()
    results = []
    with terminal.progress() as bar:
        task = bar.add_task("links", total=len(options.links) * len(options.path))
        for links in options.links:
            for path in options.path:
                results.append(measure(links, path, options.seconds))
                bar.advance(task)
    records.write(options.json, [machine, *results])
    terminal.console().print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
