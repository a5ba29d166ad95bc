"""A native engine without UCX, for tests of the control plane: it does as it is told."""

from __future__ import annotations

import itertools
import os
import secrets
from typing import Any, ClassVar

from ucxkv.catalogue import LocalCatalogue, LocalEntry
from ucxkv.types import CacheDesc, DataType


class FakeLink:
    def __init__(self, engine: FakeEngine, slot: int) -> None:
        self.engine = engine
        self.slot = slot
        self.token = secrets.randbits(64)
        self.connected_to: dict[str, Any] | None = None
        self.proven = True
        self.failed: list[tuple[int, str]] = []
        self.error = ""
        self.get = False
        self.serving = 0
        self.transports = ("tcp/lo",)
        self._am_broken = False
        self._pulls = 0
        self._closed = False

    def connect(self, **peer: Any) -> None:
        if not peer["am_address"].startswith(b"am "):
            raise ValueError("no address")
        self.connected_to = peer
        self.engine.notify()

    @property
    def ready(self) -> bool:
        return self.connected_to is not None and self.engine.proves and not self._closed

    @property
    def am_broken(self) -> bool:
        return self._am_broken

    @am_broken.setter
    def am_broken(self, value: bool) -> None:
        self._am_broken = value
        self.engine.notify()

    @property
    def pulls(self) -> int:
        return self._pulls

    @pulls.setter
    def pulls(self, value: int) -> None:
        self._pulls = value
        self.engine.notify()

    def fail_pulls(self, status: int, reason: str = "") -> None:
        self.failed.append((status, reason))
        self.pulls = 0

    def totals(self) -> dict[str, Any]:
        names = ("transfers", "spans", "bytes_get", "bytes_stream", "bytes_pushed", "bytes_served")
        return {**dict.fromkeys(names, 0), "failures": {}, "latency_ns": {}}

    def close(self) -> None:
        self._closed = True
        self.engine.notify()

    @property
    def closed(self) -> bool:
        return self._closed and not self.engine.stuck


class FakeEngine:
    def __init__(self, chunk_size: int = 1000, ucx_version: str = "1.22.0") -> None:
        self.notify_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.rma_address = b""
        self.words_rkey = b""
        self.words_address = 4096
        self.word0 = secrets.randbits(64)
        self.chunk_size = chunk_size
        self.ucx_version = ucx_version
        self.workers: list[dict[str, str]] = []
        self.links: list[FakeLink] = []
        self.proves = True
        self.stuck = False

    def notify(self) -> None:
        os.eventfd_write(self.notify_fd, 1)

    def prove(self) -> None:
        self.proves = True
        self.notify()

    def add_worker(self, values: dict[str, str]) -> int:
        self.workers.append(values)
        return len(self.workers) - 1

    def worker_address(self, index: int) -> bytes:
        return b"am %d" % index

    def new_link(self, worker: int) -> FakeLink:
        link = FakeLink(self, len(self.links))
        self.links.append(link)
        return link

    def close(self) -> None:
        os.close(self.notify_fd)


class FakeRemote:
    """Stands for ucxkv.memory.RemoteCache."""

    made: ClassVar[int] = 0

    def __init__(self, link: FakeLink, **told: Any) -> None:
        if len(told["addresses"]) != 8 * told["num_tensors"]:
            raise ValueError("addresses")
        self.link = link
        self.told = told
        self.retired = False
        self._active = 0

    def retire(self) -> None:
        self.retired = True

    @property
    def active(self) -> int:
        return self._active

    @active.setter
    def active(self, value: int) -> None:
        self._active = value
        self.link.engine.notify()


class FakeLocal:
    """Stands for ucxkv.memory.LocalCache."""

    def __init__(self, cache_id: int, tensors: int) -> None:
        self.cache_id = cache_id
        self.generation = secrets.randbits(64)
        self.slot = 1 + cache_id % 1000
        self.tensors = tensors

    def export(self) -> tuple[bytes, bytes, list[bytes]]:
        return bytes(8 * self.tensors), bytes(4 * self.tensors), [b"rkey"]


_ids = itertools.count(1)


def register(catalogue: LocalCatalogue, *, access: str = "r", tensors: int = 2) -> LocalEntry:
    """A new cache in `catalogue`."""
    cache_id = next(_ids)
    entry = LocalEntry(
        cache_id=cache_id,
        desc=CacheDesc(tensors, (3, 10), DataType.FLOAT),
        access=access,
        native=FakeLocal(cache_id, tensors),  # type: ignore[arg-type]
        blocks=3,
        block_bytes=40,
    )
    catalogue.add(entry)
    return entry
