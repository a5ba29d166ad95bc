"""Chooses one UCX and loads it before any extension is imported.

The extensions name libucp without a path, so the copy that is loaded first is the one they get.
``UCXKV_UCX`` chooses it: ``wheel`` (the libucx wheel), ``system`` (what the dynamic linker would
find), a prefix such as ``/opt/hpcx/ucx``, or ``auto``, which prefers a system UCX with RDMA
transports where the machine has RDMA devices, and otherwise the wheel, which has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import struct
import sysconfig
from dataclasses import dataclass
from pathlib import Path

FLOOR = (1, 13)
SWITCH = "UCXKV_UCX"

_LIBRARIES = ("ucm", "ucs", "uct", "ucp")
_MAPPED = re.compile(r"/lib(uc[mpst])(?:-\w+)?\.so[.\d]*$")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_MULTIARCH = sysconfig.get_config_var("MULTIARCH") or ""
_SYSTEM_FOLDERS = (f"/usr/lib/{_MULTIARCH}", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_LINKER_CONFIGURATION = Path("/etc/ld.so.conf.d")
# HPC-X has a second build in "mt", for processes that call UCX from several threads, as ucxkv does.
_IN_PREFIX = ("mt/lib", "lib", "lib64", "ucx/mt/lib", "ucx/lib")
_SIGNALS = range(1, 65)
# More than any Linux has: struct sigaction and stack_t.
_SIGACTION_BYTES = 256
_STACK_BYTES = 64


@dataclass(frozen=True)
class LoadedUcx:
    """The UCX in use.

    path: the file of its libucp.
    version: major, minor and release number.
    origin: "wheel", "system" or "prefix".
    """

    path: str
    version: tuple[int, int, int]
    origin: str

    @property
    def folder(self) -> Path:
        """Where its libraries are; its transports are in the folder ``ucx`` in it."""
        return Path(self.path).parent

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


def _linker_folders() -> list[str]:
    """Where the dynamic linker looks, as far as its configuration tells."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for file in sorted(_LINKER_CONFIGURATION.glob("*.conf")):
        with contextlib.suppress(OSError):
            folders += file.read_text(errors="replace").split()
    return [*folders, *_SYSTEM_FOLDERS]


def system_folder() -> Path | None:
    """Where the system's UCX is, None if there is none."""
    for place in _linker_folders():
        if place.startswith("/") and (Path(place) / "libucp.so.0").exists():
            return Path(place)
    return None


def has_rdma(folder: Path) -> bool:
    """Whether the UCX in `folder` has a transport module for InfiniBand verbs."""
    return (folder / "ucx" / "libuct_ib.so.0").exists()


def rdma_devices() -> list[str]:
    """The RDMA devices of this machine, by name."""
    try:
        return sorted(device.name for device in _RDMA_DEVICES.iterdir())
    except OSError:
        return []


def version_in(folder: Path) -> tuple[int, int, int] | None:
    """The version of the UCX in `folder`, told from its file without loading it; None: unclear."""
    try:
        content = (folder / "libucp.so.0").read_bytes()
    except OSError:
        return None
    found = set(re.findall(rb"1\.(\d{1,3})\.(\d{1,3})[-\w]*\0", content))
    if len(found) != 1:
        return None
    minor, release = found.pop()
    return 1, int(minor), int(release)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def choose(switch: str) -> tuple[Path, str]:
    """Folder and origin of the UCX that `switch` asks for; ImportError if there is none."""
    wheel, system = wheel_folder(), system_folder()
    if switch == "auto":
        if system is not None and rdma_devices() and has_rdma(system):
            version = version_in(system)
            if version is None or version >= FLOOR:
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
    for name in (*_IN_PREFIX, f"lib/{_MULTIARCH}", "."):
        if (prefix / name / "libucp.so.0").exists():
            return prefix / name, "prefix"
    if not prefix.is_dir():
        raise ImportError(f"{SWITCH}={switch}, but there is no such folder")
    raise ImportError(f"{SWITCH}={switch}, but there is no lib/libucp.so.0 under it")


def _mapped() -> dict[str, set[Path]]:
    """The UCX libraries that are mapped into this process: files by "ucp", "uct", "ucs", "ucm"."""
    found: dict[str, set[Path]] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            columns = line.rstrip("\n").split(maxsplit=5)
            name = _MAPPED.search(columns[5]) if len(columns) == 6 else None
            if name:
                found.setdefault(name[1], set()).add(Path(columns[5]).resolve())
    return found


def _origin(folder: Path) -> str:
    """What kind of installation `folder` is, for a UCX that this process had loaded before."""
    for place, origin in ((wheel_folder(), "wheel"), (system_folder(), "system")):
        if place is not None and place.resolve() == folder:
            return origin
    return "prefix"


