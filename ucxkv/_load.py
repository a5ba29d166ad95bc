"""Chooses one UCX and loads it before any extension is imported.

The extensions name libucp without a path, so the copy that is loaded first is the one they get.
``UCXKV_UCX`` chooses it: ``wheel`` (the libucx wheel), ``system`` (what the dynamic linker finds),
a prefix such as ``/opt/hpcx/ucx``, or ``auto``, which prefers a system UCX with RDMA transports
where the machine has RDMA devices, and the wheel, which has none, otherwise.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

FLOOR = (1, 13)
SWITCH = "UCXKV_UCX"

# In the order in which they have to be loaded: each needs those before it.
_LIBRARIES = ("libucs.so.0", "libucm.so.0", "libuct.so.0", "libucp.so.0")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/lib",
)
_SIGACTION_BYTES = 256
_SIGNALS = range(1, 65)


@dataclass(frozen=True)
class LoadedUcx:
    """The UCX in use: its libucp, its version, and what kind of installation it is."""

    path: str
    version: tuple[int, int, int]
    origin: str

    @property
    def version_text(self) -> str:
        """The version as UCX writes it, such as "1.22.0"."""
        return ".".join(map(str, self.version))


_loaded: LoadedUcx | None = None


def loaded() -> LoadedUcx:
    """The UCX that `load` has loaded."""
    if _loaded is None:
        raise RuntimeError("no UCX has been loaded")
    return _loaded


def wheel_folder() -> Path | None:
    """Where the libucx wheel keeps its libraries, None if it is not installed."""
    spec = importlib.util.find_spec("libucx")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "lib"
        if (folder / "libucp.so.0").exists():
            return folder
    return None


def system_folder() -> Path | None:
    """Where the system's UCX is, as LD_LIBRARY_PATH and the usual folders have it."""
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for place in [*listed, *_SYSTEM_FOLDERS]:
        if place and (Path(place) / "libucp.so.0").exists():
            return Path(place)
    return None


def has_rdma(folder: Path) -> bool:
    """Whether the UCX in `folder` has a transport module for InfiniBand verbs."""
    return (folder / "ucx" / "libuct_ib.so.0").exists()


def machine_has_rdma() -> bool:
    """Whether this machine has RDMA devices."""
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def choose(switch: str) -> tuple[Path, str]:
    """Folder and origin of the UCX that `switch` asks for; ImportError if there is none."""
    wheel, system = wheel_folder(), system_folder()
    if switch == "auto":
        if system is not None and machine_has_rdma() and has_rdma(system):
            if _version_in(system) >= FLOOR:
                return system, "system"
        if wheel is not None:
            return wheel, "wheel"
        if system is not None:
            return system, "system"
        raise ImportError(
            "no UCX found: install the package libucx-cu12, or a system UCX (libucp.so.0)"
        )
    if switch == "wheel":
        if wheel is None:
            raise ImportError(f"{SWITCH}=wheel, but the package libucx-cu12 is not installed")
        return wheel, "wheel"
    if switch == "system":
        if system is None:
            raise ImportError(
                f"{SWITCH}=system, but no libucp.so.0 is in LD_LIBRARY_PATH or a system folder"
            )
        return system, "system"
    prefix = Path(switch)
    if not prefix.is_absolute():
        raise ImportError(f"{SWITCH} must be auto, wheel, system or a prefix, not {switch!r}")
    for name in ("lib", "lib64", "."):
        if (prefix / name / "libucp.so.0").exists():
            return prefix / name, "prefix"
    raise ImportError(f"{SWITCH}={switch}, but there is no lib/libucp.so.0 under it")


def _version_in(folder: Path) -> tuple[int, ...]:
    """The version that the files of a UCX installation tell without loading it; () if unknown."""
    for place in (folder / "pkgconfig" / "ucx.pc", folder / "cmake" / "ucx" / "ucx-config-version.cmake"):
        try:
            found = re.search(r"(?:Version:\s*|PACKAGE_VERSION\s+\")(\d+)\.(\d+)", place.read_text())
        except OSError:
            continue
        if found:
            return int(found[1]), int(found[2])
    # Runtime packages carry no such file; load() checks the floor on the library itself.
    return FLOOR


def _mapped() -> set[str]:
    """The libucp files mapped into this process."""
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[5:]
            if path and re.search(r"/libucp(-\w+)?\.so", path[0]):
                found.add(os.path.realpath(path[0].strip()))
    return found


class _Dispositions:
    """The handling of all signals, as C sees it: Python knows nothing of handlers set in C."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._saved: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def __enter__(self) -> None:
        for number in _SIGNALS:
            buffer = ctypes.create_string_buffer(_SIGACTION_BYTES)
            if self._libc.sigaction(number, None, buffer) == 0:
                self._saved[number] = buffer

    def __exit__(self, *_: object) -> None:
        for number, buffer in self._saved.items():
            self._libc.sigaction(number, buffer, None)


def _load_from(folder: Path) -> ctypes.CDLL:
    missing = [name for name in _LIBRARIES if not (folder / name).exists()]
    if missing:
        raise ImportError(
            f"the UCX in {folder} is incomplete: {', '.join(missing)} missing; choose another with"
            f" {SWITCH}"
        )
    library = None
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ImportError(f"cannot load {folder / name}: {error}") from error
    assert library is not None
    return library


def load() -> LoadedUcx:
    """Load the UCX that ``UCXKV_UCX`` asks for; does nothing the second time.

    Raises ImportError if there is none, it is older than 1.13, or another one is in the process
    already.  Signal handlers are left as they were.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    switch = os.environ.get(SWITCH) or "auto"
    before = _mapped()
    if before and switch == "auto":
        # Whoever loaded it, this process can have only one.
        folder, origin = Path(sorted(before)[0]).parent, "present"
        wheel = wheel_folder()
        if wheel is not None and folder == wheel.resolve():
            origin = "wheel"
    else:
        folder, origin = choose(switch)
    wanted = os.path.realpath(folder / "libucp.so.0")
    if before - {wanted}:
        raise ImportError(
            f"{' and '.join(sorted(before))} is loaded already, but {SWITCH}={switch} asks for"
            f" {wanted}: a process can use only one UCX; import ucxkv first, or set {SWITCH} to the"
            " prefix of the other"
        )
    with _Dispositions():
        library = _load_from(folder)
        parts = [ctypes.c_uint() for _ in range(3)]
        library.ucp_get_version(*(ctypes.byref(part) for part in parts))
    version = (parts[0].value, parts[1].value, parts[2].value)
    after = _mapped()
    if after != {wanted}:
        raise ImportError(
            f"asked for {wanted}, but {' and '.join(sorted(after)) or 'nothing'} was loaded; an"
            f" LD_PRELOAD may be in the way, {SWITCH} chooses another"
        )
    if version[:2] < FLOOR:
        raise ImportError(
            f"{wanted} is UCX {'.'.join(map(str, version))}, older than"
            f" {'.'.join(map(str, FLOOR))}; set {SWITCH} to wheel or to a newer prefix"
        )
    _loaded = LoadedUcx(wanted, version, origin)
    return _loaded
