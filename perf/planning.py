"""A pull of very many spans: the share of it that is planning, and the memory that it takes.

Planning is what happens before the transfer is handed over: all checks, and what they make of the
lists of blocks.  Posting is handing it over: on path "stream" the request is sent meanwhile, on
path "get" it is nearly nothing.  Extra memory is the peak of a process during its first pull over
what it had before; each line has two processes of its own, since a later pull finds memory that an
earlier one has left.

    python perf/planning.py [--spans N] [--path get stream] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import memory, records, terminal
from common.caches import OWNER, PULLER, Engine
from common.environment import environment
from common.quantiles import median
from common.workers import Worker

import ucxkv
from ucxkv import geometry, submission

_BLOCK_BYTES = 16
_TIMEOUT_MS = 60_000
_ORDERS = ("ascending", "shuffled")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")


class Side(Engine):
    """An engine whose process tells how much memory it takes."""

    def rest(self) -> int:
        """Forget the peak; bytes in memory now."""
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")

    def peak(self) -> int:
        """Most bytes in memory since `rest`."""
        return _status("VmHWM")

    def choose(self, spans: int, order: str) -> None:
        """Choose the blocks: every other one of the source, and the others of the destination."""
        self._sources = np.arange(0, 2 * spans, 2)
        self._targets = np.arange(1, 2 * spans, 2)
        if order == "shuffled":
            np.random.default_rng(1).shuffle(self._targets)
        memory.clear(self.tensors["kv"], self._targets)

    def pull(self, remote_id: int, rounds: int) -> list[tuple[float, float, float]]:
        """For each round the seconds of planning, of posting, and of all."""
        return [self._pull(remote_id) for _ in range(rounds)]

    def check(self) -> None:
        """ValueError if a byte is wrong."""
        memory.check(self.tensors["kv"], self._sources, self._targets)

    def _pull(self, remote_id: int) -> tuple[float, float, float]:
        running = self.engine._engine()
        start = time.perf_counter()
        call = geometry.check_blocks(
            ucxkv.CacheIndex(OWNER, remote_id),
            self.caches["kv"],
            ucxkv.KvCacheExtParam(tensor_num_per_layer=1),
            _TIMEOUT_MS,
            _TIMEOUT_MS,
            self._sources,
            self._targets,
        )
        transfer, begin = submission._prepare(running, call, attended=True)
        planned = time.perf_counter()
        begin()
        posted = time.perf_counter()
        transfer.result()
        return planned - start, posted - planned, time.perf_counter() - start


def _measure(path: str, order: str, spans: int, rounds: int) -> records.Record:
    shape = {"tensors": 1, "blocks": 2 * spans, "block_bytes": _BLOCK_BYTES, "kind": "ordinary"}
    served = "planning:Side"
    with (
        Worker(served, name="owner") as owner,
        Worker(served, name="puller", cluster_id=PULLER, listen=None, path=path) as puller,
    ):
        remote_id = owner.call("add", name="kv", filled=True, **shape)
        puller.call("add", name="kv", filled=False, **shape)
        puller.call("link", address=owner.call("address"))
        puller.call("choose", spans=spans, order=order)
        sides = owner, puller
        rested = [side.call("rest") for side in sides]
        puller.call("pull", remote_id=remote_id, rounds=1)
        extra = [side.call("peak") - before for side, before in zip(sides, rested, strict=True)]
        puller.call("check")
        used = [side.call("cpu") for side in sides]
        taken = puller.call("pull", remote_id=remote_id, rounds=rounds, timeout=60 * rounds)
        cpu = [side.call("cpu") - before for side, before in zip(sides, used, strict=True)]
        puller.call("check")
    planning, posting, seconds = zip(*taken, strict=True)
    return {
        "kind": "planning",
        "path": path,
        "order": order,
        "spans": spans,
        "planning": planning,
        "posting": posting,
        "seconds": seconds,
        "owner_cpu": cpu[0] / rounds,
        "puller_cpu": cpu[1] / rounds,
        "owner_bytes": extra[0],
        "puller_bytes": extra[1],
    }


def measure(paths: Sequence[str], spans: int, rounds: int) -> list[records.Record]:
    """One record per path and order of the destination's blocks."""
    found = []
    with terminal.progress() as bar:
        task = bar.add_task("planning", total=len(paths) * len(_ORDERS))
        for path in paths:
            for order in _ORDERS:
                found.append(_measure(path, order, spans, rounds))
                bar.advance(task)
    return found


def share(record: records.Record, part: str) -> float:
    """The share of a part in a pull."""
    pairs = zip(record[part], record["seconds"], strict=True)
    return median([seconds / whole for seconds, whole in pairs])


def table(results: Sequence[records.Record]) -> object:
    """One line per path and order."""
    return terminal.table(
        f"A pull of {results[0]['spans']:,} spans of {_BLOCK_BYTES} bytes (owner + puller)",
        ["path", "blocks", "ms", "planning", "posting", "CPU ms", "extra MB"],
        [
            [
                record["path"],
                record["order"],
                f"{median(record['seconds']) * 1e3:.0f}",
                f"{share(record, 'planning') * 100:.1f} %",
                f"{share(record, 'posting') * 100:.1f} %",
                f"{record['owner_cpu'] * 1e3:.0f} + {record['puller_cpu'] * 1e3:.0f}",
                f"{record['owner_bytes'] / 1e6:.0f} + {record['puller_bytes'] / 1e6:.0f}",
            ]
            for record in results
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--path", nargs="+", choices=("get", "stream"), default=["get", "stream"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    machine = environment()
    results = measure(options.path, options.spans, options.rounds)
    records.write(options.json, [machine, *results])
    terminal.console().print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
