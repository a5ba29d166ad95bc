"""``ucxkv top``: the figures of engines, live in a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ucxkv import scraping, window
from ucxkv.figures import Figures, LinkFigures, Totals

_WIDTH = 80
_HISTORY = 48
_MOST_LINKS = 20
_MOST_TROUBLES = 5
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STYLES = {"up": "green", "repairing": "yellow", "reconnecting": "yellow", "down": "red"}
_LOCAL = ("127.0.0.1", "::1", "localhost")
_ANYWHERE = ("0.0.0.0", "::")

Look: TypeAlias = Callable[[], list[Figures]]


class Gone(Exception):
    """There is nothing, or nothing any more, to be looked at; the text says what."""


def looker(target: str | None) -> Look:
    """What looks at a target: a process, an engine's or a metrics server's address, or None for all
    engines of this user on this host.

    Raises ValueError for what is no target.
    """
    if target is None:
        return lambda: _in_windows(None)
    if target.isdecimal():
        pid = int(target)
        return lambda: _in_windows(pid)
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{target!r} is neither a process id nor HOST:PORT")
    host = host.strip("[]")
    return lambda: _listening(host, int(port)) or scraping.scrape(host, int(port))


def _in_windows(pid: int | None) -> list[Figures]:
    found = []
    trouble: Exception | None = None
    for name in window.names(pid):
        try:
            found.append(window.look(name))
        except (OSError, ValueError) as error:
            # Closed between the two, another user's, or one that does not answer.
            trouble = error
    if not found and isinstance(trouble, TimeoutError):
        raise trouble
    if not found:
        whose = "here" if pid is None else f"in process {pid}"
        raise Gone(f"no engine is open {whose}" + (f": {trouble}" if trouble else ""))
    return found


def _listening(host: str, port: int) -> list[Figures]:
    """The engine of this host that listens at an address, if it is one of ours."""
    found = []
    for name in window.names():
        try:
            one = window.look(name)
        except (OSError, ValueError):
            continue
        own, _, own_port = one.address.rpartition(":")
        own = own.strip("[]")
        if own_port == str(port) and (own == host or (host in _LOCAL and own in _ANYWHERE)):
            found.append(one)
    return found


# -- what is shown --------------------------------------------------------------------------


class Screen:
    """Turns looks into what is to be printed; rates are those since the look before."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], Figures] = {}
        self._rates: dict[tuple[int, int], deque[float]] = {}

    def draw(self, engines: Sequence[Figures], trouble: str = "") -> RenderableType:
        """The picture of one look."""
        parts: list[RenderableType] = []
        for one in engines:
            key = (one.pid, one.cluster_id)
            before = self._before.get(key)
            if before is not None and before.started != one.started:
                before = None
            parts += self._engine(one, before, self._rates.setdefault(key, deque(maxlen=_HISTORY)))
            self._before[key] = one
        if trouble:
            parts.append(Text(trouble, style="red"))
        return Group(*parts)

    def _engine(
        self, one: Figures, before: Figures | None, rates: deque[float]
    ) -> list[RenderableType]:
        seconds = one.at - before.at if before is not None else 0.0
        recent = one.totals.since(before.totals) if before is not None else Totals()
        if seconds > 0:
            moved = recent.pulled + max(recent.bytes_pushed, recent.bytes_served)
            rates.append(moved / seconds)
        parts: list[RenderableType] = [_heading(one), _summary(one, recent, seconds)]
        if one.totals.failures:
            listed = ", ".join(f"{name} {n:,}" for name, n in sorted(one.totals.failures.items()))
            parts.append(Text(f" failures: {listed}", style="red"))
        if any(rates):
            parts.append(_line(rates))
        if one.links:
            parts.append(_links(one.links, before, seconds))
            if len(one.links) > _MOST_LINKS:
                more = len(one.links) - _MOST_LINKS
                parts.append(Text(f" and {more:,} more, which have moved less", style="dim"))
            troubles = [link for link in one.links if link.state != "up" and link.error]
            parts += [
                Text(f" {link.cluster_id}: {_plain(link.error)}", style="red")
                for link in troubles[:_MOST_TROUBLES]
            ]
        else:
            parts.append(Text(" no links", style="dim"))
        parts.append(Text(""))
        return parts


def _heading(one: Figures) -> Text:
    text = Text(f"cluster {one.cluster_id}", style="bold")
    words = [one.role, one.address and f"at {one.address}", one.pid and f"process {one.pid}"]
    if one.started:
        words.append(f"open for {timedelta(seconds=max(0, int(time.time() - one.started)))}")
    text.append("".join(f" · {word}" for word in words if word), style="not bold")
    return text


