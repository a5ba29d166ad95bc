"""One link: its states, and what its control connection says.

    connecting → up ⇄ repairing            (repairing: the data plane is being remade)
                 up, repairing → reconnecting → up    (reconnecting: the control connection is cut)
    any → down                             (for good; a later link to the cluster is a new Link)

`up` and `remote` may be read from any thread, everything else happens on the control loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Protocol

from ucxkv import wire
from ucxkv.catalogue import MAX_CACHES, LocalCatalogue, LocalEntry, RemoteEntry, remote_entry
from ucxkv.connection import Connection, ConnectionLost
from ucxkv.control import ControlThread, Waiters
from ucxkv.errors import Status
from ucxkv.types import LlmRole

if TYPE_CHECKING:
    from ucxkv.catalogue import RemoteFactory
    from ucxkv.endpoint import NativeLink
    from ucxkv.memory import RemoteCache

logger = logging.getLogger("ucxkv.links")

# How long a link that is being made may stand still.
ESTABLISH_SECONDS = 8.0
# How long a cut control connection may take to come back.
RECONNECT_SECONDS = 10.0
# Both planes broken for this long: the peer process is dead.  Pulls have to fail within 1 s.
DEAD_SECONDS = 0.6
_CLOSED_SECONDS = 1.0

_UNFINISHED = "the peer did not finish the link"
_DEAF = (
    "UCX has closed the socket that it listened at, as it does when the process is out of"
    " descriptors: link anew"
)


class Home(Protocol):
    """What a link needs of the table it is in."""

    control: ControlThread
    catalogue: LocalCatalogue
    remote_factory: RemoteFactory | None

    def attachment(self, link: Link) -> wire.Attach:
        """What the peer has to know of our end of this link."""

    def deaf(self, worker: int) -> bool:
        """Whether no peer can connect to a worker any more."""

    def changed(self, link: Link) -> None:
        """The link's state has changed."""

    def promote(self, link: Link) -> None:
        """The link is about to be up for the first time."""

    def lost(self, link: Link) -> None:
        """The control connection of an established link was cut; who dialled dials again."""


