"""Tables and progress on the terminal, at most 80 columns wide."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_WIDTH = 80


def console() -> Console:
    """Standard output, no wider than 80 columns."""
    found = Console(highlight=False)
    return Console(highlight=False, width=min(found.width, _WIDTH))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Group:
    """A table whose first column is a name and whose others are figures."""
    made = Table(box=None, padding=(0, 1), pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return Group(f"\n[bold]{title}[/bold]", made)


def progress() -> Progress:
    """A bar on standard error, which goes when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )


def rate(bytes_: float, seconds: float) -> str:
    """Bandwidth in GB/s (10^9 bytes)."""
    return f"{bytes_ / seconds / 1e9:.2f}"
