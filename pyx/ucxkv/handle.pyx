"""What Python sees of one transfer: starting it, waiting for it, ending it."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport getpid, write

from ucxkv.errors import LlmError

from ucxkv.blocks cimport BlockList, blocks_share
from ucxkv.cma cimport cma_drive
from ucxkv.core cimport (
    DONE,
    MAX_WORDS,
    NOTICE_MAX,
    PATH_GET,
    PATH_PUSH,
    PATH_STREAM,
    RUNNING,
    SIGNAL_NS,
    ST_CACHE_NOT_EXIST,
    ST_FAILED,
    ST_NOT_YET_LINK,
    STREAM_CHUNK,
    WAITING,
    CacheMem,
    Core,
    Link,
    RemoteMem,
    Told,
    Transfer,
    core_lock,
    core_unlock,
    core_wake,
)
from ucxkv.endpoint cimport NativeLink, link_unref
from ucxkv.geometry cimport Plan
from ucxkv.memory cimport LocalCache, RemoteCache
from ucxkv.pthread cimport (
    deadline_of,
    now_ns,
    pthread_cond_timedwait,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    timespec,
    to_timespec,
)
from ucxkv.service cimport link_step, run_timers
from ucxkv.spans cimport Geometry, cursor_seek, geometry_bytes
from ucxkv.transfer cimport (
    transfer_begin,
    transfer_begun,
    transfer_end,
    transfer_layers,
    transfer_over,
    transfer_release,
    transfer_unref,
)
from ucxkv.ucp cimport UCS_OK, ucp_worker_progress, ucs_status_string


cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initval, int flags)
    int EFD_NONBLOCK
    int EFD_CLOEXEC


cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef enum:
    # An answer in one message, and how long its caller looks for it before he sleeps.
    WATCHED_BYTES = STREAM_CHUNK
    WATCH_NS = 60000


cdef struct Side:
    # A cache, ours or a peer's, as the source or the destination of a transfer.
    const uint64_t* addrs
    uint64_t num_tensors
    uint64_t blocks
    uint64_t block_bytes


cdef struct Piece:
    # What of a side takes part: `length` bytes of each block of some tensors.
    uint64_t first
    uint64_t tensors
    uint64_t length
    uint64_t block
    uint64_t n_blocks
    uint64_t last               # the largest block number
    const uint32_t* blocks      # NULL: `block` alone


cdef TransferHandle handle_create(object engine, Core* core, Transfer* t):
    """Takes over the caller's reference to `t`."""
    cdef TransferHandle handle = TransferHandle.__new__(TransferHandle)
    handle.core = core
    handle.t = t
    handle._engine = engine
    return handle


