"""Mooncake's transfer engine over TCP, with the limits of its queues raised.

At their defaults it refuses a pull of some thousand spans.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from peers import sides


class _Engine(sides.Side):
    def _start(self) -> None:
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine did not start")

    def _register(self) -> None:
        nbytes = self.work.blocks * self.work.block_bytes
        self._registered = self._addresses().tolist()
        for address in self._registered:
            if self._engine.register_memory(address, nbytes) != 0:
                raise RuntimeError("Mooncake did not register the memory")


class Owner(_Engine, sides.Owner):
    def open(self) -> dict[str, Any]:
        self._start()
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}"}

    def _map(self) -> dict[str, Any]:
        self._register()
        return {"tensors": self._registered}


class Puller(_Engine, sides.Puller):
    def open(self, offer: dict[str, Any]) -> None:
        self._start()
        self._peer = offer["name"]

    def _map(self, offer: dict[str, Any]) -> None:
        self._register()
        source, destination = self._blocks()
        remote = np.array(offer["tensors"], dtype=np.uint64)
        self._here = self._span_addresses(self._addresses(), destination).tolist()
        self._there = self._span_addresses(remote, source).tolist()
        self._lengths = [self.work.block_bytes] * len(self._here)

    def pull(self) -> None:
        status = self._engine.batch_transfer_sync_read(
            self._peer, self._here, self._there, self._lengths
        )
        if status != 0:
            raise RuntimeError(f"Mooncake: {status}")
