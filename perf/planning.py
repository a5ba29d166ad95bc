"""A pull of very many spans: the share of it that is planning, and the memory that it takes.

Planning is what happens before the transfer exists: all checks, and what they make of the lists of
blocks.  Extra memory is the peak of a process during the pull over what it had before.

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


def _round(
    engine: Side, remote_id: int, sources: np.ndarray, targets: np.ndarray
) -> tuple[float, float]:
    """Seconds of planning, and of all."""
    index = ucxkv.CacheIndex(OWNER, remote_id)
    running = engine.engine._engine()
    start = time.perf_counter()
    given = submission.common(
        running,
        index,
        engine.caches["kv"],
        ucxkv.KvCacheExtParam(tensor_num_per_layer=1),
        _TIMEOUT_MS,
    )
    call = geometry.check_blocks(given, sources, targets)
    transfer, begin = submission._prepare(running, call, attended=True)
    planned = time.perf_counter()
    begin()
    transfer.result()
    return planned - start, time.perf_counter() - start


def measure(paths: Sequence[str], spans: int, rounds: int) -> list[records.Record]:
    """One record per path and order of the blocks; they take turns."""
    shape = {"tensors": 1, "blocks": 2 * spans, "block_bytes": _BLOCK_BYTES}
    sources = np.arange(0, 2 * spans, 2)
    ascending = np.arange(1, 2 * spans, 2)
    orders = {"ascending": ascending, "shuffled": np.random.default_rng(1).permutation(ascending)}
    found = []
    with terminal.progress() as bar, Worker("planning:Side", name="owner") as owner:
        remote_id = owner.call("add", name="kv", kind="ordinary", filled=True, **shape)
        task = bar.add_task("planning", total=rounds * len(paths) * len(orders))
        for number, path in enumerate(paths):
            engine = Side(PULLER + number, listen=None, path=path)
            engine.link(owner.call("address"))
            engine.add("kv", kind="ordinary", filled=False, **shape)
            for order, targets in orders.items():
                memory.clear(engine.tensors["kv"], targets)
                rested = engine.rest(), owner.call("rest")
                taken = [_round(engine, remote_id, sources, targets)]
                extra = engine.peak() - rested[0], owner.call("peak") - rested[1]
                memory.check(engine.tensors["kv"], sources, targets)
                for _ in range(rounds):
                    taken.append(_round(engine, remote_id, sources, targets))
                    bar.advance(task)
                found.append(
                    {
                        "kind": "planning",
                        "path": path,
                        "order": order,
                        "spans": spans,
                        "planning": [planned for planned, _ in taken[1:]],
                        "seconds": [seconds for _, seconds in taken[1:]],
                        "puller_bytes": extra[0],
                        "owner_bytes": extra[1],
                    }
                )
            engine.close()
    return found


def share(record: records.Record) -> float:
    """The share of planning in a pull."""
    pairs = zip(record["planning"], record["seconds"], strict=True)
    return median([planned / seconds for planned, seconds in pairs])


def table(results: Sequence[records.Record]) -> object:
    """One line per path and order."""
    return terminal.table(
        f"A pull of {results[0]['spans']:,} spans of {_BLOCK_BYTES} bytes",
        ["path", "blocks", "ms", "planning", "puller MB", "owner MB"],
        [
            [
                record["path"],
                record["order"],
                f"{median(record['seconds']) * 1e3:.0f}",
                f"{share(record) * 100:.1f} %",
                f"{record['puller_bytes'] / 1e6:.0f}",
                f"{record['owner_bytes'] / 1e6:.0f}",
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
