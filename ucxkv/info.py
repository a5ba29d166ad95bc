"""``ucxkv info``: which UCX is in use, what it can do here, and whether a GET would be native."""

from __future__ import annotations

import ctypes
import json as json_module
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ucxkv import settings
from ucxkv._load import SWITCH, has_rdma, loaded, rdma_devices, wheel_folder
from ucxkv._version import __version__
from ucxkv.context import UcxError, describe
from ucxkv.devices import Interface, Port, interfaces, rdma_ports
from ucxkv.engine import silence_ucx
from ucxkv.errors import LlmError
from ucxkv.options import Options

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PROBE_SECONDS = 20

# What a peer on this host does to read our memory: one process_vm_readv.
_PROBE = """
import ctypes, sys
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
target = ctypes.create_string_buffer(8)
local = IoVec(ctypes.addressof(target), 8)
remote = IoVec(int(sys.argv[2]), 8)
moved = libc.process_vm_readv(
    int(sys.argv[1]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print(0 if moved == 8 else ctypes.get_errno())
"""


@dataclass(frozen=True)
class Finding:
    """Whether a GET between two processes of this host is native, why not, and what helps."""

    native: bool
    reason: str
    advice: str


@dataclass(frozen=True)
class Info:
    """What ``ucxkv info`` tells."""

    ucxkv: str
    python: str
    ucx_version: str
    ucx_library: str
    ucx_origin: str
    stream_transports: list[str]
    get_transports: list[str]
    path: str
    rdma_transports: bool
    rdma_devices: list[str]
    same_host_get: Finding
    ports: list[Port]
    interfaces: list[Interface]


def _resources(wanted: dict[str, str] | None) -> list[str]:
    """Transports and devices that a context with these settings has; none if it cannot be made."""
    if wanted is None:
        return []
    try:
        described = describe(wanted)
    except UcxError:
        return []
    return re.findall(r"^#\s+resource \d+\s.*-- (\S+)$", described, re.MULTILINE)


def _probe() -> int:
    """Errno with which another process fails to read our memory; 0 if it can."""
    word = ctypes.create_string_buffer(8)
    run = subprocess.run(
        [sys.executable, "-I", "-c", _PROBE, str(os.getpid()), str(ctypes.addressof(word))],
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
        check=True,
    )
    return int(run.stdout)


def _without_cma(options: Options, get_transports: list[str]) -> Finding:
    version = loaded().version
    if version < settings.NATIVE_CMA:
        floor = ".".join(map(str, settings.NATIVE_CMA))
        return Finding(
            False,
            f"UCX {loaded().version_text} would only emulate it",
            f"use UCX {floor} or newer, such as the wheel's ({SWITCH}=wheel)",
        )
    value = settings.user_value(options, "TLS")
    if value is not None and not get_transports:
        return Finding(
            False,
            f"UCX_TLS={value} leaves no transport here that has a GET",
            "unset UCX_TLS, or add cma to it",
        )
    if value is not None:
        return Finding(False, f"UCX_TLS={value} leaves out cma", "add cma to UCX_TLS")
    return Finding(
        False,
        "this UCX has no usable cma transport",
        f"install its cma module, or use the wheel's UCX ({SWITCH}=wheel)",
    )


