"""The wire between the two RDMA devices of the guest: laid, maltreated, mended.

The kernel's soft RoCE serves no other network namespace than the first, so both ends are in it: a
rule sends what leaves an end over the wire, though its destination is an address of this machine.
Everything but RDMA, the control connections for instance, takes the loopback interface as usual.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ENDS = ("fabric0", "fabric1")
ADDRESSES = ("10.99.0.1", "10.99.1.1")
DEVICES = ("rxe0", "rxe1")
_MACS = ("02:00:00:00:99:00", "02:00:00:00:99:01")
_TABLES = ("100", "101")


def _routes() -> list[Sequence[str]]:
    """What is lost when an end goes down."""
    steps: list[Sequence[str]] = []
    for here, there in ((0, 1), (1, 0)):
        device = ("dev", ENDS[here])
        steps += [
            ("ip", "neigh", "replace", ADDRESSES[there], "lladdr", _MACS[there], *device),
            ("ip", "route", "replace", ADDRESSES[there], *device, "table", _TABLES[here]),
        ]
    return steps


def _lay() -> list[Sequence[str]]:
    near, far = ENDS
    steps: list[Sequence[str]] = [
        ("ip", "link", "add", near, "type", "veth", "peer", "name", far),
    ]
    for number, end in enumerate(ENDS):
        settings = f"net.ipv4.conf.{end}"
        steps += [
            ("ip", "link", "set", end, "address", _MACS[number], "mtu", "4200", "up"),
            ("ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", end),
            ("sysctl", "-qw", f"{settings}.accept_local=1", f"{settings}.rp_filter=0"),
            ("ip", "rule", "add", "pref", "0", "oif", end, "table", _TABLES[number]),
        ]
    # The rule for addresses of this machine comes after ours.
    steps += [
        ("ip", "rule", "add", "pref", "10", "table", "local"),
        ("ip", "rule", "delete", "pref", "0", "table", "local"),
        *_routes(),
    ]
    for end, device in zip(ENDS, DEVICES, strict=True):
        steps.append(("rdma", "link", "add", device, "type", "rxe", "netdev", end))
    return steps


LAY = _lay()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def maltreat(number: int, *treatment: str) -> None:
    """Have what leaves an end treated as netem is told, such as "loss", "10%"."""
    _run("tc", "qdisc", "replace", "dev", ENDS[number], "root", "netem", *treatment)


def cut(number: int) -> None:
    """Take the port of a device down."""
    _run("ip", "link", "set", ENDS[number], "down")


def mend() -> None:
    """Both ends as they were laid."""
    for end in ENDS:
        subprocess.run(
            ["tc", "qdisc", "delete", "dev", end, "root"], capture_output=True, timeout=60
        )
        _run("ip", "link", "set", end, "up")
    for step in _routes():
        _run(*step)


def counters(number: int) -> dict[str, int]:
    """What a device has counted since it was made."""
    folder = Path(f"/sys/class/infiniband/{DEVICES[number]}/ports/1/hw_counters")
    return {
        file.name: int(file.read_text()) for file in folder.iterdir() if file.name != "lifespan"
    }
