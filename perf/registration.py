"""What registering costs: by number and size of tensors, and with very many caches.

    python perf/registration.py [--caches N ...] [--rounds N] [--json FILE]

A cache is registered and unregistered beside a linked peer, which hears of both.  Then an owner
registers so many caches, a puller registers one and links, and pulls from the last of them: the
time of each, which should grow no worse than their number.
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
from common.quantiles import median, quantile
from common.workers import Worker

import ucxkv

_SHAPES = ((1, 64 << 10), (1, 1 << 20), (1, 64 << 20), (16, 1 << 20), (64, 1 << 20), (256, 1 << 20))
_CACHES = (1000, 2500, 5000, 10_000)
_BLOCK_BYTES = 4096


class Registering(Engine):
    """An engine that registers at its worker's."""

    def repeat(self, tensors: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of registering and of unregistering one cache."""
        arrays = memory.tensors_of(tensors, 1, nbytes, huge=False)
        for array in arrays:
            array[:] = 1
        taken: dict[str, list[float]] = {"register": [], "unregister": []}
        for _ in range(rounds):
            start = time.perf_counter()
            cache = self.engine.register_kv_cache(None, arrays)
            middle = time.perf_counter()
            self.engine.unregister_kv_cache(cache.cache_id)
            taken["register"].append(middle - start)
            taken["unregister"].append(time.perf_counter() - middle)
        return taken

    def many(self, caches: int) -> dict[str, float]:
        """Register so many caches of one block; seconds for all, and the number of the last."""
        whole = memory.tensors_of(1, caches, _BLOCK_BYTES, huge=False)
        memory.fill(whole)
        start = time.perf_counter()
        for block in whole[0]:
            last = self.engine.register_kv_cache(None, [block.reshape(1, -1)])
        return {"seconds": time.perf_counter() - start, "last": last.cache_id}

    def few(self) -> float:
        """Unregister all; seconds."""
        start = time.perf_counter()
        self.engine.finalize()
        return time.perf_counter() - start


def _one(tensors: int, nbytes: int, rounds: int) -> records.Record:
    with Worker("registration:Registering", name="owner") as owner:
        engine = Engine(PULLER, listen=None)
        try:
            engine.link(owner.call("address"))
            taken = owner.call("repeat", tensors=tensors, nbytes=nbytes, rounds=rounds + 1)
        finally:
            engine.close()
    return {
        "kind": "registration",
        "tensors": tensors,
        "tensor_bytes": nbytes,
        **{name: seconds[1:] for name, seconds in taken.items()},
    }


def _many(caches: int, path: str) -> records.Record:
    with Worker("registration:Registering", name="owner") as owner:
        registered = owner.call("many", caches=caches, timeout=300)
        engine = Engine(PULLER, listen=None, path=path)
        try:
            engine.add("kv", 1, 1, _BLOCK_BYTES, "ordinary", filled=False)
            link = engine.link(owner.call("address"))
            index = ucxkv.CacheIndex(OWNER, int(registered["last"]))
            start = time.perf_counter()
            engine.engine.pull_kv_cache(index, engine.caches["kv"])
            first = time.perf_counter() - start
            memory.check(engine.tensors["kv"], np.array([caches - 1]), np.array([0]))
        finally:
            engine.close()
        closing = owner.call("few")
    return {
        "kind": "many_caches",
        "path": path,
        "caches": caches,
        "register": registered["seconds"],
        "link": link,
        "first_pull": first,
        "finalize": closing,
    }


def measure(
    caches: Sequence[int], rounds: int, shapes: Sequence[tuple[int, int]]
) -> list[records.Record]:
    """Records of both kinds."""
    results = []
    with terminal.progress() as bar:
        task = bar.add_task("registration", total=len(shapes) + 2 * len(caches))
        for tensors, nbytes in shapes:
            results.append(_one(tensors, nbytes, rounds))
            bar.advance(task)
        for count in caches:
            for path in ("get", "stream"):
                results.append(_many(count, path))
                bar.advance(task)
    return results


def tables(results: Sequence[records.Record]) -> list[object]:
    """One table for each kind."""
    single = [r for r in results if r["kind"] == "registration"]
    many = [r for r in results if r["kind"] == "many_caches"]
    rows = []
    for record in single:
        cells = [
            f"{median(record[name]) * 1e6:.0f} / {quantile(record[name], 0.9) * 1e6:.0f}"
            for name in ("register", "unregister")
        ]
        rows.append([f"{record['tensors']} x {record['tensor_bytes'] >> 10} KiB", *cells])
    return [
        terminal.table("One cache, µs, p50 / p90", ["tensors", "register", "unregister"], rows),
        terminal.table(
            "Many caches of one block",
            ["caches", "path", "register each µs", "link ms", "first pull ms", "finalize ms"],
            [
                [
                    str(r["caches"]),
                    r["path"],
                    f"{r['register'] / r['caches'] * 1e6:.0f}",
                    f"{r['link'] * 1e3:.1f}",
                    f"{r['first_pull'] * 1e3:.2f}",
                    f"{r['finalize'] * 1e3:.0f}",
                ]
                for r in many
            ],
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caches", nargs="+", type=int, default=_CACHES, metavar="N")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a small size, to try the script out")
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    machine = environment()
    shapes = _SHAPES[:1] if options.tiny else _SHAPES
    results = measure(options.caches, options.rounds, shapes)
    records.write(options.json, [machine, *results])
    for table in tables(results):
        terminal.console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
