"""A process that is no engine and sends packets of its own making to an engine's UCX port.

It talks to libucp directly (the same one that ucxkv has loaded), since nothing that the library
offers can be made to send a message that is not its own.
"""

from __future__ import annotations

import ctypes
import random
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from child import Context

# Numbers of ucp/api/ucp.h and of the library's own messages.
FEATURE_AM = 1 << 6
PARAM_FEATURES = 1 << 0
EP_REMOTE_ADDRESS, EP_ERROR_MODE = 1 << 0, 1 << 1
MESSAGES = range(20)
PING_MESSAGE, REQUEST_MESSAGE, NOTICE_MESSAGE, NOTED_MESSAGE = 1, 3, 13, 14
# The front of every message: slot and, in the upper 16 bits, how often the endpoint was repaired;
# status, token, number of the transfer.
HEAD = struct.Struct("<IIQQ")
# A request behind its head: cache id, generation, word slot, first tensor, tensors, has blocks,
# block, number of blocks, bytes of each, start, number of the offer it answers, word of a hold and
# its slot.
REQUEST = struct.Struct("<qQIIIIQQQQQQI4x")
# A notice behind its head, whose transfer is its number: word of a hold and its slot.
NOTICE = struct.Struct("<QI4x")


def data_plane(ctx: Context, cluster_id: int) -> dict[str, Any]:
    """What an engine keeps from strangers: where its data plane is and what its link expects."""
    running = ctx.engine._running
    link = running.links.lookup(cluster_id)
    caches = [
        {
            "cache_id": entry.cache_id,
            "generation": entry.native.generation,
            "slot": entry.native.slot,
            "block_bytes": entry.block_bytes,
        }
        for entry in running.catalogue.snapshot()
    ]
    hold = ctx.values.setdefault(
        "hold", ctx.engine.hold(next(iter(ctx.caches.values())), None, 600_000)
    )
    return {
        "address": running.native.worker_address(0),
        "slot": link.native.slot,
        "token": link.native.token,
        "caches": caches,
        "hold": (hold._native.word, hold._native.slot),
    }


def drops(ctx: Context, cluster_id: int) -> tuple[int, int]:
    """Messages dropped because they named no link, and because their token was wrong."""
    running = ctx.engine._running
    link = running.links.lookup(cluster_id)
    return running.native.totals()["dropped"], link.native.totals()["dropped"]


def told(ctx: Context) -> tuple[int, str | None]:
    """Notices that have come, and how the hold has ended, if it has."""
    return ctx.engine.stats().notices_received, ctx.values["hold"].outcome


class Sender:
    """A UCX worker with one endpoint, as bare as can be; with no `address`, one that is connected
    later."""

    error_mode = 0  # none

    def __init__(self, address: bytes | None = None) -> None:
        import ucxkv  # noqa: F401  loads libucp
        from ucxkv import settings
        from ucxkv._load import loaded
        from ucxkv.options import Options

        self.ucp = ctypes.CDLL("libucp.so.0")
        for name in ("ucp_am_send_nbx", "ucp_worker_create", "ucp_ep_create"):
            getattr(self.ucp, name)
        self.ucp.ucp_am_send_nbx.restype = ctypes.c_void_p
        config = ctypes.c_void_p()
        self.check(self.ucp.ucp_config_read(None, None, ctypes.byref(config)))
        version = loaded().version
        for name, value in settings.am_settings(Options(), "lo", version).items():
            self.check(self.ucp.ucp_config_modify(config, name.encode(), value.encode()))
        params = (ctypes.c_uint64 * 64)(PARAM_FEATURES, FEATURE_AM)
        self.context = ctypes.c_void_p()
        self.check(
            self.ucp.ucp_init_version(
                1, 13, ctypes.byref(params), config, ctypes.byref(self.context)
            )
        )
        self.ucp.ucp_config_release(config)
        self.worker = ctypes.c_void_p()
        self.check(
            self.ucp.ucp_worker_create(
                self.context, ctypes.byref((ctypes.c_uint64 * 64)()), ctypes.byref(self.worker)
            )
        )
        if address is not None:
            self.connect(address)

    def connect(self, address: bytes) -> None:
        self.target = ctypes.create_string_buffer(address, len(address))
        mask = EP_REMOTE_ADDRESS | EP_ERROR_MODE
        params = (ctypes.c_uint64 * 64)(mask, ctypes.addressof(self.target), self.error_mode)
        self.ep = ctypes.c_void_p()
        self.check(self.ucp.ucp_ep_create(self.worker, ctypes.byref(params), ctypes.byref(self.ep)))

    @staticmethod
    def check(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"UCX: {status}")

    def send(self, message: int, header: bytes, payload: bytes = b"") -> None:
        """Send an active message and wait until UCX is done with it."""
        param = (ctypes.c_uint64 * 32)()
        request = self.ucp.ucp_am_send_nbx(
            self.ep,
            ctypes.c_uint(message),
            header,
            ctypes.c_size_t(len(header)),
            payload,
            ctypes.c_size_t(len(payload)),
            ctypes.byref(param),
        )
        if not request:
            return
        end = time.monotonic() + 5
        request = ctypes.c_void_p(request)
        while self.ucp.ucp_request_check_status(request) == 1:
            self.ucp.ucp_worker_progress(self.worker)
            if time.monotonic() > end:
                raise RuntimeError("a message was not sent within 5 s")
        self.ucp.ucp_request_free(request)

    def close(self) -> None:
        for _ in range(100):
            self.ucp.ucp_worker_progress(self.worker)
        self.ucp.ucp_worker_destroy(self.worker)
        self.ucp.ucp_cleanup(self.context)


