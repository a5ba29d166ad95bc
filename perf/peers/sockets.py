"""Plain Python sockets: `sendmsg` and `recvmsg_into` over one TCP connection."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np

from peers import sides

# Linux takes no more in one call.
_MOST_VIEWS = 1024
_PATIENCE = 30


def _views(tensors: list[np.ndarray], blocks: np.ndarray) -> list[list[memoryview]]:
    """The spans, in groups for one call each."""
    views = [memoryview(tensor[block]) for tensor in tensors for block in blocks]
    return [views[i : i + _MOST_VIEWS] for i in range(0, len(views), _MOST_VIEWS)]


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """What of `views` is left after the first `moved` bytes."""
    for number, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[number + 1 :]]
        moved -= len(view)
    return []


class Owner(sides.Owner):
    def open(self) -> dict[str, Any]:
        self._groups: list[list[memoryview]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_PATIENCE)
        threading.Thread(target=self._serve, daemon=True).start()
        return {"address": self._listener.getsockname()}

    def _serve(self) -> None:
        connection = self._listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for group in self._groups:
                left = group
                while left:
                    left = _rest(left, connection.sendmsg(left))

    def _map(self) -> dict[str, Any]:
        self._groups = _views(self.tensors, self._blocks()[0])
        return {}


class Puller(sides.Puller):
    def open(self, offer: dict[str, Any]) -> None:
        self._connection = socket.create_connection(offer["address"], _PATIENCE)
        # Blocking, so that each call waits for all it was asked for.
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _map(self, offer: dict[str, Any]) -> None:
        self._groups = _views(self.tensors, self._blocks()[1])

    def pull(self) -> None:
        self._connection.sendall(b"x")
        for group in self._groups:
            left = group
            while left:
                moved = self._connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
                if not moved:
                    raise ConnectionError("the owner closed the connection")
                left = _rest(left, moved)
