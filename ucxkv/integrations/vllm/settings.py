"""What can be set in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ucxkv import Options, Tls

LOADS = ("async", "layerwise")


@dataclass(frozen=True)
class ConnectorSettings:
    """The connector's settings; both engines may have different ones.

    host: where a prefill engine's workers listen, and are reached by decode; None (the default):
        the address that vLLM takes for the host's own.
    port: that of rank 0; rank r listens at `port` + r.  0 (the default): any free ones.
    load: how a decode engine pulls.  "async" (the default): between its steps, other requests go on
        meanwhile.  "layerwise": in the step that computes the request's first token, which begins
        at once and waits, before each layer, for that layer alone; the whole step waits with it.
        Only whole blocks are pulled then, the rest of the prompt is computed.
    hold_seconds: for how long prefill keeps the blocks of a request that nobody pulls (120).
    pull_seconds: deadline of a request's pull, in seconds, after which its blocks have failed (60).
    link_seconds: how long to try to reach an engine (5).
    blocks_per_pull: a request's blocks are pulled by so many at a time (256), all at once: where
        some fail, the others are kept.
    path, ucx: as in `ucxkv.Options`.
    secret_file: path of a file whose content, without white space around it, is the secret that the
        engines share; None (the default): whoever reaches the port may pull.
    tls: the arguments of `ucxkv.Tls`; None (the default): the control plane is not encrypted.

    Raises ValueError for an unknown name or a value out of range.
    """

    host: str | None = None
    port: int = 0
    load: str = "async"
    hold_seconds: float = 120.0
    pull_seconds: float = 60.0
    link_seconds: float = 5.0
    blocks_per_pull: int = 256
    path: str = "auto"
    ucx: Mapping[str, str] = field(default_factory=dict)
    secret_file: str | None = None
    tls: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise ValueError(f"load must be one of {', '.join(LOADS)}, not {self.load!r}")
        for name in ("hold_seconds", "pull_seconds", "link_seconds", "blocks_per_pull"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, not {self.port!r}")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """The settings in a `kv_connector_extra_config`."""
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(unknown)}; UcxKvConnector knows"
                f" {', '.join(sorted(known))}"
            )
        return cls(**extra)

    @property
    def layerwise(self) -> bool:
        """Whether pulls are waited for layer by layer."""
        return self.load == "layerwise"

    def options(self, listen: str | None) -> Options:
        """The options of a worker's engine."""
        secret = None
        if self.secret_file is not None:
            secret = Path(self.secret_file).read_text().strip()
        return Options(
            listen=listen,
            sync_cache_wait_time_ms=self.pull_seconds * 1e3,
            secret=secret,
            tls=None if self.tls is None else Tls(**self.tls),
            path=self.path,
            ucx=self.ucx,
        )
