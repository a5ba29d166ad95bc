"""A bare C program over UCX: one `ucp_get_nbx` per span, compiled when it is needed."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np

from peers import sides
from peers.environments import folder

_SOURCE = Path(__file__).with_suffix(".c")
_ROOM = 4096
_COMPILE_SECONDS = 60


def ucx_wheel() -> Path | None:
    """Where the libucx wheel is installed."""
    spec = importlib.util.find_spec("libucx")
    places = (spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def missing() -> str:
    """Why this peer cannot run here; empty if it can."""
    if ucx_wheel() is None:
        return "the libucx wheel is not installed"
    if shutil.which("cc") is None:
        return "no C compiler (cc)"
    return ""


def compiled() -> Path:
    """The library, compiled unless it is there already."""
    wheel = ucx_wheel()
    if wheel is None:
        raise RuntimeError("the libucx wheel is not installed")
    digest = hashlib.sha256(_SOURCE.read_bytes() + str(wheel).encode()).hexdigest()[:16]
    library = folder() / f"bare_get-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(".new")
        subprocess.run(
            [
                *("cc", "-O2", "-shared", "-fPIC", "-I", wheel / "include", "-o", made, _SOURCE),
                *(wheel / "lib" / "libucp.so.0", f"-Wl,-rpath,{wheel / 'lib'}"),
            ],
            check=True,
            timeout=_COMPILE_SECONDS,
        )
        made.rename(library)
    return library


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled()))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("bare_open", pointer, [ctypes.c_char_p]),
        ("bare_address", size, [pointer, ctypes.c_char_p, size]),
        ("bare_connect", ctypes.c_int, [pointer, ctypes.c_char_p]),
        ("bare_register", ctypes.c_int, [pointer, pointer, size]),
        ("bare_pack", size, [pointer, size, ctypes.c_char_p, size]),
        ("bare_unpack", ctypes.c_int, [pointer, size, ctypes.c_char_p]),
        ("bare_get", ctypes.c_int, [pointer, size, size, pointer, pointer, size]),
        ("bare_serve", None, [pointer]),
        ("bare_stop", None, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Program(sides.Side):
    def __init__(self, settings: str) -> None:
        self._settings = settings

    def _start(self) -> None:
        self._c = _library()
        self._side = self._c.bare_open(self._settings.encode())
        if not self._side:
            raise RuntimeError(f"UCX could not be opened with {self._settings}")

    def _register(self) -> None:
        nbytes = self.work.blocks * self.work.block_bytes
        for address in self._addresses().tolist():
            self._must(self._c.bare_register(self._side, address, nbytes))

    def _must(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"UCX status {status}")


class Owner(_Program, sides.Owner):
    def open(self) -> dict[str, Any]:
        self._start()
        room = ctypes.create_string_buffer(_ROOM)
        length = self._c.bare_address(self._side, room, _ROOM)
        self._thread = threading.Thread(target=self._c.bare_serve, args=(self._side,))
        self._thread.start()
        return {"address": base64.b64encode(room.raw[:length]).decode()}

    def _map(self) -> dict[str, Any]:
        self._register()
        room = ctypes.create_string_buffer(_ROOM)
        keys = []
        for region in range(self.work.tensors):
            length = self._c.bare_pack(self._side, region, room, _ROOM)
            keys.append(base64.b64encode(room.raw[:length]).decode())
        return {"tensors": self._addresses().tolist(), "keys": keys}

    def close(self) -> None:
        self._c.bare_stop(self._side)
        self._thread.join(5)


class Puller(_Program, sides.Puller):
    def open(self, offer: dict[str, Any]) -> None:
        self._start()
        self._must(self._c.bare_connect(self._side, base64.b64decode(offer["address"])))

    def _map(self, offer: dict[str, Any]) -> None:
        self._register()
        for region, key in enumerate(offer["keys"]):
            self._must(self._c.bare_unpack(self._side, region, base64.b64decode(key)))
        source, destination = self._blocks()
        remote = np.array(offer["tensors"], dtype=np.uint64)
        self._here = self._span_addresses(self._addresses(), destination)
        self._there = self._span_addresses(remote, source)

    def pull(self) -> None:
        self._must(
            self._c.bare_get(
                self._side,
                len(self._here),
                self.work.wanted,
                self._here.ctypes.data,
                self._there.ctypes.data,
                self.work.block_bytes,
            )
        )
