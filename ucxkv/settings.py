"""UCX settings of the two contexts, from the user's and from what the library needs.

Settings go to UCX by its configuration calls, never through the environment.  `Options.ucx` wins
over the environment's ``UCX_*``, and both win over our defaults, except for the few that both ends
of a link must have: those are forced, and a user's that contradict them make linking fail.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ucxkv.options import Options

STREAM_CHUNK = 262144
# Room for UCX's and our headers behind the chunk.
_SEGMENT = str(STREAM_CHUNK + 1024)

# TCP segments that differ between two ends are a crash in UCX, and the default address format does
# not carry their size; a rendezvous would let the peer read from the owner at its leisure.
FORCED: Mapping[str, str] = {
    "TCP_TX_SEG_SIZE": _SEGMENT,
    "TCP_RX_SEG_SIZE": _SEGMENT,
    "ADDRESS_VERSION": "v2",
    "RNDV_THRESH": "inf",
}

# Endpoints that report the death of their peer are impossible over shared memory without these.
_ERROR_HANDLING: Mapping[str, str] = {"POSIX_ERROR_HANDLING": "y", "SYSV_ERROR_HANDLING": "y"}

# Transports that have no GET, or emulate it by messages to the owner's CPU.
_EMULATORS = {"tcp", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "udx"}
# Transports that only carry what others need, or reach nobody else.
_HELPERS = {"posix", "sysv", "self", "shm", "sm", "mm"}
_CMA_HELPERS = ("posix",)
_NATIVE_RDMA = {"rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ib", "all"}


def user_value(options: Options, name: str) -> str | None:
    """What the user has set `name` (without UCX_) to, by options or environment."""
    if name in options.ucx:
        return options.ucx[name]
    return os.environ.get(f"UCX_{name}")


def forced_conflicts(options: Options) -> list[str]:
    """The user's settings that contradict what both ends of a link need, as sentences."""
    return [
        f"UCX_{name}={value} contradicts {name}={FORCED[name]}, which ucxkv needs on both ends"
        for name in FORCED
        if (value := user_value(options, name)) is not None and value != FORCED[name]
    ]


def _unless_set(options: Options, defaults: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in defaults.items() if user_value(options, name) is None
    }


def am_settings(
    options: Options, interface: str | None, version: tuple[int, int, int]
) -> dict[str, str]:
    """Settings of the context that streams, over the network interface of that name."""
    defaults = {"TLS": "tcp,self", **_ERROR_HANDLING}
    if interface is not None:
        defaults["NET_DEVICES"] = interface
    return {**_unless_set(options, defaults), **options.ucx, **FORCED}


def _transports(value: str) -> tuple[bool, list[str]]:
    """Whether a UCX_TLS excludes what it lists, and the list."""
    negated = value.startswith("^")
    return negated, [name.strip() for name in value.lstrip("^").split(",") if name.strip()]


def _rma_transports(value: str | None) -> str | None:
    """The user's transports minus the emulators; None if no native GET is left."""
    if value is None or value == "all":
        return "^tcp,ud"
    negated, names = _transports(value)
    if negated:
        return "^" + ",".join(dict.fromkeys([*names, "tcp", "ud"]))
    kept = [name for name in names if name not in _EMULATORS]
    # UCX's collective names for shared memory include CMA.
    if not [name for name in kept if name not in _HELPERS or name in ("shm", "sm")]:
        return None
    if "cma" in kept and not _HELPERS & set(kept):
        # CMA cannot set up a connection by itself.
        kept += _CMA_HELPERS
    return ",".join(kept)


def rma_settings(options: Options, version: tuple[int, int, int]) -> dict[str, str] | None:
    """Settings of the context for GETs; None if the user's transports leave none that has any."""
    path = options.resolved_path()
    if path == "stream":
        return None
    value = user_value(options, "TLS")
    transports = _rma_transports(value)
    # Emulated GET is there for comparison, where the user forces the path and leaves nothing else.
    emulated = transports is None and path == "get"
    if emulated:
        transports = value
    if transports is None:
        return None
    defaults = {"RCACHE_MAX_UNRELEASED": "1024", **_ERROR_HANDLING}
    if (1, 16) <= version[:2] < (1, 19) or (
        version[:2] < (1, 19) and set(_transports(transports)[1]) & _NATIVE_RDMA
    ):
        if not transports.startswith("^") and set(_transports(transports)[1]) & _NATIVE_RDMA:
            defaults["PROTO_ENABLE"] = "n"
    if version[:2] < (1, 19):
        defaults["CMA_MEMORY_INVALIDATE"] = "y"
    if version[:2] >= (1, 21) and not emulated:
        defaults["PROTO_EMULATION_ENABLE"] = "n"
    ours = {"TLS": transports, "RNDV_THRESH": "inf"}
    if emulated:
        ours |= FORCED
    return {**_unless_set(options, defaults), **options.ucx, **ours}
