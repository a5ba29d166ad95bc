"""UCX settings of the two contexts, from the user's and from what the library needs.

Settings go to UCX by its configuration calls, never through the environment.  `Options.ucx` wins
over the environment's ``UCX_*``, and both win over our defaults, except for the few that a link
cannot do without: those are forced, and a user's that contradict them make linking fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ucxkv import _load
from ucxkv.options import Options

STREAM_CHUNK = 262144
# Room for UCX's and our headers beside the chunk.
STREAM_SEGMENT = STREAM_CHUNK + 1024

# TCP segments that differ between two ends are a crash in UCX, and the default address format does
# not carry their size; a connection that is made by a blocking call would hold the engine up, and
# all its deadlines, for as long as a host does not answer; a rendezvous would let the peer read
# from the owner at its leisure; and without the last two, shared memory has no endpoints that
# report the death of their peer.
FORCED: Mapping[str, str] = {
    "TCP_TX_SEG_SIZE": str(STREAM_SEGMENT),
    "TCP_RX_SEG_SIZE": str(STREAM_SEGMENT),
    "TCP_CONN_NB": "y",
    "ADDRESS_VERSION": "v2",
    "RNDV_THRESH": "inf",
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
}

# Same-host GET is native from this version on: older ones emulate it by messages to the owner's
# CPU in the error mode that fences need (seen on 1.13 to 1.18).
NATIVE_CMA = (1, 19)
# From this one on CMA takes part by itself; before it has to claim that it can invalidate memory.
_CMA_BY_ITSELF = (1, 20)
# Before this one UCX takes settings of a transport, if they come by its configuration calls, only
# without the transport's name, and otherwise leaves them alone with a warning.
_PREFIXED = (1, 17)
# The first one that can be told never to emulate.
_NO_EMULATION = (1, 21)

_SHARED = frozenset(("posix", "sysv", "cma", "knem", "xpmem"))
# As many as UCX can use for one operation.
_MOST_RAILS = 4
# UCX's names for several transports at once (mm may have xpmem too, which few machines have).
_ALIASES: Mapping[str, frozenset[str]] = {
    "mm": frozenset(("posix", "sysv")),
    "sm": _SHARED,
    "shm": _SHARED,
}
_RDMA_PREFIXES = ("rc", "dc", "ib", "gga", "srd", "ugni")
# Transports that have no GET, or emulate it by messages to the owner's CPU.
_EMULATORS = re.compile(r"tcp|udx?|ud_\w+")
# What sets up the connections of a transport; UCX adds it only to its own names for several ones
# ("rc", "dc", "ib").  As ":aux" it carries nothing else.
_AUXILIARY = {"rc_verbs": "ud_verbs:aux", "rc_mlx5": "ud_mlx5:aux", "dc_mlx5": "ud_mlx5:aux"}
# They have GET for memory of their own only, but can set up connections for CMA.
_WIRING = ("posix", "sysv")
_NATIVE_SHARED = frozenset(("cma", "knem", "xpmem"))


def user_value(options: Options, name: str) -> str | None:
    """What the user has set `name` (without UCX_) to, by options or environment."""
    if name in options.ucx:
        return options.ucx[name]
    return os.environ.get(f"UCX_{name}")


def _meaning(value: str) -> str:
    """A form that is equal for values that UCX takes for the same."""
    value = value.strip().lower()
    if value in ("y", "yes", "on", "1"):
        return "y"
    size = re.fullmatch(r"(\d+)([km]?)b?", value)
    if size:
        return str(int(size[1]) * {"": 1, "k": 1024, "m": 1048576}[size[2]])
    return value


def forced_conflicts(options: Options) -> list[str]:
    """The user's settings that contradict what a link cannot do without, as sentences."""
    return [
        f"UCX_{name}={value} contradicts UCX_{name}={needed}, which ucxkv needs: unset it"
        for name, needed in FORCED.items()
        if (value := user_value(options, name)) is not None and _meaning(value) != _meaning(needed)
    ]


