"""`process_vm_readv` with as many ranges in one call as Linux takes: the floor on one host."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from peers import sides

_MOST_RANGES = 1024


class Owner(sides.Owner):
    def open(self) -> dict[str, Any]:
        return {"pid": os.getpid()}


class Puller(sides.Puller):
    def open(self, offer: dict[str, Any]) -> None:
        self._pid = offer["pid"]
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        self._readv.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]

    def _map(self, offer: dict[str, Any]) -> None:
        source, destination = self._blocks()
        remote = np.array(offer["tensors"], dtype=np.uint64)
        self._here = self._ranges(self._span_addresses(self._addresses(), destination))
        self._there = self._ranges(self._span_addresses(remote, source))
        entry = self._here.strides[0]
        # Arguments made in advance: only the calls are measured.
        self._calls = [
            (
                self._here.ctypes.data + first * entry,
                self._there.ctypes.data + first * entry,
                min(_MOST_RANGES, len(self._here) - first),
            )
            for first in range(0, len(self._here), _MOST_RANGES)
        ]

    def _ranges(self, addresses: np.ndarray) -> np.ndarray:
        ranges = np.empty((len(addresses), 2), dtype=np.uint64)
        ranges[:, 0] = addresses
        ranges[:, 1] = self.work.block_bytes
        return ranges

    def pull(self) -> None:
        for here, there, count in self._calls:
            moved = self._readv(self._pid, here, count, there, count, 0)
            if moved != count * self.work.block_bytes:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
