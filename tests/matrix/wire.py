"""Two hosts on one machine: network namespaces, and a wire between them that can be maltreated.

Each namespace has one TAP device, and a thread passes the frames from one to the other: losing,
delaying, holding and reordering them as it is told.  It needs the right to make network namespaces
and /dev/net/tun, but no queueing discipline of the kernel, which many are built without.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, replace

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MTU = 9000
HOSTS = ("10.97.0.1", "10.97.0.2")
# What a router in front of a slow line keeps for it, in seconds of the line.
QUEUE_SECONDS = 0.25
_DEVICE = "wire0"
_numbers = itertools.count()


def obstacle() -> str:
    """Why there can be no such hosts here; "" where there can."""
    if shutil.which("ip") is None:
        return "the command ip (of iproute2) is not installed"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    name = f"ucxkv-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=10)


@dataclass(frozen=True)
class Weather:
    """What happens to frames: each is lost with probability `loss`, and comes `delay` seconds late,
    give or take `jitter` without overtaking; with probability `overtaken` it is kept so long that
    `1 / overtaken` others overtake it; `rate` are bytes per second (0: as fast as they come)."""

    loss: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    overtaken: float = 0.0
    rate: float = 0.0
    ends_lost: bool = False  # nobody hears of the end of a TCP connection
    held: bool = False  # nothing arrives until this is over


FAIR = Weather()
KEPT_SECONDS = 0.004


def _segment(frame: bytes) -> bytes:
    """The TCP segment in a frame; empty where there is none."""
    ipv4_tcp = frame[12:14] == b"\x08\x00" and frame[23] == socket.IPPROTO_TCP
    length = int.from_bytes(frame[16:18], "big")
    return frame[34 : 14 + length] if ipv4_tcp else b""


def _ends(frame: bytes) -> bool:
    """Whether a frame has a TCP segment with FIN or RST in it."""
    segment = _segment(frame)
    return bool(segment) and bool(segment[13] & 0x05)


def _speaks_to(frame: bytes, port: int) -> bool:
    """Whether a frame has bytes of a connection for that port."""
    segment = _segment(frame)
    return (
        bool(segment)
        and int.from_bytes(segment[2:4], "big") == port
        and len(segment) > (segment[12] >> 4) * 4
    )


class Wire:
    """The two hosts `names` with the addresses HOSTS, and the wire between them."""

    def __init__(self, seed: int = 1) -> None:
        numbers = [next(_numbers) for _ in HOSTS]
        self.names = tuple(f"ucxkv-{os.getpid()}-{number}" for number in numbers)
        self._rng = random.Random(seed)
        self._weather = FAIR
        self._fds: list[int] = []
        self._busy_until = [0.0, 0.0]
        self._last = [0.0, 0.0]
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._wake_r, self._wake_w = os.pipe()
        self._closing = False
        self._hold_for: int | None = None
        try:
            for number, name, address in zip(numbers, self.names, HOSTS, strict=True):
                self._make(f"u{os.getpid()}-{number}", name, address)
        except BaseException:
            self._unmake()
            raise
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def _make(self, device: str, name: str, address: str) -> None:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._fds.append(fd)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
        _ip("netns", "add", name)
        _ip("link", "set", device, "netns", name, "name", _DEVICE, "mtu", str(MTU))
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", _DEVICE)
        _ip("-n", name, "link", "set", _DEVICE, "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _unmake(self) -> None:
        for fd in (*self._fds, self._wake_r, self._wake_w):
            os.close(fd)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    # -- what the test does -----------------------------------------------------------------------

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._weather = weather
        os.write(self._wake_w, b"x")

    def hold(self) -> None:
        """Keep what comes until `release`."""
        self.weather = replace(self._weather, held=True)

    def hold_from_word_to(self, port: int) -> None:
        """Keep what comes from the first bytes on that are said over a connection to a port."""
        self._hold_for = port

    def release(self) -> None:
        self._hold_for = None
        self.weather = replace(self._weather, held=False)

    @property
    def held(self) -> bool:
        """Whether something is being kept."""
        return self._weather.held and bool(self._queue)

    def close(self) -> None:
        self._closing = True
        os.write(self._wake_w, b"x")
        self._thread.join(5)
        self._unmake()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self._fds, self._wake_r):
            poll.register(fd, select.POLLIN)
        while not self._closing:
            timeout = None
            if self._queue and not self._weather.held:
                timeout = max(0.0, (self._queue[0][0] - time.monotonic()) * 1e3)
            for fd, _ in poll.poll(timeout):
                if fd == self._wake_r:
                    os.read(fd, 64)
                else:
                    self._take(self._fds.index(fd))
            self._deliver()

    def _take(self, side: int) -> None:
        """Read what a host has sent, and decide when it arrives."""
        for _ in range(64):
            try:
                frame = os.read(self._fds[side], MTU + 64)
            except BlockingIOError:
                return
            if self._hold_for is not None and _speaks_to(frame, self._hold_for):
                self._hold_for = None
                self._weather = replace(self._weather, held=True)
            weather = self._weather
            if weather == FAIR and not self._queue:
                self._pass(side, frame)
                continue
            if self._rng.random() < weather.loss or (weather.ends_lost and _ends(frame)):
                continue
            now = time.monotonic()
            due = now
            if weather.rate:
                start = max(now, self._busy_until[side])
                if start - now > QUEUE_SECONDS:
                    continue
                due = self._busy_until[side] = start + len(frame) / weather.rate
            due += weather.delay + self._rng.uniform(-1, 1) * weather.jitter
            # Jitter alone keeps the order.
            due = self._last[side] = max(due, self._last[side])
            if self._rng.random() < weather.overtaken:
                due += KEPT_SECONDS
            self._count += 1
            heapq.heappush(self._queue, (due, self._count, side, frame))

    def _deliver(self) -> None:
        while self._queue and not self._weather.held and self._queue[0][0] <= time.monotonic():
            _, _, side, frame = heapq.heappop(self._queue)
            self._pass(side, frame)

    def _pass(self, side: int, frame: bytes) -> None:
        # Full is as good as lost.
        with contextlib.suppress(OSError):
            os.write(self._fds[1 - side], frame)