def _summary(one: Figures, recent: Totals, seconds: float) -> Table:
    table = Table(box=None, padding=(0, 1), width=_WIDTH, header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("now", "in all"):
        table.add_column(name, justify="right", no_wrap=True, min_width=10)
    table.add_column("", no_wrap=True)
    for name in ("now", "in all"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)

    def rate(count: float) -> float | None:
        return count / seconds if seconds > 0 else None

    notices = f"{one.notices_queued:,}"
    if one.notices_waiting:
        notices += f" + {one.notices_waiting:,}"
    totals = one.totals
    left = [
        ("pulled, get", _speed(rate(recent.bytes_get)), _size(totals.bytes_get)),
        ("pulled, stream", _speed(rate(recent.bytes_stream)), _size(totals.bytes_stream)),
        ("pushed", _speed(rate(recent.bytes_pushed)), _size(totals.bytes_pushed)),
        ("served by stream", _speed(rate(recent.bytes_served)), _size(totals.bytes_served)),
        ("spans", _often(rate(recent.spans)), f"{totals.spans:,}"),
        ("transfers", _often(rate(recent.transfers)), f"{totals.transfers:,}"),
        ("failed", _often(rate(recent.failed)), f"{totals.failed:,}"),
    ]
    right = [
        (f"latency, {share:.0%}", _time(recent.quantile(share)), _time(totals.quantile(share)))
        for share in (0.5, 0.9, 0.99)
    ]
    right += [
        ("running", f"{one.running:,}", ""),
        ("holds, notices", f"{one.holds:,}, {notices}", ""),
        ("caches", f"{one.caches:,}", _size(one.registered_bytes)),
        ("pinned", "", _size(one.pinned_bytes)),
    ]
    for row in zip(left, right, strict=True):
        table.add_row(*row[0], *row[1])
    return table


def _links(links: Sequence[LinkFigures], before: Figures | None, seconds: float) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), width=_WIDTH, header_style="dim")
    table.add_column(" peer", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("path", no_wrap=True, min_width=6)
    table.add_column("address", no_wrap=True, ratio=1)
    for name in ("pulled", "pushed", "served", "99%"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    table.add_column("failed", justify="right", no_wrap=True)
    known = {} if before is None else {link.cluster_id: link.totals for link in before.links}
    shown = [(link, link.totals.since(known.get(link.cluster_id, Totals()))) for link in links]
    # Of many, those that are in trouble and then the busiest; in an order that stays.
    shown.sort(key=lambda one: (one[0].state == "up", -sum(_moved(one[1]))))
    for link, recent in sorted(shown[:_MOST_LINKS], key=lambda one: one[0].cluster_id):
        measured = recent if recent.latency and seconds > 0 else link.totals
        table.add_row(
            str(link.cluster_id),
            Text(link.state, style=_STYLES.get(link.state, "")),
            link.path,
            _plain(link.address),
            *(_speed(count / seconds if seconds > 0 else None) for count in _moved(recent)),
            _time(measured.quantile(0.99)),
            f"{link.totals.failed:,}",
        )
    return table


def _moved(totals: Totals) -> tuple[int, int, int]:
    return totals.pulled, totals.bytes_pushed, totals.bytes_served


def _line(rates: Sequence[float]) -> Text:
    top = max(rates)
    bars = "".join(_BLOCKS[round(rate / top * 8)] for rate in rates)
    return Text.assemble(" ", (bars.rjust(_HISTORY), "cyan"), f"  up to {_speed(top)}")


def _plain(text: str) -> str:
    """Without what could move the cursor: it may be a peer's."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} {units[0]}" if count >= 99.5 else f"{count:.3g} {units[0]}"


def _speed(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{_size(rate)}/s" if rate else "0"


def _often(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s" if rate else "0"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


# -- the command ----------------------------------------------------------------------------


def main(
    target: str | None, *, interval: float = 1.0, once: bool = False, json: bool = False
) -> int:
    """Show a target's figures until interrupted; returns the exit code.

    `once`: after one interval print them and return; `json`: print one look as JSON and return.
    """
    try:
        look = looker(target)
    except ValueError as error:
        print(f"ucxkv top: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    try:
        first = look()
        if json:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(first)) + b"\n")
            return 0
        screen = Screen()
        picture = screen.draw(first)
        if once or not console.is_terminal:
            return _print(console, screen, look, interval, once)
        with Live(picture, console=console, screen=True, auto_refresh=False) as live:
            latest = first
            while True:
                time.sleep(interval)
                trouble = ""
                try:
                    latest = look()
                except (OSError, ValueError) as error:
                    trouble = f"no answer: {error}"
                live.update(screen.draw(latest, trouble), refresh=True)
    except (Gone, OSError, ValueError) as error:
        print(f"ucxkv top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _print(console: Console, screen: Screen, look: Look, interval: float, once: bool) -> int:
    while True:
        time.sleep(interval)
        console.print(screen.draw(look()))
        if once:
            return 0
