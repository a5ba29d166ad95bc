"""A kernel with soft RoCE and its initramfs, made from Debian's packages at run time."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Whatever of these a kernel has as modules; one that has it built in needs none.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "dummy", "veth", "sch_netem"),
    *("crc32_generic", "rdma_rxe", "rdma_ucm", "ib_umad"),
)
BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")
QEMU = "qemu-system-x86_64"
PROGRAMS = (QEMU, "setpriv", "cpio", "gzip", "depmod", "rdma", "ip", "sysctl")
PACKAGES = (
    "qemu-system-x86 busybox-static cpio kmod procps iproute2 rdma-core ibverbs-providers libucx0"
)
_DOWNLOAD_SECONDS = 300

INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod "$module" || echo "insmod $module failed"; done
options=trans=virtio,version=9p2000.L,msize=512000
/bin/busybox mount -t 9p -o ro,cache=loose,$options root /root
for place in proc sys dev; do /bin/busybox mount --move /$place /root/$place; done
/bin/busybox mkdir -p /root/dev/shm /root/dev/pts
/bin/busybox mount -t devpts pts /root/dev/pts
for place in dev/shm run mnt; do /bin/busybox mount -t tmpfs tmpfs /root/$place; done
/bin/busybox mkdir -p /root/mnt/job
/bin/busybox mount -t 9p -o $options job /root/mnt/job
/bin/busybox chroot /root /bin/bash /mnt/job/run
echo $? > /root/mnt/job/status
/bin/busybox sync
/bin/busybox poweroff -f
"""


class Unavailable(RuntimeError):
    """The guest cannot be had here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Guest:
    """What a machine emulator boots."""

    kernel: Path
    initramfs: Path


def cache() -> Path:
    """Where kernels and images are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ucxkv-rdma"


def check() -> None:
    """Unavailable, with the command that mends it, if a program is missing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not any(Path(place).exists() for place in BUSYBOX):
        missing.append("busybox")
    if missing:
        raise Unavailable(f"not found: {', '.join(missing)}; apt-get install {PACKAGES}")


def guest() -> Guest:
    """The guest, from the cache or made now."""
    check()
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    tree = _kernel(folder)
    kernel = next((tree / "boot").glob("vmlinuz-*"))
    image = folder / f"{tree.name}.initramfs"
    recipe = folder / f"{tree.name}.init"
    if not image.exists() or not recipe.exists() or recipe.read_text() != INIT:
        _pack(tree, image)
        recipe.write_text(INIT)
    return Guest(kernel, image)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False
    )
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _kernel(folder: Path) -> Path:
    """Debian's present kernel, unpacked but not installed."""
    if kept := sorted(path for path in folder.glob("linux-image-*") if path.is_dir()):
        return kept[-1]
    if shutil.which("apt-get") is None:
        raise Unavailable("the kernel comes from a Debian package, and there is no apt-get")
    found = re.search(
        r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", "linux-image-amd64")
    )
    if found is None:
        raise Unavailable("apt knows no linux-image-amd64: apt-get update")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _run("apt-get", "download", "-q", found[1], cwd=Path(place))
        package = next(Path(place).glob("*.deb"))
        unpacked = Path(place) / "tree"
        _run("dpkg-deb", "-x", str(package), str(unpacked))
        unpacked.rename(folder / found[1])
    return folder / found[1]


def _name(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")


def in_order(dependencies: str, wanted: Iterable[str]) -> list[str]:
    """Paths of the wanted modules and of what they need, each after all it needs.

    `dependencies` is the text of modules.dep.
    """
    needs: dict[str, list[str]] = {}
    for line in dependencies.splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {_name(path): path for path in needs}
    ordered: list[str] = []

    def add(path: str) -> None:
        if path in ordered:
            return
        # Each line names all that its module needs, however far away.
        for other in reversed(needs[path]):
            add(other)
        ordered.append(path)

    for name in wanted:
        if name in by_name:
            add(by_name[name])
    return ordered


def _pack(tree: Path, image: Path) -> None:
    # A package has its modules without an index: that is made where it is installed.
    modules = next((tree / "lib/modules").iterdir())
    if not (modules / "modules.dep").exists():
        _run("depmod", "-b", str(tree), modules.name)
    ordered = in_order((modules / "modules.dep").read_text(), MODULES)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "bin").mkdir()
        (root / "modules").mkdir()
        busybox = next(place for place in BUSYBOX if Path(place).exists())
        shutil.copy(busybox, root / "bin/busybox")
        for number, path in enumerate(ordered):
            content = (modules / path).read_bytes()
            if path.endswith(".xz"):
                content = lzma.decompress(content)
            (root / "modules" / f"{number:03}-{_name(path)}.ko").write_bytes(content)
        (root / "init").write_text(INIT)
        (root / "init").chmod(0o755)
        packed = image.with_suffix(".part")
        script = f"find . | cpio --quiet -o -H newc | gzip -1 > {packed}"
        _run("bash", "-o", "pipefail", "-c", script, cwd=root)
        packed.rename(image)


if __name__ == "__main__":
    print(PACKAGES)
