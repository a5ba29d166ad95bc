"""All links of an engine, for the threads that use them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ucxkv._version import __version__
from ucxkv.catalogue import LocalCatalogue, LocalEntry, RemoteEntry
from ucxkv.connection import reason
from ucxkv.control import ControlThread
from ucxkv.errors import (
    KvCacheNotExist,
    LinkFailed,
    LlmError,
    LlmTimeout,
    NotYetLink,
    Status,
)
from ucxkv.figures import LinkFigures, totals_of
from ucxkv.identity import Identity
from ucxkv.linking import Linking
from ucxkv.links import Link
from ucxkv.netif import endpoint
from ucxkv.options import Options
from ucxkv.types import (
    ClusterInfo,
    LinkInfo,
    LinkResult,
    LlmRole,
    TransferStats,
    transfer_totals,
)
from ucxkv.window import Window
from ucxkv.workers import Workers, numbers

if TYPE_CHECKING:
    from ucxkv.catalogue import RemoteFactory
    from ucxkv.engine import NativeEngine

logger = logging.getLogger("ucxkv.links")

_FAREWELL_SECONDS = 0.4


class LinkTable:
    """The links of one engine, and its control thread.

    Methods may be called from any thread unless they are coroutines, which run on `loop`.
    """

    def __init__(
        self,
        *,
        cluster_id: int,
        role: LlmRole,
        options: Options,
        incarnation: int,
        native: NativeEngine,
        catalogue: LocalCatalogue,
        library: str = __version__,
        ucx_version: tuple[int, int, int] | None = None,
        remote_factory: RemoteFactory | None = None,
        window: Window | None = None,
    ) -> None:
        if ucx_version is None:
            ucx_version = numbers(native.ucx_version)
        self._control = ControlThread(f"ucxkv-{cluster_id}")
        self.loop = self._control.loop
        self.role = role
        self._options = options
        self._path = options.resolved_path()
        self._native = native
        self._window = window
        self._linking = Linking(
            self._control,
            identity=Identity(
                cluster_id=cluster_id,
                role=role,
                incarnation=incarnation,
                secret=options.secret,
                native=native,
                library=library,
                ucx_version=ucx_version,
            ),
            native=native,
            workers=Workers(self._control, native, options, ucx_version),
            catalogue=catalogue,
            remote_factory=remote_factory,
            tls=options.tls,
        )
        self._links = self._linking.links

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the control thread, and listen if the options say so; LlmError if that fails."""
        try:
            self._control.start()
            self._control.call(self._open())
        except BaseException:
            self.stop(1.0)
            raise

    async def _open(self) -> None:
        self._linking.load_certificates()
        self.loop.add_reader(self._native.notify_fd, self._on_notify)
        if self._window is not None:
            await self._window.open()
        wanted = self._options.listen_endpoint()
        if wanted is None:
            return
        try:
            await self._linking.listen(*wanted)
        except (OSError, UnicodeError) as error:
            raise LlmError(f"cannot listen at {endpoint(*wanted)}: {reason(error)}") from error

    def set_role(self, role: LlmRole, options: Options) -> None:
        """Have another role, and listen where `options` say.

        Raises ExistLink, or LlmError if it cannot listen there; nothing has changed then.
        """
        self._control.call(self._set_role(role, options))

    async def _set_role(self, role: LlmRole, options: Options) -> None:
        wanted = options.listen_endpoint()
        try:
            await self._linking.set_role(role, options.listen != self._options.listen, wanted)
        except (OSError, UnicodeError) as error:
            where = endpoint(*wanted) if wanted is not None else "nowhere"
            raise LlmError(f"cannot listen at {where}: {reason(error)}") from error
        self.role = role
        self._options = options
        self._path = options.resolved_path()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where it listens, with the real port."""
        return self._linking.listen_address

    def stop(self, timeout: float) -> None:
        """Say goodbye to all peers, close everything, join the thread, within `timeout` seconds.

        Calling it again is no error.
        """
        if not self._control.stop(self._farewell, self._end, timeout) and not self._control.here:
            logger.error("the control thread did not end within %g s", timeout)

    async def _farewell(self) -> None:
        if self._window is not None:
            self._window.close()
        await self._linking.close()
        closings = [
            link.down("the engine was finalized", "the peer's engine was finalized")
            for link in self._linking.everyone()
        ]
        waiting = [closing for closing in closings if closing is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=_FAREWELL_SECONDS)
        self.loop.remove_reader(self._native.notify_fd)

    def _end(self) -> None:
        self._linking.let_go()
        del self._native

    def post(self, callback: Callable[..., object], *args: Any) -> bool:
        """Have the control loop call it soon; False if the engine is being finalized."""
        return self._control.post(callback, *args)

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Hold a task of the loop until it is done, and log what it fails with."""
        self._control.keep(task)

    def _on_notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._native.notify_fd, 8)
        for link in self._linking.everyone():
            link.poll()

    # -- linking and unlinking ------------------------------------------------------------------

    def link(self, clusters: Sequence[ClusterInfo], timeout_ms: float) -> list[LinkResult]:
        """Link to all of `clusters` at once; LinkFailed, with all results, if any was not linked.

        Returns when both sides of each link are up.
        """
        results = self._control.call(self._link_all(clusters, timeout_ms / 1e3))
        failed = [result for result in results if result.status != Status.SUCCESS]
        if failed:
            raise LinkFailed("; ".join(result.message for result in failed), results=results)
        return results

    async def _link_all(self, clusters: Sequence[ClusterInfo], timeout: float) -> list[LinkResult]:
        deadline = self.loop.time() + timeout
        return list(
            await asyncio.gather(*(self._linking.link(cluster, deadline) for cluster in clusters))
        )

    def unlink(
        self, clusters: Sequence[ClusterInfo], timeout_ms: float, force: bool = False
    ) -> list[LinkResult]:
        """End links.  Running pulls of both sides may end within the timeout, unless `force`.

        What still runs then is fenced and fails.  Unlinking what is not linked succeeds.
        """
        return self._control.call(self._unlink_all(clusters, timeout_ms / 1e3, force))

    async def _unlink_all(
        self, clusters: Sequence[ClusterInfo], timeout: float, force: bool
    ) -> list[LinkResult]:
        deadline = self.loop.time() + timeout
        return list(
            await asyncio.gather(
                *(
                    self._unlink_one(cluster.remote_cluster_id, deadline, force)
                    for cluster in clusters
                )
            )
        )

    async def _unlink_one(self, cluster_id: int, deadline: float, force: bool) -> LinkResult:
        self._linking.give_up(cluster_id)
        link = self._links.get(cluster_id)
        if link is None:
            return LinkResult(cluster_id, Status.SUCCESS)
        try:
            closed = link.state == "down" or await link.unlink(deadline, force)
        finally:
            # An interrupted caller must not leave a link that can neither be used nor made anew.
            link.down("it was unlinked", "unlinked by the peer")
            self._linking.forget(link)
        if closed:
            return LinkResult(cluster_id, Status.SUCCESS)
        return LinkResult(
            cluster_id,
            Status.UNLINK_FAILED,
            f"cluster {cluster_id} ({link.address}): UCX has not closed its endpoints",
        )

    # -- what is linked -------------------------------------------------------------------------

    def lookup(self, cluster_id: int) -> Link | None:
        """The current link to a cluster, whatever its state."""
        return self._links.get(cluster_id)

    def infos(self) -> list[LinkInfo]:
        """All links, ended ones included."""
        return [
            LinkInfo(
                cluster_id=link.cluster_id,
                address=link.address,
                state=link.state,
                path=self._path_of(link),
                transports=self._transports_of(link),
                role=link.role,
                error=link.error,
                stats=TransferStats(**transfer_totals(link.native.totals())),
            )
            for link in list(self._links.values())
        ]

    def figures(self) -> list[LinkFigures]:
        """The figures of all links, ended ones included."""
        return [
            LinkFigures(
                cluster_id=link.cluster_id,
                state=link.state,
                address=link.address,
                path=self._path_of(link),
                transports=list(self._transports_of(link)),
                error=link.error,
                totals=totals_of(link.native.totals()),
            )
            for link in list(self._links.values())
        ]

    def _path_of(self, link: Link) -> str:
        if link.state in ("down", "connecting"):
            return ""
        return "get" if link.native.get and self._path != "stream" else "stream"

    def _transports_of(self, link: Link) -> tuple[str, ...]:
        if link.state in ("down", "connecting"):
            return ()
        return tuple(link.native.transports)

    def stats(self) -> dict[int, TransferStats]:
        """The totals of each present link, by cluster."""
        return {
            link.cluster_id: TransferStats(**transfer_totals(link.native.totals()))
            for link in list(self._links.values())
        }

    # -- caches ---------------------------------------------------------------------------------

    def announce(self, entry: LocalEntry) -> None:
        """Tell all peers of a new cache; does not wait."""
        if entry.access:
            self._control.post(self._announce, entry)

    def _announce(self, entry: LocalEntry) -> None:
        for link in self._linking.everyone():
            link.announce(entry)

    def retire(self, entry: LocalEntry, deadline: float) -> None:
        """Tell all peers that a cache is being unregistered, and wait for their pulls to end.

        At `deadline`, on the monotonic clock, it returns all the same.
        """
        if not entry.access or not self._control.post(self._retire, entry.cache_id):
            return
        if self._control.here:
            return
        try:
            waiting = self._control.submit(self._retired(entry.cache_id, deadline))
        except LlmError:
            return
        try:
            # The loop may be late where an application holds the GIL: the deadline holds here too.
            self._control.wait(waiting, deadline + 0.01)
        finally:
            waiting.cancel()

    def _retire(self, cache_id: int) -> None:
        for link in self._linking.everyone():
            link.retire(cache_id)

    async def _retired(self, cache_id: int, deadline: float) -> None:
        await asyncio.gather(
            *(link.retired(cache_id, deadline) for link in self._linking.everyone())
        )

    async def resolve(
        self, cluster_id: int, cache_id: int, deadline: float
    ) -> tuple[Link, RemoteEntry]:
        """The link to a cluster and one of its caches, for a pull.

        A link being set up or repaired is waited for, and an unknown cache asked for, until
        `deadline` on the monotonic clock.  Raises NotYetLink, KvCacheNotExist or LlmTimeout.
        """
        while True:
            link = await self._usable(cluster_id, deadline)
            entry = link.remote.get(cache_id)
            if entry is None:
                if not await link.sync(deadline):
                    raise LlmTimeout(
                        f"cluster {cluster_id} ({link.address}) did not confirm in time whether it"
                        f" has cache {cache_id}"
                    )
                if not link.up:
                    continue
                entry = link.remote.get(cache_id)
            if entry is None or entry.native.retired:
                raise KvCacheNotExist(
                    f"cluster {cluster_id} ({link.address}) has no cache {cache_id} that may be"
                    " read"
                )
            return link, entry

    async def _usable(self, cluster_id: int, deadline: float) -> Link:
        def decided() -> bool:
            link = self._links.get(cluster_id)
            if link is not None and link.up:
                return True
            if self._linking.dialling(cluster_id):
                return False
            return link is None or link.state == "down" or link.unlinking

        in_time = await self._linking.waiters.until(decided, deadline)
        link = self._links.get(cluster_id)
        if link is not None and link.up:
            return link
        where = f"cluster {cluster_id}" + (f" ({link.address})" if link is not None else "")
        if not in_time:
            state = link.state if link is not None else "connecting"
            raise LlmTimeout(f"{where}: the link was still {state} at the deadline")
        if link is None:
            raise NotYetLink(f"{where} is not linked")
        if link.unlinking and link.state != "down":
            raise NotYetLink(f"{where} is being unlinked")
        raise NotYetLink(f"{where}: the link is down: {link.error}")
