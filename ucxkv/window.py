"""Where processes of the same user look at an engine's figures: a local socket.

Its name is of Linux's abstract kind, ``ucxkv/PID/N``, so nothing is left in any folder however the
process ends.  Whoever connects and is the same user, or root, gets the figures as JSON and then the
end of the stream.  Nothing is read from a visitor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
import weakref
from typing import TYPE_CHECKING

import msgspec

from ucxkv.figures import Figures, figures_of

if TYPE_CHECKING:
    from ucxkv.running import Running

logger = logging.getLogger("ucxkv.window")

_PREFIX = "ucxkv/"
_UCRED = struct.Struct("iII")  # pid, uid, gid
_LONGEST = 64 << 20
# A visitor that takes longer to read is left, and more than these at a time are not let in.
_SHOW_SECONDS = 2.0
_MOST_VISITORS = 8

_numbers = itertools.count(1)


class Window:
    """The owner's side; opened and closed on the control loop."""

    def __init__(self, running: Running) -> None:
        # Who has the engine has its window: the other way round would keep it alive.
        self._running = weakref.ref(running)
        self._server: asyncio.Server | None = None
        self._visitors = 0

    async def open(self) -> None:
        """Open it; where there are no such sockets an engine does without."""
        name = f"\0{_PREFIX}{os.getpid()}/{next(_numbers)}"
        try:
            self._server = await asyncio.start_unix_server(self._show, path=name)
        except OSError as error:
            logger.debug("figures cannot be shown to other processes: %s", error)

    def close(self) -> None:
        """Close it; no error if it is not open."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _show(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running = self._running()
        self._visitors += 1
        try:
            if (
                running is not None
                and self._visitors <= _MOST_VISITORS
                and _credentials(writer.get_extra_info("socket"))[1] in (os.geteuid(), 0)
            ):
                writer.write(msgspec.json.encode(figures_of(running)))
                await asyncio.wait_for(writer.drain(), _SHOW_SECONDS)
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _SHOW_SECONDS)
        except (OSError, asyncio.TimeoutError):
            logger.debug("a visitor did not wait for the figures")
        finally:
            self._visitors -= 1
            writer.transport.abort()


def _credentials(connected: socket.socket) -> tuple[int, int]:
    """Process and user of the other end."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


def names(pid: int | None = None) -> list[str]:
    """The names of all windows here, of one process or of all, in the order of their opening."""
    found = set()
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            name = line.rpartition(" ")[2].strip()
            if name.startswith(f"@{_PREFIX}"):
                owner, _, number = name[len(_PREFIX) + 1 :].partition("/")
                if owner.isdecimal() and number.isdecimal() and pid in (None, int(owner)):
                    found.add((int(owner), int(number)))
    return [f"{_PREFIX}{owner}/{number}" for owner, number in sorted(found)]


def look(name: str, timeout: float = 3.0) -> Figures:
    """The figures that are shown in a window of that name.

    Raises OSError where it is gone or belongs to another user's process, TimeoutError where the
    process does not answer within `timeout` seconds of silence, ValueError for what are no figures.
    """
    owner = int(name[len(_PREFIX) :].partition("/")[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.settimeout(timeout)
        connected.connect(f"\0{name}")
        # Anybody can take a name that is free.
        if _credentials(connected)[0] != owner:
            raise PermissionError(f"another process than {owner} answers for it")
        parts = bytearray()
        while part := connected.recv(1 << 16):
            parts += part
            if len(parts) > _LONGEST:
                raise ValueError("more than figures can be")
    if not parts:
        raise PermissionError(f"process {owner} shows its figures only to its own user")
    return msgspec.json.decode(parts, type=Figures)
