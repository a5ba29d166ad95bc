"""What can be found out on one machine, without a peer."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ucxkv import devices, settings
from ucxkv._load import SWITCH, has_rdma, loaded
from ucxkv.devices import Port
from ucxkv.doctor.findings import Finding
from ucxkv.info import Info
from ucxkv.options import Options

_UNLIMITED = resource.RLIM_INFINITY
_CAP_IPC_LOCK = 14
_ROCE_MTU = 4200
_SHARED_MEMORY = 64 << 20
_DGID_CHECK = "UD_VERBS_ETH_DGID_CHECK"
# It cannot connect over the loopback interface (openucx/ucx#11202).
_BROKEN_LOOPBACK = (1, 20)


@dataclass(frozen=True)
class Machine:
    """Where to look; other places than the usual are for tests."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


def examine(info: Info, options: Options, machine: Machine = Machine()) -> list[Finding]:
    """Everything about this machine that matters to ucxkv."""
    ports = devices.rdma_ports(machine.sys)
    found = [*_ucx(), *_settings(options), *_rdma(ports, machine)]
    for port in ports:
        found += [_state(port), *_addresses(port), *_affinity(port, machine)]
    found += _soft_roce(ports, options)
    return [
        *found,
        _memlock(ports, machine),
        _same_host(info),
        _huge_pages(machine),
        _shared_memory(machine),
    ]


def _ucx() -> Iterator[Finding]:
    ucx = loaded()
    what = f"{ucx.version_text} ({ucx.origin}), {ucx.path}"
    if ucx.version[:2] == _BROKEN_LOOPBACK:
        yield Finding(
            "UCX",
            "warn",
            what,
            "this release cannot connect over the loopback interface",
            f"pip install -U libucx-cu12, or set {SWITCH} to the prefix of another",
        )
        return
    yield Finding("UCX", "ok", what)
    if not (ucx.folder / "ucx").is_dir() and not os.environ.get("UCX_MODULE_DIR"):
        yield Finding(
            "UCX modules",
            "warn",
            f"there is no folder {ucx.folder / 'ucx'}",
            "UCX's transports for RDMA, shared memory and GPUs are modules in it; without them"
            " it has TCP alone",
            f"reinstall that UCX whole, or set {SWITCH}=wheel",
        )


def _settings(options: Options) -> Iterator[Finding]:
    for conflict in settings.forced_conflicts(options):
        name = conflict.partition("=")[0]
        yield Finding("settings", "fail", conflict, "no link can be made with it", f"unset {name}")
    names = sorted(name for name in os.environ if name.startswith(("UCX_", "UCXKV_")))
    if names:
        what = ", ".join(f"{name}={os.environ[name]}" for name in names)
        yield Finding("environment", "note", what)


def _rdma(ports: list[Port], machine: Machine) -> Iterator[Finding]:
    if not ports:
        yield Finding("RDMA", "note", "no device: pulls between hosts are streamed over TCP")
        return
    names = ", ".join(port.name for port in ports)
    if not has_rdma(loaded().folder):
        yield Finding(
            "RDMA",
            "fail",
            f"{names}, but the UCX in use has no RDMA transports",
            "pulls go over TCP, with the owner's CPU, at a fraction of the rate",
            f"apt-get install libucx0 ibverbs-providers (the wheel has none), or set {SWITCH} to"
            " the prefix of a UCX with verbs",
        )
        return
    nodes = sorted((machine.dev / "infiniband").glob("uverbs*"))
    if not nodes:
        yield Finding(
            "RDMA",
            "fail",
            f"{names}, but no /dev/infiniband/uverbs* here",
            "verbs are called through it; containers are not given it by themselves",
            "docker run --device=/dev/infiniband ..., on a host: modprobe ib_uverbs",
        )
    elif not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        yield Finding(
            "RDMA",
            "fail",
            f"{nodes[0]} may not be opened by this user",
            "verbs are called through it",
            f"chmod a+rw {nodes[0]}, or a udev rule that does",
        )
    else:
        yield Finding("RDMA", "ok", names)


def _rate(port: Port) -> str:
    return f"{port.gigabits:g} Gbit/s" if port.gigabits else "rate unknown"


def _state(port: Port) -> Finding:
    what = f"{port.state}, {port.link_layer or 'link layer unknown'}, {_rate(port)}"
    if port.software:
        what += ", in software"
    if port.state == "ACTIVE":
        return Finding(port.name, "ok", what)
    if port.link_layer == "InfiniBand":
        mend = "opensm (a subnet manager has to run in the fabric), then look at ibstat"
        if port.state == "DOWN":
            mend = "plug the cable in, or look at the switch; ibstat tells more"
    else:
        mend = f"ip link set {port.interface or '<its interface>'} up"
    return Finding(port.name, "fail", what, "UCX uses active ports only", mend)


