"""The streaming workers: one for each network interface that links use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ucxkv import settings
from ucxkv.control import ControlThread
from ucxkv.ears import Ears
from ucxkv.netif import interface_of
from ucxkv.options import Options

if TYPE_CHECKING:
    from ucxkv.engine import NativeEngine


class CannotLink(Exception):
    """A link that cannot be made, for a reason that is no surprise."""


class Workers:
    """Makes workers as they are needed; lives on the control loop."""

    def __init__(
        self,
        control: ControlThread,
        native: NativeEngine,
        options: Options,
        version: tuple[int, int, int],
    ) -> None:
        self._control = control
        self._native = native
        self._options = options
        self._version = version
        self._tasks: dict[str | None, asyncio.Task[Ears]] = {}
        self._ears: dict[int, Ears] = {}

    async def index(self, local_host: str) -> int:
        """The worker for the interface that has a local address; raises CannotLink.

        UCX has to be told the interface when a worker's context is made.
        """
        conflicts = settings.forced_conflicts(self._options)
        if conflicts:
            raise CannotLink("; ".join(conflicts))
        try:
            interface = interface_of(local_host)
        except OSError as error:
            raise CannotLink(f"the network interfaces cannot be listed: {error}") from error
        task = self._tasks.get(interface)
        if task is None or (task.done() and _useless(task)):
            values = settings.am_settings(self._options, interface, self._version)
            native = self._native
            task = self._control.loop.create_task(
                self._control.aside(lambda: Ears(local_host, lambda: native.add_worker(values)))
            )
            self._tasks[interface] = task
        try:
            # Others may wait for the same worker, and the next link will want it anyway.
            ears = await asyncio.shield(task)
            self._ears[ears.worker] = ears
            return ears.worker
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            missing = settings.rdma_missing(self._options)
            raise CannotLink(
                f"no UCX worker for interface {interface} ({local_host}): {error}"
                + (f"; {missing}" if missing else "")
            ) from error

    def deaf(self, worker: int) -> bool:
        """Whether no peer can connect to a worker any more."""
        return self._ears[worker].deaf


def _useless(made: asyncio.Task[Ears]) -> bool:
    return made.cancelled() or made.exception() is not None or made.result().deaf


def numbers(version: str) -> tuple[int, int, int]:
    """A version as UCX writes it, such as "1.22.0", in numbers."""
    parts = [int(part) for part in version.split(".") if part.isdecimal()]
    major, minor, patch = (*parts, 0, 0, 0)[:3]
    return major, minor, patch
