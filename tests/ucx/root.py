"""The file system of a Debian release with its UCX, made by debootstrap, kept in a cache."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MIRROR = "http://deb.debian.org/debian"
_MAKING_SECONDS = 900
# UCX and verbs, and what a Python that comes from outside of the root needs of it.
_PACKAGES = (
    *("libucx0", "ibverbs-providers", "libffi8", "libbz2-1.0", "liblzma5", "libexpat1"),
    *("libsqlite3-0", "libuuid1", "libstdc++6", "zlib1g", "iproute2", "procps"),
)
_SYSTEM = Path("/usr")
_SHARED = ("/proc", "/sys", "/dev", "/tmp", "/etc/hosts")


class Unavailable(RuntimeError):
    """It cannot be had here; the message says what is missing, and how to get it."""


@dataclass(frozen=True)
class Release:
    """A Debian release: its code name, its UCX, and packages that are named otherwise in each."""

    suite: str
    ucx: tuple[int, int]
    packages: tuple[str, ...]


RELEASES = {
    "debian12": Release("bookworm", (1, 13), ("libssl3",)),
    "debian13": Release("trixie", (1, 18), ("libssl3t64",)),
}


def cache() -> Path:
    """Where roots are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ucxkv-ucx"


def _check() -> None:
    missing = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing:
        raise Unavailable(
            f"not found: {', '.join(missing)}; apt-get install debootstrap util-linux"
        )
    if os.geteuid() != 0:
        raise Unavailable("debootstrap and chroot need root: run it with sudo -E")


def made(name: str) -> Path:
    """The root of a release, from the cache or made now (two minutes, 600 MB)."""
    _check()
    root = cache() / name
    if root.exists():
        return root
    release = RELEASES[name]
    partial = root.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    print(f"making {root}", file=sys.stderr, flush=True)
    include = ",".join((*_PACKAGES, *release.packages))
    mirror = os.environ.get("DEBIAN_MIRROR", _MIRROR)
    done = subprocess.run(
        [
            *("debootstrap", "--variant=minbase", f"--include={include}"),
            *(release.suite, str(partial), mirror),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_MAKING_SECONDS,
    )
    if done.returncode != 0:
        raise Unavailable(f"debootstrap has failed:\n{done.stdout[-2000:]}")
    shutil.rmtree(partial / "var/cache/apt/archives", ignore_errors=True)
    partial.rename(root)
    return root


def _python() -> list[Path]:
    """Files and folders of this Python and its packages."""
    base = Path(sys.base_prefix)
    places = [Path(sys.prefix), *map(Path, filter(None, sys.path))]
    if base != _SYSTEM:
        return [base, *(place for place in places if not place.is_relative_to(_SYSTEM))]
    # A distribution's Python is spread over /usr, of which the root has its own.
    programs = (_SYSTEM / "bin").glob("python3*")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = [_SYSTEM / "lib" / version, _SYSTEM / "lib/python3"]
    return [*programs, *libraries, *(place for place in places if place != _SYSTEM)]


def _outermost(places: Sequence[Path]) -> list[Path]:
    """Those that are there, and in none of the others."""
    chosen: list[Path] = []
    for place in sorted({place for place in places if place.exists()}):
        if not any(place.is_relative_to(other) for other in chosen):
            chosen.append(place)
    return chosen


def inside(root: Path, project: Path, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in a root, with the project and this Python in it."""
    script = []
    # What is shared comes first: the project may be in it.
    for place in (*map(Path, _SHARED), *_outermost([*_python(), project])):
        source, target = shlex.quote(str(place)), shlex.quote(f"{root}{place}")
        make = "mkdir -p" if place.is_dir() else f"mkdir -p $(dirname {target}); touch"
        script.append(f"{make} {target}; mount --rbind {source} {target}")
    there = f"cd {shlex.quote(str(project))} && exec {shlex.join(command)}"
    script.append(f"exec chroot {shlex.quote(str(root))} /bin/sh -c {shlex.quote(there)}")
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(script)]