def tell(ctx: Context, plane: dict[str, Any], hold: tuple[int, int]) -> None:
    """Send the first notice of a linked peer in its name, to end a hold."""
    sender = Sender(plane["address"])
    head = HEAD.pack(plane["slot"], 0, plane["token"], 1)
    sender.send(NOTICE_MESSAGE, head + NOTICE.pack(*hold), b"done with it")
    sender.close()


def intrude(ctx: Context, plane: dict[str, Any], count: int) -> int:
    """Send `count` messages that carry no valid token: well-formed requests and notices, which name
    a hold that there is, chunks for possible transfers, heads of every length, noise."""
    rng = random.Random(11)
    sender = Sender(plane["address"])
    for number in range(count):
        token = rng.choice([0, plane["token"] ^ 1, plane["token"] ^ (1 << 63), rng.getrandbits(64)])
        slot = rng.choice([plane["slot"], plane["slot"] + 1, 8191, 8192, 2**32 - 1])
        head = HEAD.pack(slot, 0, token, rng.choice([0, 1, rng.getrandbits(64)]))
        kind = number % 5
        if kind == 0:
            cache = rng.choice(plane["caches"])
            request = REQUEST.pack(
                cache["cache_id"],
                cache["generation"],
                cache["slot"],
                0,
                1,
                0,
                0,
                1,
                cache["block_bytes"],
                0,
                0,
                *rng.choice([(0, 0), plane["hold"]]),
            )
            sender.send(REQUEST_MESSAGE, head + request)
        elif kind == 1:
            sender.send(rng.choice(MESSAGES), head, rng.randbytes(rng.choice([0, 8, 1000])))
        elif kind == 2:
            head = HEAD.pack(slot, 0, token, rng.choice([1, 2, 100]))
            if rng.random() < 0.5:
                sender.send(NOTED_MESSAGE, head)
            else:
                sender.send(NOTICE_MESSAGE, head + NOTICE.pack(*plane["hold"]), b"mine now")
        elif kind == 3:
            size = rng.randrange(len(head) + 100)
            sender.send(rng.choice(MESSAGES), (head + rng.randbytes(100))[:size])
        else:
            sender.send(rng.choice(MESSAGES), rng.randbytes(rng.randrange(1, 120)))
    sender.close()
    return count


def tell_late(ctx: Context, plane: dict[str, Any], messages: list[tuple[str, int, int]]) -> None:
    """In the name of a linked peer send pings and notices, each with a number, from an endpoint that
    was repaired so many times."""
    sender = Sender(plane["address"])
    for kind, epoch, number in messages:
        head = HEAD.pack(plane["slot"] | (epoch & 0xFFFF) << 16, 0, plane["token"], number)
        if kind == "ping":
            sender.send(PING_MESSAGE, head)
        else:
            sender.send(NOTICE_MESSAGE, head + NOTICE.pack(0, 0), b"notice %d" % number)
    sender.close()
