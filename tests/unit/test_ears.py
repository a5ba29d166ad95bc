"""Whether UCX still listens for a worker is seen from outside."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from ucxkv import workers
from ucxkv.control import ControlThread
from ucxkv.ears import Ears, listening_at
from ucxkv.options import Options
from ucxkv.workers import CannotLink, Workers

HOST = "127.0.0.1"


class Native:
    """Makes workers that listen, as UCX does."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def add_worker(self, values: dict[str, str]) -> int:
        self.sockets.append(socket.create_server((HOST, 0)))
        return len(self.sockets) - 1


@pytest.fixture
def native() -> Iterator[Native]:
    made = Native()
    yield made
    for one in made.sockets:
        one.close()


def test_what_listens_is_found_and_nothing_else() -> None:
    with (
        socket.create_server((HOST, 0)) as one,
        socket.create_server(("127.0.0.2", 0)) as elsewhere,
        socket.socket() as idle,
    ):
        idle.bind((HOST, 0))
        found = listening_at(HOST)
        ports = {each.getsockname()[1] for each in (one, elsewhere, idle)}
        assert ports & set(found.values()) == {one.getsockname()[1]}
        # Looking has closed none of them.
        assert all(os.fstat(each.fileno()) for each in (one, elsewhere, idle))


def test_deaf_when_the_socket_is_gone_whatever_has_its_number(native: Native) -> None:
    ears = Ears(HOST, lambda: native.add_worker({}))
    assert ears.worker == 0
    assert not ears.deaf
    number = native.sockets[0].fileno()
    native.sockets[0].close()
    assert ears.deaf
    with socket.socket() as other:
        if other.fileno() != number:
            os.dup2(other.fileno(), number)
        assert ears.deaf
        if other.fileno() != number:
            os.close(number)


def test_a_worker_without_a_socket_of_its_own_never_is() -> None:
    with socket.create_server((HOST, 0)) as before:
        ears = Ears(HOST, lambda: 3)
    assert before.fileno() == -1
    assert not ears.deaf


@pytest.fixture
def made(native: Native) -> Iterator[tuple[ControlThread, Workers]]:
    control = ControlThread("ears")
    control.start()
    yield control, Workers(control, native, Options(), (1, 22, 0))  # type: ignore[arg-type]

    async def farewell() -> None:
        return

    control.stop(farewell, lambda: None, 5.0)


def test_a_deaf_worker_is_replaced(native: Native, made: tuple[ControlThread, Workers]) -> None:
    control, table = made
    assert [control.call(table.index(HOST)) for _ in range(2)] == [0, 0]
    native.sockets[0].close()
    assert table.deaf(0)
    assert [control.call(table.index(HOST)) for _ in range(2)] == [1, 1]
    assert not table.deaf(1)
    assert table.deaf(0)


def test_interfaces_that_cannot_be_listed_are_no_internal_error(
    made: tuple[ControlThread, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_descriptors(host: str) -> str:
        raise OSError(24, "Too many open files")

    control, table = made
    monkeypatch.setattr(workers, "interface_of", out_of_descriptors)
    with pytest.raises(CannotLink, match="Too many open files"):
        control.call(table.index(HOST))
