"""The demo to its user: progress while it runs, then what came out, in 80 columns."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ucxkv.demo import processes
from ucxkv.demo.run import Outcome, gigabytes_per_second

COLUMNS = 80
_LABEL = 13
_PATIENCE = 1.0
_SHOWN_BLOCKS = 8
_WHAT = {
    ("prefill", "weights"): "prefill: making weights",
    ("prefill", "prefill"): "prefill: computing the prompt",
    ("prefill", "digest"): "prefill: hashing its cache",
    ("decode", "weights"): "decode: making weights",
    ("decode", "pull"): "decode: pulling the cache",
    ("decode", "generate"): "decode: generating",
    ("decode", "digest"): "decode: hashing its cache",
    ("reference", "weights"): "one process: making weights",
    ("reference", "recompute"): "one process: computing the prompt",
    ("reference", "generate"): "one process: generating",
}


def progress() -> Bars | Lines:
    """What shows progress on this standard error."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines(sys.stderr)


class Lines:
    """Progress for a log or a pipe: a line every `every` seconds, none for what takes less."""

    def __init__(self, file: TextIO, every: float = 5.0) -> None:
        self._file = file
        self._every = every
        self._next = time.monotonic() + every

    def close(self) -> None:
        """Nothing is left to be taken back."""

    def update(self, process: str, progress: processes.Progress) -> None:
        """Tell how far a process is, unless something was told just before."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            share = 100 * progress.done // progress.total
            print(f"{_what(process, progress)}, {share} %", file=self._file, flush=True)


class Bars:
    """Progress bars on a terminal, from the second second on."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=26),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._patient_until = time.monotonic() + _PATIENCE
        self._bars: dict[str, tuple[str, TaskID]] = {}
        self._started = False

    def close(self) -> None:
        if self._started:
            self._progress.stop()

    def update(self, process: str, progress: processes.Progress) -> None:
        """Note how far a process is: one bar for each process, for what it does at the time."""
        what, bar = self._bars.get(process, ("", None))
        if bar is None or what != progress.what:
            if bar is not None:
                self._progress.remove_task(bar)
            bar = self._progress.add_task(_what(process, progress), total=progress.total)
            self._bars[process] = progress.what, bar
        self._progress.update(bar, completed=progress.done)
        if progress.done == progress.total:
            self._progress.remove_task(bar)
            del self._bars[process]
        if not self._started and time.monotonic() >= self._patient_until:
            self._started = True
            self._progress.start()


def _what(process: str, progress: processes.Progress) -> str:
    return _WHAT.get((process, progress.what), f"{process}: {progress.what}")


def lines(outcome: Outcome) -> list[str]:
    """The outcome in words, no line longer than 80 columns."""
    job, decoded, alone = outcome.job, outcome.decoded, outcome.alone
    config, report = job.config, decoded.report
    pulled, recomputed = decoded.first_token_seconds, alone.first_token_seconds
    model = (
        f"{config.layers} layers, {config.dim} wide, {config.heads} heads on {config.kv_heads}"
        f" KV heads, {_count(config.weights)} weights (seed {config.seed})"
    )
    prefilled = (
        f"process {outcome.prefilled.pid} at {outcome.prefilled.address} computed"
        f" {len(job.prompt):,} tokens in {_seconds(outcome.prefilled.seconds)}"
    )
    there = 100 * decoded.started_bytes / max(report.bytes, 1)
    started = f"began after {_seconds(decoded.started_seconds)}, with {there:.0f} % of the bytes"
    threads = f"{outcome.blas_threads} BLAS {_plural('thread', outcome.blas_threads)}"
    again = f"{_seconds(recomputed)} by computing it again ({threads})"
    rows = [
        ("Model", model),
        ("Prefill", prefilled),
        ("Decode", f"process {decoded.pid} linked to it in {_seconds(decoded.link_seconds)}"),
        ("", ""),
        ("Moved", _moved(outcome)),
        ("Path", f"{report.path}, on a link with {', '.join(decoded.transports) or 'no name'}"),
        ("Speed", f"{gigabytes_per_second(decoded):.2f} GB/s ({_seconds(report.seconds)})"),
        ("Layer 0", started),
        *_paged(outcome),
        ("", ""),
        ("First token", f"{_seconds(pulled)} by pulling the prompt's cache"),
        ("", f"{again}: {_times(recomputed, pulled)}"),
        ("Text", _text(decoded.tokens)),
        ("Cache", _RIGHT if outcome.bytes_equal else _WRONG),
        ("Tokens", _verdict(outcome)),
    ]
    return [line for label, text in rows for line in _row(label, text)]


_RIGHT = "the bytes pulled are the prefill process's"
_WRONG = "WRONG: the bytes pulled are not the prefill process's"


def _moved(outcome: Outcome) -> str:
    report, blocks = outcome.decoded.report, len(outcome.decoded.blocks)
    moved = f"{report.bytes:,} bytes in {report.spans:,} {_plural('span', report.spans)}"
    if not blocks:
        return moved
    return f"{blocks:,} {_plural('block', blocks)} of {outcome.job.block_tokens:,} tokens: {moved}"


def _paged(outcome: Outcome) -> list[tuple[str, str]]:
    held = outcome.prefilled.held
    if held is None:
        return []
    ended = f"ended by the notice {held.notice!r} after {_seconds(held.seconds)}"
    return [
        ("Blocks", f"{_few(held.blocks)} of prefill"),
        ("", f"to {_few(outcome.decoded.blocks)} of decode"),
        ("Hold", f"{ended}; prefill has written over its blocks since"),
    ]


def _few(blocks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, blocks[:_SHOWN_BLOCKS]))
    return shown if len(blocks) <= _SHOWN_BLOCKS else f"{shown}, ..."


def _verdict(outcome: Outcome) -> str:
    ours, theirs = outcome.decoded.tokens, outcome.alone.tokens
    if outcome.tokens_equal:
        return f"all {len(ours)} equal to those of a single process"
    first = 1
    while ours[:first] == theirs[:first]:
        first += 1
    return f"WRONG: they differ from those of a single process, from token {first} on"


def _row(label: str, text: str) -> list[str]:
    """A label and its text, which is broken at blanks and cut where there are none."""
    width = COLUMNS - _LABEL
    rows: list[str] = []
    while len(text) > width:
        cut = text.rfind(" ", 0, width + 1)
        cut = cut if cut > 0 else width
        rows.append(text[:cut])
        text = text[cut:].lstrip(" ")
    rows.append(text)
    labels = [label, *[""] * (len(rows) - 1)]
    return [f"{label:<{_LABEL}}{row}".rstrip() for label, row in zip(labels, rows, strict=True)]


def _text(tokens: tuple[int, ...]) -> str:
    """Random weights write no language: what is not plain ASCII is shown as a dot."""
    shown = "".join(chr(token) if 32 <= token < 127 else "." for token in tokens)
    width = COLUMNS - _LABEL
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s"


def _times(slow: float, fast: float) -> str:
    factor = slow / max(fast, 1e-9)
    return f"{factor:.1f} times as long" if factor < 10 else f"{factor:.0f} times as long"


def _count(number: int) -> str:
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e6:.1f} M" if number < 1e9 else f"{number / 1e9:.1f} G"


def _plural(word: str, number: int | str) -> str:
    return word if str(number) == "1" else word + "s"
