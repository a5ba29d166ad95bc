"""Making links, from either side, and restoring their control connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ucxkv import handshake, wire
from ucxkv.catalogue import LocalCatalogue
from ucxkv.connection import Connection, ConnectionLost, Listener
from ucxkv.control import ControlThread, Waiters, Warnings
from ucxkv.dialling import Caller, DialFailed, Progress, Reached, reach
from ucxkv.errors import ExistLink, Status
from ucxkv.identity import Identity
from ucxkv.links import Link
from ucxkv.netif import endpoint
from ucxkv.tls import Certificates, Tls
from ucxkv.types import ClusterInfo, LinkResult, LlmRole
from ucxkv.workers import CannotLink, Workers

if TYPE_CHECKING:
    from ucxkv.catalogue import RemoteFactory
    from ucxkv.engine import NativeEngine

logger = logging.getLogger("ucxkv.links")

# Where both dial each other, the higher cluster's connection waits this long for the lower one's.
_PARK_SECONDS = 0.5
_FIRST_DELAY = 0.005
_LAST_DELAY = 0.5
# One attempt to restore a connection; the link's own timer bounds them all.
_REDIAL_SECONDS = 2.0
_PROBE_SECONDS = 1.0
# Links that peers may be making at one time.
_MAX_MAKING = 1024
# So many ended links are remembered for what their errors say.
_REMEMBERED = 64


class _Dial:
    """A dial under way to one cluster."""

    def __init__(self, attempt: asyncio.Task[Reached]) -> None:
        self.attempt = attempt
        self.done = asyncio.Event()
        self.superseded = False
        self.given_up = False

    def supersede(self) -> None:
        """The peer's own dial makes the link."""
        self.superseded = True
        self.attempt.cancel()