def _combined(
    options: Options, defaults: Mapping[str, str], forced: Mapping[str, str]
) -> dict[str, str]:
    """Defaults that the user has not set, the user's options, and what is forced."""
    chosen = {name: value for name, value in defaults.items() if user_value(options, name) is None}
    return {**chosen, **options.ucx, **forced}


def _is_port(device: str) -> bool:
    """Whether a name of `Options.devices` is a port of an RDMA device."""
    return ":" in device or device in _load.rdma_devices()


def _devices(options: Options, *, ports: bool, interfaces: bool) -> list[str]:
    return [name for name in options.devices or () if (ports if _is_port(name) else interfaces)]


def _packets(options: Options, version: tuple[int, int, int]) -> dict[str, str]:
    """What packets of RDMA devices carry; only for contexts that use them: UCX warns of others."""
    prefix = "IB_" if version >= _PREFIXED else ""
    values = {
        "TRAFFIC_CLASS": options.traffic_class,
        "SL": options.service_level,
        "GID_INDEX": options.gid_index,
    }
    return {prefix + name: str(value) for name, value in values.items() if value is not None}


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.lstrip("^").split(",") if name.strip()]


def _expanded(names: list[str]) -> set[str]:
    """Plain names of transports; those of RDMA stay as they are."""
    return {plain for name in names for plain in _ALIASES.get(name, (name,))}


def _is_rdma(name: str) -> bool:
    return name.startswith(_RDMA_PREFIXES)


def _may_use(tls: str, transport: str) -> bool:
    """Whether a UCX_TLS of `tls` allows a transport."""
    names = _expanded(_names(tls))
    if tls.startswith("^"):
        return transport not in names
    return transport in names or "all" in names


def _forced(tls: str, version: tuple[int, int, int]) -> dict[str, str]:
    """What is forced, as far as it concerns these transports: UCX warns of what it cannot use."""
    chosen = {}
    for name, value in FORCED.items():
        transport, _, plain = name.partition("_")
        if transport.lower() not in ("tcp", *_WIRING):
            chosen[name] = value
        elif _may_use(tls, transport.lower()):
            chosen[name if version >= _PREFIXED else plain] = value
    return chosen


def rdma_usable() -> bool:
    """Whether this machine has RDMA devices and the loaded UCX has transports for them."""
    return bool(_load.rdma_devices()) and _load.has_rdma(_load.loaded().folder)


def rdma_missing(options: Options) -> str:
    """What the RDMA transports that the user names lack here, as a sentence; empty if nothing."""
    value = user_value(options, "TLS")
    if value is None or value.startswith("^"):
        return ""
    if not any(_is_rdma(name) or name.startswith("ud") for name in _names(value)):
        return ""
    folder = _load.loaded().folder
    if not _load.has_rdma(folder):
        return (
            f"UCX_TLS={value} names RDMA transports, but the UCX in {folder} has no module for"
            f" them: choose another with {_load.SWITCH}"
        )
    if not _load.rdma_devices():
        return f"UCX_TLS={value} names RDMA transports, but this machine has no RDMA device"
    return ""


def _one_network(options: Options, rdma: bool) -> bool:
    """Whether TCP is all that the streaming context uses between hosts."""
    value = user_value(options, "TLS")
    if value is None:
        return True
    names = _names(value)
    if value.startswith("^"):
        return "tcp" not in names and not rdma
    if "all" in names:
        return not rdma
    return "tcp" in names and not any(_is_rdma(name) or name.startswith("ud") for name in names)


def am_settings(
    options: Options,
    interface: str | None,
    version: tuple[int, int, int],
    *,
    rdma: bool | None = None,
) -> dict[str, str]:
    """Settings of the context that streams.

    `interface` is the network interface that the link's addresses belong to: TCP is kept to it,
    unless the user names devices, or transports that have devices of other kinds.  `version` is
    that of UCX.  `rdma` says whether RDMA can be used; None: found out.
    """
    defaults = {"TLS": "tcp,self"}
    alone = _one_network(options, rdma_usable() if rdma is None else rdma)
    if interface is not None and alone:
        defaults["NET_DEVICES"] = interface
    chosen = _devices(options, ports=not alone, interfaces=True)
    wanted = {"NET_DEVICES": ",".join(chosen)} if chosen else {}
    if not alone:
        wanted.update(_packets(options, version))
    tls = user_value(options, "TLS") or defaults["TLS"]
    return _combined(options, defaults, {**wanted, **_forced(tls, version)})