@cython.no_gc
cdef class TransferHandle:
    """One transfer.  Its life in the engine does not depend on this object's.

    In a forked child every method raises LlmError: the transfer is the parent's.
    """

    def __init__(self):
        raise TypeError("transfers are made by NativeEngine.new_transfer")

    def __dealloc__(self):
        if self.t == NULL or self.core.pid != getpid():
            return
        with nogil:
            core_lock(self.core)
            transfer_unref(self.t)
            core_unlock(self.core)

    cdef int ours(self) except -1:
        if self.core.pid != getpid():
            raise LlmError("this transfer belongs to the parent process")
        return 0

    def submit(self, NativeLink link not None, RemoteCache remote not None,
               LocalCache local not None, Plan plan not None, *, bint get=False,
               bint attended=False, bint withheld=False, quieted=None, barriers=None):
        """Start moving bytes as planned; does nothing if the transfer has ended already.

        A pull, by GET if `get`, from `remote` to `local`, or a push the other way round.  A push
        that is `withheld` runs, and ends with its link, its caches or a `quiesce` of its
        destination, but is not offered before `release`.  One that was called when
        `remote.quieted`, or `link.barriers_heard`, was another than `quieted`, or `barriers`, ends:
        its destination may have been quiesced meanwhile.
        """
        self.ours()
        cdef Transfer* t = self.t
        cdef uint64_t src_len = source_length(plan)
        cdef uint64_t block_len = plan.block_len
        cdef uint32_t tensors = plan.tensors, tensors_per_layer = plan.tensors_per_layer
        cdef bint push = plan.push
        cdef Told* told = NULL
        cdef Side near = Side(local.mem.addrs, local.mem.num_tensors, local.mem.blocks,
                              local.mem.block_bytes)
        cdef Side far = Side(remote.mem.addrs, remote.mem.num_tensors, remote.mem.blocks,
                             remote.mem.block_bytes)
        cdef Side source = near if push else far
        cdef Side target = far if push else near
        cdef Piece source_piece = piece(plan.src_first, tensors, src_len, plan.src_block,
                                        plan.src_blocks)
        cdef Piece target_piece = piece(plan.dst_first, tensors, block_len, plan.dst_block,
                                        plan.dst_blocks)
        cdef uint32_t word_slot = remote.mem.slot
        cdef uint64_t word = remote.mem.generation
        cdef bint held = plan.hold is not None
        cdef bint old_cache = quieted is not None, old_link = barriers is not None
        cdef uint64_t cache_count = quieted or 0, link_count = barriers or 0
        if tensors_per_layer == 0:
            raise ValueError("a layer has at least one tensor")
        if not push and not local.mem.writable:
            raise ValueError("a destination must be writable")
        if get and remote.mem.n_regions == 0:
            raise ValueError("the peer gave no rkeys for this cache")
        if held:
            word_slot, word = plan.hold.slot, plan.hold.word
            if word_slot >= MAX_WORDS:
                raise ValueError("a hold that no engine can have given")
        check_piece(&source, &source_piece)
        check_piece(&target, &target_piece)
        try:
            told = told_new(self.t, plan.notice, word_slot, word if held else 0)
            with nogil:
                core_lock(self.core)
                if ((old_cache and remote.mem.quieted != cache_count)
                        or (old_link and link.link.barriers_heard != link_count)):
                    transfer_end(t, ST_FAILED, UCS_OK, b"the receiver quiesced its destination")
                elif self.startable(link.link, remote.mem, local.mem):
                    t.path = PATH_PUSH if push else PATH_GET if get else PATH_STREAM
                    t.far = remote.mem
                    t.near = local.mem
                    t.word_slot = word_slot
                    t.word = word
                    t.held = held
                    t.withheld = withheld
                    t.notice = told
                    told = NULL
                    set_geometry(&t.src_geo, &source, &source_piece)
                    set_geometry(&t.dst_geo, &target, &target_piece)
                    t.src_blocks = blocks_share(<uint32_t*>t.src_geo.blocks)
                    t.dst_blocks = blocks_share(<uint32_t*>t.dst_geo.blocks)
                    t.total = geometry_bytes(&t.dst_geo)
                    t.layer_bytes = block_len * t.dst_geo.n_blocks * tensors_per_layer
                    t.layers = (tensors + tensors_per_layer - 1) // tensors_per_layer
                    cursor_seek(&t.src_cursor, &t.src_geo, 0)
                    cursor_seek(&t.dst_cursor, &t.dst_geo, 0)
                    self.start(link.link, get and attended)
                core_unlock(self.core)
        finally:
            free(told)

    cdef bint startable(self, Link* link, RemoteMem* remote, CacheMem* local) noexcept nogil:
        """Whether it can still be started; ends it where the link or a cache has gone meanwhile."""
        cdef Transfer* t = self.t
        if t.state != WAITING or t.near != NULL:
            return False
        if link.closing or not link.connected or remote.link != link:
            transfer_end(t, ST_NOT_YET_LINK, UCS_OK, b"the link was closed")
        elif local.retiring:
            transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK, b"the local cache was unregistered")
        elif remote.retired:
            transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK, b"its owner has unregistered it")
        else:
            return True
        return False

    cdef void start(self, Link* link, bint attended) noexcept nogil:
        transfer_begin(self.t, link)
        # Posting from here saves the way through the service thread.
        if self.t.state == RUNNING:
            link_step(link, now_ns())
        if not attended:
            core_wake(self.core)

    def release(self):
        """Offer a push that is withheld; does nothing if it is not, or has ended."""
        self.ours()
        cdef Transfer* t = self.t
        with nogil:
            core_lock(self.core)
            if t.withheld and t.state == RUNNING:
                transfer_release(t)
                link_step(t.link, now_ns())
                core_wake(self.core)
            core_unlock(self.core)

    def end(self, uint32_t status, str reason=""):
        """Have it end with `status`, fenced; does nothing if its end is decided already."""
        self.ours()
        cdef bytes text = reason.encode(errors="backslashreplace")[:150]
        cdef const char* c_reason = text
        with nogil:
            core_lock(self.core)
            transfer_end(self.t, status, UCS_OK, c_reason)
            # The peer is to be told, and whoever waited for its turn may begin.
            core_wake(self.core)
            core_unlock(self.core)

    def wait(self, seconds=None, int64_t layer=-1, bint signals=True):
        """Wait until it is over, or until layer number `layer` has landed.

        Returns False if neither is so after `seconds`.  Signal handlers run meanwhile, unless
        `signals` is False.
        """
        self.ours()
        cdef uint64_t end = deadline_of(seconds)
        cdef uint64_t until
        cdef bint ready
        while True:
            with nogil:
                until = now_ns() + SIGNAL_NS
                ready = wait_until(self.core, self.t, layer, until if until < end else end)
            if ready:
                return True
            if signals:
                PyErr_CheckSignals()
            if now_ns() >= end:
                return False

    def event_fd(self):
        """An eventfd that becomes, and stays, readable when the transfer is over."""
        self.ours()
        cdef uint64_t one = 1
        cdef Transfer* t = self.t
        with nogil:
            pthread_mutex_lock(&t.mutex)
            if t.event_fd < 0:
                t.event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
                if t.event_fd >= 0 and t.state == DONE:
                    write(t.event_fd, &one, sizeof(one))
            pthread_mutex_unlock(&t.mutex)
        if t.event_fd < 0:
            raise OSError("no descriptor for an eventfd")
        return t.event_fd

    @property
    def done(self):
        """Over, and nothing will be written on its behalf any more."""
        return bool(transfer_over(self.t))

    @property
    def status(self):
        """How it ended, a Status value; meaningless before `done`."""
        return self.t.status

    @property
    def reason(self):
        """The cause of a failure in words, or an empty string."""
        cdef str text = self.t.reason.decode("utf-8", "replace")
        if self.t.ucs != UCS_OK:
            text = f"{text} ({ucs_status_string(self.t.ucs).decode()})".lstrip()
        return text

    @property
    def get(self):
        """It uses (or used) path "get"; None before that is known."""
        if self.t.path == PATH_PUSH:
            return None if self.t.taken == 0 else self.t.taken == PATH_GET
        if self.t.far == NULL:
            return None
        return self.t.path == PATH_GET

    @property
    def withheld(self):
        """It is a push that was never released."""
        return bool(self.t.withheld)

    @property
    def total(self):
        """Bytes it moves in all; 0 before it was submitted."""
        return self.t.total

    @property
    def bytes_done(self):
        """Bytes that are in place and known to be right."""
        return self.t.good

    @property
    def layers(self):
        """Number of layers it moves; 0 before it was submitted."""
        return self.t.layers

    @property
    def layers_done(self):
        """Layers that have landed, from the first on, and are known to be right."""
        return transfer_layers(self.t)

    @property
    def spans(self):
        """Contiguous pieces that were written."""
        return self.t.spans

    @property
    def seconds(self):
        """From its creation to its end (or to now)."""
        cdef uint64_t end = self.t.ended if transfer_over(self.t) else now_ns()
        return (end - self.t.submitted) * 1e-9


