"""What a listening doctor lends to others: a board with its facts and its time, and bytes to pull.

Both are ordinary caches, and are read by ordinary pulls: nothing here speaks a protocol of its own.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucxkv import Cache, CacheDesc, LlmDataDist
from ucxkv._load import loaded
from ucxkv._version import __version__
from ucxkv.devices import rdma_ports

CLUSTER = 0x0D0C_7012
# The first caches of an engine are numbered from 1.
BOARD, DATA = 1, 2
BOARD_BYTES = 65536
DATA_BYTES = 64 << 20
# The time on the board is at most this old, in seconds.
TICK = 0.005

_HEAD = struct.Struct("<QI")


@dataclass(frozen=True)
class Posted:
    """What was read from a board: the time there in seconds since the epoch, and its facts."""

    time: float
    facts: dict[str, Any]


def facts() -> dict[str, Any]:
    """What two ends compare, and what the other end cannot see by itself."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "host": socket.gethostname(),
        "ucxkv": __version__,
        "ucx": loaded().version_text,
        "origin": loaded().origin,
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("UCX_", "UCXKV_"))
        },
        "ports": {
            port.name: {
                "gigabits": port.gigabits,
                "state": port.state,
                "mtu": port.mtu,
                "link_layer": port.link_layer,
            }
            for port in rdma_ports()
        },
    }


class Board:
    """Caches to be pulled, and a thread that keeps the time on the board; `close` ends it."""

    def __init__(self, engine: LlmDataDist) -> None:
        self._bytes = np.zeros(BOARD_BYTES, np.uint8)
        text = json.dumps(facts()).encode()[: BOARD_BYTES - _HEAD.size]
        self._bytes[_HEAD.size : _HEAD.size + len(text)] = np.frombuffer(text, np.uint8)
        self._length = len(text)
        self._closing = threading.Event()
        self._tick()
        register(engine, self._bytes)
        register(engine, np.arange(DATA_BYTES // 8, dtype=np.uint64).view(np.uint8))
        self._thread = threading.Thread(target=self._keep_time, name="ucxkv-doctor", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        _HEAD.pack_into(self._bytes.data, 0, time.time_ns(), self._length)

    def _keep_time(self) -> None:
        while not self._closing.wait(TICK):
            self._tick()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def register(engine: LlmDataDist, data: NDArray[np.uint8]) -> Cache:
    """Register bytes as a cache of one tensor with one slot."""
    tensor = data.reshape(1, -1)
    return engine.register_kv_cache(CacheDesc.from_tensors([tensor]), [tensor])


def read(board: NDArray[np.uint8]) -> Posted:
    """What is on a board that was pulled; ValueError if that was no board."""
    nanoseconds, length = _HEAD.unpack_from(board.data, 0)
    return Posted(nanoseconds * 1e-9, json.loads(board[_HEAD.size : _HEAD.size + length].tobytes()))