def _our_transports(
    version: tuple[int, int, int], rdma: bool, excluded: set[str] | frozenset[str] = frozenset()
) -> list[str]:
    """What serves GETs without the owner where the user names nothing, or only what not to use."""
    chosen = []
    if rdma and not any(name == "ib" or name.startswith("rc") for name in excluded):
        chosen.append("rc")
    wiring = [name for name in _WIRING if name not in excluded]
    if version >= NATIVE_CMA and "cma" not in excluded and wiring:
        chosen += ["cma", wiring[0]]
    # Devices that turn out to be unusable leave a context that reaches nobody, not an error.
    return [*chosen, "self"] if chosen == ["rc"] else chosen


def _native_transports(
    value: str | None, version: tuple[int, int, int], rdma: bool
) -> list[str] | None:
    """What of the user's transports can serve GETs without the owner; None if nothing can."""
    if value is None or value == "all":
        return _our_transports(version, rdma) or None
    names = _names(value)
    if value.startswith("^"):
        return _our_transports(version, rdma, _expanded(names)) or None
    # A context with nothing but transports that are not there cannot be made.
    kept = [
        name for name in names if not _EMULATORS.fullmatch(name) and (rdma or not _is_rdma(name))
    ]
    if version < NATIVE_CMA:
        kept = [name for name in kept if name not in _ALIASES and name not in _SHARED]
    plain = _expanded(kept)
    if any(_is_rdma(name) for name in plain):
        auxiliary = {_AUXILIARY[name] for name in kept if name in _AUXILIARY}
        return [*kept, *sorted(auxiliary.difference(kept))]
    if not plain & _NATIVE_SHARED:
        return None
    return kept if plain & set(_WIRING) else [*kept, _WIRING[0]]


def rma_settings(
    options: Options, version: tuple[int, int, int], *, rdma: bool | None = None
) -> dict[str, str] | None:
    """Settings of the context for GETs; None where no transport has GETs without the owner.

    It has no transport that would emulate them, TCP above all: the owner's CPU would take part, and
    an emulated GET of memory that is gone is a crash of the owner.  Only where the user forces the
    path "get" and names nothing but such transports it has those, for comparison.
    `version` is that of UCX.  `rdma` says whether RDMA can be used; None: found out.
    """
    path = options.resolved_path()
    if path == "stream":
        return None
    value = user_value(options, "TLS")
    ports = _devices(options, ports=True, interfaces=False)
    usable = (rdma_usable() if rdma is None else rdma) and (options.devices is None or bool(ports))
    native = _native_transports(value, version, usable)
    defaults = {"RCACHE_MAX_UNRELEASED": "1024"}
    if native is None:
        if path != "get" or value is None:
            return None
        return _combined(options, defaults, {"TLS": value, **_forced(value, version)})
    if version < NATIVE_CMA:
        # Only the old protocols have native GETs here, and only over RDMA.
        defaults["PROTO_ENABLE"] = "n"
    elif version < _CMA_BY_ITSELF:
        defaults["CMA_MEMORY_INVALIDATE"] = "y"
    if version >= _NO_EMULATION:
        defaults["PROTO_EMULATION_ENABLE"] = "n"
    wanted: dict[str, str] = {}
    if any(_is_rdma(name) for name in native):
        wanted = _packets(options, version)
        if ports:
            wanted["NET_DEVICES"] = ",".join(ports)
            defaults["MAX_RMA_RAILS"] = str(min(len(ports), _MOST_RAILS))
    tls = ",".join(native)
    return _combined(options, defaults, {**wanted, "TLS": tls, **_forced(tls, version)})
