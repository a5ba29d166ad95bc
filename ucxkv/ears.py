"""Whether UCX still listens for a worker.

A worker of UCX's TCP transport closes its listening socket, for good, when a connection comes while
the process has no descriptor left (seen in 1.22).  It says nothing of that, and peers that connect
later are refused.  So the socket is noted when the worker is made, and looked at later.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable

# Descriptor and inode: the number alone may be given to another file.
_Ear = tuple[int, int]


def listening_at(host: str) -> dict[_Ear, int]:
    """The TCP sockets of this process that listen at an address, and their ports."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        inode = _socket_inode(fd)
        if inode is None:
            continue
        try:
            looked_at = socket.socket(fileno=fd)
        except OSError:
            continue
        try:
            if (
                looked_at.family in (socket.AF_INET, socket.AF_INET6)
                and looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and looked_at.getsockname()[0] == host
            ):
                found[fd, inode] = looked_at.getsockname()[1]
        except OSError:
            # Closed meanwhile by its owner.
            continue
        finally:
            looked_at.detach()
    return found


def _socket_inode(fd: int) -> int | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


class Ears:
    """The listening sockets of one worker; none where they could not be told from others."""

    def __init__(self, host: str, make_worker: Callable[[], int]) -> None:
        before = listening_at(host)
        self.worker = make_worker()
        self._sockets = listening_at(host).keys() - before.keys()

    @property
    def deaf(self) -> bool:
        """Whether UCX has closed them."""
        return any(_socket_inode(fd) != inode for fd, inode in self._sockets)