cdef Piece piece(uint64_t first, uint64_t tensors, uint64_t length, uint64_t block,
                 BlockList blocks) noexcept:
    if blocks is None:
        return Piece(first, tensors, length, block, 1, block, NULL)
    return Piece(first, tensors, length, 0, blocks.size, blocks.largest, blocks.numbers)


cdef int check_piece(const Side* side, const Piece* part) except -1:
    if (part.tensors > side.num_tensors or part.first > side.num_tensors - part.tensors
            or part.length > side.block_bytes
            or (part.n_blocks > 0 and part.last >= side.blocks)):
        raise ValueError("a transfer would leave the memory of its cache")
    return 0


cdef uint64_t source_length(Plan plan) except? 0:
    """Bytes of one source block: without a list it is one slot, cut into all destinations."""
    if plan.dst_blocks is None:
        if plan.src_blocks is not None:
            raise ValueError("source blocks without destination blocks")
        return plan.block_len
    if not plan.dst_blocks.representable:
        raise ValueError("destination blocks that no cache can have")
    if plan.src_blocks is None:
        return plan.block_len * plan.dst_blocks.size
    if plan.src_blocks.size != plan.dst_blocks.size or not plan.src_blocks.representable:
        raise ValueError("block lists differ in length")
    return plan.block_len