def _same_host(options: Options, get_transports: list[str]) -> Finding:
    if options.resolved_path() == "stream":
        return Finding(False, "the path 'stream' is forced", "unset UCXKV_PATH")
    if not any(name.startswith("cma/") for name in get_transports):
        return _without_cma(options, get_transports)
    try:
        error = _probe()
    except (subprocess.SubprocessError, OSError, ValueError) as failure:
        return Finding(False, f"it could not be tried: {failure}", "look at this machine's limits")
    if error == 0:
        return Finding(
            True,
            "cma; processes of this user can read this one's memory, in the same PID and user"
            " namespace",
            "",
        )
    name = os.strerror(error)
    try:
        scope = int(_YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope >= 2:
        remedy = "sysctl kernel.yama.ptrace_scope=1" + (" and a reboot" if scope > 2 else "")
        return Finding(
            False,
            f"kernel.yama.ptrace_scope is {scope} ({name})",
            f"{remedy}, or give both processes CAP_SYS_PTRACE" if scope == 2 else remedy,
        )
    return Finding(
        False,
        f"process_vm_readv is not permitted here ({name})",
        "allow it in the container's seccomp profile, run both processes as one user and"
        " in one PID and user namespace",
    )


def collect(options: Options | None = None) -> Info:
    """Look at UCX and this machine."""
    options = options or Options()
    if settings.user_value(options, "LOG_LEVEL") is None:
        silence_ucx()
    ucx = loaded()
    get_transports = _resources(settings.rma_settings(options, ucx.version))
    stream_transports = _resources(settings.am_settings(options, None, ucx.version))
    return Info(
        ucxkv=__version__,
        python=sys.version.split()[0],
        ucx_version=ucx.version_text,
        ucx_library=ucx.path,
        ucx_origin=ucx.origin,
        stream_transports=stream_transports,
        get_transports=get_transports,
        path=options.resolved_path(),
        rdma_transports=has_rdma(ucx.folder),
        rdma_devices=rdma_devices(),
        same_host_get=_same_host(options, get_transports),
        ports=rdma_ports(),
        interfaces=interfaces(),
    )


def _node(number: int | None) -> list[str]:
    return [] if number is None else [f"NUMA node {number}"]


def _port_words(port: Port) -> str:
    """One line of a port: what it is, and where, since bytes that cross between nodes are slow."""
    words = [port.state, port.link_layer]
    if port.gigabits:
        words.append(f"{port.gigabits:g} Gbit/s")
    words += _node(port.numa_node)
    words.append(f"PCI {port.pci}" if port.pci else "in software")
    words += [f"{gpu.vendor} GPU {gpu.pci} {gpu.distance}" for gpu in port.gpus]
    return ", ".join(filter(None, words))


def _interface_words(interface: Interface) -> str:
    words = [f"MTU {interface.mtu}"] if interface.mtu else []
    if interface.gigabits:
        words.append(f"{interface.gigabits:g} Gbit/s")
    return ", ".join([*words, *_node(interface.numa_node)])


def _rdma_words(info: Info) -> str:
    if info.rdma_transports and info.rdma_devices:
        return f"yes: {', '.join(info.rdma_devices)}"
    if info.rdma_transports:
        return "this UCX has the transports, this machine no RDMA device"
    text = "this UCX has no RDMA transports"
    if wheel_folder() is not None and info.ucx_origin == "wheel":
        text += " (the wheel has none)"
    if info.rdma_devices:
        text += (
            f", but there are devices ({', '.join(info.rdma_devices)}): install a system UCX"
            f" with IB support, or set {SWITCH} to its prefix"
        )
    return text


def render(info: Info, console: Console) -> None:
    """Print it for people; fits 80 columns."""
    table = Table(show_header=False, box=None, padding=(0, 1), width=min(console.width, 80))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("ucxkv", f"{info.ucxkv} on Python {info.python}")
    table.add_row("UCX", f"{info.ucx_version} ({info.ucx_origin}; {SWITCH} chooses)")
    table.add_row("libucp", info.ucx_library)
    table.add_row("path", info.path)
    table.add_row("stream over", ", ".join(info.stream_transports) or "nothing")
    table.add_row("GET over", ", ".join(info.get_transports) or "nothing")
    table.add_row("RDMA", _rdma_words(info))
    for port in info.ports:
        table.add_row(port.name, _port_words(port))
    for interface in info.interfaces:
        if interface.up:
            table.add_row(interface.name, _interface_words(interface))
    finding = info.same_host_get
    table.add_row("same-host GET", ("native: " if finding.native else "no: ") + finding.reason)
    if finding.advice:
        table.add_row("what helps", finding.advice)
    console.print(table)


def main(json: bool = False) -> int:
    """Print what `collect` finds, for people or as JSON; returns the exit code."""
    try:
        info = collect()
    except (LlmError, UcxError) as error:
        print(f"ucxkv info: {error}", file=sys.stderr)
        return 1
    if json:
        print(json_module.dumps(asdict(info), indent=2))
    else:
        render(info, Console(highlight=False))
    return 0