class _Dispositions:
    """The handling of all signals, as C sees it: Python knows nothing of handlers set in C.

    UCX's libraries install handlers when they are loaded, before any setting of theirs is read:
    for SIGHUP, and older ones for crashes too, on a signal stack of their own.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._actions: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._stack = ctypes.create_string_buffer(_STACK_BYTES)

    def _action(self, number: int) -> ctypes.Array[ctypes.c_char] | None:
        buffer = ctypes.create_string_buffer(_SIGACTION_BYTES)
        return buffer if self._libc.sigaction(number, None, buffer) == 0 else None

    def __enter__(self) -> None:
        for number in _SIGNALS:
            action = self._action(number)
            if action is not None:
                self._actions[number] = action
        self._libc.sigaltstack(None, self._stack)

    def __exit__(self, *_: object) -> None:
        for number, action in self._actions.items():
            now = self._action(number)
            if now is None or _meant(now) != _meant(action):
                self._libc.sigaction(number, action, None)
        stack = ctypes.create_string_buffer(_STACK_BYTES)
        self._libc.sigaltstack(None, stack)
        if stack.raw != self._stack.raw:
            self._libc.sigaltstack(self._stack, None)


def _meant(action: ctypes.Array[ctypes.c_char]) -> tuple[int, bytes, int]:
    """Handler, mask and flags; libc leaves the rest of the structure undefined."""
    handler, mask, flags = struct.unpack_from("P8s120xI", action)
    return handler, mask, flags


def _check_modules(folder: Path) -> None:
    """Raise ImportError if UCX_MODULE_DIR would add the transports of another installation."""
    setting = os.environ.get("UCX_MODULE_DIR")
    if not setting:
        return
    other = Path(setting).resolve().parent / "libucs.so.0"
    if other.exists() and other.resolve() != (folder / "libucs.so.0").resolve():
        raise ImportError(
            f"UCX_MODULE_DIR={setting} holds the transports of {other}, but the UCX in {folder} is"
            f" to be used: unset it, or choose the other with {SWITCH}={other.parent}"
        )


def _load_from(folder: Path) -> ctypes.CDLL:
    """Load the libraries of `folder`, or those files of it that are in this process already."""
    mapped = _mapped()
    files = [min(mapped.get(name, {folder / f"lib{name}.so.0"})) for name in _LIBRARIES]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ImportError(
            f"the UCX in {folder} is incomplete: {', '.join(missing)} missing; choose another with"
            f" {SWITCH}"
        )
    # libucm and libucs need each other, and libucs would look for libucm wherever it was built to.
    # Only with lazy binding can libucm come first, which ctypes does not offer.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    dlopen(os.fsencode(files[0]), os.RTLD_LAZY | os.RTLD_GLOBAL)
    try:
        return [ctypes.CDLL(str(file), os.RTLD_NOW | os.RTLD_GLOBAL) for file in files[1:]][-1]
    except OSError as error:
        raise ImportError(
            f"cannot load the UCX in {folder}: {error}; choose another with {SWITCH}"
        ) from error


def _version_of(library: ctypes.CDLL) -> tuple[int, int, int]:
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    library.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    return major.value, minor.value, release.value


def _wanted(switch: str) -> tuple[Path, str]:
    """Folder and origin of the UCX to load, given what is in this process already."""
    present = {file.parent for file in _mapped().get("ucp", ())}
    if not present:
        return choose(switch)
    if switch == "auto":
        # Whoever loaded it: this process cannot have another one.
        folder = min(present)
        return folder, _origin(folder)
    folder, origin = choose(switch)
    wanted = (folder / "libucp.so.0").resolve().parent
    if others := present - {wanted}:
        raise ImportError(
            f"the UCX in {_named(others)} is loaded already, but {SWITCH}={switch} asks for that in"
            f" {_named({wanted})}: a process can use only one; import ucxkv first, or unset"
            f" {SWITCH}"
        )
    return folder, origin


def _named(folders: set[Path]) -> str:
    return " and ".join(
        f"{folder} ({_text(version) if (version := version_in(folder)) else 'unknown version'})"
        for folder in sorted(folders)
    )


def _check_unmixed(folder: Path) -> None:
    """Raise ImportError unless each UCX library in this process is one file in `folder`."""
    for name, files in _mapped().items():
        wanted = (folder / f"lib{name}.so.0").resolve().parent
        if len(files) > 1 or {file.parent for file in files} != {wanted}:
            raise ImportError(
                f"{' and '.join(map(str, sorted(files)))} in this process, but the UCX to use is"
                f" that in {_named({wanted})}: two UCX cannot be mixed; LD_PRELOAD,"
                f" LD_LIBRARY_PATH or an earlier import may be in the way, {SWITCH} chooses another"
            )


def _check_version(folder: Path, version: tuple[int, int, int] | None) -> None:
    if version is not None and version < FLOOR:
        raise ImportError(
            f"the UCX in {folder} is {_text(version)}, older than {_text(FLOOR)}; set {SWITCH} to"
            " wheel or to the prefix of a newer one"
        )


def _check_built() -> None:
    if importlib.util.find_spec("ucxkv.engine") is None:
        raise ImportError(
            f"{Path(__file__).parent} is the source of ucxkv, its extensions have not been built:"
            " import the installed package from another folder, or run 'pip install -e .' here"
        )


def load() -> LoadedUcx:
    """Load the UCX that ``UCXKV_UCX`` asks for; does nothing the second time.

    Raises ImportError if there is none, if it is older than 1.13, or if another one is in this
    process.  Signal handlers and the environment stay as they were.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    _check_built()
    folder, origin = _wanted(os.environ.get(SWITCH) or "auto")
    _check_modules(folder)
    _check_unmixed(folder)
    # What the file tells saves loading a UCX that cannot be used, and cannot be unloaded either.
    _check_version(folder, version_in(folder))
    with _Dispositions():
        version = _version_of(_load_from(folder))
    _check_version(folder, version)
    _check_unmixed(folder)
    _loaded = LoadedUcx(str(min(_mapped()["ucp"])), version, origin)
    return _loaded
