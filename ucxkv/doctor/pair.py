"""What can be found out only between two ends: of one machine, or of two."""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ucxkv import (
    CacheIndex,
    ClusterInfo,
    IpInfo,
    LinkFailed,
    LinkInfo,
    LlmDataDist,
    LlmError,
    Options,
)
from ucxkv.devices import Interface, Port, interfaces, rdma_ports
from ucxkv.doctor import board
from ucxkv.doctor.findings import Finding
from ucxkv.netif import endpoint

SIZES = (4096, 1 << 20, board.DATA_BYTES)
_REPEATS = (50, 20, 5)
_TIMEOUT_MS = 10_000
_CONNECT_SECONDS = 5.0
_MOST_CLOCK_SKEW = 0.1
# What a healthy port gives one pull of many megabytes, of what it promises.
_SHARE = {"get": 0.8, "stream": 0.5}


@dataclass(frozen=True)
class Measured:
    """Pulls of one size: the median of their seconds, and what that makes."""

    bytes: int
    seconds: float
    path: str

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9


@dataclass
class Visit:
    """What was found at a peer."""

    findings: list[Finding] = field(default_factory=list)
    transports: tuple[str, ...] = ()
    path: str = ""
    pulls: list[Measured] = field(default_factory=list)


def visit(host: str, port: int, options: Options) -> Visit:
    """Look at the doctor that listens at an address, and at the way to it."""
    seen = Visit()
    unreachable = _reach(host, port)
    seen.findings.append(unreachable or Finding("control port", "ok", f"{endpoint(host, port)}"))
    if unreachable is not None:
        return seen
    dialling = replace(options, listen=None)
    with LlmDataDist(board.CLUSTER + 1 + secrets.randbelow(1 << 20), options=dialling) as engine:
        peer = ClusterInfo(board.CLUSTER, [IpInfo(host, port)])
        try:
            engine.link_llm_clusters([peer], timeout_ms=_TIMEOUT_MS)
        except LinkFailed as error:
            seen.findings.append(_no_link(error))
            return seen
        try:
            _examine(engine, seen)
        except (LlmError, ValueError) as error:
            seen.findings.append(
                Finding(
                    "transfer",
                    "fail",
                    str(error),
                    "the link is there, but bytes do not come through",
                    "look at the log of the other end, and for a firewall between the data ports"
                    " (UCX_TCP_PORT_RANGE fixes them)",
                )
            )
    return seen


def _reach(host: str, port: int) -> Finding | None:
    """Why a connection to the control port cannot be made, None if it can."""
    where = endpoint(host, port)
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
        return None
    except socket.gaierror as error:
        what, mend = f"{host}: {error.strerror}", "use an address, or mend DNS or /etc/hosts"
    except TimeoutError:
        what = f"{where} does not answer within {_CONNECT_SECONDS:.0f} s"
        mend = f"let TCP port {port} through the firewalls of both hosts and between them"
    except ConnectionRefusedError:
        what = f"nothing listens at {where}"
        mend = f"ucxkv doctor --listen 0.0.0.0:{port}, at the other end"
    except OSError as error:
        what, mend = f"{where}: {error.strerror}", "ip route get <address>; ip link"
    return Finding("control port", "fail", what, "links are set up over it", mend)


def _no_link(error: LinkFailed) -> Finding:
    message = "; ".join(result.message for result in error.results) or str(error)
    if "answers here" in message:
        mend = "ucxkv doctor --listen HOST:PORT at the other end, and --peer with that port"
    else:
        mend = (
            "what the message names; if it is a time-out, let UCX's ports through the firewalls"
            " (UCX_TCP_PORT_RANGE fixes them)"
        )
    return Finding("link", "fail", message, "nothing can be pulled without one", mend)


def _examine(engine: LlmDataDist, seen: Visit) -> None:
    paper = np.zeros(board.BOARD_BYTES, np.uint8)
    target = board.register(engine, paper)
    index = CacheIndex(board.CLUSTER, board.BOARD)

    def look() -> board.Posted:
        engine.pull_kv_cache(index, target, timeout_ms=_TIMEOUT_MS)
        return board.read(paper)

    there = look().facts
    link = next(link for link in engine.links() if link.cluster_id == board.CLUSTER)
    seen.transports, seen.path = link.transports, link.path
    same_host = there["host"] == socket.gethostname()
    seen.findings += _agreement(board.facts(), there)
    seen.findings.append(clocks(look))
    seen.findings.append(_path(link, there, same_host))
    seen.pulls = _pull(engine)
    seen.findings += rates(seen.pulls, seen.transports, rdma_ports(), interfaces())


