"""What Python sees of the native core: the engine and its transfers."""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close, getpid, write

from ucxkv.errors import LlmError

from ucxkv.context cimport check, worker_close, worker_open
from ucxkv.core cimport (
    CLOSED,
    DONE,
    LATENCY_BUCKETS,
    MAX_AM_WORKERS,
    MAX_LINKS,
    MAX_TRANSFERS,
    MAX_WORDS,
    PATH_GET,
    PATH_PUSH,
    PATH_STREAM,
    RUNNING,
    ST_CACHE_NOT_EXIST,
    ST_FAILED,
    ST_NOT_YET_LINK,
    STREAM_CHUNK,
    WAITING,
    CacheMem,
    Core,
    Link,
    RemoteMem,
    Transfer,
    Worker,
    core_free,
    core_lock,
    core_new,
    core_timer,
    core_unlock,
    core_wake,
)
from ucxkv.endpoint cimport NativeLink, link_create, link_unref
from ucxkv.memory cimport LocalCache, RemoteCache
from ucxkv.memory import LocalCache as _LocalCache
from ucxkv.pthread cimport (
    now_ns,
    pthread_cond_timedwait,
    pthread_create,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_t,
    timespec,
    to_timespec,
)
from ucxkv.push cimport push_install
from ucxkv.service cimport link_step, prune_remotes, run_timers, service_main
from ucxkv.spans cimport cursor_seek, geometry_bytes
from ucxkv.stream cimport stream_install
from ucxkv.transfer cimport transfer_begin, transfer_end, transfer_new, transfer_unref
from ucxkv.ucp cimport (
    UCP_FEATURE_AM,
    UCP_FEATURE_RMA,
    UCP_MEM_MAP_PARAM_FIELD_ADDRESS,
    UCP_MEM_MAP_PARAM_FIELD_LENGTH,
    UCP_MEM_MAP_PARAM_FIELD_PROT,
    UCP_MEM_MAP_PROT_LOCAL_READ,
    UCP_MEM_MAP_PROT_LOCAL_WRITE,
    UCP_MEM_MAP_PROT_REMOTE_READ,
    UCS_OK,
    ucp_address_t,
    ucp_get_version_string,
    ucp_mem_h,
    ucp_mem_map,
    ucp_mem_map_params_t,
    ucp_mem_unmap,
    ucp_rkey_buffer_release,
    ucp_rkey_pack,
    ucp_worker_get_address,
    ucp_worker_progress,
    ucp_worker_release_address,
    ucs_global_opts_set_value,
    ucs_status_string,
)


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <pthread.h>
    int pthread_timedjoin_np(pthread_t, void**, const struct timespec*);
    """
    int pthread_timedjoin_np(pthread_t thread, void** result, const timespec* until) nogil


cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initval, int flags)
    int EFD_NONBLOCK
    int EFD_CLOEXEC


cdef extern from "<time.h>" nogil:
    int clock_gettime(int clock, timespec* ts)
    int CLOCK_REALTIME


cdef enum:
    CLOSE_SECONDS = 3
    # A waiting caller looks for signals this often.
    SIGNAL_NS = 50000000


ENGINE_LIMITS = {
    "links": MAX_LINKS,
    "caches": MAX_WORDS - 1,
    "transfers": MAX_TRANSFERS,
}


def silence_ucx():
    """Keep UCX from writing to the terminal; what it reports comes in our errors instead."""
    ucs_global_opts_set_value("LOG_LEVEL", "fatal")


def monotonic_ns():
    """The clock of all deadlines here, in nanoseconds."""
    return now_ns()


cdef bytes worker_address(Worker* w):
    cdef ucp_address_t* address
    cdef size_t length
    check(ucp_worker_get_address(w.worker, &address, &length), "give a worker's address")
    try:
        return PyBytes_FromStringAndSize(<char*>address, length)
    finally:
        ucp_worker_release_address(w.worker, address)


@cython.no_gc
cdef class NativeEngine:
    """The native half of one engine: its UCX workers, its service thread, all data-plane state.

    `rma_settings` are the UCX settings of the context for GETs; None means that this engine only
    streams.  Closing is idempotent; a collected engine closes itself, except in a forked child,
    which leaves everything to the parent.
    """

    cdef Core* core
    cdef bint _closed
    cdef readonly object incarnation
    cdef readonly bytes rma_address
    cdef readonly bytes words_rkey
    cdef dict _am_addresses

    def __init__(self, uint64_t incarnation, rma_settings=None):
        cdef int error
        if self.core != NULL:
            raise RuntimeError("already initialised")
        self.incarnation = incarnation
        self.rma_address = b""
        self.words_rkey = b""
        self._am_addresses = {}
        self.core = core_new()
        if rma_settings is not None:
            worker_open(&self.core.rma, UCP_FEATURE_RMA, rma_settings)
            self.rma_address = worker_address(&self.core.rma)
            self.core.words_memh = self._map_table(
                self.core.words, MAX_WORDS,
                UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ)
            self.core.scratch_memh = self._map_table(
                self.core.scratch, MAX_TRANSFERS + MAX_LINKS,
                UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE)
            self.words_rkey = self._pack(self.core.words_memh)
        with nogil:
            error = pthread_create(&self.core.thread, NULL, service_main, self.core)
        if error:
            raise OSError(error, "cannot start the service thread")
        self.core.thread_running = True

    cdef ucp_mem_h _map_table(self, uint64_t* table, size_t count, unsigned int prot) except *:
        cdef ucp_mem_map_params_t params
        cdef ucp_mem_h memh
        memset(&params, 0, sizeof(params))
        params.field_mask = (UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH
                             | UCP_MEM_MAP_PARAM_FIELD_PROT)
        params.address = table
        params.length = count * sizeof(uint64_t)
        params.prot = prot
        check(ucp_mem_map(self.core.rma.context, &params, &memh),
              "register the engine's tables (on RDMA fabrics check ulimit -l)")
        return memh

    cdef bytes _pack(self, ucp_mem_h memh):
        cdef void* buffer
        cdef size_t size
        check(ucp_rkey_pack(self.core.rma.context, memh, &buffer, &size), "pack an rkey")
        try:
            return PyBytes_FromStringAndSize(<char*>buffer, size)
        finally:
            ucp_rkey_buffer_release(buffer)

    def __dealloc__(self):
        if self.core == NULL or self.core.pid != getpid():
            return
        if not self._closed and not self._shut():
            return
        core_free(self.core)

    def close(self):
        """Fence and end every transfer, close every link, join the thread, release UCX.

        Raises UcxError if the service thread cannot be stopped within seconds; its memory is then
        left alone.
        """
        if self._closed or self.core.pid != getpid():
            return
        if not self._shut():
            raise RuntimeError("the service thread is stuck inside UCX")

    cdef bint _shut(self) noexcept:
        cdef Core* core = self.core
        cdef timespec until
        cdef int error = 0
        cdef int i
        cdef Link* link
        self._closed = True
        with nogil:
            core_lock(core)
            core.stop = True
            while core.first_transfer != NULL and core.first_transfer.state == WAITING:
                transfer_end(core.first_transfer, ST_FAILED, UCS_OK, b"the engine was finalized")
            core_wake(core)
            core_unlock(core)
            if core.thread_running:
                clock_gettime(CLOCK_REALTIME, &until)
                until.tv_sec += CLOSE_SECONDS
                error = pthread_timedjoin_np(core.thread, NULL, &until)
        if error:
            return False
        core.thread_running = False
        with nogil:
            end_waiting(core)
            core_lock(core)
            close(core.wake_fd)
            close(core.notify_fd)
            core.wake_fd = -1
            core.notify_fd = -1
            core_unlock(core)
            for i in range(core.n_am):
                worker_close(&core.am[i])
            core.n_am = 0
            if core.rma.context != NULL:
                if core.words_memh != NULL:
                    ucp_mem_unmap(core.rma.context, core.words_memh)
                if core.scratch_memh != NULL:
                    ucp_mem_unmap(core.rma.context, core.scratch_memh)
                core.words_memh = NULL
                core.scratch_memh = NULL
            worker_close(&core.rma)
            # Links whose last messages nobody took went with their workers.
            while core.first_link != NULL:
                link = core.first_link
                core.first_link = link.next
                core.links[link.slot] = NULL
                link.am.state = CLOSED
                prune_remotes(link)
                link_unref(link)
        return True

    @property
    def words_address(self):
        """Where the table of generation words lies in this process."""
        return <size_t>self.core.words

    @property
    def word0(self):
        """64 random bits that prove this process to a peer's GET."""
        return self.core.words[0]

    @property
    def notify_fd(self):
        """An eventfd, readable when the control plane should look at its links."""
        return self.core.notify_fd

    @property
    def chunk_size(self):
        """Bytes of one streamed message; linked engines must agree."""
        return STREAM_CHUNK

    @property
    def ucx_version(self):
        """Version of the UCX in use, such as "1.22.0"."""
        return ucp_get_version_string().decode()

    def add_worker(self, settings):
        """Make a worker for streaming with these UCX settings; returns its index."""
        cdef Worker w
        cdef int index = -1
        memset(&w, 0, sizeof(w))
        worker_open(&w, UCP_FEATURE_AM, settings)
        try:
            check(stream_install(self.core, w.worker), "install message handlers")
            check(push_install(self.core, w.worker), "install message handlers")
            address = worker_address(&w)
        except BaseException:
            worker_close(&w)
            raise
        with nogil:
            core_lock(self.core)
            if self.core.n_am < MAX_AM_WORKERS and not self.core.stop:
                index = self.core.n_am
                self.core.am[index] = w
                self.core.n_am += 1
                core_wake(self.core)
            core_unlock(self.core)
        if index < 0:
            worker_close(&w)
            raise RuntimeError(f"an engine has at most {MAX_AM_WORKERS} streaming workers")
        self._am_addresses[index] = address
        return index

    def worker_address(self, int index):
        """What peers need to reach streaming worker `index`."""
        return self._am_addresses[index]

    def new_link(self, int worker):
        """A link over streaming worker `worker`, not connected yet."""
        return link_create(self, self.core, worker)

    def register(self, cache_id, addresses, blocks, block_bytes, *, readable, writable,
                 pushable=False):
        """Register memory: one address per tensor of `blocks * block_bytes` bytes each."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        return _LocalCache._register(self, <size_t>self.core, cache_id, addresses, blocks,
                                     block_bytes, readable, writable, pushable)

    def new_transfer(self, uint64_t deadline, bint attended):
        """A transfer that ends at `deadline` (monotonic nanoseconds) if not before.

        `attended` says that the caller is going to wait for it all the time, so that the service
        thread need not be woken for the deadline.
        """
        cdef TransferHandle handle = TransferHandle.__new__(TransferHandle)
        cdef Transfer* t = NULL
        cdef bint stopped
        with nogil:
            core_lock(self.core)
            stopped = self.core.stop
            if not stopped:
                t = transfer_new(self.core, deadline)
            if t != NULL:
                core_timer(self.core, deadline, not attended)
            core_unlock(self.core)
        if stopped:
            raise RuntimeError("the engine is closed")
        if t == NULL:
            raise MemoryError(f"an engine runs at most {MAX_TRANSFERS} transfers at a time")
        handle.core = self.core
        handle.t = t
        handle._engine = self
        return handle

    def totals(self):
        """Counters over all ended transfers; latencies in 8 buckets per doubling of ns."""
        cdef Core* core = self.core
        cdef int i
        latency = {}
        for i in range(LATENCY_BUCKETS):
            if core.totals.latency[i]:
                # Inverse of the bucket computation: the middle of what falls into it.
                octave, step = divmod(i, 8)
                if i >= 16:
                    octave, step = octave - 1, step + 8
                else:
                    octave, step = 0, i
                latency[(step + 0.5) * (1 << octave)] = core.totals.latency[i]
        return {
            "transfers": core.totals.transfers,
            "bytes": core.totals.bytes,
            "spans": core.totals.spans,
            "failed": core.totals.failed,
            "not_exist": core.totals.not_exist,
            "timeouts": core.totals.timeouts,
            "not_linked": core.totals.not_linked,
            "dropped": core.dropped,
            "latency_ns": latency,
        }


cdef void end_waiting(Core* core) noexcept nogil:
    cdef Transfer* t
    core_lock(core)
    while core.first_transfer != NULL:
        t = core.first_transfer
        transfer_end(t, ST_FAILED, UCS_OK, b"the engine was finalized")
        if core.first_transfer == t:
            break
    core_unlock(core)


@cython.no_gc
cdef class TransferHandle:
    """One transfer.  Its life in the engine does not depend on this object's.

    In a forked child every method raises LlmError: the transfer is the parent's.
    """

    cdef Core* core
    cdef Transfer* t
    cdef object _engine         # keeps `core` alive

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
               LocalCache local not None, *, bint get, uint32_t src_first, uint32_t dst_first,
               uint32_t tensors, uint32_t tensors_per_layer, uint64_t block_len,
               uint64_t src_block=0, uint64_t dst_block=0, const uint32_t[::1] src_blocks=None,
               const uint32_t[::1] dst_blocks=None, bint attended=False):
        """Start moving bytes; does nothing if the transfer has ended already.

        Of `tensors` tensors of each side, from `src_first` and `dst_first` on, `block_len` bytes
        of each block are copied: the single blocks `src_block` and `dst_block`, or the lists.
        """
        self.ours()
        cdef Transfer* t = self.t
        cdef uint64_t src_len = source_length(block_len, src_blocks, dst_blocks)
        cdef uint32_t* src_copy = NULL
        cdef uint32_t* dst_copy = NULL
        if tensors_per_layer == 0 or not local.mem.writable:
            raise ValueError("a destination must be writable, a layer has at least one tensor")
        if get and remote.mem.n_regions == 0:
            raise ValueError("the peer gave no rkeys for this cache")
        # Copied before they are checked: the caller's array may change meanwhile.
        try:
            src_copy = copy_blocks(src_blocks)
            dst_copy = copy_blocks(dst_blocks)
            check_side(src_first, tensors, src_len, src_block, src_copy, src_blocks,
                       remote.mem.num_tensors, remote.mem.blocks, remote.mem.block_bytes)
            check_side(dst_first, tensors, block_len, dst_block, dst_copy, dst_blocks,
                       local.mem.num_tensors, local.mem.blocks, local.mem.block_bytes)
        except BaseException:
            free_blocks(src_copy)
            free_blocks(dst_copy)
            raise
        with nogil:
            core_lock(self.core)
            if self.startable(link.link, remote.mem, local.mem):
                t.path = PATH_GET if get else PATH_STREAM
                t.far = remote.mem
                t.near = local.mem
                set_geometry(t, remote.mem.addrs, remote.mem.block_bytes, local.mem.addrs,
                             local.mem.block_bytes, src_first, dst_first, tensors,
                             tensors_per_layer, block_len, src_block, dst_block, src_blocks,
                             dst_blocks)
                t.src_blocks = src_copy
                t.dst_blocks = dst_copy
                t.src_geo.blocks = src_copy
                t.dst_geo.blocks = dst_copy
                src_copy = NULL
                dst_copy = NULL
                cursor_seek(&t.src_cursor, &t.src_geo, 0)
                cursor_seek(&t.dst_cursor, &t.dst_geo, 0)
                self.start(link.link, get and attended)
            core_unlock(self.core)
        free_blocks(src_copy)
        free_blocks(dst_copy)

    def offer(self, NativeLink link not None, RemoteCache remote not None,
              LocalCache local not None, *, uint32_t src_first, uint32_t dst_first,
              uint32_t tensors, uint32_t tensors_per_layer, uint64_t block_len,
              uint64_t src_block=0, uint64_t dst_block=0, const uint32_t[::1] src_blocks=None,
              const uint32_t[::1] dst_blocks=None):
        """Start a push: the reverse of `submit`, from `local` to `remote`."""
        self.ours()
        cdef Transfer* t = self.t
        cdef uint64_t src_len = source_length(block_len, src_blocks, dst_blocks)
        cdef uint32_t* src_copy = NULL
        cdef uint32_t* dst_copy = NULL
        if tensors_per_layer == 0:
            raise ValueError("a layer has at least one tensor")
        try:
            src_copy = copy_blocks(src_blocks)
            dst_copy = copy_blocks(dst_blocks)
            check_side(src_first, tensors, src_len, src_block, src_copy, src_blocks,
                       local.mem.num_tensors, local.mem.blocks, local.mem.block_bytes)
            check_side(dst_first, tensors, block_len, dst_block, dst_copy, dst_blocks,
                       remote.mem.num_tensors, remote.mem.blocks, remote.mem.block_bytes)
        except BaseException:
            free_blocks(src_copy)
            free_blocks(dst_copy)
            raise
        with nogil:
            core_lock(self.core)
            if self.startable(link.link, remote.mem, local.mem):
                t.path = PATH_PUSH
                t.far = remote.mem
                t.near = local.mem
                set_geometry(t, local.mem.addrs, local.mem.block_bytes, remote.mem.addrs,
                             remote.mem.block_bytes, src_first, dst_first, tensors,
                             tensors_per_layer, block_len, src_block, dst_block, src_blocks,
                             dst_blocks)
                t.src_blocks = src_copy
                t.dst_blocks = dst_copy
                t.src_geo.blocks = src_copy
                t.dst_geo.blocks = dst_copy
                src_copy = NULL
                dst_copy = NULL
                self.start(link.link, False)
            core_unlock(self.core)
        free_blocks(src_copy)
        free_blocks(dst_copy)

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

    def end(self, uint32_t status, str reason=""):
        """Have it end with `status`, fenced; does nothing if its end is decided already."""
        self.ours()
        cdef bytes text = reason.encode()[:150]
        cdef const char* c_reason = text
        with nogil:
            core_lock(self.core)
            transfer_end(self.t, status, UCS_OK, c_reason)
            core_unlock(self.core)

    def wait(self, seconds=None, int64_t layer=-1, bint signals=True):
        """Wait until it is over, or until layer number `layer` has landed.

        Returns False if neither is so after `seconds`.  Signal handlers run meanwhile, unless
        `signals` is False.
        """
        self.ours()
        cdef uint64_t end = <uint64_t>-1
        cdef uint64_t until
        cdef bint ready
        if seconds is not None:
            end = now_ns() + <uint64_t>(max(0.0, seconds) * 1e9)
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
        return self.t.state == DONE

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
        return self.t.layers_done

    @property
    def spans(self):
        """Contiguous pieces that were written."""
        return self.t.spans

    @property
    def seconds(self):
        """From its creation to its end (or to now)."""
        cdef uint64_t end = self.t.ended if self.t.state == DONE else now_ns()
        return (end - self.t.submitted) * 1e-9


cdef void check_side(uint64_t first, uint64_t tensors, uint64_t length, uint64_t block,
                     const uint32_t* copied, const uint32_t[::1] blocks, uint64_t num_tensors,
                     uint64_t num_blocks, uint64_t block_bytes) except *:
    cdef Py_ssize_t i
    cdef bint inside = (tensors <= num_tensors and first <= num_tensors - tensors
                        and length <= block_bytes)
    if blocks is None:
        inside = inside and block < num_blocks
    else:
        for i in range(blocks.shape[0]):
            inside = inside and copied[i] < num_blocks
    if not inside:
        raise ValueError("a transfer would leave the memory of its cache")


cdef uint64_t source_length(uint64_t block_len, const uint32_t[::1] src_blocks,
                            const uint32_t[::1] dst_blocks) except? 0:
    """Bytes of one source block: without a list it is one slot, cut into all destinations."""
    if dst_blocks is None:
        if src_blocks is not None:
            raise ValueError("source blocks without destination blocks")
        return block_len
    if src_blocks is None:
        return block_len * <uint64_t>dst_blocks.shape[0]
    if src_blocks.shape[0] != dst_blocks.shape[0]:
        raise ValueError("block lists differ in length")
    return block_len


cdef void set_geometry(Transfer* t, const uint64_t* src_addrs, uint64_t src_stride,
                       const uint64_t* dst_addrs, uint64_t dst_stride, uint32_t src_first,
                       uint32_t dst_first, uint32_t tensors, uint32_t tensors_per_layer,
                       uint64_t block_len, uint64_t src_block, uint64_t dst_block,
                       const uint32_t[::1] src_blocks,
                       const uint32_t[::1] dst_blocks) noexcept nogil:
    t.src_geo.addrs = src_addrs
    t.src_geo.first = src_first
    t.src_geo.count = tensors
    t.src_geo.stride = src_stride
    t.src_geo.block = src_block
    t.src_geo.n_blocks = 1 if src_blocks is None else <uint64_t>src_blocks.shape[0]
    t.dst_geo.addrs = dst_addrs
    t.dst_geo.first = dst_first
    t.dst_geo.count = tensors
    t.dst_geo.stride = dst_stride
    t.dst_geo.block_len = block_len
    t.dst_geo.block = dst_block
    t.dst_geo.n_blocks = 1 if dst_blocks is None else <uint64_t>dst_blocks.shape[0]
    t.src_geo.block_len = block_len
    if src_blocks is None:
        t.src_geo.block_len = block_len * t.dst_geo.n_blocks
    t.total = geometry_bytes(&t.dst_geo)
    t.layer_bytes = block_len * t.dst_geo.n_blocks * tensors_per_layer
    t.layers = (tensors + tensors_per_layer - 1) // tensors_per_layer


cdef uint32_t* copy_blocks(const uint32_t[::1] blocks) except? NULL:
    cdef uint32_t* copy
    if blocks is None:
        return NULL
    copy = <uint32_t*>malloc(max(1, blocks.shape[0]) * sizeof(uint32_t))
    if copy == NULL:
        raise MemoryError
    if blocks.shape[0]:
        memcpy(copy, &blocks[0], blocks.shape[0] * sizeof(uint32_t))
    return copy


cdef void free_blocks(uint32_t* blocks) noexcept:
    free(blocks)


cdef inline bint reached(const Transfer* t, int64_t layer) noexcept nogil:
    return t.state == DONE or (layer >= 0 and t.layers_done > layer)


cdef bint wait_until(Core* core, Transfer* t, int64_t layer, uint64_t end) noexcept nogil:
    """Wait until `end` at the latest; runs GETs and timers itself instead of waiting for others."""
    cdef uint64_t now, until
    cdef timespec ts
    while not reached(t, layer):
        if t.path == PATH_GET and t.state != WAITING:
            drive(core, t, layer, end)
            if reached(t, layer):
                return True
        now = now_ns()
        if t.state < DONE and now >= t.deadline:
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
    """Progress the RMA worker for as long as that moves something, until `end` at the latest."""
    cdef bint moved = True
    cdef uint64_t now = 0
    while moved and not reached(t, layer) and now < end:
        core_lock(core)
        moved = False
        if t.state != DONE and t.link != NULL:
            now = now_ns()
            moved = ucp_worker_progress(core.rma.worker) > 0
            run_timers(core, now)
            if t.state != DONE and t.link.dirty:
                link_step(t.link, now)
                moved = True
            if not moved or now >= end:
                core_wake(core)
        core_unlock(core)
