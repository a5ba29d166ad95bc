"""What a running engine owns, opened and closed as one."""

from __future__ import annotations

import os
import secrets

from ucxkv import settings
from ucxkv._load import loaded
from ucxkv.catalogue import LocalCatalogue
from ucxkv.engine import NativeEngine, silence_ucx
from ucxkv.options import Options
from ucxkv.table import LinkTable
from ucxkv.types import LlmRole

STOP_SECONDS = 1.0


class Running:
    """All that a running engine owns; it refers to no LlmDataDist, so that one can be collected."""

    def __init__(self, cluster_id: int, role: LlmRole, options: Options) -> None:
        self.pid = os.getpid()
        self.options = options
        self.path = options.resolved_path()
        self.catalogue = LocalCatalogue()
        # What keeps the registered memory alive, by cache id.
        self.holds: dict[int, object] = {}
        if settings.user_value(options, "LOG_LEVEL") is None:
            silence_ucx()
        incarnation = secrets.randbits(64)
        version = loaded().version
        self.native = NativeEngine(incarnation, settings.rma_settings(options, version))
        self.links = LinkTable(
            cluster_id=cluster_id,
            role=role,
            options=options,
            incarnation=incarnation,
            native=self.native,
            catalogue=self.catalogue,
        )
        try:
            self.links.start()
        except BaseException:
            self.native.close()
            raise

    def close(self) -> None:
        """Close it all, in order; does nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        self.links.stop(STOP_SECONDS)
        for entry in self.catalogue.snapshot():
            entry.native.begin_retire()
        stuck = []
        for entry in self.catalogue.snapshot():
            if entry.native.retire():
                self.catalogue.remove(entry.cache_id)
            else:
                stuck.append(self.holds[entry.cache_id])
        self.native.close()
        if stuck:
            _stuck.append(stuck)
        self.holds.clear()


# Memory that UCX would not give back: freeing it would be worse than keeping it.
_stuck: list[object] = []
