"""A TCP relay that mistreats what passes through it, at any byte or any frame.

    with MeanProxy(owner.address) as proxy:
        proxy.plan(Fault("swap", "listener", 3))        # for the next connection
        puller.link(owner, address=proxy.address)
        proxy.plan(Fault("cut", "dialler", 40, "byte"), now=True)    # counted from here on

Connections without a plan pass unharmed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("stall", "cut", "truncate", "drop", "duplicate", "replay", "swap")
SIDES = ("dialler", "listener")
FOREVER = 3600.0

PREAMBLE = 8
TLS_RECORD = b"\x16"


@dataclass(frozen=True)
class Fault:
    """What happens to unit number `at` of what one side says.

    stall      is held up, with all behind it, for `seconds`
    cut        the connection ends in front of it
    truncate   half of it is passed on, then the connection ends
    drop       is left out
    duplicate  is passed on twice
    replay     is followed by all that was said before it, and itself
    swap       comes after the one behind it

    A unit is a byte, or a frame: the preamble, a length and as much as it promises, or a record of
    TLS.
    """

    kind: str
    side: str
    at: int
    unit: str = "frame"
    seconds: float = FOREVER
    reset: bool = False  # connections end by RST instead of FIN

    def __str__(self) -> str:
        return f"{self.kind} {self.unit} {self.at} of the {self.side}"


class _Cut(Exception):
    pass


class _Flow:
    """One direction of a connection."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.heard = 0  # units
        self._rest = b""
        self._said: list[bytes] = []
        self._late = b""
        self._first = True
        self._tls = False

    def plan(self, fault: Fault) -> None:
        """From the next unit on."""
        self.fault, self.heard, self._said = fault, 0, []

    def units(self, data: bytes) -> Iterator[bytes]:
        self._rest += data
        if self._first:
            self._tls = self._rest.startswith(TLS_RECORD)
        while self._rest:
            fault = self.fault
            if fault is not None and fault.unit == "byte" and self.heard <= fault.at + 1:
                size = 1
            elif self._tls:
                size = 5 + int.from_bytes(self._rest[3:5], "big") if len(self._rest) >= 5 else 5
            elif self._first:
                size = PREAMBLE
            else:
                size = 4 + int.from_bytes(self._rest[:4], "big") if len(self._rest) >= 4 else 4
            if len(self._rest) < size:
                return
            unit, self._rest = self._rest[:size], self._rest[size:]
            self._first = False
            yield unit

    def treat(self, unit: bytes) -> tuple[bytes, float, bool]:
        """What to pass on, after how long, and whether the connection ends then."""
        fault, number = self.fault, self.heard
        self.heard += 1
        if fault is None:
            return unit, 0.0, False
        self._said.append(unit)
        if number == fault.at:
            if fault.kind == "stall":
                return unit, fault.seconds, False
            if fault.kind == "cut":
                return b"", 0.0, True
            if fault.kind == "truncate":
                return unit[: len(unit) // 2], 0.0, True
            if fault.kind == "drop":
                return b"", 0.0, False
            if fault.kind == "duplicate":
                return unit * 2, 0.0, False
            if fault.kind == "replay":
                return unit + b"".join(self._said), 0.0, False
            self._late = unit
            return b"", 0.0, False
        late, self._late = self._late, b""
        return unit + late, 0.0, False


class _Relay:
    """One connection."""

    def __init__(self, near: socket.socket, far: socket.socket, fault: Fault | None) -> None:
        self.ends = {"dialler": near, "listener": far}
        self.flows = {
            side: _Flow(fault if fault is not None and fault.side == side else None)
            for side in SIDES
        }
        self.done = threading.Event()
        self._reset = fault is not None and fault.reset
        self._lock = threading.Lock()
        self._passing = 2
        self._threads = [
            threading.Thread(target=self._pass, args=(side, other), daemon=True)
            for side, other in (SIDES, SIDES[::-1])
        ]
        for thread in self._threads:
            thread.start()

    def plan(self, fault: Fault) -> None:
        self._reset = fault.reset
        self.flows[fault.side].plan(fault)

    def _pass(self, side: str, other: str) -> None:
        source, sink, flow = self.ends[side], self.ends[other], self.flows[side]
        with contextlib.suppress(OSError, _Cut):
            while data := source.recv(65536):
                passing = b""
                for unit in flow.units(data):
                    more, seconds, cut = flow.treat(unit)
                    if seconds:
                        sink.sendall(passing)
                        passing = b""
                        self.done.wait(seconds)
                    passing += more
                    if cut:
                        sink.sendall(passing)
                        raise _Cut
                sink.sendall(passing)
        self.end()
        with self._lock:
            self._passing -= 1
            last = self._passing == 0
        if last:
            for sock in self.ends.values():
                if self._reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()

    def end(self) -> None:
        """Have both threads end, and the connections with them."""
        self.done.set()
        for sock in self.ends.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD if self._reset else socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        for thread in self._threads:
            thread.join(5)


class MeanProxy:
    """Relays every connection to `target`; what is planned happens to one of them."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self.accepted = 0
        self._fault: Fault | None = None
        self._relays: list[_Relay] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def plan(self, fault: Fault, *, now: bool = False) -> None:
        """For the next connection, or for what is said from `now` on over the last one."""
        if now:
            self._relays[-1].plan(fault)
        else:
            self._fault = fault

    def cut(self) -> None:
        """End all connections."""
        for relay in self._relays:
            relay.end()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self.accepted += 1
            self._sweep()
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fault, self._fault = self._fault, None
            self._relays.append(_Relay(near, far, fault))

    def _sweep(self) -> None:
        for relay in [relay for relay in self._relays if relay.done.is_set()]:
            relay.close()
            self._relays.remove(relay)

    def __enter__(self) -> MeanProxy:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._server.close()
        for relay in self._relays:
            relay.close()