class Link:
    """A link to one incarnation of a cluster."""

    def __init__(
        self,
        home: Home,
        hello: wire.Hello,
        *,
        address: str,
        link_id: bytes,
        peer_serial: int,
        native: NativeLink,
        worker: int,
    ) -> None:
        self.cluster_id = hello.cluster_id
        self.incarnation = hello.incarnation
        self.role = LlmRole(hello.role)
        self.address = address
        self.link_id = link_id
        # Hellos of the peer with a lower serial were sent before this link was agreed on.
        self.peer_serial = peer_serial
        self.native = native
        self.worker = worker
        self.state = "connecting"
        self.up = False
        self.established = False  # it has been up
        self.error = ""
        self.remote: dict[int, RemoteEntry] = {}
        self.unlinking = False
        self._home = home
        self._loop = home.control.loop
        self._waiters = Waiters(self._loop)
        self._connection: Connection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._dead: asyncio.TimerHandle | None = None
        self._attached = False
        self._complete = False  # the peer's catalogue has been heard to its end
        self._ready = False  # we have said so
        self._peer_ready = False
        self._heard: set[int] = set()  # cache ids of the catalogue being heard
        self._told: set[int] = set()
        self._retire_waits: set[int] = set()
        self._retiring: dict[int, list[RemoteCache]] = {}
        self._asked = self._answered = 0  # numbers of Sync and Synced
        self._peer_unlinks = False
        self._peer_done = False

    def __repr__(self) -> str:
        return f"<Link: cluster {self.cluster_id} at {self.address}, {self.state}>"

    # -- connections ----------------------------------------------------------------------------

    def begin(self, connection: Connection, *, resumed: bool = False) -> None:
        """Set the link up, or go on with it, over a connection whose ends know each other."""
        self._detach()
        self._connection = connection
        self._complete = self._ready = self._peer_ready = False
        self._heard.clear()
        if resumed:
            self._turn("reconnecting", up=False)
            self._arm(RECONNECT_SECONDS, "the control connection was not restored in time")
        else:
            self._arm(ESTABLISH_SECONDS, _UNFINISHED)
            connection.send(self._home.attachment(self))
        self._told = set()
        for entry in self._home.catalogue.snapshot():
            self.announce(entry)
        connection.send(wire.CatalogueEnd())
        for cache_id in self._retire_waits:
            connection.send(wire.Retire(cache_id))
        if self._asked > self._answered:
            connection.send(wire.Sync(self._asked))
        self._reader = self._home.control.spawn(self._receive(connection))

    def _detach(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _receive(self, connection: Connection) -> None:
        try:
            # What was heard together with the end counts no more, though it comes without a wait.
            while connection is self._connection:
                message = await connection.receive()
                if self.state == "connecting":
                    self._arm(ESTABLISH_SECONDS, _UNFINISHED)
                self._handle(message)
        except ConnectionLost as lost:
            self._lost(connection, str(lost))
        except wire.ProtocolError as error:
            logger.warning("cluster %d broke the protocol: %s", self.cluster_id, error)
            self.down(f"the peer broke the protocol: {error}")
        except Exception as error:
            logger.exception("the link to cluster %d failed", self.cluster_id)
            self.down(f"internal error: {error!r}")

    def _lost(self, connection: Connection, cause: str) -> None:
        if connection is not self._connection:
            return
        connection.abort()
        self._connection = self._reader = None
        if self.state == "connecting":
            self.down(f"the connection was lost while linking: {cause}")
        elif self.unlinking and (self._peer_unlinks or self._peer_done):
            self.down("unlinked by the peer")
        else:
            self.error = f"the control connection was lost: {cause}"
            self._turn("reconnecting", up=False)
            self._arm(RECONNECT_SECONDS, f"{self.error}, and did not come back")
            if not self.unlinking:
                self._home.lost(self)
            self.poll()

    def _arm(self, seconds: float, error: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.down, error)

    # -- states ---------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether there is a control connection."""
        return self._connection is not None

    @property
    def settled(self) -> bool:
        """Up on both sides, or down."""
        return self.state == "down" or (self.state in ("up", "repairing") and self._peer_ready)

    @property
    def stage(self) -> str:
        """What an unfinished link waits for."""
        if not self._attached:
            return "waiting for the peer's data-plane address"
        if not self._complete:
            return "waiting for the peer's catalogue"
        if not self.native.ready:
            return f"proving the data plane ({self.native.error or 'no answer yet'})"
        return "waiting for the peer to be ready"

    async def until_settled(self, deadline: float) -> bool:
        """Wait for `settled`."""
        return await self._waiters.until(lambda: self.settled, deadline)

    async def until_down(self, deadline: float) -> bool:
        """Wait until it is down."""
        return await self._waiters.until(lambda: self.state == "down", deadline)

    def _turn(self, state: str, *, up: bool) -> None:
        self.up = up and not self.unlinking
        self.state = state
        self._touch()

    def _touch(self) -> None:
        self._waiters.touch()
        self._home.changed(self)

    def poll(self) -> None:
        """Look at the data plane; called whenever the native engine says that something changed."""
        native = self.native
        if self.state != "down":
            broken = native.am_broken
            if broken and self._home.deaf(self.worker):
                # The peer knows no other address: only another link has another worker.
                self.down(_DEAF, "the peer's data plane takes no connections any more")
                return
            if self.state == "up" and broken:
                # Still up: what is submitted now waits for the repair, within its own deadline.
                self._turn("repairing", up=True)
            elif self.state == "repairing" and not broken:
                self._turn("up", up=True)
            if self.state == "reconnecting" and broken:
                if self._dead is None:
                    self._dead = self._loop.call_later(DEAD_SECONDS, self._pronounce_dead)
            elif self._dead is not None:
                self._dead.cancel()
                self._dead = None
            for cache_id in [
                cache_id
                for cache_id, caches in self._retiring.items()
                if not any(cache.active for cache in caches)
            ]:
                del self._retiring[cache_id]
                self._send(wire.Retired(cache_id))
            self._advance()
        self._waiters.touch()

    def _pronounce_dead(self) -> None:
        self._dead = None
        if self.state == "reconnecting" and self._connection is None and self.native.am_broken:
            cause = f"; data plane: {self.native.error}" if self.native.error else ""
            self.down(f"the peer process is gone: {self.error}{cause}")

    def _advance(self) -> None:
        """Be up, and say so, once nothing is missing on this side."""
        if self._connection is None or not self._complete or not self.native.ready:
            return
        if not self._ready:
            self._ready = True
            if not self.established:
                self._home.promote(self)
                self.established = True
            # Before the peer hears of it: its application may tell ours to pull at once.
            self._turn("repairing" if self.native.am_broken else "up", up=True)
            self._send(wire.Ready())
        if self._peer_ready and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.error = ""
            self._touch()

    def down(self, error: str, farewell: str | None = None) -> asyncio.Task[None] | None:
        """End the link for good: its pulls are fenced and fail.

        Returns the closing of the connection, for those who want to wait for it.
        """
        if self.state == "down":
            return None
        logger.debug("link to cluster %d down: %s", self.cluster_id, error)
        self.error = error
        self.state = "down"
        self.up = False
        for timer in (self._timer, self._dead):
            if timer is not None:
                timer.cancel()
        self._timer = self._dead = None
        closing = None
        if self._connection is not None:
            text = farewell or f"closed by the peer: {error}"
            closing = self._connection.close(wire.Bye(text[:500]))
            self._connection = None
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        self.native.fail_pulls(int(Status.NOT_YET_LINK), error)
        self.native.close()
        self.remote = {}
        self._retiring.clear()
        self._retire_waits.clear()
        self._touch()
        return closing

    # -- unlinking ------------------------------------------------------------------------------

    async def unlink(self, deadline: float, force: bool) -> bool:
        """Close it, after running pulls of both sides if they end in time.

        False if the native link could not be closed.
        """
        self.unlinking = True
        self.up = False
        self._touch()
        if not force and self.state != "connecting":
            self._send(wire.Unlink())
            await self._waiters.until(
                lambda: (
                    self.state == "down"
                    or (not self.native.pulls and (self._peer_done or self._connection is None))
                ),
                deadline,
            )
            if self._peer_unlinks and not self.native.pulls:
                self._send(wire.Unlinked())
        self.down("it was unlinked", "unlinked by the peer")
        return await self._waiters.until(
            lambda: self.native.closed, self._loop.time() + _CLOSED_SECONDS
        )

    async def _follow_unlink(self) -> None:
        """The peer unlinks: let our pulls end, say so, and wait for it to close the connection."""
        await self._waiters.until(lambda: self.state == "down" or not self.native.pulls, math.inf)
        self._send(wire.Unlinked())

    # -- our caches -----------------------------------------------------------------------------

    def _send(self, message: wire.Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def announce(self, entry: LocalEntry) -> None:
        """Tell the peer of a cache, unless it knows or may not."""
        if self._connection is None or entry.cache_id in self._told:
            return
        if not entry.shown_to(self.cluster_id):
            return
        self._told.add(entry.cache_id)
        self._connection.send_entry(entry.cache_id, entry.message)

    def retire(self, cache_id: int) -> None:
        """Tell the peer that a cache is being unregistered."""
        if self._connection is not None and self._connection.withdraw(cache_id):
            self._told.discard(cache_id)
        if cache_id in self._told and self.state != "down":
            self._told.discard(cache_id)
            self._retire_waits.add(cache_id)
            self._send(wire.Retire(cache_id))

    async def retired(self, cache_id: int, deadline: float) -> None:
        """Wait until no pull of a cache that `retire` was called for runs at the peer."""
        # Without either plane the peer cannot answer, nor be served.
        await self._waiters.until(
            lambda: (
                cache_id not in self._retire_waits
                or (self.state == "reconnecting" and self.native.am_broken)
            ),
            deadline,
        )
        self._retire_waits.discard(cache_id)

    # -- the peer's caches ----------------------------------------------------------------------

    async def sync(self, deadline: float) -> bool:
        """Wait until everything the peer has registered so far is known; False at the deadline.

        A link that goes down ends the wait too.
        """
        self._asked += 1
        number = self._asked
        self._send(wire.Sync(number))
        return await self._waiters.until(
            lambda: self._answered >= number or self.state == "down", deadline
        )

    def _learn(self, told: wire.CacheEntry) -> None:
        if not self._complete:
            self._heard.add(told.cache_id)
        known = self.remote.get(told.cache_id)
        if known is not None:
            if known.generation == told.generation:
                return
            self._retire_remote(told.cache_id)
        if len(self.remote) >= MAX_CACHES:
            raise wire.ProtocolError(f"more than {MAX_CACHES} caches")
        self.remote[told.cache_id] = remote_entry(told, self.native, self._home.remote_factory)

    def _retire_remote(self, cache_id: int) -> None:
        entry = self.remote.pop(cache_id, None)
        caches = self._retiring.setdefault(cache_id, [])
        if entry is not None:
            entry.native.retire()
            caches.append(entry.native)

    # -- what the peer says ---------------------------------------------------------------------

    def _handle(self, message: wire.Running) -> None:
        match message:
            case wire.Register():
                for entry in message.entries:
                    self._learn(entry)
                if self._retiring:
                    self.poll()
            case wire.Retire():
                self._retire_remote(message.cache_id)
                self.poll()
            case wire.Retired():
                self._retire_waits.discard(message.cache_id)
                self._waiters.touch()
            case wire.Sync():
                self._send(wire.Synced(message.seq))
            case wire.Synced():
                if message.seq > self._asked:
                    raise wire.ProtocolError("an echo of what was not said")
                self._answered = max(self._answered, message.seq)
                self._waiters.touch()
            case wire.Attach():
                self._attach(message)
            case wire.CatalogueEnd():
                for cache_id in self.remote.keys() - self._heard:
                    self._retire_remote(cache_id)
                self._heard.clear()
                self._complete = True
                self.poll()
            case wire.Ready():
                self._peer_ready = True
                self._advance()
            case wire.Unlink():
                # Once, however often it is said: each would wait for our pulls.
                if not self._peer_unlinks:
                    self._home.control.spawn(self._follow_unlink())
                self.unlinking = self._peer_unlinks = True
                self.up = False
            case wire.Unlinked():
                self._peer_done = True
                self._waiters.touch()
            case wire.Bye():
                self.down(message.reason)

    def _attach(self, message: wire.Attach) -> None:
        if self._attached:
            raise wire.ProtocolError("a second attachment")
        self._attached = True
        try:
            self.native.connect(
                peer_slot=message.slot,
                peer_token=message.token,
                am_address=message.am_address,
                rma_address=message.rma_address,
                words_address=message.words_address,
                words_rkey=message.words_rkey,
                word0=message.word0,
                cluster_id=self.cluster_id,
            )
        except (ValueError, OverflowError) as error:
            raise wire.ProtocolError(f"the peer's attachment: {error}") from error
