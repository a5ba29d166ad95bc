"""How fast the KV cache of a model is pulled.

    python perf/kv_pull.py --local [--model NAME ...] [--tokens N] [--path get stream] ...
    python perf/kv_pull.py --listen HOST:PORT          on the node that has the caches
    python perf/kv_pull.py --connect HOST:PORT ...     on the node that pulls

One rank's share of the cache of `--tokens` tokens is one request: `--tokens` / `--block-size`
scattered blocks of each of its tensors.  `--threads` threads keep `--in-flight` requests each under
way; one round is one request of each.  Variants (paths, kinds of memory) take turns.  Whoever can
reach the listening node's port can have it allocate memory: keep it on a network of your own.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import memory, records, terminal
from common.caches import OWNER, Engine, linked
from common.calls import Caller, serve
from common.environment import environment
from common.models import BY_NAME, MODELS, Model
from common.quantiles import median, quantile
from common.workers import Worker

import ucxkv

_ARRIVALS = 5


@dataclass(frozen=True)
class Request:
    """What a request pulls: blocks of the source, and where they go."""

    source: np.ndarray
    destination: np.ndarray


@dataclass
class Variant:
    """One way to pull, and what was measured of it."""

    path: str
    memory: str
    engine: Engine
    name: str
    remote_id: int
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    owner_cpu: list[float] = field(default_factory=list)
    puller_cpu: list[float] = field(default_factory=list)
    arrivals: list[list[float]] = field(default_factory=list)
    reports: set[tuple[str, int]] = field(default_factory=set)


class Pulls:
    """The pulls of one model: its caches on both sides, and the rounds."""

    def __init__(
        self, owner: Caller | Worker, engines: dict[str, Engine], model: Model, options: Any
    ) -> None:
        self.model = model
        self.options = options
        self.owner = owner
        blocks = -(-options.tokens // options.block_size)
        self.block_bytes = model.token_bytes(options.tp) * options.block_size
        together = options.threads * options.in_flight
        total = blocks * together * (1 if options.contiguous else 2)
        self.requests = _requests(blocks, together, total, options.contiguous)
        step = options.layers or model.layers
        self.ranges = [
            (first, min(first + step, model.layers) - 1) for first in range(0, model.layers, step)
        ]
        self.bytes = blocks * self.block_bytes * model.tensors * model.layers * together
        shape = {
            "tensors": model.tensors * model.layers,
            "blocks": total,
            "block_bytes": self.block_bytes,
        }
        self._names: list[str] = []
        self.variants: list[Variant] = []
        for kind in options.memory:
            self._names.append(kind)
            remote_id = owner.call("add", name=kind, kind=kind, filled=True, timeout=120, **shape)
            for path, engine in engines.items():
                engine.add(kind, kind=kind, filled=False, **shape)
                self.variants.append(Variant(path, kind, engine, kind, remote_id))

    def close(self) -> None:
        """Give the memory of both sides back."""
        for variant in self.variants:
            variant.engine.remove(variant.name)
        for name in self._names:
            self.owner.call("remove", name=name)

    def _start(self, variant: Variant, request: Request) -> list[ucxkv.Transfer]:
        index = ucxkv.CacheIndex(OWNER, variant.remote_id)
        return [
            variant.engine.engine.pull_kv_blocks_async(
                index,
                variant.engine.caches[variant.name],
                request.source,
                request.destination,
                ucxkv.KvCacheExtParam(layers, layers, self.model.tensors),
            )
            for layers in self.ranges
        ]

    def _thread(self, variant: Variant, requests: Sequence[Request]) -> list[float]:
        """Pull these requests at the same time; seconds that each took."""
        start = time.perf_counter()
        running = [self._start(variant, request) for request in requests]
        taken = []
        for transfers in running:
            for transfer in transfers:
                report = transfer.result()
                variant.reports.add((report.path, report.spans))
            taken.append(time.perf_counter() - start)
        return taken

    def round(self, variant: Variant, pool: ThreadPoolExecutor, counted: bool = True) -> None:
        """All requests once, then a look at every byte."""
        tensors = variant.engine.tensors[variant.name]
        destination = np.concatenate([request.destination for request in self.requests])
        memory.clear(tensors, destination)
        each = self.options.in_flight
        shares = [self.requests[i : i + each] for i in range(0, len(self.requests), each)]
        owner_cpu, puller_cpu = self.owner.call("cpu"), variant.engine.cpu()
        start = time.perf_counter()
        if len(shares) == 1:
            taken = [self._thread(variant, shares[0])]
        else:
            taken = list(pool.map(lambda share: self._thread(variant, share), shares))
        seconds = time.perf_counter() - start
        puller_cpu = variant.engine.cpu() - puller_cpu
        owner_cpu = self.owner.call("cpu") - owner_cpu
        source = np.concatenate([request.source for request in self.requests])
        memory.check(tensors, source, destination)
        if counted:
            variant.seconds.append(seconds)
            variant.latencies += [one for share in taken for one in share]
            variant.owner_cpu.append(owner_cpu)
            variant.puller_cpu.append(puller_cpu)

    def arrival(self, variant: Variant) -> None:
        """When each layer of one request arrives."""
        layers = (0, self.model.layers - 1)
        start = time.perf_counter()
        transfer = variant.engine.engine.pull_kv_blocks_async(
            ucxkv.CacheIndex(OWNER, variant.remote_id),
            variant.engine.caches[variant.name],
            self.requests[0].source,
            self.requests[0].destination,
            ucxkv.KvCacheExtParam(layers, layers, self.model.tensors),
        )
        variant.arrivals.append([time.perf_counter() - start for _ in transfer.layers()])
        transfer.result()

    def finish(self) -> None:
        """Whether nothing was written but what should have been."""
        destination = np.concatenate([request.destination for request in self.requests])
        for variant in self.variants:
            memory.check_untouched(variant.engine.tensors[variant.name], destination)

    def record(self, variant: Variant) -> records.Record:
        options = self.options
        return {
            "kind": "kv_pull",
            "model": self.model.name,
            "layout": self.model.source,
            "layers": self.model.layers,
            "tensors_per_layer": self.model.tensors,
            "tokens": options.tokens,
            "block_size": options.block_size,
            "block_bytes": self.block_bytes,
            "tp": options.tp,
            "layers_per_pull": options.layers or self.model.layers,
            "in_flight": options.in_flight,
            "threads": options.threads,
            "contiguous": options.contiguous,
            "path": variant.path,
            "took": sorted({path for path, _ in variant.reports}),
            "memory": variant.memory,
            "link": variant.engine.links(),
            "bytes": self.bytes,
            "seconds": variant.seconds,
            "latencies": variant.latencies,
            "owner_cpu": variant.owner_cpu,
            "puller_cpu": variant.puller_cpu,
            "arrival": [median(times) for times in zip(*variant.arrivals, strict=True)],
        }


def _requests(blocks: int, count: int, total: int, contiguous: bool) -> list[Request]:
    if contiguous:
        places = np.arange(total).reshape(count, blocks)
        return [Request(place, place) for place in places]
    source, destination = (memory.scattered(blocks * count, total, seed) for seed in (1, 2))
    return [
        Request(*pair)
        for pair in zip(
            source.reshape(count, blocks), destination.reshape(count, blocks), strict=True
        )
    ]


def measure(
    owner: Caller | Worker, engines: dict[str, Engine], options: Any
) -> Iterator[records.Record]:
    """One record per model, path and kind of memory."""
    with terminal.progress() as bar, ThreadPoolExecutor(options.threads) as pool:
        for name in options.model:
            pulls = Pulls(owner, engines, BY_NAME[name], options)
            steps = options.warmup + options.rounds + 1
            task = bar.add_task(name, total=steps * len(pulls.variants))
            order = random.Random(name)
            for number in range(options.warmup + options.rounds):
                for variant in order.sample(pulls.variants, len(pulls.variants)):
                    pulls.round(variant, pool, counted=number >= options.warmup)
                    bar.advance(task)
            for variant in pulls.variants:
                for _ in range(_ARRIVALS):
                    pulls.arrival(variant)
                bar.advance(task)
            pulls.finish()
            bar.remove_task(task)
            yield from [pulls.record(variant) for variant in pulls.variants]
            pulls.close()


def _row(record: records.Record) -> list[str]:
    bandwidth = [record["bytes"] / seconds / 1e9 for seconds in record["seconds"]]
    per_gib = 2**30 / record["bytes"]
    taken = record["latencies"]
    return [
        record["model"],
        record["path"] if record["took"] == [record["path"]] else "/".join(record["took"]),
        record["memory"],
        f"{record['bytes'] / 2**20:.3g}",
        f"{median(bandwidth):.2f}",
        f"{quantile(bandwidth, 0.1):.2f}-{quantile(bandwidth, 0.9):.2f}",
        f"{median(taken) * 1e3:.3g}/{quantile(taken, 0.99) * 1e3:.3g}",
        f"{median(record['owner_cpu']) * per_gib:.2f}",
        f"{median(record['puller_cpu']) * per_gib:.2f}",
    ]


def table(results: Sequence[records.Record]) -> object:
    """What was measured, one line per variant."""
    columns = ["model", "path", "memory", "MiB", "GB/s", "p10-p90", "ms p50/p99"]
    rows = [_row(record) for record in results]
    title = "Pulls of one round; right: CPU seconds per GiB"
    return terminal.table(title, [*columns, "owner", "puller"], rows)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise argparse.ArgumentTypeError("an address is HOST:PORT")
    return host.strip("[]"), int(port)


def listen(address: tuple[str, int]) -> None:
    """Be the owner of whoever connects, one after the other, until interrupted."""
    host = address[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(address, family=family) as listener:
        print(f"waiting at {host}:{listener.getsockname()[1]}; Ctrl-C ends it", flush=True)
        while True:
            connection = listener.accept()[0]
            engine = Engine(listen=f"[{host}]:0" if ":" in host else f"{host}:0")
            with connection, contextlib.closing(engine), contextlib.suppress(OSError):
                serve(connection, engine)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--local", action="store_true", help="both sides on this host")
    where.add_argument("--listen", type=_address, metavar="HOST:PORT", help="be the owner")
    where.add_argument("--connect", type=_address, metavar="HOST:PORT", help="pull from there")
    where.add_argument("--models", action="store_true", help="list the models, and end")
    names = [model.name for model in MODELS]
    parser.add_argument("--model", nargs="+", choices=names, default=["llama3-8b"], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=1024, help="of one request (1024)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the KV heads (1)")
    parser.add_argument("--layers", type=int, default=0, help="of one pull (0: all)")
    parser.add_argument("--in-flight", type=int, default=1, help="requests of a thread (1)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contiguous", action="store_true", help="neighbouring blocks, in order")
    parser.add_argument("--path", nargs="+", choices=("auto", "get", "stream"))
    parser.add_argument("--memory", nargs="+", choices=("ordinary", "huge"), default=["ordinary"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count (2)")
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    out = terminal.console()
    if options.models:
        for model in MODELS:
            out.print(f"{model.name:12} {model.source}")
        return 0
    if options.listen:
        with contextlib.suppress(KeyboardInterrupt):
            listen(options.listen)
        return 0
    # On one host both paths mean something; between hosts "auto" tells what there is.
    paths = options.path or (["get", "stream"] if options.local else ["auto"])
    machine = environment()
    with contextlib.ExitStack() as stack:
        owner: Caller | Worker
        if options.local:
            owner = stack.enter_context(Worker("common.caches:Engine", name="owner"))
        else:
            owner = Caller(socket.create_connection(options.connect, 10), "owner")
            stack.callback(owner.close)
        engines = stack.enter_context(linked(owner, paths))
        results = list(measure(owner, engines, options))
    records.write(options.json, [machine, *results])
    out.print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
