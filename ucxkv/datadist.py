"""The engine: what an application creates, links and pulls with."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from ucxkv import copies, geometry, numbers
from ucxkv.catalogue import LocalEntry
from ucxkv.clusters import cluster_number, cluster_numbers, clusters_of
from ucxkv.engine import monotonic_ns
from ucxkv.errors import KvCacheNotExist, LlmError, LlmOutOfMemory, ParamInvalid
from ucxkv.holds import Hold
from ucxkv.layered import LayerReady, ready_by
from ucxkv.notices import Notices
from ucxkv.options import Options
from ucxkv.running import Running
from ucxkv.submission import run, run_async
from ucxkv.tensors import Shared, Tensor, allocate, bytes_of, resolve
from ucxkv.transfers import Transfer
from ucxkv.types import (
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    EngineStats,
    KvCacheExtParam,
    LinkInfo,
    LinkResult,
    LlmRole,
    TransferReport,
    transfer_totals,
)

_ACCESS = ("r", "rw", "")


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
        self._running: Running | None = None
        self._cluster_id = cluster_number(cluster_id)
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
        self._closer: weakref.finalize[[], LlmDataDist] | None = None

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
                running = Running(self._cluster_id, self._role, self._options or Options())
            except LlmError:
                raise
            except MemoryError as error:
                raise LlmOutOfMemory(str(error)) from error
            except (OSError, RuntimeError) as error:
                raise LlmError(f"cannot open the engine: {error}") from error
            self._running = running
            self._closer = weakref.finalize(self, running.close)

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

    def _engine(self) -> Running:
        running = self._running
        if running is None:
            raise LlmError("the engine is not initialized")
        if running.pid != os.getpid():
            raise LlmError(
                "this engine belongs to the parent process: a forked child cannot use it"
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
        checked = clusters_of(clusters)
        return running.links.link(checked, numbers.timeout(timeout_ms))

    def unlink_llm_clusters(
        self, clusters: Sequence[ClusterInfo], timeout_ms: float = 1000, force: bool = False
    ) -> list[LinkResult]:
        """Close links; running transfers may end within the timeout, `force` ends them at once.

        Unlinking what is not linked succeeds.
        """
        running = self._engine()
        checked = clusters_of(clusters)
        return running.links.unlink(checked, numbers.timeout(timeout_ms), bool(force))

    def links(self) -> list[LinkInfo]:
        """Each link's cluster, address, state, data path and transports."""
        return self._engine().links.infos()

    # -- caches -------------------------------------------------------------------------------

    def register_kv_cache(
        self,
        cache_desc: CacheDesc | None,
        tensors: Any,
        *,
        access: str = "r",
        peers: Collection[int] | None = None,
    ) -> Cache:
        """Register memory as a cache; linked peers learn of it at once.

        `tensors` are `num_tensors` C-contiguous arrays (NumPy, the buffer protocol, DLPack) of one
        shape and type, or plain addresses together with a `CacheDesc`; shape[0] is the number of
        slots or blocks.  With `cache_desc` None it is made from the tensors.  `access` "r" lets
        peers pull, "rw" also push, "" neither.  Tensors must be writable to be pulled into; those
        that overlap end up with the bytes of whichever came last.  They are kept alive until the
        cache is unregistered; plain addresses are the caller's to keep valid.  PyTorch tensors that
        require gradients are refused (give `tensor.detach()`), and so are those whose storage was
        resized under them; the storage of those that are registered cannot be resized any more.
        Tensors that touch or overlap, such as views into one large tensor, are one memory region.

        With `peers`, a collection of cluster ids, only these clusters are told of the cache,
        whenever they link, and have their requests for it served; for all others it does not exist.
        An id is what a peer says of itself: a secret only proves that it is one of the deployment,
        a certificate with `Tls.peer_name` that it is this cluster.

        Raises TypeError, ParamInvalid, FeatureNotEnabled (device memory) or LlmOutOfMemory.
        """
        running = self._engine()
        if not isinstance(access, str):
            raise TypeError(f"access must be a string, not {type(access).__name__}")
        found, desc = resolve(tensors, cache_desc)
        if access not in _ACCESS:
            raise ParamInvalid(f"access must be one of 'r', 'rw' and '', not {access!r}")
        return self._register(running, found, desc, access, peers)

    def allocate_kv_cache(
        self,
        cache_desc: CacheDesc,
        *,
        access: str = "r",
        peers: Collection[int] | None = None,
    ) -> Cache:
        """Register zeroed memory of the library's own, page-aligned, on huge pages where possible.

        Linked processes of the same host that may read this one's memory map it, and then pull from
        it without the kernel's help, half as fast again.  It is a file in memory (two descriptors),
        which a forked child shares with its parent.

        `access` and `peers` are those of `register_kv_cache`.

        The cache's `tensors` are NumPy arrays; types that NumPy lacks come as unsigned integers.
        `torch.from_dlpack` makes tensors of them without a copy, of those types too.  The memory
        lives for as long as it is registered or an array refers to it.
        """
        running = self._engine()
        if not isinstance(cache_desc, CacheDesc):
            raise TypeError(f"cache_desc must be a CacheDesc, not {type(cache_desc).__name__}")
        if access not in _ACCESS:
            raise ParamInvalid(f"access must be one of 'r', 'rw' and '', not {access!r}")
        if not isinstance(access, str):
            raise TypeError(f"access must be a string, not {type(access).__name__}")
        arrays, shared = allocate(cache_desc)
        addresses = [array.ctypes.data for array in arrays]
        found, desc = resolve(addresses, cache_desc)
        cache = self._register(running, found, desc, access, peers, arrays, shared)
        cache.tensors = tuple(arrays)
        return cache

    def _register(
        self,
        running: Running,
        found: list[Tensor],
        desc: CacheDesc,
        access: str,
        peers: Collection[int] | None,
        hold: object = None,
        shared: Shared | None = None,
    ) -> Cache:
        shown = None if peers is None else cluster_numbers(peers)
        nbytes = bytes_of(found, desc)
        blocks = desc.shape[0]
        writable = all(tensor.writable for tensor in found)
        if access == "rw" and not writable:
            raise ParamInvalid("access 'rw' needs tensors that can be written to")
        cache_id = next(self._ids)
        try:
            native = running.native.register(
                cache_id,
                [tensor.address for tensor in found],
                blocks,
                nbytes // blocks,
                readable=access != "",
                writable=writable,
                pushable=access == "rw",
                peers=shown,
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
            peers=shown,
            shared=shared,
        )
        running.holds[cache_id] = hold or [tensor.hold for tensor in found]
        try:
            running.catalogue.add(entry)
        except BaseException as error:
            native.retire()
            # An engine that is being finalized has let go of it already.
            running.holds.pop(cache_id, None)
            if isinstance(error, RuntimeError) and not isinstance(error, LlmError):
                raise LlmError(str(error)) from error
            raise
        running.links.announce(entry)
        return Cache(cache_id, tuple(tensor.address for tensor in found), desc)

    def unregister_kv_cache(self, cache_id: int, *, timeout_ms: float = 1000) -> None:
        """Take memory back: when this returns, nothing of the engine refers to it.

        Pulls of it by peers may end within the timeout; later ones get KvCacheNotExist, and so do,
        at once, pulls into it.  An unknown id is no error.
        """
        running = self._engine()
        cache_id = numbers.integer(cache_id, "cache_id")
        timeout = numbers.timeout(timeout_ms) / 1e3
        entry = running.catalogue.remove(cache_id)
        if entry is None:
            return
        deadline = time.monotonic() + timeout
        entry.native.begin_retire()
        try:
            if entry.access:
                running.links.retire(entry, deadline)
            entry.native.wait_served(deadline - time.monotonic())
        finally:
            # An interrupt shortens the wait, no more: it must not leave the memory registered.
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
        notice: bytes | None = None,
        hold: str | None = None,
    ) -> TransferReport:
        """Copy one slot of a peer's cache into slot `batch_index` of a cache of ours.

        For each selected layer pair and each of its tensors, the first `size` bytes (-1: the whole
        source slot) of the remote slot are written to the start of the local one; nothing else is
        touched.  Returns when every byte is in place and known to be what the cache held while it
        was registered.  `timeout_ms` defaults to `Options.sync_cache_wait_time_ms`.

        `notice`, at most 4096 bytes, is told to the owner (see `notices`) when all has landed:
        exactly once if this returns, which it does when the owner's engine has it, and otherwise at
        most once.  `hold` is the token of a hold of the source (see `hold`), which ends with the
        notice.  That a hold has ended is found out when bytes have come, those of the first layer
        at the latest; a pull of nothing does not look.

        Raises, by the first check that fails: TypeError; ParamInvalid (values); KvCacheNotExist
        (local); NotYetLink; KvCacheNotExist (remote); ParamInvalid (geometry); HoldEnded (a hold of
        another cache); FeatureNotEnabled (a forced path the link does not have); then LlmTimeout,
        KvCacheNotExist, HoldEnded, NotYetLink or LlmError when the transfer fails.  After any of
        them no byte is written on its behalf.
        """
        engine = self._engine()
        call = geometry.check_slots(
            src_cache_index,
            dst_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            batch_index,
            size,
            notice=notice,
            hold=hold,
        )
        return run(engine, call)

    def pull_kv_cache_async(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
        notice: bytes | None = None,
        hold: str | None = None,
    ) -> Transfer:
        """Like `pull_kv_cache`, but returns the running Transfer.

        Checks that need no waiting raise here; where a link is being set up or a cache id has to be
        confirmed with its owner, what is found comes out of the Transfer.
        """
        engine = self._engine()
        call = geometry.check_slots(
            src_cache_index,
            dst_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            batch_index,
            size,
            notice=notice,
            hold=hold,
        )
        return run_async(engine, call)

    def pull_kv_blocks(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
        notice: bytes | None = None,
        hold: str | None = None,
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
        engine = self._engine()
        call = geometry.check_blocks(
            src_cache_index,
            dst_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            src_blocks,
            dst_blocks,
            notice=notice,
            hold=hold,
        )
        return run(engine, call)

    def pull_kv_blocks_async(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
        notice: bytes | None = None,
        hold: str | None = None,
    ) -> Transfer:
        """Like `pull_kv_blocks`, but returns the running Transfer."""
        engine = self._engine()
        call = geometry.check_blocks(
            src_cache_index,
            dst_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            src_blocks,
            dst_blocks,
            notice=notice,
            hold=hold,
        )
        return run_async(engine, call)

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
        engine = self._engine()
        call = geometry.check_slots(
            dst_cache_index,
            src_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            src_batch_index,
            size,
            push=True,
        )
        return run(engine, call)

    def push_kv_cache_async(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
        layer_ready: LayerReady | None = None,
    ) -> Transfer:
        """Like `push_kv_cache`, but returns the running Transfer, whose layers land all at once.

        With `layer_ready` it is a `LayeredPush`: each layer, counted from 0 within the pushed
        range, is sent as soon as it is ready, in whatever order that happens.  `layer_ready` is

        - True: the application calls `transfer.layer_ready(i)`;
        - a sequence of events, one per layer, with `is_set()` (of threading, multiprocessing or
          asyncio) or `query()` (torch.cuda.Event);
        - a function: layer `i` is ready once `layer_ready(i)` is true.

        Events and functions are asked every 0.2 to 2 ms, for each layer that is not ready, by a
        thread of the engine that all its pushes share: they must return at once.  If one raises,
        the layers that have not landed fail with LlmError, whose cause it is.

        The checks are made once, `timeout_ms` is the deadline of the whole: at it the layers that
        have not landed fail with LlmTimeout, those that have keep their result
        (`LayeredPush.layer_results`).  A layer that is not ready counts as running: unregistering
        the source and unlinking wait for it within their timeouts, and `quiesce` of its destination
        ends it.

        Raises also TypeError if `layer_ready` is none of these, and, as the last check,
        ParamInvalid for a number of events that is not that of the layers.
        """
        engine = self._engine()
        ready = ready_by(layer_ready)
        call = geometry.check_slots(
            dst_cache_index,
            src_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            src_batch_index,
            size,
            push=True,
        )
        return run_async(engine, call, ready)

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
        engine = self._engine()
        call = geometry.check_blocks(
            dst_cache_index,
            src_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            src_blocks,
            dst_blocks,
            push=True,
        )
        return run(engine, call)

    def push_kv_blocks_async(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_blocks: Sequence[int] | NDArray[Any] | None,
        dst_blocks: Sequence[int] | NDArray[Any],
        ext_param: KvCacheExtParam = KvCacheExtParam(),
        *,
        timeout_ms: float | None = None,
        layer_ready: LayerReady | None = None,
    ) -> Transfer:
        """Like `push_kv_blocks`, but returns the running Transfer.

        `layer_ready` is as for `push_kv_cache_async`.
        """
        engine = self._engine()
        ready = ready_by(layer_ready)
        call = geometry.check_blocks(
            dst_cache_index,
            src_cache,
            ext_param,
            timeout_ms,
            engine.options.sync_cache_wait_time_ms,
            src_blocks,
            dst_blocks,
            push=True,
        )
        return run_async(engine, call, ready)

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
        stay refused until they do.  Pushes that were called before, and only waited for a link that
        was being restored, end too.  Pushes that begin after that are not affected.  An empty list
        names nothing; one of more than 500,000 blocks may end pushes into other blocks as well.

        Raises KvCacheNotExist if the cache is not registered, ParamInvalid for blocks out of range.
        """
        running = self._engine()
        timeout = numbers.timeout(timeout_ms) / 1e3
        entry, blocks = self._part(running, cache, slot_or_blocks)
        entry.native.quiesce(blocks, timeout)

    # -- holds and notices --------------------------------------------------------------------

    def hold(
        self,
        cache: Cache,
        slot_or_blocks: int | Sequence[int] | NDArray[Any] | None,
        ttl_ms: float,
    ) -> Hold:
        """Promise to leave a slot, or blocks, of a cache alone for at most `ttl_ms` milliseconds.

        The promise is the application's to keep: it does not give the memory another use before the
        hold has ended.  `Hold.token` goes to the peer by the application's own channel, and the
        peer's pulls name it.  None stands for the whole cache.  Which blocks are meant is between
        the applications: the engines see to it that a pull with this token fails once the hold has
        ended, whatever it pulls of the cache.

        Raises KvCacheNotExist if the cache is not registered, ParamInvalid for blocks out of range,
        a time that is not positive, or a cache that no peer may pull from, LlmOutOfMemory where
        there are 65535 caches and holds.
        """
        running = self._engine()
        entry, blocks = self._part(running, cache, slot_or_blocks)
        ttl = numbers.timeout(ttl_ms, "ttl_ms")
        if not entry.access:
            raise ParamInvalid(f"cache {entry.cache_id} has access '': no peer pulls from it")
        try:
            native = entry.native.hold(monotonic_ns() + int(ttl * 1e6))
        except KeyError:
            raise KvCacheNotExist(f"cache {entry.cache_id} is being unregistered") from None
        except MemoryError as error:
            raise LlmOutOfMemory(str(error)) from error
        return Hold(
            native,
            entry.cache_id,
            entry.native.generation,
            None if blocks is None else tuple(blocks.tolist()),
        )

    def notices(self, timeout_ms: float | None = None) -> Notices:
        """What peers have told by the `notice` of their pulls: iterate, or iterate asynchronously.

        Iteration ends when none has come for `timeout_ms` milliseconds (None: only when the engine
        is finalized; 0: at once).  `fileno()` of the result is a descriptor to poll.  All iterators
        share one queue of `Options.notice_queue` places; peers whose notice finds none wait.
        """
        checked = None if timeout_ms is None else numbers.milliseconds(timeout_ms, "timeout_ms")
        if checked is not None and not checked >= 0:
            raise ParamInvalid(f"timeout_ms must not be negative, not {timeout_ms}")
        return Notices(self._engine().native, None if checked is None else checked / 1e3)

    def _part(
        self, running: Running, cache: Any, slot_or_blocks: Any
    ) -> tuple[LocalEntry, NDArray[Any] | None]:
        """A cache of ours, and a slot or blocks of it as ascending numbers."""
        if not isinstance(cache, Cache):
            raise TypeError(f"cache must be a Cache, not {type(cache).__name__}")
        blocks = geometry.ascending_blocks(slot_or_blocks)
        entry = running.catalogue.get(cache.cache_id)
        if entry is None:
            raise KvCacheNotExist(f"no local cache {cache.cache_id} is registered")
        if blocks is not None and blocks.size and blocks[-1] >= entry.blocks:
            raise ParamInvalid(f"block {blocks[-1]} of a cache with {entry.blocks} blocks")
        return entry, blocks

    def stats(self) -> EngineStats:
        """Totals since the engine was initialized, and those of each present link."""
        running = self._engine()
        counted = running.native.totals()
        return EngineStats(
            **transfer_totals(counted),
            links=running.links.stats(),
            notices_received=counted["notices_received"],
            notices_queued=counted["notices_queued"],
            notices_waiting=counted["notices_waiting"],
            holds=counted["holds"],
            dropped=counted["dropped"],
            registered_regions=counted["registered_regions"],
            registered_bytes=counted["registered_bytes"],
            registration_seconds=counted["registration_ns"] * 1e-9,
        )