class Linking:
    """Makes the links of one engine, and keeps them; everything here runs on the control loop."""

    def __init__(
        self,
        control: ControlThread,
        *,
        identity: Identity,
        native: NativeEngine,
        workers: Workers,
        catalogue: LocalCatalogue,
        remote_factory: RemoteFactory | None,
        tls: Tls | None,
    ) -> None:
        self.control = control
        self.loop = control.loop
        self.catalogue = catalogue
        self.remote_factory = remote_factory
        self.links: dict[int, Link] = {}
        # Links that peers are making although an older one of theirs is there: who says that he is
        # a peer's successor proves it on the data plane before he takes its place.
        self._arriving: set[Link] = set()
        self.listen_address: tuple[str, int] | None = None
        self.waiters = Waiters(self.loop)
        self._identity = identity
        self._cluster_id = identity.cluster_id
        self._native = native
        self._workers = workers
        self._dials: dict[int, _Dial] = {}
        # What is needed to dial again, by link id.
        self._routes: dict[bytes, ClusterInfo] = {}
        self._warn = Warnings()
        self._certificates = Certificates(tls, self._warn) if tls is not None else None
        self._listener = self._new_listener()
        self._host = ""  # what `listen_address` was made from
        self._closed = False

    def load_certificates(self) -> None:
        """Read the files that `Tls` names; ParamInvalid if they are of no use."""
        if self._certificates is not None:
            self._certificates.load()

    def _new_listener(self) -> Listener:
        return Listener(self.control, self._warn, self._serve, self._certificates)

    async def listen(self, host: str, port: int) -> None:
        """Accept links from now on; raises OSError."""
        self.listen_address = await self._listener.open(host, port)
        self._host = host

    async def set_role(self, role: LlmRole, move: bool, wanted: tuple[str, int] | None) -> None:
        """Have another role and, with `move`, listen at `wanted` or, for None, nowhere.

        Raises ExistLink while there are links, or OSError; nothing has changed then.
        """
        self._check_unlinked()
        old = self._listener
        if move:
            await self._listen_anew(wanted)
        # No link can be made between the last look for one and this.
        self._identity.role = role
        if move:
            old.close()

    def _check_unlinked(self) -> None:
        linked = {link.cluster_id for link in self.everyone() if link.state != "down"}
        linked.update(self._dials)
        if linked:
            names = ", ".join(map(str, sorted(linked)))
            raise ExistLink(f"there are links, finished or not, to these clusters: {names}")

    async def _listen_anew(self, wanted: tuple[str, int] | None) -> None:
        """Listen elsewhere too, or there instead where both want one port."""
        old, address = self._listener, self.listen_address
        fresh = self._new_listener()
        in_the_way = address is not None and wanted is not None and address[1] == wanted[1]
        try:
            if in_the_way:
                old.close()
            moved = await fresh.open(*wanted) if wanted is not None else None
            # Meanwhile somebody may have linked.
            self._check_unlinked()
        except BaseException:
            fresh.close()
            if in_the_way and address is not None and not self._closed:
                self.listen_address = None
                self._listener = self._new_listener()
                await self.listen(self._host, address[1])
            raise
        self._listener, self.listen_address = fresh, moved
        self._host = wanted[0] if wanted is not None else ""

    async def close(self) -> None:
        """Accept and make no more links."""
        self._closed = True
        for cluster_id in self._dials:
            self.give_up(cluster_id)
        self._listener.close()

    def let_go(self) -> None:
        """Refer to the native engine no more; nothing else may be called afterwards.

        Errors of tasks refer to their frames and those to the tasks, so that some of what is used
        here is only freed by a collection, for which the engine and its descriptors must not wait.
        """
        self.links.clear()
        del self._native, self._workers, self._identity

    def everyone(self) -> list[Link]:
        """All links, those included that may yet replace another."""
        return [*self.links.values(), *self._arriving]

    def dialling(self, cluster_id: int) -> bool:
        """Whether a dial to the cluster is under way."""
        return cluster_id in self._dials

    def forget(self, link: Link) -> None:
        """Drop a link that has ended."""
        if self.links.get(link.cluster_id) is link:
            del self.links[link.cluster_id]

    def give_up(self, cluster_id: int) -> None:
        """End what is under way to link a cluster, from either side."""
        dial = self._dials.get(cluster_id)
        if dial is not None:
            dial.given_up = True
            dial.attempt.cancel()
        for link in list(self._arriving):
            if link.cluster_id == cluster_id:
                link.down("it was unlinked", "unlinked by the peer")

    # -- what links need (links.Home) -----------------------------------------------------------

    def attachment(self, link: Link) -> wire.Attach:
        """What the peer has to know of our end of this link."""
        return self._identity.attachment(link.native, link.worker)

    def deaf(self, worker: int) -> bool:
        """Whether no peer can connect to a worker any more."""
        return self._workers.deaf(worker)

    def changed(self, link: Link) -> None:
        """A link's state has changed."""
        if link.state == "down":
            dialled = self._routes.pop(link.link_id, None)
            self._arriving.discard(link)
            if dialled is None and not link.established:
                # A stranger's attempt, of which nobody here knew.
                text = f"cluster {link.cluster_id} did not finish a link: {link.error}"
                self._warn("unfinished", text, logging.INFO)
                self.forget(link)
        self.waiters.touch()

    def promote(self, link: Link) -> None:
        """A link is about to be up: it is the one to its cluster from now on."""
        self._arriving.discard(link)
        old = self.links.get(link.cluster_id)
        if old is link:
            return
        self.links[link.cluster_id] = link
        if old is not None:
            same = old.incarnation == link.incarnation
            old.down("the peer linked anew" if same else "the peer process was restarted")

    def lost(self, link: Link) -> None:
        """The control connection of an established link was cut."""
        route = self._routes.get(link.link_id)
        if route is not None:
            self.control.spawn(self._redial(link, route))

    # -- making links ---------------------------------------------------------------------------

    def _caller_for(self, cluster: ClusterInfo, intent: int, link: Link | None) -> Caller:
        cluster_id = cluster.remote_cluster_id
        link_id = link.link_id if link is not None else b""
        return Caller(
            self.control,
            self._identity.key,
            lambda address: self._identity.hello(address, cluster_id, intent, link_id),
            cluster.remote_role,
            self._certificates,
        )

    def _install(
        self,
        reached: handshake.Introduction,
        connection: Connection,
        worker: int,
        address: str,
        peer_serial: int,
        route: ClusterInfo | None,
    ) -> Link:
        """Make the link that both sides have agreed on."""
        making = sum(link.state == "connecting" for link in self.everyone())
        if route is None and making >= _MAX_MAKING:
            raise CannotLink("too many links are being made at the moment")
        try:
            native = self._native.new_link(worker)
        except (RuntimeError, MemoryError) as error:
            raise CannotLink(f"no room for another link: {error}") from error
        link = Link(
            self,
            reached.theirs,
            address=address,
            link_id=reached.link_id,
            peer_serial=peer_serial,
            native=native,
            worker=worker,
        )
        old = self.links.get(link.cluster_id)
        if old is None or old.state == "down":
            self.links.pop(link.cluster_id, None)
            self.links[link.cluster_id] = link
            self._forget_ended()
        else:
            self._arriving.add(link)
        if route is not None:
            self._routes[link.link_id] = route
        return link

    def _forget_ended(self) -> None:
        ended = [key for key, link in self.links.items() if link.state == "down"]
        for key in ended[: max(0, len(ended) - _REMEMBERED)]:
            del self.links[key]

    # -- linking: who is dialled ----------------------------------------------------------------

    async def _serve(self, connection: Connection, known: Callable[[], object]) -> None:
        host_port = endpoint(*self.listen_address) if self.listen_address else ""
        try:
            if self._certificates is not None and not connection.secure:
                await self._decline(connection)
            introduction, verdict = await handshake.answer(
                connection, lambda: self._identity.hello(host_port), self._identity.key
            )
        except ConnectionLost:
            connection.abort()
            return
        except wire.ProtocolError as error:
            self._warn("garbage", f"closed a connection from {connection.peer}: {error}")
            connection.abort()
            return
        except handshake.Refused as refused:
            if refused.suspicious:
                self._warn("secret", f"refused a connection from {connection.peer}: {refused}")
            else:
                text = f"refused a connection from {connection.peer}: {refused}"
                self._warn("refused", text, logging.INFO)
            connection.close()
            return
        if self._certificates is not None:
            theirs = introduction.theirs.cluster_id
            problem = self._certificates.tls.stranger(connection.names, theirs)
            if problem is not None:
                self._warn("secret", f"refused a connection from {connection.peer}: {problem}")
                verdict(wire.Refusal(wire.REFUSED, problem[:512]))
                connection.close()
                return
        known()
        try:
            await self._admit(connection, introduction, verdict)
        except (CannotLink, handshake.Refused) as refused:
            code = refused.code if isinstance(refused, handshake.Refused) else wire.REFUSED
            verdict(wire.Refusal(code, str(refused)[:512]))
            connection.close()
        except Exception as error:
            verdict(wire.Refusal(wire.REFUSED, f"internal error: {error!r}"[:512]))
            connection.close()
            raise

    async def _decline(self, connection: Connection) -> None:
        """Tell a peer that has begun in the clear why there will be no link."""
        await connection.receive_preamble()
        await connection.receive_opening()
        problem = handshake.Refused(
            f"cluster {self._cluster_id} takes connections with TLS only", suspicious=True
        )
        connection.send_preamble()
        connection.send_opening(wire.Refusal(problem.code, str(problem)))
        raise problem

    async def _admit(
        self,
        connection: Connection,
        introduction: handshake.Introduction,
        verdict: Callable[[wire.Welcome | wire.Refusal], None],
    ) -> None:
        theirs = introduction.theirs
        if theirs.intent != wire.LINK:
            link = self._alive(theirs)
            if link is None:
                raise handshake.Refused(f"cluster {self._cluster_id} has no such link", wire.GONE)
            verdict(wire.Welcome(self._identity.serial()))
            if theirs.intent == wire.RESUME:
                link.begin(connection, resumed=True)
            else:
                connection.close()
            return
        worker = await self._workers.index(connection.local_host)
        await self._settle_crossing(theirs.cluster_id)
        if any(
            link.cluster_id == theirs.cluster_id
            and link.incarnation == theirs.incarnation
            and link.state != "down"
            and theirs.serial < link.peer_serial
            for link in self.everyone()
        ):
            raise handshake.Refused("the clusters are linking the other way round", wire.CROSSED)
        if introduction.mine.role != self._identity.role:
            raise handshake.Refused(f"cluster {self._cluster_id} has another role by now")
        link = self._install(introduction, connection, worker, connection.peer, theirs.serial, None)
        verdict(wire.Welcome(self._identity.serial()))
        link.begin(connection)

    def _alive(self, theirs: wire.Hello) -> Link | None:
        """The link that a hello names, if it can go on."""
        link = self.links.get(theirs.cluster_id)
        if (
            link is None
            or link.state in ("down", "connecting")
            or link.unlinking
            or link.incarnation != theirs.incarnation
            or link.link_id != theirs.link_id
        ):
            return None
        return link

    async def _settle_crossing(self, cluster_id: int) -> None:
        """Where both dial, the lower cluster's dial makes the link, unless it leads nowhere."""
        dial = self._dials.get(cluster_id)
        if dial is None:
            return
        if self._cluster_id < cluster_id:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(dial.done.wait(), _PARK_SECONDS)
                return
        dial.supersede()

    # -- linking: who dials ---------------------------------------------------------------------

    async def link(self, cluster: ClusterInfo, deadline: float) -> LinkResult:
        cluster_id = cluster.remote_cluster_id
        progress = Progress()
        status, text = Status.LINK_FAILED, ""
        try:
            status = await asyncio.wait_for(
                self._link_within(cluster, progress, deadline), deadline - self.loop.time()
            )
            if status is Status.ALREADY_LINK:
                text = "it is linked already"
        except asyncio.TimeoutError:
            status, text = Status.TIMEOUT, f"no link in time; {progress}"
        except (CannotLink, DialFailed, handshake.Refused) as error:
            text = str(error)
        except Exception as error:
            logger.exception("linking to cluster %d failed", cluster_id)
            text = f"internal error: {error!r}"
        message = f"cluster {cluster_id}: {text}" if text else ""
        return LinkResult(cluster_id, status, message)

    async def _link_within(
        self, cluster: ClusterInfo, progress: Progress, deadline: float
    ) -> Status:
        cluster_id = cluster.remote_cluster_id
        if cluster_id == self._cluster_id:
            raise CannotLink("an engine does not link to itself")
        joined = False
        while True:
            # What is waited for below returns at the deadline without giving way to its timer.
            if self.loop.time() >= deadline:
                raise asyncio.TimeoutError
            link = self.links.get(cluster_id)
            dial = self._dials.get(cluster_id)
            if dial is not None:
                joined = True
                progress("waiting for another dial to the cluster")
                await dial.done.wait()
            elif link is None or link.state == "down":
                joined = True
                await self._dial(cluster, wire.LINK, None, progress, deadline)
                made = self.links.get(cluster_id)
                if made is not None and not made.settled:
                    await self._finish(made, progress, deadline)
                if made is not None and made.state == "down":
                    raise CannotLink(f"{made.address}: {made.error}")
            elif link.unlinking:
                progress("waiting for the old link to end")
                await link.until_down(deadline)
            elif link.state == "connecting":
                joined = True
                await self._finish(link, progress, deadline)
            elif not link.settled:
                await self._recover(cluster, link, progress, deadline)
            elif joined:
                return Status.SUCCESS
            elif await self._still_there(cluster, link, deadline):
                return Status.ALREADY_LINK

    async def _finish(self, link: Link, progress: Progress, deadline: float) -> None:
        """Wait for a link under way; a dialler that gives up takes it down."""
        progress.at(link.address)
        try:
            # A little earlier than the caller's own time-out, which would not know the stage.
            settled = await link.until_settled(deadline - 0.001)
        except asyncio.CancelledError:
            settled = False
            raise
        finally:
            progress(link.stage)
            if not link.settled and link.link_id in self._routes:
                link.down(f"given up while {link.stage}", "the peer gave up linking")
        if not settled:
            raise asyncio.TimeoutError

    async def _dial(
        self,
        cluster: ClusterInfo,
        intent: int,
        link: Link | None,
        progress: Progress,
        deadline: float,
    ) -> None:
        """Dial, and make or resume the link.

        Returns without one where the peer's dial is the one that counts.
        """
        cluster_id = cluster.remote_cluster_id
        caller = self._caller_for(cluster, intent, link)
        dial = _Dial(self.loop.create_task(reach(caller, cluster, progress, deadline)))
        self._dials[cluster_id] = dial
        connection: Connection | None = None
        try:
            try:
                reached = await dial.attempt
            except asyncio.CancelledError:
                if dial.superseded:
                    return
                if dial.given_up:
                    raise CannotLink("it was unlinked while being linked") from None
                raise
            except handshake.Refused as refused:
                if refused.code == wire.CROSSED:
                    return
                raise
            connection = reached.connection
            route = ClusterInfo(cluster_id, (reached.address,), None, cluster.local_ip_infos)
            if link is not None:
                if self._continues(link, reached.introduction):
                    link.begin(connection, resumed=True)
                    connection = None
                    # One side alone dials again, or they would cross each other for ever.
                    if link.link_id in self._routes:
                        self._routes[link.link_id] = route
                return
            progress("opening a UCX worker")
            worker = await self._workers.index(connection.local_host)
            if dial.superseded:
                return
            if dial.given_up:
                raise CannotLink("it was unlinked while being linked")
            made = self._install(
                reached.introduction,
                connection,
                worker,
                endpoint(reached.address.ip, reached.address.port),
                reached.welcome.serial,
                route,
            )
            made.begin(connection)
            connection = None
        finally:
            dial.attempt.cancel()
            if connection is not None:
                connection.abort()
            del self._dials[cluster_id]
            dial.done.set()
            self.waiters.touch()
            # Whoever waits for this dial comes first.
            if dial.superseded:
                with contextlib.suppress(asyncio.TimeoutError):
                    await self.waiters.until(
                        lambda: cluster_id in self.links, self.loop.time() + 0.1
                    )

    def _continues(self, link: Link, introduction: handshake.Introduction) -> bool:
        """Whether a resumed link's peer is the one it was; takes the link down if not."""
        if introduction.theirs.incarnation != link.incarnation:
            link.down("the peer process was restarted")
        return link.state != "down" and not link.unlinking

    async def _recover(
        self, cluster: ClusterInfo, link: Link, progress: Progress, deadline: float
    ) -> None:
        """A link without its control connection: wait for it, or dial where that is not done."""
        route = self._routes.get(link.link_id)
        progress.at(link.address)
        progress("waiting for the control connection to be restored")
        if link.state != "reconnecting" or (
            route is not None and route.remote_ip_infos[0] in cluster.remote_ip_infos
        ):
            await link.until_settled(deadline)
            return
        try:
            await self._dial(cluster, wire.RESUME, link, progress, deadline)
        except handshake.Refused as refused:
            if refused.code != wire.GONE:
                raise
            link.down("the peer has given the link up")
        else:
            await link.until_settled(deadline)

    async def _still_there(self, cluster: ClusterInfo, link: Link, deadline: float) -> bool:
        """Whether a link that is up has its peer still; takes it down if the peer is another."""
        caller = self._caller_for(cluster, wire.PROBE, link)
        seconds = min(_PROBE_SECONDS, (deadline - self.loop.time()) / 2)
        try:
            reached = await asyncio.wait_for(reach(caller, cluster, Progress(), deadline), seconds)
        except handshake.Refused as refused:
            if refused.code == wire.GONE:
                link.down("the peer has given the link up")
                return False
        except (DialFailed, asyncio.TimeoutError):
            # What is wrong with this address is no word about the link.
            pass
        else:
            reached.connection.abort()
        return link.settled and link.state != "down"

    async def _redial(self, link: Link, route: ClusterInfo) -> None:
        """Restore a cut control connection; its link gives up by itself in the end."""
        caller = self._caller_for(route, wire.RESUME, link)
        delay = _FIRST_DELAY
        while link.state == "reconnecting" and not link.unlinking:
            if link.connected:
                return
            try:
                reached = await asyncio.wait_for(
                    reach(caller, route, Progress(), 0.0), _REDIAL_SECONDS
                )
            except DialFailed as failed:
                if failed.deserted:
                    link.down(f"the peer process is gone: {failed}")
                    return
            except asyncio.TimeoutError:
                pass
            except handshake.Refused as refused:
                link.down(f"the peer has given the link up: {refused}")
                return
            else:
                if self._continues(link, reached.introduction):
                    link.begin(reached.connection, resumed=True)
                else:
                    reached.connection.abort()
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)
