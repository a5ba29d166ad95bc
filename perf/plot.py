"""Draws what the other scripts have written: one PNG, and one HTML page that needs nothing else.

    python perf/plot.py RESULTS.json ... [--png FILE] [--html FILE]

Takes lines of JSON of compare.py, kv_pull.py and latency.py, in any number of files; what there is
nothing about is left out.  Wants matplotlib (``pip install 'ucxkv[perf]'``).
"""

from __future__ import annotations

import argparse
import html
import io
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from common import records
from common.quantiles import median, quantile

# Okabe and Ito's colours, which people with any colour vision can tell apart; the markers and the
# dashes do it for those who print in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_BETWEEN = {"host": "same host", "tcp": "TCP over loopback"}
# The same thing looks the same in every picture; what is never in one picture may share a style.
_LOOKS = {
    "ucxkv get": 0,
    "ucxkv stream": 0,
    "ucxkv get, huge pages": 5,
    "NIXL": 1,
    "bare ucp_get_nbx": 2,
    "process_vm_readv": 3,
    "plain sockets": 3,
    "Mooncake": 4,
    "memcpy": 6,
    "iperf3": 6,
    "ucx_perftest": 7,
}
_SIZE = (13, 10)


def _size(nbytes: float, _position: object = None) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes:g} B"


def _microseconds(value: float, _position: object = None) -> str:
    return f"{value / 1000:g} ms" if value >= 1000 else f"{value:g} µs"


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 6,
        # Ours comes first and is drawn over the others.
        "linewidth": 2.6 if number == 0 else 1.5,
        "zorder": 10 - number,
    }


def _block_sizes(axes: Any, sizes: Iterable[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(sizes)))
    axes.xaxis.set_major_formatter(_size)
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("block size")


def bandwidths(results: Sequence[records.Record], between: str) -> Callable[[Any], None] | None:
    """Bandwidth against block size, one line per contender."""
    lines: dict[str, list[tuple[int, list[float]]]] = {}
    for record in results:
        if record["kind"] != "compare" or record["between"] != between:
            continue
        if record["work"].startswith("W") and record["seconds"]:
            values = [record["bytes"] / seconds / 1e9 for seconds in record["seconds"]]
            point = (record["bytes"] // record["spans"], values)
            lines.setdefault(record["label"], []).append(point)
    if not lines:
        return None

    def draw(axes: Any) -> None:
        for number, (label, points) in enumerate(lines.items()):
            # A little apart, so that none hides another.
            apart = 1.05 ** (number - len(lines) / 2)
            sizes = [size * apart for size, _ in sorted(points)]
            values = [found for _, found in sorted(points)]
            middle = [median(found) for found in values]
            spread = [
                [m - quantile(found, 0.1) for m, found in zip(middle, values, strict=True)],
                [quantile(found, 0.9) - m for m, found in zip(middle, values, strict=True)],
            ]
            style = _style(_LOOKS.get(label, number))
            axes.errorbar(sizes, middle, spread, label=label, elinewidth=0.8, **style)
        _block_sizes(axes, (size for points in lines.values() for size, _ in points))
        axes.set_ylabel("GB/s (median, p10 to p90)")
        axes.set_ylim(bottom=0)
        axes.set_title(f"Bandwidth, {_BETWEEN[between]}")

    return draw


def latencies(results: Sequence[records.Record]) -> Callable[[Any], None] | None:
    """Median and 99th percentile of single pulls against their size."""
    found: dict[tuple[str, float], list[tuple[int, list[float]]]] = {}
    for record in results:
        if record["kind"] == "latency" and record["how"] == "blocking":
            point = (record["bytes"], record["seconds"])
            found.setdefault((record["path"], record["pause"]), []).append(point)
    if not found:
        return None

    def draw(axes: Any) -> None:
        for number, ((path, pause), points) in enumerate(sorted(found.items())):
            sizes = [size for size, _ in sorted(points)]
            when = f"after {pause * 1e3:g} ms" if pause else "back to back"
            for share, dashes, label in ((0.5, "-", f"{path}, {when}"), (0.99, ":", None)):
                values = [quantile(taken, share) * 1e6 for _, taken in sorted(points)]
                axes.plot(sizes, values, linestyle=dashes, label=label, **_style(number))
        _block_sizes(axes, (size for points in found.values() for size, _ in points))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_microseconds)
        axes.set_ylabel("time of one pull (line: p50, dots: p99)")
        axes.set_title("Latency of one block")

    return draw


