"""From a cluster's addresses to a connection whose other end has proven itself."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ucxkv import handshake, wire
from ucxkv.connection import Connection, ConnectionLost, connect, reason
from ucxkv.control import ControlThread
from ucxkv.netif import endpoint
from ucxkv.tls import Certificates
from ucxkv.types import ClusterInfo, IpInfo, LlmRole


class DialFailed(Exception):
    """No address led to the cluster; the text says what happened at each.

    `deserted`: nothing listens at any of them.
    """

    def __init__(self, text: str, *, deserted: bool = False) -> None:
        super().__init__(text)
        self.deserted = deserted


class Progress:
    """How far a dial has come, for the message of a timeout."""

    def __init__(self) -> None:
        self.where = ""
        self.stage = "waiting for its turn"

    def at(self, where: str) -> None:
        """Another address is being tried."""
        self.where = where

    def __call__(self, stage: str) -> None:
        self.stage = stage

    def __str__(self) -> str:
        return f"{self.where}: {self.stage}" if self.where else self.stage


@dataclass(frozen=True)
class Reached:
    """A connection after its handshake, and the address that led there."""

    connection: Connection
    introduction: handshake.Introduction
    welcome: wire.Welcome
    address: IpInfo
    local: str | None


@dataclass(frozen=True)
class Caller:
    """What a dialler says of itself; `make_hello` is given the address it dials."""

    control: ControlThread
    key: bytes | None
    make_hello: Callable[[str], wire.Hello]
    role: LlmRole | None  # the one the peer must have
    certificates: Certificates | None


async def _connect(
    caller: Caller, address: IpInfo, local: str | None, progress: Progress
) -> Connection:
    control = caller.control
    progress("resolving the name")
    try:
        infos = socket.getaddrinfo(
            address.ip,
            address.port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
    except socket.gaierror:
        infos = await control.aside(
            lambda: socket.getaddrinfo(address.ip, address.port, type=socket.SOCK_STREAM)
        )
    failure: OSError = OSError("the name has no address")
    for family, _, _, _, sockaddr in infos:
        try:
            return await connect(control, family, sockaddr, local, caller.certificates, progress)
        except OSError as error:
            # A name may stand for IPv6 and IPv4 while the peer listens at one of them.
            failure = error
    raise failure


async def _try(caller: Caller, address: IpInfo, local: str | None, progress: Progress) -> Reached:
    where = endpoint(address.ip, address.port)
    progress.at(where)
    connection = await _connect(caller, address, local, progress)
    try:
        introduction, welcome = await handshake.dial(
            connection, lambda: caller.make_hello(where), caller.key, progress, caller.role
        )
        if caller.certificates is not None:
            theirs = introduction.theirs.cluster_id
            problem = caller.certificates.tls.stranger(connection.names, theirs)
            if problem is not None:
                raise handshake.Refused(problem)
    except BaseException:
        connection.abort()
        raise
    return Reached(connection, introduction, welcome, address, local)


async def reach(
    caller: Caller, cluster: ClusterInfo, progress: Progress, deadline: float
) -> Reached:
    """Try the cluster's addresses in order.

    Raises handshake.Refused with a code other than REFUSED as soon as an address answers so,
    otherwise DialFailed.  With several addresses each has its share of the time until `deadline`;
    the last is left to the caller's own time-out, which knows the stage reached.
    """
    local = next((info.ip for info in cluster.local_ip_infos), None)
    failures: list[str] = []
    deserted = True
    count = len(cluster.remote_ip_infos)
    for number, address in enumerate(cluster.remote_ip_infos):
        attempt = _try(caller, address, local, progress)
        share: float | None = None
        if number < count - 1:
            share = (deadline - caller.control.loop.time()) / (count - number)
        try:
            return await asyncio.wait_for(attempt, share)
        except asyncio.TimeoutError:
            text = f"no answer in time ({progress.stage})"
            deserted = False
        except handshake.Refused as refused:
            if refused.code != wire.REFUSED:
                raise
            text = str(refused)
            deserted = False
        except (wire.ProtocolError, ConnectionLost) as error:
            text = f"{error} ({progress.stage})"
            deserted = False
        except (OSError, UnicodeError, ValueError, OverflowError) as failed:
            # Names that cannot be encoded and ports out of range are reported like any other.
            text = f"{reason(failed)} ({progress.stage})"
            deserted &= isinstance(failed, OSError) and failed.errno == errno.ECONNREFUSED
        failures.append(f"{endpoint(address.ip, address.port)}: {text}")
    if not failures:
        raise DialFailed("no address was given")
    raise DialFailed("; ".join(failures), deserted=deserted)
