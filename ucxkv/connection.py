"""One control connection: frames in and out, nothing about what they mean; and the listener."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ucxkv import auth, tls, wire
from ucxkv.control import ControlThread, Warnings, wake
from ucxkv.netif import endpoint, parse
from ucxkv.tls import Certificates

logger = logging.getLogger("ucxkv.control")

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
# Where there are no descriptors left for them.
_ACCEPT_PAUSE = 1.0

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
    if isinstance(error, ssl.SSLError):
        return tls.explain(error)
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
        secured = writer.get_extra_info("ssl_object")
        self.secure = secured is not None
        self.names = tls.names_of(secured.getpeercert()) if secured is not None else frozenset()
        self._heard = False

    # -- the handshake --------------------------------------------------------------------------

    def send_preamble(self) -> None:
        """Begin."""
        self._writer.write(wire.preamble())

    async def receive_preamble(self) -> int:
        """The peer's protocol version."""
        data = await self._read(wire.PREAMBLE_SIZE)
        if not self.secure and data.startswith(tls.RECORD):
            raise wire.NotOurProtocol("the peer speaks TLS, this side does not")
        return wire.preamble_version(data)

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
            data = await self._reader.readexactly(count)
        except (asyncio.IncompleteReadError, OSError) as error:
            text = reason(error)
            if self.secure and not self._heard and not isinstance(error, ssl.SSLError):
                # A dialler has finished before the listener has looked at its certificate.
                text += " before it said anything: it may not accept this side's certificate"
            raise ConnectionLost(text) from error
        self._heard = True
        return data

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


async def _first_byte(control: ControlThread, sock: socket.socket) -> bytes:
    """What the peer begins with, left where it is; nothing if it has gone."""
    ready: asyncio.Future[None] = control.loop.create_future()
    control.loop.add_reader(sock, wake, ready)
    try:
        await ready
    finally:
        control.loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)


async def _accepted(
    control: ControlThread, sock: socket.socket, certificates: Certificates | None
) -> Connection:
    """A connection over an accepted socket; OSError if there is none.

    With `certificates` it is secure, unless the peer begins in the clear: whoever takes only secure
    ones can still tell it so.
    """
    context: ssl.SSLContext | None = None
    try:
        if certificates is not None and await _first_byte(control, sock) == tls.RECORD:
            context = certificates.context(listening=True)
        reader = asyncio.StreamReader(limit=_BUFFER, loop=control.loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=control.loop)
        transport, _ = await control.loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
        )
    except BaseException:
        sock.close()
        raise
    return _over(control, reader, asyncio.StreamWriter(transport, protocol, reader, control.loop))


def _over(
    control: ControlThread, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Connection:
    try:
        return Connection(control, reader, writer)
    except (OSError, TypeError, ValueError):
        # Gone before it was looked at: it has no peer name any more.
        writer.transport.abort()
        raise ConnectionResetError("closed by the peer") from None


class _Stranger:
    """A connection that has not proven itself."""

    def __init__(self, sock: socket.socket, since: float) -> None:
        self.since = since
        self.sock: socket.socket | None = sock  # until its task has begun
        self.task: asyncio.Task[None] | None = None

    def take(self) -> socket.socket:
        """The socket, which whoever takes it closes."""
        sock, self.sock = self.sock, None
        assert sock is not None
        return sock

    def drop(self) -> None:
        """Close the connection; its task, if it has begun, does that itself."""
        if self.sock is not None:
            self.take().close()
        if self.task is not None:
            self.task.cancel()


async def _ignore(connection: Connection, _: Callable[[], object]) -> None:
    connection.abort()


class Listener:
    """Accepts connections and has them served; bounds those that have not proven themselves.

    `serve` is called with a connection, and with what it calls when that has proven itself.
    """

    def __init__(
        self,
        control: ControlThread,
        warn: Warnings,
        serve: Callable[[Connection, Callable[[], object]], Awaitable[None]],
        certificates: Certificates | None = None,
    ) -> None:
        self._control = control
        self._warn = warn
        self._serve = serve
        self._certificates = certificates
        self._sockets: list[socket.socket] = []
        self._strangers: dict[_Stranger, None] = {}

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the real port."""
        self._sockets = await self._control.aside(bind, host, port)
        address = self._sockets[0].getsockname()[:2]
        for sock in self._sockets:
            sock.listen(_BACKLOG)
            self._watch(sock)
        return str(address[0]), int(address[1])

    def close(self) -> None:
        """Stop listening, and cut off who has not proven himself."""
        for sock in self._sockets:
            self._control.loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
        for stranger in list(self._strangers):
            stranger.drop()
        self._strangers.clear()
        # Who serves has this listener: what both refer to must not wait for a collection.
        self._serve = _ignore

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._control.loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn("accept", f"cannot accept connections: {reason(error)}")
                self._control.loop.remove_reader(listening)
                self._control.loop.call_later(_ACCEPT_PAUSE, self._watch, listening)
                return
            sock.setblocking(False)
            self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        now = self._control.loop.time()
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            if now - oldest.since < STRANGER_SECONDS:
                self._warn("flood", "too many connections that have not proven themselves")
                sock.close()
                return
            del self._strangers[oldest]
            oldest.drop()
        stranger = _Stranger(sock, now)
        self._strangers[stranger] = None
        stranger.task = self._control.spawn(self._guard(stranger))

    async def _guard(self, stranger: _Stranger) -> None:
        timer = self._control.loop.call_later(HANDSHAKE_SECONDS, stranger.drop)
        sock = stranger.take()
        connection: Connection | None = None
        try:
            connection = await self._receive(sock)
            if connection is not None:
                await self._serve(connection, lambda: self._strangers.pop(stranger, None))
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        finally:
            timer.cancel()
            self._strangers.pop(stranger, None)

    async def _receive(self, sock: socket.socket) -> Connection | None:
        peer = "somebody who has gone"
        try:
            with contextlib.suppress(OSError):
                peer = endpoint(*sock.getpeername()[:2])
            return await _accepted(self._control, sock, self._certificates)
        except ssl.SSLError as error:
            self._warn("tls", f"closed a connection from {peer}: {reason(error)}")
        except OSError as error:
            logger.debug("a connection was lost before it was served: %s", reason(error))
        return None


async def connect(
    control: ControlThread,
    family: int,
    address: tuple[Any, ...],
    local: str | None,
    certificates: Certificates | None,
    stage: Callable[[str], None],
) -> Connection:
    """A connection to one address, from `local` if that is given, secure with `certificates`.

    Raises OSError, or ConnectionLost if that happens in TLS.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if local is not None:
            sock.bind((local, 0))
        stage("connecting")
        await control.loop.sock_connect(sock, address)
        if certificates is None:
            reader, writer = await asyncio.open_connection(sock=sock, limit=_BUFFER)
        else:
            stage("in the TLS handshake")
            reader, writer = await _secured(sock, certificates)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return _over(control, reader, writer)


async def _secured(
    sock: socket.socket, certificates: Certificates
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(
            sock=sock,
            limit=_BUFFER,
            ssl=certificates.context(listening=False),
            server_hostname="",
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
        )
    except ssl.SSLError as error:
        raise ConnectionLost(reason(error)) from error
    except ConnectionError as error:
        raise ConnectionLost(f"{reason(error)}: it may not use TLS") from error