def _addresses(port: Port) -> Iterator[Finding]:
    if port.link_layer != "Ethernet" or port.state != "ACTIVE":
        return
    interface = port.interface or "<its interface>"
    if not port.routable:
        yield Finding(
            f"{port.name} GID",
            "warn",
            "no RoCE v2 address",
            "RoCE v1 packets are not routed, and many switches do not treat them as RoCE",
            f"ip addr add <address>/<length> dev {interface}",
        )
    else:
        gids = [gid for gid in port.gids if gid.kind == "RoCE v2"]
        yield Finding(
            f"{port.name} GID",
            "ok",
            "RoCE v2 at " + ", ".join(f"{gid.index} ({gid.address})" for gid in gids[-2:]),
        )
    if port.mtu is not None and port.mtu < _ROCE_MTU:
        yield Finding(
            f"{port.name} MTU",
            "warn",
            f"{port.mtu} bytes at {interface}",
            f"RoCE sends 4096 bytes in a packet only where {_ROCE_MTU} fit; small packets cost"
            " some per cent of the rate",
            f"ip link set {interface} mtu 9000, at both ends and in the switches between",
        )


def _soft_roce(ports: list[Port], options: Options) -> Iterator[Finding]:
    soft = [port.name for port in ports if port.software and port.link_layer == "Ethernet"]
    if soft and settings.user_value(options, _DGID_CHECK) != "n":
        yield Finding(
            "soft RoCE",
            "fail",
            f"{', '.join(soft)}, without UCX_{_DGID_CHECK}=n",
            "UCX drops all packets that set up connections there, and links hang",
            f"export UCX_{_DGID_CHECK}=n, at both ends",
        )


def _affinity(port: Port, machine: Machine) -> Iterator[Finding]:
    mine = devices.nodes_of(os.sched_getaffinity(0), machine.sys)
    if port.numa_node is None or not mine or port.numa_node in mine:
        return
    nodes = ", ".join(map(str, sorted(mine)))
    yield Finding(
        f"{port.name} NUMA",
        "warn",
        f"the device is at NUMA node {port.numa_node}, this process may run on {nodes} only",
        "all bytes cross between the nodes",
        f"numactl --cpunodebind={port.numa_node} --membind={port.numa_node} <command>",
    )


def _may_lock_anything(machine: Machine) -> bool:
    """Whether this process has CAP_IPC_LOCK, for which the limit does not count."""
    for line in _read(machine.proc / "self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _memlock(ports: list[Port], machine: Machine) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == _UNLIMITED:
        return Finding("memlock", "ok", "unlimited")
    if _may_lock_anything(machine):
        return Finding("memlock", "ok", "unlimited, by CAP_IPC_LOCK")
    what = f"{soft >> 10} KiB may be locked"
    if not ports:
        return Finding("memlock", "ok", f"{what}; without RDMA nothing has to be")
    mend = "ulimit -l unlimited" if hard == _UNLIMITED else (
        "'* - memlock unlimited' in /etc/security/limits.conf and a new login; LimitMEMLOCK="
        "infinity in a systemd unit; docker run --ulimit memlock=-1"
    )  # fmt: skip
    return Finding(
        "memlock", "fail", what, "registering a cache for RDMA locks all of its memory", mend
    )


def _same_host(info: Info) -> Finding:
    get = info.same_host_get
    if get.native:
        return Finding("same-host GET", "ok", f"native: {get.reason}")
    return Finding(
        "same-host GET",
        "warn",
        get.reason,
        "pulls between processes of this host are streamed, with the owner's CPU",
        get.advice,
    )


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _huge_pages(machine: Machine) -> Finding:
    enabled = _read(machine.sys / "kernel/mm/transparent_hugepage/enabled")
    chosen = enabled.partition("[")[2].partition("]")[0]
    reserved = "0"
    for line in _read(machine.proc / "meminfo").splitlines():
        if line.startswith("HugePages_Total:"):
            reserved = line.split()[1]
    what = f"transparent: {chosen or 'not told'}; reserved: {reserved}"
    if chosen != "never" or reserved != "0":
        return Finding("huge pages", "ok", what)
    return Finding(
        "huge pages",
        "warn",
        what,
        "copies on one host take up to twice as long with small pages, and RDMA devices hold more"
        " translations",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _shared_memory(machine: Machine) -> Finding:
    try:
        room = os.statvfs(machine.dev / "shm")
    except OSError:
        size = 0
    else:
        size = room.f_bavail * room.f_frsize
    if size >= _SHARED_MEMORY:
        return Finding("/dev/shm", "ok", f"{size >> 20} MiB free")
    return Finding(
        "/dev/shm",
        "warn",
        f"{size >> 20} MiB free",
        "processes of one host set up their connections in it",
        "docker run --shm-size=1g ..., on a host: mount -o remount,size=1g /dev/shm",
    )
