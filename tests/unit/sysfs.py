"""A made-up /sys."""

from __future__ import annotations

from pathlib import Path

ROOT = "devices/pci0000:00"


class Sysfs:
    """A folder that looks like /sys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def pci(self, place: str, node: int) -> Path:
        self.write(f"{place}/numa_node", str(node))
        return self.folder / place

    def gpu(self, place: str, node: int, vendor: str = "0x10de") -> None:
        device = self.pci(place, node)
        self.write(f"{place}/vendor", vendor)
        self.write(f"{place}/class", "0x030200")
        listed = self.folder / "bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / device.name).symlink_to(device)

    def port(
        self,
        device: str,
        place: str | None,
        *,
        node: int = 0,
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        mtu: int = 9000,
        gids: tuple[str, ...] = ("RoCE v1", "RoCE v2"),
    ) -> None:
        port = f"class/infiniband/{device}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/rate", "100 Gb/sec (4X EDR)")
        self.write(f"{port}/link_layer", link_layer)
        for number, kind in enumerate(gids):
            self.write(f"{port}/gids/{number}", f"fe80:0000:0000:0000:0000:0000:0000:{number:04x}")
            self.write(f"{port}/gid_attrs/types/{number}", kind)
            self.write(f"{port}/gid_attrs/ndevs/{number}", f"net_{device}")
        self.write(f"{port}/gids/{len(gids)}", "0000:" * 7 + "0000")
        self.write(f"class/net/net_{device}/mtu", str(mtu))
        self.write(f"class/net/net_{device}/speed", "100000")
        self.write(f"class/net/net_{device}/operstate", "up")
        if place is not None:
            (self.folder / f"class/infiniband/{device}/device").symlink_to(self.pci(place, node))
