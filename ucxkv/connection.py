"""One control connection: frames in and out, nothing about what they mean; and the listener."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ucxkv import auth, wire
from ucxkv.control import ControlThread, Warnings
from ucxkv.netif import endpoint, parse

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 64
# Under pressure, a stranger that has had this long makes room for a newer one.
STRANGER_SECONDS = 0.25

_BUFFER = 64 << 10
_CLOSE_SECONDS = 0.3
# A peer that lets this many frames wait does not read any more, or asks without end.
_MAX_OUTBOX = 200_000
# A full queue costs friends a second each, and the loop takes only so many from it at a time.
_BACKLOG = 4096
_ACCEPT_AT_ONCE = 32

_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
_USER_TIMEOUT_MS = 10_000


class ConnectionLost(Exception):
    """The connection is gone; the text says how."""


def tune(sock: Any) -> None:
    """No delay for small frames, and notice of a host that vanishes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def reason(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, asyncio.IncompleteReadError):
        return "closed by the peer"
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name cannot be resolved"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class Connection:
    """Sends and receives frames; lives on the control loop.

    It begins with the small frames of the handshake, `unseal` opens it for all others.
    """

    def __init__(
        self,
        control: ControlThread,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._control = control
        self._reader = reader
        self._writer = writer
        self._limit = wire.OPENING_LIMIT
        self._seals: tuple[auth.Seal, auth.Seal] | None = None
        # Frames to send; a number stands for the catalogue entry of that cache in _entries.
        self._outbox: deque[bytes | int] = deque()
        self._entries: dict[int, bytes] = {}
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._closed = False
        tune(writer.get_extra_info("socket"))
        self.local_host = str(parse(writer.get_extra_info("sockname")[0]))
        host, port = writer.get_extra_info("peername")[:2]
        self.peer = endpoint(str(parse(host)), port)

    # -- the handshake --------------------------------------------------------------------------

    def send_preamble(self) -> None:
        """Begin."""
        self._writer.write(wire.preamble())

    async def receive_preamble(self) -> int:
        """The peer's protocol version."""
        return wire.preamble_version(await self._read(wire.PREAMBLE_SIZE))

    def send_opening(self, message: wire.Message) -> bytes:
        """Send a message of the handshake; returns its body."""
        body = wire.encode(message)
        self._writer.write(wire.frame_head(len(body)) + body)
        return body

    async def receive_opening(self) -> tuple[wire.Opening, bytes]:
        """A message of the handshake, and its body."""
        body = await self._receive()
        return wire.decode_opening(body), body

    def unseal(self, sending: auth.Seal | None, receiving: auth.Seal | None) -> None:
        """The handshake is over; all frames from here on carry seals, if there is a secret."""
        self._limit = wire.FRAME_LIMIT
        if sending is not None and receiving is not None:
            self._seals = sending, receiving
        self._sender = self._control.spawn(self._send_all())

    # -- after it -------------------------------------------------------------------------------

    async def receive(self) -> wire.Running:
        """The next message."""
        body = await self._receive()
        if self._seals is not None:
            body, seal = body[: -auth.SEAL_SIZE], body[-auth.SEAL_SIZE :]
            if not self._seals[1].check(body, seal):
                raise ConnectionLost("a frame was altered on its way")
        return wire.decode(body)

    def send(self, message: wire.Message) -> None:
        """Queue a message."""
        self._queue(wire.encode(message))

    def send_entry(self, cache_id: int, entry: bytes) -> None:
        """Queue the news of a cache; news that wait together are sent together."""
        self._entries[cache_id] = entry
        self._queue(cache_id)

    def withdraw(self, cache_id: int) -> bool:
        """Take back news of a cache; False if they have been sent."""
        return self._entries.pop(cache_id, None) is not None

    def _queue(self, item: bytes | int) -> None:
        if self._closed:
            return
        self._outbox.append(item)
        self._wake.set()
        if len(self._outbox) > _MAX_OUTBOX:
            self.abort()

    def _seal(self, body: bytes) -> bytes:
        seal = self._seals[0].next(body) if self._seals is not None else b""
        return wire.frame_head(len(body) + len(seal)) + body + seal

    def _batch(self) -> bytes:
        """The next frames, of about one batch's size."""
        frames: list[bytes] = []
        size = 0
        while self._outbox and size < wire.BATCH_BYTES:
            item = self._outbox.popleft()
            if isinstance(item, int):
                entries = []
                while True:
                    entry = self._entries.pop(item, None)
                    if entry is not None:
                        entries.append(entry)
                        size += len(entry)
                    if size >= wire.BATCH_BYTES or not self._outbox:
                        break
                    following = self._outbox[0]
                    if not isinstance(following, int):
                        break
                    item = following
                    self._outbox.popleft()
                if entries:
                    frames.append(self._seal(wire.encode_register(entries)))
            else:
                frames.append(self._seal(item))
                size += len(item)
        return b"".join(frames)

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    self._writer.write(self._batch())
                    await self._writer.drain()
        except OSError:
            # The receiving side finds out the same, and says so.
            self._writer.transport.abort()

    async def _receive(self) -> bytes:
        head = await self._read(wire.LENGTH_SIZE)
        return await self._read(wire.frame_length(head, self._limit))

    async def _read(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionLost(reason(error)) from error

    # -- the end --------------------------------------------------------------------------------

    def close(self, farewell: wire.Message | None = None) -> asyncio.Task[None] | None:
        """Send what is queued and `farewell`, then close; a peer that does not read is cut off.

        Returns the task that does so; None if it is closed already.
        """
        if self._closed:
            return None
        if farewell is not None and self._sender is not None:
            self._outbox.append(wire.encode(farewell))
        while self._outbox:
            self._writer.write(self._batch())
        self._end()
        return self._control.spawn(self._close())

    async def _close(self) -> None:
        try:
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), _CLOSE_SECONDS)
        except (OSError, asyncio.TimeoutError):
            self._writer.transport.abort()
        finally:
            # Nothing if it is closed; being cancelled must not leave it open.
            self._writer.transport.abort()

    def abort(self) -> None:
        """Close at once."""
        self._end()
        self._writer.transport.abort()

    def _end(self) -> None:
        self._closed = True
        self._outbox.clear()
        self._entries.clear()
        if self._sender is not None:
            self._sender.cancel()


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for all addresses of `host`, with one port; OSError if there is none."""
    wildcard = host in ("", "*")
    infos = socket.getaddrinfo(
        None if wildcard else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    if wildcard:
        # One socket of IPv6 takes both, if the host has IPv6 at all.
        infos.sort(key=lambda info: info[0] != socket.AF_INET6)
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in infos:
        wanted = (address[0], port, *address[2:])
        sock: socket.socket | None = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
            sock.bind(wanted)
            sock.setblocking(False)
        except OSError as error:
            if sock is not None:
                sock.close()
            failure = failure or error
            continue
        sockets.append(sock)
        port = sock.getsockname()[1]
        if address[0] == "::":
            break
    if not sockets:
        raise failure or OSError(f"{host} has no address")
    return sockets


async def _gone(connection: Connection) -> None:
    connection.abort()


class Listener:
    """Accepts connections and has them served; bounds those that have not proven themselves."""

    def __init__(
        self,
        control: ControlThread,
        warn: Warnings,
        serve: Callable[[Connection], Awaitable[None]],
    ) -> None:
        self._control = control
        self._warn = warn
        self._serve: Callable[[Connection], Awaitable[None]] = serve
        self._servers: list[asyncio.Server] = []
        self._strangers: dict[Connection, float] = {}

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the real port."""
        sockets = await self._control.aside(bind, host, port)
        address = sockets[0].getsockname()[:2]
        for sock in sockets:
            server = await asyncio.start_server(
                self._accept, sock=sock, limit=_BUFFER, backlog=_ACCEPT_AT_ONCE
            )
            self._servers.append(server)
            sock.listen(_BACKLOG)
        return str(address[0]), int(address[1])

    def close(self) -> None:
        """Stop listening, and cut off who has not proven himself."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for stranger in list(self._strangers):
            stranger.abort()
        # Who serves has this listener: what both refer to must not wait for a collection.
        self._serve = _gone

    async def end(self) -> None:
        """Stop listening first, and then close: asyncio loses what it is just accepting if the two
        are one."""
        try:
            for server in self._servers:
                for sock in server.sockets:
                    self._control.loop.remove_reader(sock.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            self.close()

    def known(self, connection: Connection) -> None:
        """It has proven itself."""
        self._strangers.pop(connection, None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            connection = Connection(self._control, reader, writer)
        except (OSError, TypeError, ValueError):
            # Gone before it was looked at: it has no peer name any more.
            writer.transport.abort()
            return
        now = self._control.loop.time()
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            if now - self._strangers[oldest] < STRANGER_SECONDS:
                self._warn("flood", "too many connections that have not proven themselves")
                connection.abort()
                return
            del self._strangers[oldest]
            oldest.abort()
        self._strangers[connection] = now
        self._control.spawn(self._guard(connection))

    async def _guard(self, connection: Connection) -> None:
        try:
            await asyncio.wait_for(self._serve(connection), HANDSHAKE_SECONDS)
        except asyncio.TimeoutError:
            connection.abort()
        except BaseException:
            connection.abort()
            raise
        finally:
            self.known(connection)


async def connect(
    control: ControlThread, family: int, address: tuple[Any, ...], local: str | None
) -> Connection:
    """A connection to one address, from `local` if that is given; raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if local is not None:
            sock.bind((local, 0))
        await control.loop.sock_connect(sock, address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=_BUFFER)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    try:
        return Connection(control, reader, writer)
    except (OSError, TypeError):
        writer.transport.abort()
        raise ConnectionResetError("closed by the peer") from None
