"""What ``ucxkv top`` shows: in 80 columns, with what was moved between two looks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ucxkv.figures import Figures, LinkFigures, Totals
from ucxkv.top import Screen, looker


def shown(*looks: list[Figures], trouble: str = "", width: int = 80) -> str:
    """The last of these looks."""
    screen = Screen()
    for one in looks[:-1]:
        screen.draw(one)
    stream = io.StringIO()
    Console(file=stream, width=width).print(screen.draw(looks[-1], trouble))
    return stream.getvalue()


def engine(at: float, moved: int, *, failed: int = 0, error: str = "") -> Figures:
    failures = {"TIMEOUT": failed} if failed else {}
    totals = Totals(
        transfers=moved // 1000 + failed,
        bytes_get=moved,
        bytes_served=2 * moved,
        failures=failures,
        latency=[(0.0015, moved // 1000)] if moved else [],
    )
    link = LinkFigures(
        7,
        "down" if error else "repairing",
        address="[fe80::1234:5678:9abc:def0%eth0]:54321",
        path="get",
        error=error,
        totals=totals,
    )
    return Figures(
        2, "DECODER", at, pid=4321, address="10.0.0.1:5", totals=totals, links=[link], holds=12
    )


def test_rates_are_those_between_two_looks() -> None:
    text = shown([engine(10.0, 0)], [engine(12.0, 4_000_000, failed=4)])
    (pulled,) = [line for line in text.splitlines() if "pulled, get" in line]
    assert " ".join(pulled.split()) == "pulled, get 2 MB/s 4 MB latency, 50% 1.5 ms 1.5 ms"
    assert "served by stream" in text
    assert "4 MB/s" in text
    assert "TIMEOUT 4" in text
    assert "cluster 2 · DECODER · at 10.0.0.1:5 · process 4321" in text
    assert "repairing" in text


def test_the_first_look_has_no_rates() -> None:
    text = shown([engine(10.0, 4_000_000)])
    assert "MB/s" not in text
    assert "4 MB" in text


def test_one_that_was_started_anew_has_no_rates() -> None:
    old, new = engine(10.0, 4_000_000), engine(12.0, 1_000_000)
    new = Figures(2, "DECODER", 12.0, pid=4321, started=5.0, totals=new.totals)
    assert "MB/s" not in shown([old], [new])


@pytest.mark.parametrize("width", [80, 100, 60])
def test_it_fits(width: int) -> None:
    huge = Totals(
        transfers=10**12,
        bytes_get=10**18,
        bytes_stream=10**18,
        bytes_pushed=10**18,
        bytes_served=10**18,
        failures={"KV_CACHE_NOT_EXIST": 10**9, "FEATURE_NOT_ENABLED": 10**9},
        latency=[(1e3, 10**12)],
    )
    links = [
        LinkFigures(2**64 - 1, "reconnecting", "a" * 60, "stream", [], "x" * 200, huge)
        for _ in range(3)
    ]
    one = Figures(2**64 - 1, "DECODER", 1.0, 10**6, totals=huge, links=links, holds=65000)
    later = Figures(2**64 - 1, "DECODER", 1.1, 10**6, totals=huge, links=links, holds=65000)
    for text in (shown([one], width=width), shown([one], [later], width=width)):
        assert max(map(len, text.splitlines())) <= width


def test_of_many_links_those_in_trouble_and_the_busiest() -> None:
    def look(at: float, factor: int) -> Figures:
        links = [
            LinkFigures(
                number,
                "reconnecting" if number == 777 else "up",
                totals=Totals(transfers=factor, bytes_get=factor * number),
            )
            for number in range(1000)
        ]
        return Figures(2, "DECODER", at, links=links)

    text = shown([look(1.0, 0)], [look(2.0, 5)])
    peers = [
        int(line.split()[0]) for line in text.splitlines() if " up " in line or "recon" in line
    ]
    assert peers == [777, *range(981, 1000)]
    assert "and 980 more" in text


def test_what_peers_say_moves_no_cursor() -> None:
    text = shown([engine(1.0, 0, error="\x1b[2J\x07 [red]gone[/red] \u202e")])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]gone[/red]" in text


def test_trouble_is_told() -> None:
    assert "no answer: timed out" in shown([engine(1.0, 0)], trouble="no answer: timed out")


@pytest.mark.parametrize("target", ["", "here", "here:", ":0", "host:70000", "-5", "1.5"])
def test_no_target(target: str) -> None:
    with pytest.raises(ValueError, match="neither a process id nor HOST:PORT"):
        looker(target)
