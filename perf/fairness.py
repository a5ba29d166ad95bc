"""What a small pull suffers from a huge one on the same link.

The small one's p50 alone and beside the huge one, and the time in which the huge one moves 4 MiB
meanwhile: beside it the small one should take at most three times what it takes alone, and that.

    python perf/fairness.py [--path get stream] [--huge MIB] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import memory, records, terminal
from common.caches import OWNER, Engine, pair
from common.environment import environment
from common.quantiles import median, quantile

import ucxkv

_SMALL_BYTES = 4 << 10
_SMALL_BLOCKS = 16
_HUGE_TENSORS = 64
_UNIT = 4 << 20
_ALONE = 50
_PAUSE = 0.001


def _small(engine: Engine, remote_id: int) -> float:
    # As it comes in practice: not right after another.
    time.sleep(_PAUSE)
    index = ucxkv.CacheIndex(OWNER, remote_id, 3)
    start = time.perf_counter()
    engine.engine.pull_kv_cache(index, engine.caches["small"], 5)
    return time.perf_counter() - start


def _round(engine: Engine, small_id: int, huge_id: int) -> tuple[list[float], list[float], float]:
    """Seconds of small pulls alone, of those beside the huge one, and of its 4 MiB."""
    alone = [_small(engine, small_id) for _ in range(_ALONE)]
    for name in ("small", "huge"):
        memory.clear(engine.tensors[name], np.arange(engine.tensors[name][0].shape[0]))
    huge = engine.engine.pull_kv_cache_async(
        ucxkv.CacheIndex(OWNER, huge_id), engine.caches["huge"]
    )
    beside = []
    while True:
        taken = _small(engine, small_id)
        if huge.done():
            break
        beside.append(taken)
    report = huge.result()
    zero = np.zeros(1, dtype=int)
    memory.check(engine.tensors["huge"], zero, zero)
    memory.check(engine.tensors["small"], zero + 3, zero + 5)
    return alone, beside, report.seconds * _UNIT / report.bytes


def measure(paths: Sequence[str], mib: int, rounds: int) -> list[records.Record]:
    """One record per path; they take turns."""
    shapes = {
        "small": {"tensors": 1, "blocks": _SMALL_BLOCKS, "block_bytes": _SMALL_BYTES},
        "huge": {
            "tensors": _HUGE_TENSORS,
            "blocks": 1,
            "block_bytes": (mib << 20) // _HUGE_TENSORS,
        },
    }
    with pair(paths) as (owner, engines), terminal.progress() as bar:
        ids = {
            name: owner.call("add", name=name, kind="ordinary", filled=True, **shape)
            for name, shape in shapes.items()
        }
        taken = {}
        for path, engine in engines.items():
            taken[path] = ([], [], [])
            for name, shape in shapes.items():
                engine.add(name, kind="ordinary", filled=False, **shape)
        task = bar.add_task("fairness", total=rounds)
        for number in range(rounds + 1):
            for path, engine in engines.items():
                alone, beside, unit = _round(engine, ids["small"], ids["huge"])
                if number:
                    taken[path][0].extend(alone)
                    taken[path][1].extend(beside)
                    taken[path][2].append(unit)
            bar.advance(task, bool(number))
    return [
        {"kind": "fairness", "path": path, "alone": alone, "beside": beside, "unit": unit}
        for path, (alone, beside, unit) in taken.items()
    ]


def _row(record: records.Record) -> list[str]:
    alone, beside, unit = record["alone"], record["beside"], median(record["unit"])
    if not beside:
        return [record["path"], f"{median(alone) * 1e6:.0f}", "-", f"{unit * 1e6:.0f}", "-", "-"]
    bound = 3 * median(alone) + unit
    return [
        record["path"],
        f"{median(alone) * 1e6:.0f}",
        f"{median(beside) * 1e6:.0f} / {quantile(beside, 0.9) * 1e6:.0f}",
        f"{unit * 1e6:.0f}",
        f"{bound * 1e6:.0f}",
        "yes" if median(beside) <= bound else "no",
    ]


def table(results: Sequence[records.Record]) -> object:
    """One line per path."""
    return terminal.table(
        "A pull of 4 KiB beside a huge one, µs",
        ["path", "alone", "beside p50 / p90", "4 MiB", "bound", "kept"],
        [_row(record) for record in results],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", nargs="+", choices=("get", "stream"), default=["get", "stream"])
    parser.add_argument("--huge", type=int, default=512, metavar="MIB", help="size of it (512)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    machine = environment()
    results = measure(options.path, options.huge, options.rounds)
    records.write(options.json, [machine, *results])
    terminal.console().print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
