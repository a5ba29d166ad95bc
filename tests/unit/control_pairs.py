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
    ) -> None:
        self.cluster_id = cluster_id
        self.engine = engine or FakeEngine()
        self.catalogue = LocalCatalogue()
        self.table = LinkTable(
            cluster_id=cluster_id,
            role=LlmRole.MIX,
            options=Options(listen=listen, secret=secret, ucx=ucx or {}),
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
    """Passes TCP connections on; can cut them, refuse new ones, and alter a byte."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.said = [bytearray()]  # by each client, in order
        self.alter: int | None = None
        self.held = False  # accept, but pass nothing on
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()[:2]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._wake, self._woken = socket.socketpair()
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._wake.send(b"x")
        self._thread.join()
        for sock in (self._server, self._wake, self._woken, *itertools.chain(*self._pairs)):
            sock.close()

    def cut(self) -> None:
        for pair in list(self._pairs):
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while not self._stop:
            pairs = {} if self.held else {a: b for p in self._pairs for a, b in (p, p[::-1])}
            ready, _, _ = select.select([self._server, self._woken, *pairs], [], [], 0.05)
            for sock in ready:
                if sock is self._server:
                    self._accept()
                elif sock in pairs and sock.fileno() >= 0:
                    self._pass(sock, pairs[sock])

    def _accept(self) -> None:
        client, _ = self._server.accept()
        try:
            onward = socket.create_connection(self.target, timeout=5)
        except OSError:
            client.close()
            return
        self._pairs.append((client, onward))
        self.said.append(bytearray())

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            data = bytearray(source.recv(65536))
        except OSError:
            data = bytearray()
        number = next(i for i, pair in enumerate(self._pairs) if source in pair)
        if source is self._pairs[number][0]:
            said = self.said[number + 1]
            if self.alter is not None and len(said) <= self.alter < len(said) + len(data):
                data[self.alter - len(said)] ^= 1
            said += data
        if data:
            with contextlib.suppress(OSError):
                sink.sendall(data)
            return
        self.said.insert(0, self.said.pop(number + 1))
        for sock in self._pairs.pop(number):
            sock.close()


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
