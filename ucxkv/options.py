"""What can be set when an engine is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ucxkv.errors import ParamInvalid
from ucxkv.tls import Tls

PATHS = ("auto", "get", "stream")


@dataclass(frozen=True)
class Options:
    """Settings of one engine.

    listen: "host:port" to accept links at, an IPv6 address in brackets, port 0 for any free one;
        None (the default): this engine only dials.
    sync_cache_wait_time_ms: default deadline of every pull and push, in milliseconds (1000).
    secret: shared by all clusters that may link with each other; None (the default): anyone may.
    tls: certificates for the control plane, which is encrypted with them; None (the default): it is
        not.  Both ends must have it, or neither.  The data plane is not encrypted.
    path: "auto" (the default) chooses per transfer; "get" and "stream" force one.  The environment
        variable UCXKV_PATH overrides it.
    notice_queue: how many notices of peers are kept for `LlmDataDist.notices` (4096); pulls whose
        notice finds no room wait, within their deadlines.
    devices: what UCX may use, such as ("mlx5_0:1", "eth0"): ports of RDMA devices and network
        interfaces; None (the default): every device, at UCX's choice.  Several RDMA ports are rails
        of one pull.  Without interfaces here, TCP is kept to the one that a link's address is at.
    traffic_class: that of RoCE packets (0 to 255); None: UCX's choice.
    service_level: that of InfiniBand packets (0 to 15), which RoCE takes as the priority; None:
        UCX's choice.
    gid_index: which of its port's addresses packets of an RDMA device come from; None: UCX's
        choice.
    ucx: UCX settings by their names without the UCX_ prefix, such as {"TLS": "tcp"}; they win over
        the environment's.

    Raises TypeError for values of wrong types, ParamInvalid for others that make no sense.
    """

    listen: str | None = None
    sync_cache_wait_time_ms: float = 1000
    secret: str | bytes | None = field(default=None, repr=False)
    tls: Tls | None = None
    path: str = "auto"
    notice_queue: int = 4096
    devices: Sequence[str] | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    gid_index: int | None = None
    ucx: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.listen is not None:
            self.listen_endpoint()
        milliseconds = self.sync_cache_wait_time_ms
        if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)):
            raise TypeError("sync_cache_wait_time_ms must be a number")
        if not 0 < milliseconds < float("inf"):
            raise ParamInvalid(f"sync_cache_wait_time_ms must be positive, not {milliseconds}")
        if self.secret is not None and not isinstance(self.secret, (str, bytes)):
            raise TypeError("secret must be a str, bytes or None")
        if self.secret is not None and not self.secret:
            raise ParamInvalid("an empty secret protects nothing: use None")
        if self.tls is not None and not isinstance(self.tls, Tls):
            raise TypeError("tls must be a Tls or None")
        if not isinstance(self.path, str):
            raise TypeError("path must be a str")
        if self.path not in PATHS:
            raise ParamInvalid(f"path must be one of {', '.join(PATHS)}, not {self.path!r}")
        if isinstance(self.notice_queue, bool) or not isinstance(self.notice_queue, int):
            raise TypeError("notice_queue must be an integer")
        if not 0 < self.notice_queue < 1 << 32:
            raise ParamInvalid(f"notice_queue must be positive, not {self.notice_queue}")
        self._check_ucx()
        self._check_devices()

    def _check_devices(self) -> None:
        if self.devices is not None:
            if isinstance(self.devices, str) or not isinstance(self.devices, Sequence):
                raise TypeError("devices must be a sequence of names or None")
            if not all(isinstance(name, str) for name in self.devices):
                raise TypeError("devices must be names")
            if not self.devices:
                raise ParamInvalid("devices without any name leave nothing to use: use None")
            for name in self.devices:
                if not name or "," in name or name != name.strip():
                    raise ParamInvalid(f"{name!r} is no device's name")
        for field_name, most in (("traffic_class", 255), ("service_level", 15), ("gid_index", 255)):
            value = getattr(self, field_name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field_name} must be an integer or None")
            if not 0 <= value <= most:
                raise ParamInvalid(f"{field_name} must be 0 to {most}, not {value}")
        for field_name, setting in (
            ("devices", "NET_DEVICES"),
            ("traffic_class", "IB_TRAFFIC_CLASS"),
            ("service_level", "IB_SL"),
            ("gid_index", "IB_GID_INDEX"),
        ):
            if getattr(self, field_name) is not None and setting in self.ucx:
                raise ParamInvalid(f"{field_name} and {setting!r} in ucx say the same: give one")

    def _check_ucx(self) -> None:
        if not isinstance(self.ucx, Mapping):
            raise TypeError("ucx must be a mapping of names to values")
        for name, value in self.ucx.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"ucx must map str to str, but has {name!r}: {value!r}")
            if name.startswith("UCX_"):
                raise ParamInvalid(f"ucx takes names without UCX_: {name[4:]!r}, not {name!r}")

    def listen_endpoint(self) -> tuple[str, int] | None:
        """Host and port of `listen`; an IPv6 address is written in brackets."""
        if self.listen is None:
            return None
        if not isinstance(self.listen, str):
            raise TypeError("listen must be 'host:port' or None")
        host, colon, port = self.listen.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ParamInvalid(f"listen must be 'host:port', not {self.listen!r}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        return host, int(port)

    def resolved_path(self) -> str:
        """The path in force: UCXKV_PATH where it is set, otherwise `path`."""
        path = os.environ.get("UCXKV_PATH") or self.path
        if path not in PATHS:
            raise ParamInvalid(f"UCXKV_PATH must be one of {', '.join(PATHS)}, not {path!r}")
        return path
