"""Registered caches: ours, and what peers told of theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from ucxkv import wire
from ucxkv.errors import ParamInvalid
from ucxkv.types import CacheDesc, CachePlacement, DataType

if TYPE_CHECKING:
    from ucxkv.endpoint import NativeLink
    from ucxkv.memory import LocalCache, RemoteCache
    from ucxkv.tensors import Shared

    RemoteFactory = Callable[..., RemoteCache]

# As many as there can be generation words in one process.
MAX_CACHES = 65536


@dataclass
class LocalEntry:
    """A cache of ours.  The clusters in `peers` (None: all) know it unless `access` is empty."""

    cache_id: int
    desc: CacheDesc
    access: str
    native: LocalCache
    blocks: int
    block_bytes: int
    peers: frozenset[int] | None = None
    shared: Shared | None = None
    message: bytes = field(default=b"", repr=False)  # the encoded wire.CacheEntry

    def shown_to(self, cluster_id: int) -> bool:
        """Whether the cluster may know of it."""
        return bool(self.access) and (self.peers is None or cluster_id in self.peers)


@dataclass(frozen=True)
class RemoteEntry:
    """A cache of a peer."""

    cache_id: int
    desc: CacheDesc
    access: str
    native: RemoteCache
    generation: int
    blocks: int
    block_bytes: int


class LocalCatalogue:
    """The caches of this engine, by id.  Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, LocalEntry] = {}

    def add(self, entry: LocalEntry) -> None:
        """Add a cache; ParamInvalid if its description does not fit into a message to peers."""
        # Now, while the memory is certainly registered, not when some peer wants to know.
        if entry.access and not entry.message:
            entry.message = _describe(entry)
        with self._lock:
            self._entries[entry.cache_id] = entry

    def remove(self, cache_id: int) -> LocalEntry | None:
        """Remove and return it; None if there is none."""
        with self._lock:
            return self._entries.pop(cache_id, None)

    def get(self, cache_id: int) -> LocalEntry | None:
        """The cache of that id, if there is one."""
        return self._entries.get(cache_id)

    def snapshot(self) -> list[LocalEntry]:
        """All caches, oldest first."""
        with self._lock:
            return list(self._entries.values())


def _describe(entry: LocalEntry) -> bytes:
    addresses, regions, rkeys = entry.native.export()
    desc = entry.desc
    message = wire.encode(
        wire.CacheEntry(
            cache_id=entry.cache_id,
            generation=entry.native.generation,
            slot=entry.native.slot,
            shape=desc.shape,
            num_tensors=desc.num_tensors,
            data_type=desc.data_type.name,
            placement=int(desc.placement or CachePlacement.HOST),
            access=entry.access,
            blocks=entry.blocks,
            block_bytes=entry.block_bytes,
            addresses=addresses,
            regions=regions,
            rkeys=list(rkeys),
            shared=entry.shared,
        )
    )
    # The rest of a frame is a few bytes.
    if len(message) > wire.FRAME_LIMIT - 64:
        raise ParamInvalid(
            f"a cache of {desc.num_tensors} tensors in {len(rkeys)} memory regions is too much to"
            " tell peers in one message: register it in parts"
        )
    return message


def remote_entry(
    told: wire.CacheEntry, link: NativeLink, factory: RemoteFactory | None
) -> RemoteEntry:
    """What a peer told, checked; wire.ProtocolError if it contradicts itself."""
    if factory is None:
        from ucxkv.memory import RemoteCache

        factory = RemoteCache
    try:
        data_type = DataType[told.data_type]
        placement = CachePlacement(told.placement)
    except (KeyError, ValueError) as error:
        raise wire.ProtocolError(f"a cache of an unknown kind: {error}") from error
    if (
        not told.shape
        or told.num_tensors < 1
        or told.shape[0] != told.blocks
        or told.access not in ("r", "rw")
        or (
            data_type is not DataType.UNDEFINED
            and prod(told.shape) * data_type.itemsize != told.blocks * told.block_bytes
        )
    ):
        raise wire.ProtocolError(f"the description of cache {told.cache_id} contradicts itself")
    try:
        native = factory(
            link,
            cache_id=told.cache_id,
            generation=told.generation,
            slot=told.slot,
            num_tensors=told.num_tensors,
            blocks=told.blocks,
            block_bytes=told.block_bytes,
            addresses=told.addresses,
            regions=told.regions,
            rkeys=told.rkeys,
            shared=told.shared,
        )
    except (ValueError, OverflowError) as error:
        raise wire.ProtocolError(f"cache {told.cache_id}: {error}") from error
    return RemoteEntry(
        cache_id=told.cache_id,
        desc=CacheDesc(told.num_tensors, told.shape, data_type, placement),
        access=told.access,
        native=native,
        generation=told.generation,
        blocks=told.blocks,
        block_bytes=told.block_bytes,
    )
