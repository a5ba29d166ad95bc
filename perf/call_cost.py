"""What a call costs in Python: until the transfer is under way, and of the GIL.

    python perf/call_cost.py [--path get stream] [--rounds N] [--json FILE]

The time from the call of `pull_kv_blocks_async` to its return, by when the transfer has been handed
over or is being posted, beside that of a bare Cython function which looks at the same arguments
and posts nothing (compiled when needed; wants Cython and a C compiler).  Then the part of a pull of
15616 spans in which its caller holds the GIL: the call, and fetching the result once it is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import memory, records, terminal
from common.caches import OWNER, Engine, pair
from common.environment import environment
from common.quantiles import median
from peers.environments import folder

import ucxkv

_SOURCE = Path(__file__).parent / "common" / "bare_call.pyx"
_TENSORS, _BLOCKS, _BLOCK_BYTES = 61, 1024, 4096
_COUNTS = (1, 16, 256)
_GIL_SPANS = 256
_COMPILE_SECONDS = 120


def bare_call() -> Callable[..., Any] | None:
    """The bare function, None where it cannot be compiled."""
    if importlib.util.find_spec("Cython") is None or shutil.which("cc") is None:
        return None
    place = folder() / f"bare_call-{sys.implementation.cache_tag}"
    library = place / "bare_call.so"
    if not library.exists() or library.stat().st_mtime < _SOURCE.stat().st_mtime:
        place.mkdir(parents=True, exist_ok=True)
        translated = place / "bare_call.c"
        for command in (
            [sys.executable, "-m", "cython", "-3", "-o", translated, _SOURCE],
            [
                *("cc", "-O2", "-shared", "-fPIC", "-w", f"-I{sysconfig.get_path('include')}"),
                *("-o", library, translated),
            ],
        ):
            subprocess.run(command, check=True, timeout=_COMPILE_SECONDS)
    spec = importlib.util.spec_from_file_location("bare_call", library)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    called: Callable[..., Any] = module.pull_kv_blocks
    return called


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def _arguments(engine: Engine, remote_id: int, count: int) -> list[Any]:
    layers = (0, _TENSORS - 1)
    return [
        ucxkv.CacheIndex(OWNER, remote_id),
        engine.caches["kv"],
        memory.scattered(count, _BLOCKS, 1),
        memory.scattered(count, _BLOCKS, 2),
        ucxkv.KvCacheExtParam(layers, layers, 1),
    ]


def _wait(transfer: ucxkv.Transfer) -> None:
    while not transfer.done():
        time.sleep(0.0005)


def measure(paths: Sequence[str], rounds: int) -> list[records.Record]:
    """A record for each path and number of blocks, and one for each path's share of the GIL."""
    bare = bare_call()
    results: list[records.Record] = []
    shape = {"tensors": _TENSORS, "blocks": _BLOCKS, "block_bytes": _BLOCK_BYTES}
    with pair(paths) as (owner, engines):
        remote_id = owner.call("add", name="kv", kind="ordinary", filled=True, **shape)
        for path, engine in engines.items():
            engine.add("kv", kind="ordinary", filled=False, **shape)
            for count in _COUNTS:
                arguments = _arguments(engine, remote_id, count)
                taken: dict[str, list[float]] = {"call": [], "bare": []}
                for _ in range(rounds):
                    seconds, transfer = _call(engine.engine.pull_kv_blocks_async, arguments)
                    taken["call"].append(seconds)
                    transfer.result()
                    if bare is not None:
                        taken["bare"].append(_call(bare, arguments)[0])
                results.append({"kind": "call", "path": path, "blocks": count, **taken})
            results.append(_gil(engine, path, remote_id, rounds))
            source, destination = (memory.scattered(_GIL_SPANS, _BLOCKS, seed) for seed in (1, 2))
            memory.check(engine.tensors["kv"], source, destination)
    return results


def _gil(engine: Engine, path: str, remote_id: int, rounds: int) -> records.Record:
    arguments = _arguments(engine, remote_id, _GIL_SPANS)
    held, whole = [], []
    for _ in range(rounds):
        seconds, transfer = _call(engine.engine.pull_kv_blocks_async, arguments)
        _wait(transfer)
        fetching, report = _call(transfer.result, [])
        held.append(seconds + fetching)
        whole.append(report.seconds)
    spans = _GIL_SPANS * _TENSORS
    return {"kind": "gil", "path": path, "spans": spans, "held": held, "seconds": whole}


def tables(results: Sequence[records.Record]) -> list[object]:
    """One table for each kind."""
    calls = [record for record in results if record["kind"] == "call"]
    gil = [record for record in results if record["kind"] == "gil"]
    rows = []
    for record in calls:
        call = median(record["call"])
        cells = [record["path"], str(record["blocks"]), f"{call * 1e6:.1f}"]
        if record["bare"]:
            bare = median(record["bare"])
            cells += [f"{bare * 1e6:.1f}", f"{call / bare:.1f}"]
        rows.append(cells)
    return [
        terminal.table(
            f"Call of a pull of blocks of {_TENSORS} tensors, µs, medians",
            ["path", "blocks", "pull_kv_blocks_async", "bare Cython", "ratio"],
            rows,
        ),
        terminal.table(
            "The GIL in one pull",
            ["path", "spans", "held µs", "pull ms", "share"],
            [
                [
                    record["path"],
                    str(record["spans"]),
                    f"{median(record['held']) * 1e6:.0f}",
                    f"{median(record['seconds']) * 1e3:.1f}",
                    f"{median(record['held']) / median(record['seconds']):.2%}",
                ]
                for record in gil
            ],
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", nargs="+", choices=("get", "stream"), default=["get", "stream"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    machine = environment()
    results = measure(options.path, options.rounds)
    records.write(options.json, [machine, *results])
    for table in tables(results):
        terminal.console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