def _agreement(here: dict[str, Any], there: dict[str, Any]) -> Iterator[Finding]:
    versions = [
        f"ucxkv {end['ucxkv']}, UCX {end['ucx']} ({end['origin']})" for end in (here, there)
    ]
    if versions[0] == versions[1]:
        yield Finding("versions", "ok", f"{versions[0]}, at both ends")
    else:
        yield Finding(
            "versions",
            "warn",
            f"here {versions[0]}; there {versions[1]}",
            "what was measured with one may not be true of the other",
            "install the same at both ends",
        )
    mine, theirs = here["environment"], there["environment"]
    names = sorted(name for name in mine.keys() | theirs if mine.get(name) != theirs.get(name))
    if names:
        yield Finding(
            "settings",
            "warn",
            "; ".join(
                f"{name} is {mine.get(name, 'unset')} here, {theirs.get(name, 'unset')} there"
                for name in names
            ),
            "transports and sizes that differ cost rate, or the link",
            "export the same UCX_* and UCXKV_* at both ends",
        )
    else:
        yield Finding("settings", "ok", "the same at both ends")
    sizes = {port.mtu for port in rdma_ports() if port.mtu} | {
        port["mtu"] for port in there["ports"].values() if port["mtu"]
    }
    if len(sizes) > 1:
        yield Finding(
            "MTU",
            "warn",
            f"RDMA ports with {', '.join(map(str, sorted(sizes)))} bytes",
            "the smaller one counts, and a switch that has less drops packets",
            "ip link set <interface> mtu <bytes>, the same at both ends",
        )


def clocks(look: Callable[[], board.Posted]) -> Finding:
    """Compare this machine's time with that on a board."""
    best, skew = float("inf"), 0.0
    for _ in range(5):
        before = time.time()
        there = look().time
        after = time.time()
        if after - before < best:
            best = after - before
            # The board's time was right at some moment of the pull, or a tick before it.
            skew = max(0.0, there - after, before - board.TICK - there)
    if skew <= _MOST_CLOCK_SKEW:
        return Finding("clocks", "ok", f"agree within {skew + best + board.TICK:.3f} s")
    return Finding(
        "clocks",
        "warn",
        f"{skew:.1f} s apart",
        "logs of the two cannot be laid side by side, and certificates may be refused",
        "chronyc makestep, at both ends",
    )


def _path(link: LinkInfo, there: dict[str, Any], same_host: bool) -> Finding:
    over = ", ".join(link.transports) or "UCX's transports"
    if link.path == "get":
        return Finding("path", "ok", f"get, native, over {over}")
    here_rdma = any(port.state == "ACTIVE" for port in rdma_ports())
    there_rdma = any(port["state"] == "ACTIVE" for port in there["ports"].values())
    if here_rdma and there_rdma:
        return Finding(
            "path",
            "fail",
            f"stream, over {over}, although both ends have RDMA",
            "the owner's CPU copies, and TCP carries, what the devices could fetch by themselves",
            "ucxkv info at both ends: 'GET over' must name rc; ping between the ports' addresses",
        )
    if same_host:
        return Finding(
            "path",
            "warn",
            f"stream, over {over}",
            "on one host a reader can copy by itself",
            "see 'same-host GET' above",
        )
    return Finding(
        "path", "note", f"stream, over {over}: no RDMA at both ends, the owner's CPU takes part"
    )


def _pull(engine: LlmDataDist) -> list[Measured]:
    data = np.zeros(board.DATA_BYTES, np.uint8)
    target = board.register(engine, data)
    index = CacheIndex(board.CLUSTER, board.DATA)
    measured = []
    for size, repeats in zip(SIZES, _REPEATS, strict=True):
        data[:] = 0xFF
        reports = [
            engine.pull_kv_cache(index, target, size=size, timeout_ms=_TIMEOUT_MS)
            for _ in range(repeats)
        ]
        expected = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
        if not np.array_equal(data[:size], expected):
            raise LlmError(f"a pull of {size} bytes has brought others than the peer's")
        seconds = statistics.median(report.seconds for report in reports)
        measured.append(Measured(size, max(seconds, 1e-9), reports[-1].path))
    return measured


def promised(
    transports: tuple[str, ...], ports: list[Port], networks: list[Interface]
) -> tuple[str, float] | None:
    """Name and Gbit/s of the port that bytes come through, None where it promises nothing."""
    found: list[tuple[str, float]] = []
    for transport in transports:
        kind, _, device = transport.partition("/")
        if kind == "tcp":
            found += [(n.name, n.gigabits) for n in networks if n.name == device and n.gigabits]
        else:
            # The rate that software gives itself promises nothing.
            found += [
                (p.name, p.gigabits)
                for p in ports
                if p.name == device and p.gigabits and not p.software
            ]
    return max(found, key=lambda entry: entry[1], default=None)


def rates(
    pulls: list[Measured],
    transports: tuple[str, ...],
    ports: list[Port],
    networks: list[Interface],
) -> Iterator[Finding]:
    """What was measured, against what the port promises."""
    small = pulls[0]
    yield Finding("latency", "ok", f"{small.seconds * 1e6:.0f} µs for {small.bytes} bytes")
    port = promised(transports, ports, networks)
    for pull in pulls[1:]:
        rate = pull.gigabytes_per_second
        what = f"{rate:.2f} GB/s for {pull.bytes >> 20} MiB, by {pull.path}"
        if port is None:
            yield Finding("rate", "ok", f"{what}; no port's rate to compare it with")
            continue
        name, gigabits = port
        share = rate * 8 / gigabits
        what += f": {share:.0%} of the {gigabits:g} Gbit/s of {name}"
        if pull is not pulls[-1] or share >= _SHARE[pull.path]:
            yield Finding("rate", "ok", what)
            continue
        yield Finding(
            "rate",
            "warn",
            what,
            f"a healthy port gives at least {_SHARE[pull.path]:.0%} to large pulls by {pull.path}",
            "docs/fabrics.md, 'Reading a miss': MTU, NUMA node, flow control, other traffic;"
            f" {os.cpu_count()} CPUs here",
        )
