"""Children that may lock little memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from children import actions
from children.actions import Outcome

if TYPE_CHECKING:
    from child import Context

_VERSION, _CAP_IPC_LOCK = 0x20080522, 14


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """This thread may lock so much more than the process has already, like an ordinary user's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    before = (ctypes.c_uint32 * 6)()
    if libc.capget(header, before) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities cannot be read")
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with open("/proc/self/status") as status:
        pinned = next(int(line.split()[1]) for line in status if line.startswith("VmPin"))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (pinned * 1024 + nbytes, limits[1]))
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= ~(1 << _CAP_IPC_LOCK)
    libc.capset(header, fewer)
    try:
        yield
    finally:
        libc.capset(header, before)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def register(ctx: Context, nbytes: int, limit: int) -> Outcome:
    """Try to register `nbytes` where only `limit` can be locked."""
    tensor = np.zeros((1, nbytes), np.uint8)
    with limited(limit):
        return actions.attempt(lambda: ctx.engine.register_kv_cache(None, [tensor]))
