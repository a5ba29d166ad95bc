"""How long a pull should take: a model, checked against pulls that are measured here.

    python perf/model.py [--path get stream] [--rounds N] [--json FILE]
    python perf/model.py --measured FILE          the same from what --json has written
    python perf/model.py --fabric NAME ... [--span BYTES] [--bytes N] [--rails N] [--owners N] ...

The costs of each path are fitted to some of the measured pulls; the others, with other spans and
with two owners, are predicted and compared.  The exit status is 1 if one of them is more than 20 %
wrong.  Each point is the median of the fastest eighth of its rounds: what a pull costs by itself,
since whatever disturbs it only makes it slower.  Where even then threads had to wait for a
processor, for a fifth of the time, the point is called disturbed and not judged; if more than half
are, nothing has been shown, and the exit status is 2: run it where nothing else runs.

Predictions for fabrics rest on published figures of adapters and on assumed costs of the puller's
processor.  They have not been checked on any: they are to be read as "what would decide here?".
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from common import loggp, records, terminal
from common.caches import OWNER, PULLER, Engine
from common.environment import environment
from common.loggp import Part
from common.quantiles import median
from common.workers import Worker

import ucxkv

BOUND = 0.2
_KEPT = 1 / 8
_WAITED = 0.2
_SMALL = 64 << 10
_FITTED = (1 << 10, 16 << 10, 1 << 20)
_PREDICTED = (4 << 10, 64 << 10, 256 << 10)
_COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
# Pulls at a time, and bytes of each, that tell what a message costs.
_BURST, _BURST_BYTES = 128, 4 << 10
_CACHE_BYTES = 128 << 20
_MOST_BYTES = 32 << 20
_KIB, _MIB = 1 << 10, 1 << 20

# Of pyx/ucxkv/core.pxd and cma.pxd: how the paths of this library cut a pull.
_SHAPES = {
    "get": {"operation_bytes": 1 << 20, "operation_spans": 256, "grain": 4096, "window": 4 << 20},
    "stream": {"operation_bytes": 256 << 10, "operation_spans": 1 << 30, "window": 2 << 20},
}
_NOTHING = Part()


@dataclass(frozen=True)
class Fabric:
    """An adapter as others describe it, and published bandwidths of what moves caches over it.

    `published` are GB/s by the number of rails, with their source.
    """

    path: loggp.Path
    source: str
    published: dict[int, tuple[float, str]]


def _verbs(gbit: float, round_trip: float, source: str, published: dict[int, tuple[float, str]]):
    """One-sided reads: at most 16 of a queue pair are outstanding at a time."""
    path = loggp.Path(
        call=20e-6,
        latency=round_trip,
        owner=_NOTHING,
        wire=Part(operation=20e-9, byte=8e-9 / (0.97 * gbit)),
        puller=Part(operation=0.5e-6),
        operation_bytes=1 << 20,
        in_flight=16,
    )
    return Fabric(path, source, published)


_MOONCAKE = "README of Mooncake's Transfer Engine: 40 GB of caches over RoCE"
_ADAPTER = (
    "line rate less 3 % of headers, 16 outstanding reads, latencies as perftest shows them;"
    " 0.5 us of the puller's processor for a GET is a guess"
)
FABRICS = {
    "100G RoCE": _verbs(100, 3e-6, _ADAPTER, {}),
    "200G": _verbs(200, 2.5e-6, _ADAPTER, {4: (87.0, _MOONCAKE)}),
    "400G": _verbs(400, 2.5e-6, _ADAPTER, {8: (190.0, _MOONCAKE)}),
}


@dataclass(frozen=True)
class Point:
    """One kind of pull, or of as many at a time from each owner, and what it took."""

    path: str
    span_bytes: int
    spans: int
    owners: int
    pulls: int
    seconds: float
    waited: float
    owner_cpu: float
    puller_cpu: float

    @property
    def fitted(self) -> bool:
        """Whether costs are fitted to it; otherwise it is predicted."""
        return self.span_bytes in _FITTED and not self.burst

    @property
    def burst(self) -> bool:
        """Whether it was many pulls, which tell what a message costs, and are not predicted."""
        return self.pulls > 1

    @property
    def bytes(self) -> int:
        return self.spans * self.span_bytes


class Side(Engine):
    """An engine whose process tells what its threads have used, and for how long they waited."""

    def used(self) -> tuple[float, float]:
        """CPU seconds, and seconds in which a thread was ready to run and had no processor."""
        waited = 0
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                waited += int((thread / "schedstat").read_text().split()[1])
        return self.cpu(), waited * 1e-9


class Bench:
    """Owners in processes of their own, a puller here for each path, and pulls of one span size."""

    def __init__(self, paths: Sequence[str], owners: int, cache_bytes: int) -> None:
        self._stack = contextlib.ExitStack()
        self._cache_bytes = cache_bytes
        self.owners = [
            self._stack.enter_context(
                Worker("model:Side", name=f"owner {i}", cluster_id=OWNER + 10 * i)
            )
            for i in range(owners)
        ]
        self.engines: dict[str, Side] = {}
        for number, path in enumerate(paths):
            engine = Side(PULLER + number, listen=None, path=path)
            self.engines[path] = self._stack.enter_context(contextlib.closing(engine))
            for i, owner in enumerate(self.owners):
                engine.link(owner.call("address"), OWNER + 10 * i)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def spans_of(self, span_bytes: int):
        """With caches whose blocks are these spans."""
        self._blocks = max(4, self._cache_bytes // span_bytes)
        shape = {"tensors": 1, "blocks": self._blocks, "block_bytes": span_bytes}
        self._ids = [
            owner.call("add", name="kv", filled=True, kind="ordinary", **shape)
            for owner in self.owners
        ]
        for engine in self.engines.values():
            engine.add("kv", filled=False, kind="ordinary", **shape)
        try:
            yield
        finally:
            for engine in self.engines.values():
                engine.remove("kv")
            for owner in self.owners:
                owner.call("remove", name="kv")

    def pull(
        self, path: str, spans: int, owners: int, pulls: int, numbers: np.random.Generator
    ) -> tuple[float, float, float, float]:
        """Pull so many spans, in equal shares of the owners and of the pulls from each.

        Seconds that it took, that threads waited for a processor, and CPU seconds of both sides.
        """
        engine = self.engines[path]
        half = self._blocks // 2
        # Every other block of both sides, so that none is another's neighbour.
        places = numbers.permutation(half)[:spans] * 2
        shares = np.array_split(places, owners * pulls)
        one = ucxkv.KvCacheExtParam(tensor_num_per_layer=1)
        cache = engine.caches["kv"]
        before = [owner.call("used") for owner in self.owners]
        ours = engine.used()
        start = time.perf_counter()
        if len(shares) == 1:
            index = ucxkv.CacheIndex(OWNER, self._ids[0])
            engine.engine.pull_kv_blocks(index, cache, places, places + 1, one)
        else:
            running = [
                engine.engine.pull_kv_blocks_async(
                    ucxkv.CacheIndex(OWNER + 10 * (i % owners), self._ids[i % owners]),
                    cache,
                    share,
                    share + 1,
                    one,
                )
                for i, share in enumerate(shares)
            ]
            for transfer in running:
                transfer.result()
        seconds = time.perf_counter() - start
        puller, waited = (now - then for now, then in zip(engine.used(), ours, strict=True))
        after = [owner.call("used") for owner in self.owners]
        owner = sum(now[0] - then[0] for now, then in zip(after, before, strict=True))
        waited += sum(now[1] - then[1] for now, then in zip(after, before, strict=True))
        return seconds, waited, owner, puller


def measure(
    paths: Sequence[str], rounds: int, cache_bytes: int = _CACHE_BYTES, most: int = _MOST_BYTES
) -> list[Point]:
    """Pulls of all span sizes and counts, of one owner and of two, in turns."""
    points = []
    sizes = [*_FITTED, *_PREDICTED]
    with Bench(paths, 2, cache_bytes) as bench, terminal.progress() as bar:
        task = bar.add_task("pulls", total=len(sizes) * rounds)
        for size in sizes:
            counts = [n for n in _COUNTS if n * size <= most and 2 * n * size <= cache_bytes]
            cells = [(path, n, 1, 1) for path in paths for n in counts]
            cells += [(path, n, 2, 1) for path in paths for n in counts if n > 1]
            if size == _BURST_BYTES and "stream" in paths:
                cells.append(("stream", _BURST, 1, _BURST))
            taken: dict[tuple[str, int, int, int], list[tuple[float, ...]]] = {}
            order = random.Random(size)
            numbers = np.random.default_rng(size)
            with bench.spans_of(size):
                for cell in cells:
                    bench.pull(*cell, numbers)
                for _ in range(rounds):
                    for cell in order.sample(cells, len(cells)):
                        taken.setdefault(cell, []).append(bench.pull(*cell, numbers))
                    bar.advance(task)
            for (path, *how), rows in taken.items():
                kept = sorted(rows)[: max(1, round(len(rows) * _KEPT))]
                points.append(Point(path, size, *how, *map(median, zip(*kept, strict=True))))
    return points


def undisturbed(points: Sequence[Point]) -> list[Point]:
    """The points whose threads had a processor when they wanted one."""
    small = [point.waited for point in points if point.bytes <= _SMALL]
    # Asking the processes what they have used wakes threads too.
    asking = median(small)
    return [point for point in points if point.waited - asking <= _WAITED * point.seconds]


def costs(path: str, points: Sequence[Point], cores: int) -> loggp.Path:
    """The costs of a path on this machine, from those of the points that are for fitting."""
    fitted = [point for point in points if point.path == path and point.fitted]
    everything = [point for point in fitted if point.owners == 1]
    quiet = undisturbed(everything)
    # Few points would not tell the costs apart.
    alone = quiet if 2 * len(quiet) > len(everything) else everything
    shape = loggp.Path(0.0, 0.0, _NOTHING, _NOTHING, _NOTHING, cores=cores, **_SHAPES[path])
    if path == "get":
        helpers = np.linspace(0, 1, 21)
        found = min(
            (_copied(shape, alone, float(helper)) for helper in helpers),
            key=lambda one: sum(error(one, point) ** 2 for point in alone),
        )
    else:
        bursts = [point for point in points if point.path == path and point.burst]
        found = _streamed(shape, alone, bursts)
    more = [point for point in fitted if point.owners > 1 and point.bytes <= _SMALL]
    each = median([point.seconds - _predicted(found, point) for point in more])
    return replace(found, another=max(0.0, each))


def _columns(path: loggp.Path, points: Sequence[Point]) -> list[list[float]]:
    works = [loggp.work(path, point.spans, point.span_bytes) for point in points]
    return [[work.spans, work.operations, work.rounded_bytes] for work in works]


def _copied(shape: loggp.Path, points: Sequence[Point], helper: float) -> loggp.Path:
    """One side works, with a helper: the time that it takes tells all."""
    helped = replace(shape, helper=helper)
    rows = [
        [1.0, *(helped.unhelped(point.bytes) * value for value in row)]
        for point, row in zip(points, _columns(shape, points), strict=True)
    ]
    call, *puller = loggp.fit(rows, [point.seconds for point in points])
    return replace(helped, call=call, puller=Part(*puller))


def _streamed(shape: loggp.Path, points: Sequence[Point], bursts: Sequence[Point]) -> loggp.Path:
    """Two sides work at the same time: their processors' times tell who does what.

    Messages are as many as the bytes make them, so what one costs cannot be told from those of
    large pulls.  An owner that serves many small ones has a request and a message for each.
    """
    small = [point for point in points if point.bytes <= _SMALL]
    rows = [[1.0, spans, nbytes] for spans, _, nbytes in _columns(shape, points)]
    _, *owner = loggp.fit(rows, [point.owner_cpu for point in points])
    _, *puller = loggp.fit(rows, [point.puller_cpu for point in points])
    each = [point.owner_cpu / point.pulls - owner[0] - owner[1] * _BURST_BYTES for point in bursts]
    message = max(0.0, *each)
    parts = [
        Part(span, message, max(0.0, byte - message / shape.operation_bytes))
        for span, byte in (owner, puller)
    ]
    found = replace(shape, owner=parts[0], puller=parts[1])
    call = max(0.0, median([point.seconds - _predicted(found, point) for point in small]))
    return replace(found, call=call, latency=call)


def _predicted(path: loggp.Path, point: Point) -> float:
    return loggp.predict(path, point.spans, point.span_bytes, owners=point.owners)[0]


def error(path: loggp.Path, point: Point) -> float:
    """How far the prediction is from the measured time, as a share of it."""
    return _predicted(path, point) / point.seconds - 1


def smallest_window(path: loggp.Path, span_bytes: int, rails: int) -> int:
    """The least power of two of bytes in flight that a long pull has within 5 % of its best."""
    spans = (1 << 30) // span_bytes
    best, _ = loggp.predict(
        replace(path, window=1 << 40, in_flight=1 << 30), spans, span_bytes, rails=rails
    )
    window = max(path.grain, min(span_bytes, path.operation_bytes))
    while window < 1 << 30:
        tried = replace(path, window=window, in_flight=1 << 30)
        if loggp.predict(tried, spans, span_bytes, rails=rails)[0] <= 1.05 * best:
            break
        window *= 2
    return window


def even_span(path: loggp.Path) -> float:
    """Bytes of a span that costs as much for being one as for its bytes: merging pays below.

    Infinite where so little was measured that bytes seemed to cost nothing.
    """
    parts = path.puller, path.owner, path.wire
    single = path.operation_spans == 1
    span = max(part.span + single * part.operation for part in parts)
    byte = max(part.byte for part in parts)
    return span / byte if byte > 0 else math.inf


def validation_table(found: dict[str, loggp.Path], points: Sequence[Point]) -> object:
    """One line per path, span size and number of owners of what was predicted."""
    rows: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        rows.setdefault((point.path, point.span_bytes, point.owners), []).append(point)
    lines = []
    for (path, size, owners), group in sorted(rows.items()):
        errors = [error(found[path], point) for point in group]
        worst = max(errors, key=abs)
        largest = max(group, key=lambda point: point.bytes)
        lines.append(
            [
                path,
                str(size >> 10),
                str(owners),
                f"{largest.spans}",
                f"{largest.seconds * 1e3:.2f}",
                f"{_predicted(found[path], largest) * 1e3:.2f}",
                f"{median([abs(one) for one in errors]):.0%}",
                f"{worst:+.0%}",
            ]
        )
    columns = ["path", "KiB", "owners", "spans", "ms", "model", "median error", "worst"]
    return terminal.table("Pulls that were predicted; ms are those of the largest", columns, lines)


def costs_table(found: dict[str, loggp.Path]) -> object:
    """The fitted costs of each path."""
    lines = []
    for name, path in found.items():
        for side in ("owner", "puller"):
            part = getattr(path, side)
            lines.append(
                [
                    name,
                    side,
                    f"{path.call * 1e6:.0f}",
                    f"{path.another * 1e6:.0f}",
                    f"{part.span * 1e6:.2f}",
                    f"{part.operation * 1e6:.1f}",
                    f"{1e-9 / part.byte:.2f}" if part.byte else "-",
                    f"{path.helper:.2f}" if side == "puller" else "-",
                    f"{even_span(path) / _KIB:.1f}" if side == "puller" else "-",
                ]
            )
    columns = [
        "path",
        "part",
        "call µs",
        "another",
        "span µs",
        "operation",
        "GB/s",
        "helper",
        "even KiB",
    ]
    return terminal.table("Costs, fitted to other pulls", columns, lines)


def chunk_table(stream: loggp.Path) -> object:
    """What other sizes of a streamed message would do."""
    lines = []
    for chunk in (32 * _KIB, 64 * _KIB, 128 * _KIB, 256 * _KIB, 512 * _KIB, _MIB):
        tried = replace(stream, operation_bytes=chunk)
        cells = [
            loggp.predict(tried, total // (64 * _KIB), 64 * _KIB)[0] for total in (_MIB, 64 * _MIB)
        ]
        lines.append([str(chunk >> 10), *(f"{cell * 1e3:.2f}" for cell in cells)])
    return terminal.table(
        "Streaming in other chunks, predicted: ms", ["KiB", "1 MiB", "64 MiB"], lines
    )


def fabric_records(
    names: Sequence[str],
    spans: Sequence[int],
    total: int,
    rails: Sequence[int],
    owners: int,
    links: int,
) -> list[records.Record]:
    """Predictions, each with what decides and with the window that it wants."""
    found = []
    for name in names:
        fabric = FABRICS[name]
        for count in rails:
            for span in spans:
                seconds, decides = loggp.predict(
                    replace(fabric.path, in_flight=fabric.path.in_flight * count),
                    total // span,
                    span,
                    rails=count,
                    owners=owners,
                    links=links,
                )
                published, source = fabric.published.get(count, (None, ""))
                found.append(
                    {
                        "kind": "prediction",
                        "validated": False,
                        "fabric": name,
                        "assumed": fabric.source,
                        "rails": count,
                        "owners": owners,
                        "links": links,
                        "span_bytes": span,
                        "bytes": total // span * span,
                        "seconds": seconds,
                        "decides": decides,
                        "window": smallest_window(fabric.path, span, count),
                        "even_span": even_span(fabric.path),
                        "drain": fabric.path.window * fabric.path.wire.byte / count,
                        "published": published,
                        "published_by": source,
                    }
                )
    return found


def fabric_table(found: Sequence[records.Record]) -> object:
    """One line per prediction."""
    lines = [
        [
            record["fabric"],
            str(record["rails"]),
            str(record["span_bytes"] >> 10),
            f"{record['seconds'] * 1e3:.2f}",
            terminal.rate(record["bytes"], record["seconds"]),
            record["decides"],
            f"{record['window'] >> 10}",
            f"{record['drain'] * 1e3:.2f}",
            f"{record['published']:.0f}" if record["published"] else "-",
        ]
        for record in found
    ]
    columns = ["fabric", "rails", "KiB", "ms", "GB/s", "decides", "window", "drain ms", "others"]
    return terminal.table(
        "NOT VALIDATED: fabrics, from published figures and assumed costs", columns, lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", nargs="+", choices=("get", "stream"), default=["get", "stream"])
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--measured", type=Path, help="read the pulls from what --json has written")
    parser.add_argument("--tiny", action="store_true", help="small pulls, which prove nothing")
    parser.add_argument(
        "--fabric", nargs="+", choices=tuple(FABRICS), help="predict these, measure nothing"
    )
    parser.add_argument(
        "--span", nargs="+", type=int, default=[4096, 65536, 1 << 20], metavar="BYTES"
    )
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of a predicted pull (1 GiB)")
    parser.add_argument("--rails", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument(
        "--owners", type=int, default=1, help="that a predicted pull is spread over"
    )
    parser.add_argument("--links", type=int, default=1, help="to each owner")
    parser.add_argument("--json", type=Path, help="write the results there, as lines of JSON")
    options = parser.parse_args(arguments)
    console = terminal.console()
    if options.fabric:
        found = fabric_records(
            options.fabric,
            options.span,
            options.bytes,
            options.rails,
            options.owners,
            options.links,
        )
        records.write(options.json, [environment(), *found])
        console.print(fabric_table(found))
        return 0
    if options.measured:
        machine, *rest = records.read([options.measured])
        points = [
            Point(**{name: record[name] for name in Point.__dataclass_fields__})
            for record in rest
            if record["kind"] == "point"
        ]
    else:
        machine = environment()
        sizes = (4 * _MIB, _MIB) if options.tiny else (_CACHE_BYTES, _MOST_BYTES)
        points = measure(options.path, options.rounds, *sizes)
    paths = {
        path: costs(path, points, machine["usable_cores"])
        for path in dict.fromkeys(p.path for p in points)
    }
    quiet = set(undisturbed(points))
    predicted = [point for point in points if not (point.fitted or point.burst)]
    judged = [point for point in predicted if point in quiet]
    records.write(
        options.json,
        [
            machine,
            *({"kind": "costs", "path": name, **asdict(path)} for name, path in paths.items()),
            *(
                {
                    "kind": "point",
                    **asdict(point),
                    "fitted": point.fitted,
                    "disturbed": point not in quiet,
                    "predicted": None if point.burst else _predicted(paths[point.path], point),
                }
                for point in points
            ),
        ],
    )
    console.print(costs_table(paths), validation_table(paths, judged))
    if "stream" in paths:
        console.print(chunk_table(paths["stream"]))
    console.print(f"\n{len(predicted) - len(judged)} of {len(predicted)} pulls were disturbed.")
    if 2 * len(judged) < len(predicted):
        console.print("Nothing has been shown: other work keeps the processors busy.")
        return 0 if options.tiny else 2
    worst = max(abs(error(paths[point.path], point)) for point in judged)
    kept = worst <= BOUND
    console.print(f"Worst error {worst:.0%}, bound {BOUND:.0%}: {'kept' if kept else 'MISSED'}")
    return 0 if kept or options.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
