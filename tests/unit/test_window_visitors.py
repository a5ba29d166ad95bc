"""Visitors of the window that take more than they are given."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from ucxkv import window
from ucxkv.figures import Figures, LinkFigures
from ucxkv.window import Window


class Engine:
    """All that a window wants of one is that it is there."""


def many_links(_: object) -> Figures:
    """More than a socket's buffer takes."""
    links = [LinkFigures(number, "up", address="x" * 100) for number in range(4_000)]
    return Figures(1, "MIX", 0.0, links=links)


def visitor(name: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(f"\0{name}")
    connected.settimeout(10)
    return connected


def in_a_window(visit: Callable[[str], Any]) -> Any:
    async def run() -> Any:
        engine = Engine()
        opened = Window(cast("Any", engine))
        before = set(window.names())
        await opened.open()
        (name,) = set(window.names()) - before
        try:
            return await asyncio.to_thread(visit, name)
        finally:
            opened.close()
            assert name not in window.names()

    return asyncio.run(run())


def test_a_reader_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "figures_of", many_links)
    assert in_a_window(window.look) == many_links(None)


def test_those_who_do_not_read_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "figures_of", many_links)
    monkeypatch.setattr(window, "_SHOW_SECONDS", 0.5)

    def visit(name: str) -> None:
        idle = [visitor(name) for _ in range(window._MOST_VISITORS)]
        one_more = visitor(name)
        with contextlib.suppress(ConnectionResetError):
            assert len(one_more.recv(100)) == 0
        time.sleep(1.0)
        for one in idle:
            with one:
                assert read_all(one) < 500_000
        one_more.close()
        assert len(window.look(name).links) == 4_000

    in_a_window(visit)


def read_all(connected: socket.socket) -> int:
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while part := connected.recv(1 << 16):
            count += len(part)
    return count


def test_an_engine_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "figures_of", many_links)

    async def run() -> None:
        opened = Window(cast("Any", Engine()))
        before = set(window.names())
        await opened.open()
        (name,) = set(window.names()) - before
        with pytest.raises(PermissionError):
            await asyncio.to_thread(window.look, name)
        opened.close()

    asyncio.run(run())