cdef void set_geometry(Geometry* g, const Side* side, const Piece* part) noexcept nogil:
    g.addrs = side.addrs
    g.first = part.first
    g.count = part.tensors
    g.stride = side.block_bytes
    g.block_len = part.length
    g.block = part.block
    g.blocks = part.blocks
    g.n_blocks = part.n_blocks


cdef Told* told_new(Transfer* t, bytes notice, uint32_t word_slot, uint64_t word) except? NULL:
    cdef Told* told
    if notice is None:
        return NULL
    if PyBytes_GET_SIZE(notice) > NOTICE_MAX:
        raise ValueError(f"a notice of more than {NOTICE_MAX} bytes")
    told = <Told*>calloc(1, sizeof(Told) + PyBytes_GET_SIZE(notice))
    if told == NULL:
        raise MemoryError
    told.transfer = t
    told.word = word
    told.word_slot = word_slot
    told.length = <uint32_t>PyBytes_GET_SIZE(notice)
    memcpy(told + 1, PyBytes_AS_STRING(notice), told.length)
    return told


cdef inline bint reached(const Transfer* t, int64_t layer) noexcept nogil:
    return transfer_over(t) or (layer >= 0 and transfer_layers(t) > layer)


cdef bint wait_until(Core* core, Transfer* t, int64_t layer, uint64_t end) noexcept nogil:
    """Wait until `end` at the latest; runs GETs and timers itself instead of waiting for others."""
    cdef uint64_t now, until
    cdef timespec ts
    while not reached(t, layer):
        if transfer_begun(t):
            if t.path == PATH_GET:
                drive(core, t, layer, end)
            elif t.path == PATH_STREAM and t.total <= WATCHED_BYTES:
                watch(core, t, end)
            if reached(t, layer):
                return True
        now = now_ns()
        if now >= t.deadline:
            core_lock(core)
            run_timers(core, now)
            core_unlock(core)
            if reached(t, layer):
                return True
        if now >= end:
            return False
        until = end
        if t.deadline > now and t.deadline < until:
            until = t.deadline
        ts = to_timespec(until)
        pthread_mutex_lock(&t.mutex)
        if not reached(t, layer):
            pthread_cond_timedwait(&t.cond, &t.mutex, &ts)
        pthread_mutex_unlock(&t.mutex)
    return True


cdef void drive(Core* core, Transfer* t, int64_t layer, uint64_t end) noexcept nogil:
    """Copy, or progress the RMA worker, for as long as that moves something, until `end`."""
    cdef bint moved = True
    cdef uint64_t now = 0
    core_lock(core)
    t.drivers += 1
    while moved and not reached(t, layer) and now < end and t.link != NULL:
        now = now_ns()
        moved = cma_drive(t) if t.direct else ucp_worker_progress(core.rma.worker) > 0
        run_timers(core, now)
        if t.state != DONE and t.link.dirty:
            link_step(t.link, now)
            moved = True
        if moved:
            core_unlock(core)
            core_lock(core)
    t.drivers -= 1
    if t.state != DONE:
        core_wake(core)
    core_unlock(core)


cdef void watch(Core* core, Transfer* t, uint64_t end) noexcept nogil:
    """Look for the answer for a moment: a small one comes sooner than a sleeper wakes up."""
    cdef uint64_t now = now_ns()
    cdef bint moved = False
    cdef Link* link
    if now + WATCH_NS < end:
        end = now + WATCH_NS
    core_lock(core)
    link = t.link
    if link != NULL:
        link.refs += 1
    core.watchers += 1
    while t.state != DONE and t.link != NULL and now < end:
        moved = ucp_worker_progress(t.link.am.worker.worker) > 0 or moved
        now = now_ns()
        run_timers(core, now)
        if t.link != NULL and t.link.dirty:
            link_step(t.link, now)
        core_unlock(core)
        sched_yield()
        core_lock(core)
    core.watchers -= 1
    if link != NULL:
        if link.dirty and core.links[link.slot] == link:
            link_step(link, now)
        moved = link.dirty or (moved and core.first_link != NULL
                               and core.first_link.next != NULL)
        link_unref(link)
    # What has come for others is the service thread's.
    if t.state != DONE or moved:
        core_wake(core)
    core_unlock(core)
