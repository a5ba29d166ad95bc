"""The two sides of a peer: who has the memory, and who pulls from it.

A peer's module derives both.  What it may prepare before the clock runs it prepares in `_map`:
the blocks are the same in each pull.  No more than NumPy, since peers run in virtual environments
of their own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import memory

from peers.works import Work


class Side:
    """What both sides have: a work, and its tensors."""

    work: Work
    tensors: list[np.ndarray]

    def _take(self, work: dict[str, Any]) -> None:
        self.work = Work(**work)
        self.tensors = self._allocate()

    def _allocate(self) -> list[np.ndarray]:
        work = self.work
        return memory.tensors_of(work.tensors, work.blocks, work.block_bytes, huge=False)

    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Which blocks are pulled, and where to."""
        work = self.work
        return (
            memory.scattered(work.wanted, work.blocks, seed=1),
            memory.scattered(work.wanted, work.blocks, seed=2),
        )

    def _addresses(self) -> np.ndarray:
        return np.array([tensor.ctypes.data for tensor in self.tensors], dtype=np.uint64)

    def _span_addresses(self, tensors: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Address of each span, tensor by tensor."""
        offsets = blocks.astype(np.uint64) * np.uint64(self.work.block_bytes)
        return (tensors[:, None] + offsets[None, :]).reshape(-1)


class Owner(Side):
    """Has the memory."""

    def open(self) -> dict[str, Any]:
        """Start; what the puller has to know."""
        return {}

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        """Allocate and fill the memory of a work; what the puller has to know."""
        self._take(work)
        memory.fill(self.tensors)
        return self._map()

    def _map(self) -> dict[str, Any]:
        return {"tensors": self._addresses().tolist()}


class Puller(Side):
    """Pulls."""

    def open(self, offer: dict[str, Any]) -> None:
        """Connect."""

    def prepare(self, work: dict[str, Any], offer: dict[str, Any]) -> None:
        """Allocate the memory of a work and prepare to pull it."""
        self._take(work)
        self._map(offer)

    def _map(self, offer: dict[str, Any]) -> None:
        raise NotImplementedError

    def pull(self) -> None:
        """Pull the work once; returns when all of it is here."""
        raise NotImplementedError

    def measure(self, count: int) -> dict[str, Any]:
        """Pull some times: seconds of each, CPU seconds of this process for all."""
        seconds = []
        pause = self.work.pause
        cpu = time.process_time()
        for _ in range(count):
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            self.pull()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "cpu": time.process_time() - cpu}

    def clear(self) -> None:
        """Zero the destination."""
        memory.clear(self.tensors, self._blocks()[1])

    def check(self, everywhere: bool = False) -> None:
        """Look at every byte that was pulled, and at all others too if `everywhere`."""
        source, destination = self._blocks()
        memory.check(self.tensors, source, destination)
        if everywhere:
            memory.check_untouched(self.tensors, destination)
