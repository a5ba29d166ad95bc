"""Everything that can take part in a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import bare_get, environments, own_loop

_ALL = ("W1", "W2", "W3", "4K", "4K-now")
_MOONCAKE = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "32768",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "32768",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
}


def _nothing() -> str:
    return ""


@dataclass(frozen=True)
class Contender:
    """`module` has the classes `owner` and `puller`, made with `arguments`.

    `package`: the virtual environment it runs in, None for this interpreter's.  `missing` says why
    it cannot run here.  `kind` is "host" (both ends know that they are on one) or "tcp".
    `own_loop`: its figures are its own, of data that nobody checked.
    """

    name: str
    label: str
    kind: str
    module: str
    owner: str = "Owner"
    puller: str = "Puller"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    works: tuple[str, ...] = _ALL
    missing: Callable[[], str] = _nothing
    own_loop: bool = False

    def python(self) -> Path | None:
        """Its interpreter, None for this one."""
        return environments.python_of(self.package) if self.package else None

    def why_not(self) -> str:
        """Why it cannot run here; empty if it can."""
        if self.package and self.python() is None:
            return f"not installed (--setup {self.package} does it)"
        return self.missing()


CONTENDERS = (
    Contender("get", "ucxkv get", "host", "peers.engine", arguments={"path": "get"}),
    Contender(
        "get-allocated",
        "ucxkv get, huge pages",
        "host",
        "peers.engine",
        arguments={"path": "get", "allocated": True},
    ),
    Contender("vm-readv", "process_vm_readv", "host", "peers.vm_readv"),
    Contender(
        "bare-get-cma",
        "bare ucp_get_nbx",
        "host",
        "peers.bare_get",
        arguments={"settings": "TLS=cma,posix,self"},
        missing=bare_get.missing,
    ),
    Contender("nixl-host", "NIXL", "host", "peers.nixl", package="nixl"),
    Contender(
        "memcpy",
        "memcpy",
        "host",
        "peers.shared_memory",
        # More spans would measure the loop around it.
        works=("W1", "W2"),
    ),
    Contender("stream", "ucxkv stream", "tcp", "peers.engine", arguments={"path": "stream"}),
    Contender("sockets", "plain sockets", "tcp", "peers.sockets"),
    Contender(
        "nixl-tcp",
        "NIXL",
        "tcp",
        "peers.nixl",
        package="nixl",
        environment={"UCX_TLS": "tcp,self"},
    ),
    Contender(
        "mooncake", "Mooncake", "tcp", "peers.mooncake", package="mooncake", environment=_MOONCAKE
    ),
    Contender(
        "bare-get-tcp",
        "bare ucp_get_nbx",
        "tcp",
        "peers.bare_get",
        arguments={"settings": "TLS=tcp,self"},
        missing=bare_get.missing,
    ),
    Contender(
        "iperf3",
        "iperf3",
        "tcp",
        "peers.own_loop",
        puller="Iperf3",
        works=("W1",),
        missing=own_loop.iperf3_missing,
        own_loop=True,
    ),
    Contender(
        "perftest",
        "ucx_perftest",
        "tcp",
        "peers.own_loop",
        puller="UcxPerftest",
        works=("W1",),
        missing=own_loop.perftest_missing,
        own_loop=True,
    ),
)
