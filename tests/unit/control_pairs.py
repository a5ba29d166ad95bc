"""Link tables over fake native engines, and the proxies and strangers that tests put among them."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fake_native import FakeEngine, FakeRemote, register
from ucxkv.catalogue import LocalCatalogue, LocalEntry
from ucxkv.links import Link
from ucxkv.options import Options
from ucxkv.table import LinkTable
from ucxkv.tls import Tls
from ucxkv.types import ClusterInfo, IpInfo, LinkResult, LlmRole

_incarnations = itertools.count(1000)


class Member:
    """A link table, its fake engine and its catalogue."""

    def __init__(
        self,
        cluster_id: int,
        listen: str | None = "127.0.0.1:0",
        secret: str | bytes | None = None,
        engine: FakeEngine | None = None,
        ucx: dict[str, str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.engine = engine or FakeEngine()
        self.catalogue = LocalCatalogue()
        self.table = LinkTable(
            cluster_id=cluster_id,
            role=LlmRole.MIX,
            options=Options(listen=listen, secret=secret, ucx=ucx or {}, tls=tls),
            incarnation=next(_incarnations),
            native=self.engine,  # type: ignore[arg-type]
            catalogue=self.catalogue,
            remote_factory=FakeRemote,  # type: ignore[arg-type]
        )
        try:
            self.table.start()
        except BaseException:
            self.engine.close()
            raise

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.table.stop(2)
        if self.engine.notify_fd >= 0:
            self.engine.close()
            self.engine.notify_fd = -1

    @property
    def address(self) -> tuple[str, int]:
        assert self.table.listen_address
        return self.table.listen_address

    def cluster(self, address: tuple[str, int] | None = None) -> ClusterInfo:
        """What others need to link to this one."""
        return ClusterInfo(self.cluster_id, [IpInfo(*(address or self.address))])

    def link(self, *others: Member | ClusterInfo, timeout_ms: float = 5000) -> list[LinkResult]:
        clusters = [other.cluster() if isinstance(other, Member) else other for other in others]
        return self.table.link(clusters, timeout_ms)

    def unlink(self, other: Member, timeout_ms: float = 2000, force: bool = False) -> LinkResult:
        info = ClusterInfo(other.cluster_id, [])
        (result,) = self.table.unlink([info], timeout_ms, force)
        return result

    def to(self, other: Member) -> Link:
        link = self.table.lookup(other.cluster_id)
        assert link is not None
        return link

    def state(self, other: Member) -> str:
        link = self.table.lookup(other.cluster_id)
        return link.state if link is not None else "none"

    def register(self, **how: Any) -> LocalEntry:
        entry = register(self.catalogue, **how)
        self.table.announce(entry)
        return entry

    def unregister(self, entry: LocalEntry, seconds: float = 2.0) -> float:
        """Returns the seconds it took."""
        began = time.monotonic()
        self.catalogue.remove(entry.cache_id)
        self.table.retire(entry, began + seconds)
        return time.monotonic() - began

    def resolve(self, other: Member, cache_id: int, seconds: float = 2.0) -> Any:
        async def run() -> Any:
            return await self.table.resolve(other.cluster_id, cache_id, time.monotonic() + seconds)

        return self.table._control.call(run())


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run all at once; their results or exceptions."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        barrier.wait(10)
        try:
            results[number] = jobs[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Proxy:
    """Passes TCP connections on; can cut them, hold them up, and alter a byte of what is said."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.said: list[bytearray] = []  # by each client
        self.answered: list[bytearray] = []  # to each client
        self.accepted = 0
        self.alter: int | None = None  # place of a byte that the next client to say it gets wrong
        self.held = False  # pass nothing on
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()[:2]
        self._ends: dict[socket.socket, tuple[socket.socket, bytearray, bool]] = {}
        self._stop = False
        self._cut = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()
        self._server.close()
        for sock in self._ends:
            sock.close()

    @property
    def open(self) -> int:
        """Connections that are open."""
        return len(self._ends) // 2

    def cut(self) -> None:
        """Cut all connections."""
        self._cut = True
        eventually(lambda: not self._cut)

    def hold(self) -> None:
        """Pass nothing on until `held` is set to False."""
        self.held = True
        time.sleep(0.02)

    def close_door(self) -> None:
        """Refuse new connections from now on."""
        self._server.close()

    def _run(self) -> None:
        while not self._stop:
            if self._cut:
                for sock in list(self._ends):
                    self._drop(sock)
                self._cut = False
            watched: list[socket.socket] = [] if self.held else list(self._ends)
            if self._server.fileno() >= 0:
                watched.append(self._server)
            ready, _, _ = select.select(watched, [], [], 0.005)
            for sock in ready:
                if sock is self._server:
                    self._accept()
                elif sock in self._ends:
                    self._pass(sock)

    def _accept(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:
            return
        self.accepted += 1
        try:
            onward = socket.create_connection(self.target, timeout=5)
        except OSError:
            client.close()
            return
        self.said.append(bytearray())
        self.answered.append(bytearray())
        self._ends[client] = onward, self.said[-1], True
        self._ends[onward] = client, self.answered[-1], False

    def _drop(self, sock: socket.socket) -> None:
        other = self._ends.pop(sock, None)
        if other is not None:
            self._ends.pop(other[0], None)
            sock.close()
            other[0].close()

    def _pass(self, source: socket.socket) -> None:
        sink, record, client = self._ends[source]
        try:
            data = bytearray(source.recv(65536))
            place = self.alter
            if client and place is not None and len(record) <= place < len(record) + len(data):
                data[place - len(record)] ^= 1
                self.alter = None
            record += data
            sink.sendall(data)
        except OSError:
            data = bytearray()
        if not data:
            self._drop(source)


@contextlib.contextmanager
def stranger(address: tuple[str, int], say: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=10) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(say)
        yield sock


def hears(sock: socket.socket) -> bytes:
    """All that is said before the connection is closed."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            heard += data
    return heard
