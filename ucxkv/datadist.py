"""The engine: what an application creates, links and pulls with."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from ucxkv import copies, geometry, settings, tensors
from ucxkv._load import loaded
from ucxkv.catalogue import LocalCatalogue, LocalEntry, RemoteEntry
from ucxkv.engine import NativeEngine, TransferHandle, monotonic_ns, silence_ucx
from ucxkv.errors import (
    FeatureNotEnabled,
    KvCacheNotExist,
    LlmError,
    LlmOutOfMemory,
    ParamInvalid,
    Status,
)
from ucxkv.links import Link
from ucxkv.options import Options
from ucxkv.table import LinkTable
from ucxkv.transfers import Transfer
from ucxkv.types import (
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    EngineStats,
    IpInfo,
    KvCacheExtParam,
    LinkInfo,
    LinkResult,
    LlmRole,
    TransferReport,
)

_ACCESS = ("r", "rw", "")
_STOP_SECONDS = 1.0
# A century: what is longer would not fit the clock.
_FOREVER_MS = 100 * 365 * 86400e3


class _Running:
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
        if os.getpid() != self.pid:
            return
        self.links.stop(_STOP_SECONDS)
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


def _close(running: _Running) -> None:
    running.close()


class LlmDataDist:
    """One member of a disaggregated deployment: it registers caches, links to others, and pulls.

    `cluster_id` is how others name it.  `role` is told to them.  Nothing is opened before
    `initialize`; everything is closed by `finalize`, by leaving a ``with`` block, or at the latest
    when the object is collected (with a ResourceWarning) or the interpreter exits.

    All methods may be called from any thread.  After a fork the child's use raises LlmError.
    """

    def __init__(
        self, cluster_id: int, role: LlmRole = LlmRole.MIX, options: Options | None = None
    ) -> None:
        self._running: _Running | None = None
        self._cluster_id = _cluster_number(cluster_id)
        if not isinstance(role, LlmRole):
            raise TypeError(f"role must be an LlmRole, not {type(role).__name__}")
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be Options, not {type(options).__name__}")
        self._role = role
        self._options = options
        self._lock = threading.Lock()
        # Not the other one: opening a listener may wait for a name server, finalize must not.
        self._changing = threading.Lock()
        self._ids = itertools.count(1)
        self._closer: weakref.finalize[[_Running], LlmDataDist] | None = None

    # -- life ---------------------------------------------------------------------------------

    def initialize(self, options: Options | None = None) -> None:
        """Open the engine: its UCX workers, its threads and, with `Options.listen`, its listener.

        `options` replaces the constructor's.  Raises LlmError if UCX or the listener cannot be
        opened, or if the engine is open already.
        """
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be Options, not {type(options).__name__}")
        with self._lock:
            if self._running is not None:
                raise LlmError("the engine is initialized already")
            if options is not None:
                self._options = options
            try:
                running = _Running(self._cluster_id, self._role, self._options or Options())
            except LlmError:
                raise
            except MemoryError as error:
                raise LlmOutOfMemory(str(error)) from error
            except (OSError, RuntimeError) as error:
                raise LlmError(f"cannot open the engine: {error}") from error
            self._running = running
            self._closer = weakref.finalize(self, _close, running)

    def finalize(self) -> None:
        """Close the engine: within 5 s, whatever the peers do.  Closing twice is no error.

        Running transfers end with LlmError, fenced; peers see the link go down; registered memory
        is released.
        """
        with self._lock:
            running, closer = self._running, self._closer
            self._running = self._closer = None
        if running is None or closer is None:
            return
        closer()

    def __enter__(self) -> LlmDataDist:
        if self._running is None:
            self.initialize()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finalize()

    def __del__(self) -> None:
        running = getattr(self, "_running", None)
        if running is None or running.pid != os.getpid():
            return
        warnings.warn(f"{self!r} was not finalized", ResourceWarning, source=self, stacklevel=2)
        self.finalize()

    def __repr__(self) -> str:
        state = "closed" if self._running is None else "open"
        return f"<LlmDataDist: cluster {self._cluster_id}, {self._role.name}, {state}>"

    def _engine(self) -> _Running:
        running = self._running
        if running is None:
            raise LlmError("the engine is not initialized")
        if running.pid != os.getpid():
            raise LlmError(
                "this engine belongs to the parent process: create one after the fork instead"
            )
        return running

    @property
    def cluster_id(self) -> int:
        """The number others name this engine by."""
        return self._cluster_id

    @property
    def role(self) -> LlmRole:
        """The role that is told to peers."""
        return self._role

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where it listens, with the real port; None for an engine that only dials."""
        return self._engine().links.listen_address

    def set_role(self, role: LlmRole, options: Options | None = None) -> None:
        """Change the role; clusters that link from now on are told the new one.

        `options` may open, close or move the listener by another `listen` than before, and must
        otherwise be those in force (ParamInvalid).  Without them the listener stays as it is; with
        the same `listen` it does too, also where that has port 0.  Registered caches stay.

        Raises ExistLink as long as there is a link in any state but "down", one that is being made
        included, and LlmError if it cannot listen at the new address; nothing has changed then.
        Before `initialize` it sets what the constructor sets.
        """
        if not isinstance(role, LlmRole):
            raise TypeError(f"role must be an LlmRole, not {type(role).__name__}")
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be Options, not {type(options).__name__}")
        with self._changing:
            with self._lock:
                if self._running is None:
                    self._role = role
                    self._options = options or self._options
                    return
            running = self._engine()
            wanted = options or running.options
            if replace(wanted, listen=None) != replace(running.options, listen=None):
                raise ParamInvalid("set_role changes no option but listen; initialize changes all")
            running.links.set_role(role, wanted)
            running.options = self._options = wanted
            self._role = role

    # -- links --------------------------------------------------------------------------------

    def link_llm_clusters(
        self, clusters: Sequence[ClusterInfo], timeout_ms: float = 1000
    ) -> list[LinkResult]:
        """Link to clusters, all at once; returns when both sides of each link are in place.

        Raises LinkFailed, whose `results` has one entry per cluster, if any of them failed.
        """
        running = self._engine()
        checked = _clusters(clusters)
        return running.links.link(checked, _timeout(timeout_ms))

    def unlink_llm_clusters(
        self, clusters: Sequence[ClusterInfo], timeout_ms: float = 1000, force: bool = False
    ) -> list[LinkResult]:
        """Close links; running transfers may end within the timeout, `force` ends them at once.

        Unlinking what is not linked succeeds.
        """
        running = self._engine()
        checked = _clusters(clusters)
        return running.links.unlink(checked, _timeout(timeout_ms), bool(force))

    def links(self) -> list[LinkInfo]:
        """Each link's cluster, address, state, data path and transports."""
        return self._engine().links.infos()

    # -- caches -------------------------------------------------------------------------------

    def register_kv_cache(
        self, cache_desc: CacheDesc | None, tensors: Any, *, access: str = "r"
    ) -> Cache:
        """Register memory as a cache; linked peers learn of it at once.

        `tensors` are `num_tensors` C-contiguous arrays (NumPy, the buffer protocol, DLPack) of one
        shape and type, or plain addresses together with a `CacheDesc`; shape[0] is the number of
        slots or blocks.  With `cache_desc` None it is made from the tensors.  `access` "r" lets
        peers pull, "rw" also push, "" neither.  Arrays must be writable to be pulled into.  They
        are kept alive until the cache is unregistered; plain addresses are the caller's to keep
        valid.

        Raises TypeError, ParamInvalid, FeatureNotEnabled (device memory) or LlmOutOfMemory.
        """
        running = self._engine()
        if not isinstance(access, str):
            raise TypeError(f"access must be a string, not {type(access).__name__}")
        found, desc = _resolve(tensors, cache_desc)
        if access not in _ACCESS:
            raise ParamInvalid(f"access must be one of 'r', 'rw' and '', not {access!r}")
        if access == "rw" and not all(tensor.writable for tensor in found):
            raise ParamInvalid("access 'rw' needs tensors that can be written to")
        return self._register(running, found, desc, access)

    def allocate_kv_cache(self, cache_desc: CacheDesc, *, access: str = "r") -> Cache:
        """Register zeroed memory of the library's own, page-aligned, on huge pages where possible.

        The cache's `tensors` are NumPy arrays; types that NumPy lacks come as unsigned integers.
        The memory lives for as long as it is registered or an array refers to it.
        """
        running = self._engine()
        if not isinstance(cache_desc, CacheDesc):
            raise TypeError(f"cache_desc must be a CacheDesc, not {type(cache_desc).__name__}")
        if access not in _ACCESS:
            raise ParamInvalid(f"access must be one of 'r', 'rw' and '', not {access!r}")
        if not isinstance(access, str):
            raise TypeError(f"access must be a string, not {type(access).__name__}")
        arrays = tensors.allocate(cache_desc)
        addresses = [array.ctypes.data for array in arrays]
        found, desc = _resolve(addresses, cache_desc)
        cache = self._register(running, found, desc, access, arrays)
        cache.tensors = tuple(arrays)
        return cache

    def _register(
        self,
        running: _Running,
        found: list[tensors.Tensor],
        desc: CacheDesc,
        access: str,
        hold: object = None,
    ) -> Cache:
        nbytes = tensors.bytes_of(found, desc)
        blocks = desc.shape[0]
        cache_id = next(self._ids)
        try:
            native = running.native.register(
                cache_id,
                [tensor.address for tensor in found],
                blocks,
                nbytes // blocks,
                readable=access != "",
                writable=all(tensor.writable for tensor in found),
                pushable=access == "rw",
            )
        except MemoryError as error:
            raise LlmOutOfMemory(str(error)) from error
        except RuntimeError as error:
            raise LlmError(str(error)) from error
        entry = LocalEntry(
            cache_id=cache_id,
            desc=desc,
            access=access,
            native=native,
            blocks=blocks,
            block_bytes=nbytes // blocks,
        )
        running.holds[cache_id] = hold or [tensor.hold for tensor in found]
        try:
            running.catalogue.add(entry)
        except BaseException:
            native.retire()
            del running.holds[cache_id]
            raise
        running.links.announce(entry)
        return Cache(cache_id, tuple(tensor.address for tensor in found), desc)

    def unregister_kv_cache(self, cache_id: int, *, timeout_ms: float = 1000) -> None:
        """Take memory back: when this returns, nothing of the engine refers to it.

        Pulls of it by peers may end within the timeout; later ones get KvCacheNotExist, and so do,
        at once, pulls into it.  An unknown id is no error.
        """
        running = self._engine()
        cache_id = geometry.integer(cache_id, "cache_id")
        timeout = _timeout(timeout_ms) / 1e3
        entry = running.catalogue.remove(cache_id)
        if entry is None:
            return
        deadline = time.monotonic() + timeout
        entry.native.begin_retire()
        if entry.access:
            running.links.retire(entry, deadline)
            entry.native.wait_served(deadline - time.monotonic())
        if not entry.native.retire():
            raise LlmError(
                f"UCX does not give the memory of cache {cache_id} back; it stays registered"
            )
        running.holds.pop(cache_id, None)

    # -- pulls --------------------------------------------------------------------------------

    def pull_kv_cache(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> TransferReport:
        """Copy one slot of a peer's cache into slot `batch_index` of a cache of ours.

        For each selected layer pair and each of its tensors, the first `size` bytes (-1: the whole
        source slot) of the remote slot are written to the start of the local one; nothing else is
        touched.  Returns when every byte is in place and known to be what the cache held while it
        was registered.  `timeout_ms` defaults to `Options.sync_cache_wait_time_ms`.

        Raises, by the first check that fails: TypeError; ParamInvalid (values); KvCacheNotExist
        (local); NotYetLink; KvCacheNotExist (remote); ParamInvalid (geometry); FeatureNotEnabled
        (a forced path the link does not have); then LlmTimeout, KvCacheNotExist, NotYetLink or
        LlmError when the transfer fails.  After any of them no byte is written on its behalf.
        """
        running = self._engine()
        call = geometry.check_slots(
            _common(running, src_cache_index, dst_cache, ext_param, timeout_ms), batch_index, size
        )
        return _run(running, call)

    def pull_kv_cache_async(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> Transfer:
        """Like `pull_kv_cache`, but returns the running Transfer.

        Checks that need no waiting raise here; where a link is being set up or a cache id has to be
        confirmed with its owner, what is found comes out of the Transfer.
        """
        running = self._engine()
        call = geometry.check_slots(
            _common(running, src_cache_index, dst_cache, ext_param, timeout_ms), batch_index, size
        )
        return _run_async(running, call)

    def pull_kv_blocks(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> TransferReport:
        """Copy blocks of a peer's cache into blocks of a cache of ours.

        shape[0] of either cache is its number of blocks.  Remote block `src_blocks[i]` goes to
        local block `dst_blocks[i]`, for every selected layer and tensor.  With `src_blocks` None
        the source is continuous: the slot `src_cache_index.batch_index` of the remote cache is cut
        into the destination blocks, in order.  Lists are sequences of integers or integer arrays.
        Empty lists succeed with 0 bytes.  A source block may be smaller than a destination block;
        only its bytes are written then.

        Raises what `pull_kv_cache` raises; ParamInvalid also for lists of unequal length, a block
        out of range, and a destination named twice.
        """
        running = self._engine()
        call = geometry.check_blocks(
            _common(running, src_cache_index, dst_cache, ext_param, timeout_ms),
            src_blocks,
            dst_blocks,
        )
        return _run(running, call)

    def pull_kv_blocks_async(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> Transfer:
        """Like `pull_kv_blocks`, but returns the running Transfer."""
        running = self._engine()
        call = geometry.check_blocks(
            _common(running, src_cache_index, dst_cache, ext_param, timeout_ms),
            src_blocks,
            dst_blocks,
        )
        return _run_async(running, call)

    # -- copies -------------------------------------------------------------------------------

    def copy_kv_cache(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
    ) -> TransferReport:
        """Copy one slot of a cache of ours into one of another, or of the same cache.

        For each selected layer pair and each of its tensors, `size` bytes (-1: all up to the end of
        the source slot) from byte `offset` of the source slot on are written to the same place of
        the destination slot.  Of both caches only `cache_id` is read; their access is not looked
        at.  The GIL is released meanwhile.  The report's path is "copy".

        Raises, by the first check that fails: TypeError; ParamInvalid (values); KvCacheNotExist;
        ParamInvalid (geometry, as for `pull_kv_cache`; a read-only destination; a source and a
        destination that overlap, the slot itself included: there is no order in which they would
        be right for every geometry).  Unregistering either cache meanwhile ends the copy at once
        with KvCacheNotExist.
        """
        running = self._engine()
        return copies.copy_slot(
            running.catalogue,
            src_cache,
            dst_cache,
            src_batch_index,
            dst_batch_index,
            offset,
            size,
            ext_param,
        )

    def copy_kv_blocks(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_blocks: Sequence[int] | NDArray[Any] | Mapping[int, Sequence[int] | NDArray[Any]],
        dst_blocks: Sequence[int] | NDArray[Any] | None = None,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
    ) -> TransferReport:
        """Copy blocks of a cache of ours into blocks of another, or of the same cache.

        Block `src_blocks[i]` goes to block `dst_blocks[i]`, for every selected layer and tensor; a
        source block may be named several times, to be copied to several places.  A mapping
        {source block: destination blocks}, without `dst_blocks`, says the same.  Lists, blocks of
        different sizes and empty lists are as for `pull_kv_blocks`, caches and the GIL as for
        `copy_kv_cache`.

        Raises what `copy_kv_cache` raises; ParamInvalid also for lists of unequal length, a block
        out of range, a destination named twice, and one that is also a source (of the same cache,
        or where caches share memory): blocks cannot be swapped or shifted in one call.
        """
        running = self._engine()
        return copies.copy_blocks(
            running.catalogue, src_cache, dst_cache, src_blocks, dst_blocks, ext_param
        )

    # -- pushes -------------------------------------------------------------------------------

    def push_kv_cache(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> TransferReport:
        """Copy slot `src_batch_index` of a cache of ours into one slot of a peer's cache.

        The mirror of `pull_kv_cache`: the peer's engine pulls what is offered to it, its
        application takes no part.  Returns when the bytes are in the peer's memory.  The peer must
        have registered the cache with access "rw" (FeatureNotEnabled).  A cache of ours of access
        "" can be pushed from; it then goes by path "stream".

        Raises what `pull_kv_cache` raises.  After a failure the peer may still write the offered
        slot until it has heard of it; the peer's `quiesce` ends that.
        """
        running = self._engine()
        call = geometry.check_slots(
            _common(running, dst_cache_index, src_cache, ext_param, timeout_ms, push=True),
            src_batch_index,
            size,
        )
        return _run(running, call)

    def push_kv_cache_async(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> Transfer:
        """Like `push_kv_cache`, but returns the running Transfer, whose layers land all at once."""
        running = self._engine()
        call = geometry.check_slots(
            _common(running, dst_cache_index, src_cache, ext_param, timeout_ms, push=True),
            src_batch_index,
            size,
        )
        return _run_async(running, call)

    def push_kv_blocks(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> TransferReport:
        """Copy blocks of a cache of ours into blocks of a peer's cache.

        The mirror of `pull_kv_blocks`: local block `src_blocks[i]` goes to remote block
        `dst_blocks[i]`; with `src_blocks` None the local slot 0 is cut into the remote blocks.
        """
        running = self._engine()
        call = geometry.check_blocks(
            _common(running, dst_cache_index, src_cache, ext_param, timeout_ms, push=True),
            src_blocks,
            dst_blocks,
        )
        return _run(running, call)

    def push_kv_blocks_async(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
    ) -> Transfer:
        """Like `push_kv_blocks`, but returns the running Transfer."""
        running = self._engine()
        call = geometry.check_blocks(
            _common(running, dst_cache_index, src_cache, ext_param, timeout_ms, push=True),
            src_blocks,
            dst_blocks,
        )
        return _run_async(running, call)

    def quiesce(
        self,
        cache: Cache,
        slot_or_blocks: int | Sequence[int] | NDArray[Any] | None = None,
        *,
        timeout_ms: float = 1000,
    ) -> None:
        """Make sure that no push from before this call writes to a slot or blocks of a cache.

        Pushes into them that are running are fenced and fail at their senders; those that were sent
        before and arrive later are refused, also where the peer is stopped and goes on much later.
        None stands for the whole cache.  Returns when the fences are over and every linked peer has
        confirmed, or at the timeout, when only peers that do not answer are left: their old pushes
        stay refused until they do.  Pushes that begin after that are not affected.

        Raises KvCacheNotExist if the cache is not registered, ParamInvalid for blocks out of range.
        """
        running = self._engine()
        if not isinstance(cache, Cache):
            raise TypeError(f"cache must be a Cache, not {type(cache).__name__}")
        blocks = geometry.ascending_blocks(slot_or_blocks)
        timeout = _timeout(timeout_ms) / 1e3
        entry = running.catalogue.get(cache.cache_id)
        if entry is None:
            raise KvCacheNotExist(f"no local cache {cache.cache_id} is registered")
        if blocks is not None and blocks.size and blocks[-1] >= entry.blocks:
            raise ParamInvalid(f"block {blocks[-1]} of a cache with {entry.blocks} blocks")
        entry.native.quiesce(blocks, timeout)

    def stats(self) -> EngineStats:
        """Totals of this engine's pulls since it was initialized, and their latency quantiles."""
        return EngineStats.from_totals(self._engine().native.totals())


def _common(
    running: _Running,
    index: Any,
    cache: Any,
    ext_param: Any,
    timeout_ms: Any,
    *,
    push: bool = False,
) -> geometry.Common:
    return geometry.Common(
        index, cache, ext_param, timeout_ms, running.options.sync_cache_wait_time_ms, push
    )


def _run(running: _Running, call: geometry.Call) -> TransferReport:
    """Start a transfer and wait for it; an interrupted wait gives it up, fenced."""
    transfer, start = _prepare(running, call, attended=True)
    try:
        start()
        return transfer.result()
    except LlmError:
        raise
    except BaseException:
        transfer._abort("its caller was interrupted")
        raise


def _run_async(running: _Running, call: geometry.Call) -> Transfer:
    transfer, start = _prepare(running, call, attended=False)
    try:
        start()
    except BaseException:
        transfer._abort("its caller was interrupted")
        raise
    return transfer


def _prepare(
    running: _Running, call: geometry.Call, *, attended: bool
) -> tuple[Transfer, Callable[[], None]]:
    """A transfer that nothing writes for yet, and what starts it.

    The two are apart so that an interrupt can come at any moment: who holds the transfer can end
    it.
    """
    near = running.catalogue.get(call.near_cache_id)
    if near is None:
        raise KvCacheNotExist(f"no local cache {call.near_cache_id} is registered")
    deadline = monotonic_ns() + int(min(call.timeout_ms, _FOREVER_MS) * 1e6)
    what = (
        f"push to cache {call.far_cache_id} of cluster {call.cluster_id}"
        if call.push
        else f"pull of cache {call.far_cache_id} from cluster {call.cluster_id}"
    )
    link = running.links.lookup(call.cluster_id)
    far = link.remote.get(call.far_cache_id) if link is not None and link.up else None
    if link is not None and far is not None and not far.native.retired:
        plan, get = _decide(running.path, call, link, far, near)
        transfer = Transfer(_new(running, deadline, attended), what, call.timeout_ms)
        return transfer, partial(_submit, transfer, call, plan, get, link, far, near, attended)
    transfer = Transfer(_new(running, deadline, False), what, call.timeout_ms)

    def start() -> None:
        if not running.links.post(_start_later, running, transfer, call, near, deadline):
            raise LlmError("the engine was finalized")

    return transfer, start


def _new(running: _Running, deadline: int, attended: bool) -> TransferHandle:
    try:
        return running.native.new_transfer(deadline, attended)
    except MemoryError as error:
        raise LlmOutOfMemory(str(error)) from error
    except RuntimeError as error:
        raise LlmError(str(error)) from error


def _decide(
    path: str, call: geometry.Call, link: Link, far: RemoteEntry, near: LocalEntry
) -> tuple[geometry.Plan, bool]:
    """Geometry, then what the caches and the link allow; and whether a pull goes by GET."""
    try:
        plan = geometry.plan(call, near, far) if call.push else geometry.plan(call, far, near)
    except ParamInvalid as error:
        raise ParamInvalid(f"cluster {call.cluster_id} ({link.address}): {error}") from None
    if call.push:
        if far.access != "rw":
            raise FeatureNotEnabled(
                f"cache {far.cache_id} of cluster {call.cluster_id} ({link.address}) was not"
                " registered with access 'rw'"
            )
        return plan, False
    if not near.native.writable:
        raise ParamInvalid(f"the tensors of cache {near.cache_id} are read-only")
    if path == "get" and not link.native.get:
        raise FeatureNotEnabled(
            f"path 'get' is forced, but one-sided reads do not reach cluster {call.cluster_id}"
            f" ({link.address}); 'ucxkv info' says why"
        )
    return plan, path != "stream" and link.native.get


def _submit(
    transfer: Transfer,
    call: geometry.Call,
    plan: geometry.Plan,
    get: bool,
    link: Link,
    far: RemoteEntry,
    near: LocalEntry,
    attended: bool,
) -> None:
    transfer._submitted(link)
    spans: dict[str, Any] = {
        "src_first": plan.src_first,
        "dst_first": plan.dst_first,
        "tensors": plan.tensors,
        "tensors_per_layer": plan.tensors_per_layer,
        "block_len": plan.block_len,
        # Of a side that is given by blocks, the index of a slot means nothing.
        "src_block": call.src_batch if call.src_blocks is None else 0,
        "dst_block": call.dst_batch if call.dst_blocks is None else 0,
        "src_blocks": call.src_blocks,
        "dst_blocks": call.dst_blocks,
    }
    if call.push:
        transfer._handle.offer(link.native, far.native, near.native, **spans)
    else:
        transfer._handle.submit(
            link.native, far.native, near.native, get=get, attended=attended, **spans
        )


def _start_later(
    running: _Running, transfer: Transfer, call: geometry.Call, near: LocalEntry, deadline: int
) -> None:
    """On the control loop: find link and cache, waiting where that helps, then submit."""

    async def start() -> None:
        try:
            link, far = await running.links.resolve(
                call.cluster_id, call.far_cache_id, deadline / 1e9
            )
            plan, get = _decide(running.path, call, link, far, near)
            _submit(transfer, call, plan, get, link, far, near, False)
        except LlmError as error:
            if error.status is Status.TIMEOUT:
                return  # the deadline itself ends the transfer, not a moment earlier
            transfer._fail(error)

    task = running.links.loop.create_task(start())
    running.links.keep(task)


def _resolve(tensors_: Any, desc: CacheDesc | None) -> tuple[list[tensors.Tensor], CacheDesc]:
    return tensors.resolve(tensors_, desc)


def _timeout(timeout_ms: Any) -> float:
    value = geometry.milliseconds(timeout_ms, "timeout_ms")
    if not value > 0:
        raise ParamInvalid(f"timeout_ms must be positive, not {timeout_ms}")
    return min(value, _FOREVER_MS)


def _clusters(clusters: Any) -> list[ClusterInfo]:
    if isinstance(clusters, ClusterInfo) or not hasattr(clusters, "__iter__"):
        raise TypeError("clusters must be a sequence of ClusterInfo")
    return [_cluster(cluster) for cluster in clusters]


def _cluster(cluster: Any) -> ClusterInfo:
    """`cluster` with everything in it checked."""
    if not isinstance(cluster, ClusterInfo):
        raise TypeError(f"clusters must hold ClusterInfo, not {type(cluster).__name__}")
    if cluster.remote_role is not None and not isinstance(cluster.remote_role, LlmRole):
        raise TypeError("remote_role must be an LlmRole or None")
    return ClusterInfo(
        _cluster_number(cluster.remote_cluster_id),
        _addresses(cluster.remote_ip_infos, "remote_ip_infos"),
        cluster.remote_role,
        _addresses(cluster.local_ip_infos, "local_ip_infos"),
    )


def _cluster_number(value: Any) -> int:
    number = geometry.integer(value, "cluster_id")
    if not 0 <= number < 1 << 63:
        raise ParamInvalid(f"cluster_id must be from 0 to 2**63 - 1, not {number}")
    return number


def _addresses(infos: Any, name: str) -> tuple[IpInfo, ...]:
    if isinstance(infos, IpInfo) or not hasattr(infos, "__iter__"):
        raise TypeError(f"{name} must be a sequence of IpInfo")
    checked = []
    for info in infos:
        if not isinstance(info, IpInfo) or not isinstance(info.ip, str):
            raise TypeError(f"{name} must hold IpInfo with an address or a name")
        port = geometry.integer(info.port, "port")
        if not 0 <= port <= 65535:
            raise ParamInvalid(f"port must be from 0 to 65535, not {port}")
        checked.append(IpInfo(info.ip, port))
    return tuple(checked)