def arrivals(results: Sequence[records.Record]) -> Callable[[Any], None] | None:
    """How many layers have arrived, against the time since the call."""
    found = [record for record in results if record["kind"] == "kv_pull" and record["arrival"]]
    models = list(dict.fromkeys(record["model"] for record in found))
    if not models:
        return None
    # More models in one picture say less.
    chosen = [record for record in found if record["model"] == models[0]][: len(_COLOURS)]

    def draw(axes: Any) -> None:
        for number, record in enumerate(chosen):
            times = [0.0, *(seconds * 1e3 for seconds in record["arrival"])]
            label = f"{record['path']}, {record['memory']} memory"
            style = {**_style(number), "marker": None}
            axes.step(times, range(len(times)), where="post", label=label, **style)
        axes.set_xlabel("ms since the call")
        axes.set_ylabel("layers that have arrived")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        first = chosen[0]
        title = f"Arrival of layers, {first['model']}, {first['tokens']} tokens"
        axes.set_title(title)

    return draw


def panels(results: Sequence[records.Record]) -> list[Callable[[Any], None]]:
    """What there is to draw."""
    made = [
        bandwidths(results, "host"),
        bandwidths(results, "tcp"),
        latencies(results),
        arrivals(results),
    ]
    return [panel for panel in made if panel is not None]


def figure(drawn: Sequence[Callable[[Any], None]]) -> Any:
    """All panels in one picture."""
    across = 1 if len(drawn) == 1 else 2
    rows = math.ceil(len(drawn) / across)
    whole, grid = plt.subplots(
        rows,
        across,
        figsize=(_SIZE[0] * across / 2, _SIZE[1] * rows / 2),
        squeeze=False,
        layout="constrained",
    )
    places = list(grid.flat)
    for panel, axes in zip(drawn, places, strict=False):
        panel(axes)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        # Below, where it hides nothing.
        columns = 2 if len(axes.get_legend_handles_labels()[1]) <= 4 else 3
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns, frameon=False)
    for axes in places[len(drawn) :]:
        axes.remove()
    return whole


def _inline(drawn: Callable[[Any], None]) -> str:
    buffer = io.StringIO()
    whole = figure([drawn])
    whole.savefig(buffer, format="svg")
    plt.close(whole)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _compare_rows(results: Sequence[records.Record]) -> Iterable[list[str]]:
    for record in results:
        if record["kind"] != "compare" or not record["seconds"]:
            continue
        seconds = record["seconds"]
        taken = f"{median(seconds) * 1e6:,.0f} / {quantile(seconds, 0.99) * 1e6:,.0f}"
        yield [
            record["label"],
            _BETWEEN[record["between"]],
            record["work"],
            f"{record['bytes'] / median(seconds) / 1e9:.2f}",
            taken,
        ]


def page(results: Sequence[records.Record], drawn: Sequence[Callable[[Any], None]]) -> str:
    """The page: machine, pictures, figures."""
    machines = [record for record in results if record["kind"] == "environment"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>ucxkv, measured</title>",
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;"
        "padding:0 1em;color:#222}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
        ".pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(26em,1fr));gap:1em}"
        "</style><h1>ucxkv, measured</h1>",
    ]
    if machines:
        machine = machines[0]
        parts.append(
            "<p>"
            + html.escape(
                f"{machine['cpu']}, {machine['usable_cores']} cores, Linux {machine['kernel']}; "
                f"UCX {machine['ucx']} ({machine['ucx_origin']}), Python {machine['python']}, "
                f"ucxkv {machine['ucxkv']}; {machine['time']}"
            )
            + "</p>"
        )
    parts.append("<div class='pictures'>" + "".join(map(_inline, drawn)) + "</div>")
    rows = list(_compare_rows(results))
    if rows:
        columns = ["", "between", "work", "GB/s, median", "µs, p50 / p99"]
        parts.append("<h2>Comparison</h2>" + _table(columns, rows))
    if machines:
        settings = ((name, str(value)) for name, value in machines[0].items() if name != "kind")
        parts.append("<h2>Environment</h2>" + _table(["", ""], settings))
    return "\n".join(parts) + "</html>\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, default=Path("ucxkv-perf.png"))
    parser.add_argument("--html", type=Path, default=Path("ucxkv-perf.html"))
    options = parser.parse_args(arguments)
    matplotlib.use("Agg")
    # Text stays text: smaller, and it can be searched.
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["legend.fontsize"] = 8.5
    results = records.read(options.results)
    drawn = panels(results)
    if not drawn:
        print("nothing in these files can be drawn", file=sys.stderr)
        return 1
    whole = figure(drawn)
    whole.savefig(options.png, dpi=130)
    plt.close(whole)
    options.html.write_text(page(results, drawn))
    print("drawn:", options.png, options.html, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
