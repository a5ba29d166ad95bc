"""How long one pull of one block takes, for each path and size.

Blocking and asynchronous, one right after the other or each after a pause: then caches are cold,
and whoever sleeps has to wake up first.

    python perf/latency.py [--path get stream] [--size BYTES ...] [--pulls N] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import memory, records, terminal
from common.caches import OWNER, Engine, pair
from common.environment import environment
from common.quantiles import median, quantile

import ucxkv

_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
_BLOCKS = 64
_TURNS = 10
_PAUSE = 0.002
_WAYS = (("blocking", 0.0), ("async", 0.0), ("blocking", _PAUSE))


def _pull(engine: Engine, name: str, index: ucxkv.CacheIndex, how: str, slot: int) -> None:
    cache = engine.caches[name]
    if how == "blocking":
        engine.engine.pull_kv_cache(index, cache, slot)
    else:
        engine.engine.pull_kv_cache_async(index, cache, slot).result()


def _turn(
    engine: Engine, name: str, remote_id: int, how: str, pause: float, pulls: int
) -> list[float]:
    """Seconds of each pull; the bytes are looked at afterwards."""
    taken = []
    tensors = engine.tensors[name]
    source, destination = (memory.scattered(_BLOCKS // 2, _BLOCKS, seed) for seed in (1, 2))
    memory.clear(tensors, destination)
    for number in range(pulls):
        place = number % len(source)
        index = ucxkv.CacheIndex(OWNER, remote_id, int(source[place]))
        if pause:
            time.sleep(pause)
        start = time.perf_counter()
        _pull(engine, name, index, how, int(destination[place]))
        taken.append(time.perf_counter() - start)
    pulled = min(pulls, len(source))
    memory.check(tensors, source[:pulled], destination[:pulled])
    return taken


def measure(paths: Sequence[str], sizes: Sequence[int], pulls: int) -> list[records.Record]:
    """One record per path, size and way to pull; they take turns."""
    results = []
    with pair(paths) as (owner, engines), terminal.progress() as bar:
        task = bar.add_task("latency", total=len(sizes) * _TURNS)
        for size in sizes:
            name = str(size)
            shape = {"tensors": 1, "blocks": _BLOCKS, "block_bytes": size, "kind": "ordinary"}
            remote_id = owner.call("add", name=name, filled=True, **shape)
            taken: dict[tuple[str, str, float], list[float]] = {}
            for engine in engines.values():
                engine.add(name, filled=False, **shape)
            for turn in range(_TURNS + 1):
                for path, engine in engines.items():
                    for how, pause in _WAYS:
                        count = max(1, pulls // _TURNS // (4 if pause else 1))
                        seconds = _turn(engine, name, remote_id, how, pause, count)
                        if turn:
                            taken.setdefault((path, how, pause), []).extend(seconds)
                bar.advance(task, bool(turn))
            for (path, how, pause), seconds in taken.items():
                results.append(
                    {
                        "kind": "latency",
                        "path": path,
                        "how": how,
                        "pause": pause,
                        "bytes": size,
                        "seconds": seconds,
                    }
                )
            for engine in engines.values():
                engine.remove(name)
            owner.call("remove", name=name)
    return results


def table(results: Sequence[records.Record]) -> object:
    """One line per path and size."""
    rows: dict[tuple[str, int], list[str]] = {}
    for record in results:
        seconds = record["seconds"]
        cell = f"{median(seconds) * 1e6:.0f} / {quantile(seconds, 0.99) * 1e6:.0f}"
        rows.setdefault((record["path"], record["bytes"]), []).append(cell)
    return terminal.table(
        "One pull in µs, p50 / p99",
        ["path", "KiB", "blocking", "async", f"after {_PAUSE * 1e3:g} ms"],
        [[path, str(size >> 10), *cells] for (path, size), cells in sorted(rows.items())],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", nargs="+", choices=("get", "stream"), default=["get", "stream"])
    parser.add_argument("--size", nargs="+", type=int, default=_SIZES, metavar="BYTES")
    parser.add_argument("--pulls", type=int, default=2000, help="of each size and way (2000)")
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    machine = environment()
    results = measure(options.path, options.size, options.pulls)
    records.write(options.json, [machine, *results])
    terminal.console().print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
