"""Network devices of this machine, as the kernel's sysfs tells of them."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")

_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY = "0x03"
_ROCE_V2 = "RoCE v2"
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True)
class Gid:
    """One of a port's addresses; `kind` is such as "RoCE v2", empty where it is not told."""

    index: int
    address: str
    kind: str


@dataclass(frozen=True)
class Gpu:
    """A GPU by its PCI address; `distance` is from the port that lists it."""

    pci: str
    vendor: str
    distance: str


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device.

    `link_layer` is "InfiniBand" or "Ethernet", `gigabits` its rate in Gbit/s.  `interface` and
    `mtu` (bytes) are those of the network interface that belongs to it.  What is not told is None,
    or empty.
    """

    device: str
    port: int
    state: str
    link_layer: str
    gigabits: float | None
    gids: tuple[Gid, ...]
    interface: str | None
    mtu: int | None
    numa_node: int | None
    pci: str | None
    gpus: tuple[Gpu, ...]

    @property
    def name(self) -> str:
        """As UCX writes it, such as "mlx5_0:1"."""
        return f"{self.device}:{self.port}"

    @property
    def software(self) -> bool:
        """Whether there is no hardware behind it, as with soft RoCE."""
        return self.pci is None

    @property
    def routable(self) -> bool:
        """Whether it has an address that RoCE can be routed by."""
        return any(gid.kind == _ROCE_V2 for gid in self.gids)


@dataclass(frozen=True)
class Interface:
    """A network interface; `gigabits` is its rate in Gbit/s, None where it has none or is down."""

    name: str
    up: bool
    mtu: int | None
    gigabits: float | None
    numa_node: int | None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    with contextlib.suppress(ValueError):
        return int(text)
    return None


def _positive(text: str) -> int | None:
    number = _number(text)
    return number if number is not None and number > 0 else None


def _node(device: Path) -> int | None:
    node = _number(_read(device / "numa_node"))
    return node if node is not None and node >= 0 else None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _pci(device: Path) -> str | None:
    """The PCI address of a device's folder, None if it is not on PCI."""
    name = device.resolve().name
    return name if device.exists() and name.count(":") == 2 and "." in name else None


def distance(one: Path, other: Path) -> str:
    """How far two PCI devices are from each other, in words, by their folders in sysfs."""
    pairs = zip(one.resolve().parts, other.resolve().parts, strict=False)
    shared = [mine for mine, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    bridges = [part for part in shared if part.count(":") == 2]
    if bridges:
        return "behind the same PCI bridge"
    if any(part.startswith("pci") for part in shared):
        return "at the same PCI root"
    nodes = _node(one), _node(other)
    if None in nodes:
        return "at another PCI root"
    return "on the same NUMA node" if nodes[0] == nodes[1] else "on another NUMA node"


def _gpus(sys: Path) -> list[tuple[Path, str]]:
    found = []
    for device in _listed(sys / "bus/pci/devices"):
        vendor = _GPU_VENDORS.get(_read(device / "vendor"))
        if vendor and _read(device / "class").startswith(_DISPLAY):
            found.append((device, vendor))
    return found


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for file in _listed(port / "gids"):
        address = _read(file)
        if address and address != _ZERO_GID:
            kind = _read(port / "gid_attrs/types" / file.name)
            found.append(Gid(int(file.name), address, kind))
    return tuple(sorted(found, key=lambda gid: gid.index))


def _interface_of(port: Path, device: Path) -> str | None:
    for file in _listed(port / "gid_attrs/ndevs"):
        if name := _read(file):
            return name
    nets = _listed(device / "device/net")
    return nets[0].name if nets else None


def _state(text: str) -> str:
    return text.partition(":")[2].strip() or text


def rdma_ports(sys: Path = SYS) -> list[Port]:
    """The ports of all RDMA devices."""
    gpus = _gpus(sys)
    ports = []
    for device in _listed(sys / "class/infiniband"):
        bus = device / "device"
        for port in _listed(device / "ports"):
            interface = _interface_of(port, device)
            rate = _read(port / "rate").partition(" ")[0]
            try:
                gigabits: float | None = float(rate)
            except ValueError:
                gigabits = None
            ports.append(
                Port(
                    device=device.name,
                    port=int(port.name),
                    state=_state(_read(port / "state")),
                    link_layer=_read(port / "link_layer"),
                    gigabits=gigabits,
                    gids=_gids(port),
                    interface=interface,
                    mtu=_positive(_read(sys / "class/net" / interface / "mtu"))
                    if interface
                    else None,
                    numa_node=_node(bus),
                    pci=_pci(bus),
                    gpus=tuple(
                        Gpu(gpu.name, vendor, distance(bus, gpu))
                        for gpu, vendor in gpus
                        if _pci(bus) is not None
                    ),
                )
            )
    return ports


def interfaces(sys: Path = SYS) -> list[Interface]:
    """The network interfaces, the loopback interface included."""
    found = []
    for net in _listed(sys / "class/net"):
        if not net.is_dir():
            continue
        speed = _positive(_read(net / "speed"))
        found.append(
            Interface(
                name=net.name,
                up=_read(net / "operstate") in ("up", "unknown"),
                mtu=_positive(_read(net / "mtu")),
                gigabits=speed / 1000 if speed else None,
                numa_node=_node(net / "device"),
            )
        )
    return found


def nodes_of(cpus: set[int], sys: Path = SYS) -> set[int]:
    """The NUMA nodes that have any of these CPUs."""
    found = set()
    for node in _listed(sys / "devices/system/node"):
        number = _number(node.name.removeprefix("node")) if node.name.startswith("node") else None
        if number is not None and cpus & _cpus(_read(node / "cpulist")):
            found.add(number)
    return found


def _cpus(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
