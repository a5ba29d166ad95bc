"""What a running engine owns, opened and closed as one."""

from __future__ import annotations

import os
import secrets
import time
import weakref

from ucxkv import settings
from ucxkv._load import loaded
from ucxkv.catalogue import LocalCatalogue
from ucxkv.engine import NativeEngine, silence_ucx
from ucxkv.errors import LlmError
from ucxkv.feeder import Feeder
from ucxkv.options import Options
from ucxkv.table import LinkTable
from ucxkv.types import LlmRole
from ucxkv.window import Window

STOP_SECONDS = 1.0
RETIRE_SECONDS = 1.0


class Running:
    """All that a running engine owns; it refers to no LlmDataDist, so that one can be collected."""

    def __init__(self, cluster_id: int, role: LlmRole, options: Options) -> None:
        if _forked_beside_an_engine:
            raise LlmError(
                "this process was forked while an engine was open, and UCX does not work in it:"
                " start it by 'spawn', or fork before opening an engine"
            )
        self.pid = os.getpid()
        self.cluster_id = cluster_id
        self.started = time.time()
        self.options = options
        self.path = options.resolved_path()
        self.catalogue = LocalCatalogue()
        # What keeps the registered memory alive, by cache id.
        self.holds: dict[int, object] = {}
        if settings.user_value(options, "LOG_LEVEL") is None:
            silence_ucx()
        incarnation = secrets.randbits(64)
        version = loaded().version
        self.native = NativeEngine(
            incarnation, settings.rma_settings(options, version), notices=options.notice_queue
        )
        self.links = LinkTable(
            cluster_id=cluster_id,
            role=role,
            options=options,
            incarnation=incarnation,
            native=self.native,
            catalogue=self.catalogue,
            window=Window(self),
        )
        self.feeder = Feeder(f"ucxkv-{cluster_id}-feeder")
        _open.add(self)
        try:
            self.links.start()
        except BaseException:
            _open.discard(self)
            self.native.close()
            raise

    def close(self) -> None:
        """Close it all, in order; does nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        self.feeder.stop(STOP_SECONDS)
        self.links.stop(STOP_SECONDS)
        for entry in self.catalogue.snapshot():
            entry.native.begin_retire()
        stuck = []
        deadline = time.monotonic() + RETIRE_SECONDS
        for entry in self.catalogue.snapshot():
            if entry.native.retire(deadline - time.monotonic()):
                self.catalogue.remove(entry.cache_id)
            else:
                stuck.append(self.holds[entry.cache_id])
        if stuck:
            _stuck.append(stuck)
        self.holds.clear()
        try:
            self.native.close()
        except RuntimeError as error:
            raise LlmError(f"the engine is not closed entirely: {error}") from error
        finally:
            _open.discard(self)


_open: weakref.WeakSet[Running] = weakref.WeakSet()


def open_engines() -> list[Running]:
    """The engines of this process that are open."""
    return [running for running in list(_open) if running.pid == os.getpid()]


# UCX has threads of its own, which a forked child lacks while it believes that they run.
_forked_beside_an_engine = False


def _after_fork() -> None:
    global _forked_beside_an_engine
    _forked_beside_an_engine = _forked_beside_an_engine or bool(_open)


os.register_at_fork(after_in_child=_after_fork)

# Memory that UCX would not give back: freeing it would be worse than keeping it.
_stuck: list[object] = []
