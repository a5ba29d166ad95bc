"""What can be set when an engine is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ucxkv.errors import ParamInvalid

PATHS = ("auto", "get", "stream")


@dataclass(frozen=True)
class Options:
    """Settings of one engine.

    listen: "host:port" to accept links at, port 0 for any free one; None: this engine only dials.
    sync_cache_wait_time_ms: default deadline of every pull, in milliseconds.
    secret: shared by all clusters that may link with each other; None: anyone may link.
    path: "auto" chooses per transfer; "get" and "stream" force one.  The environment variable
        UCXKV_PATH overrides it.
    ucx: UCX settings without their UCX_ prefix; they win over the environment's.
    """

    listen: str | None = None
    sync_cache_wait_time_ms: float = 1000
    secret: str | bytes | None = field(default=None, repr=False)
    path: str = "auto"
    ucx: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.listen is not None:
            self.listen_endpoint()
        if not self.sync_cache_wait_time_ms > 0:
            raise ParamInvalid("sync_cache_wait_time_ms must be positive")
        if self.secret is not None and not isinstance(self.secret, (str, bytes)):
            raise TypeError("secret must be a str, bytes or None")
        if self.secret is not None and not self.secret:
            raise ParamInvalid("an empty secret protects nothing: use None")
        if self.path not in PATHS:
            raise ParamInvalid(f"path must be one of {', '.join(PATHS)}, not {self.path!r}")

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
