"""What Python sees of the native core: the engine."""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset
from libc.errno cimport errno
from posix.unistd cimport close, getpid

from ucxkv.cma cimport cma_main
from ucxkv.context cimport check, worker_close, worker_open
from ucxkv.core cimport (
    CLOSED,
    MAX_AM_WORKERS,
    MAX_LINKS,
    MAX_TRANSFERS,
    MAX_WORDS,
    OWN_WORDS,
    SCRATCH_WORDS,
    ST_FAILED,
    STREAM_CHUNK,
    WAITING,
    WORD_PROOF,
    Core,
    Link,
    Totals,
    Transfer,
    Worker,
    core_free,
    core_lock,
    core_new,
    core_timer,
    core_unlock,
    core_wake,
    core_wake_copier,
)
from ucxkv.endpoint cimport link_create, link_unref
from ucxkv.handle cimport handle_create
from ucxkv.hold cimport holds_forget
from ucxkv.memory import LocalCache as _LocalCache
from ucxkv.message cimport message_install
from ucxkv.notice cimport notice_install, notice_take, notices_forget
from ucxkv.pthread cimport (
    now_ns,
    pthread_create,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_t,
    timespec,
)
from ucxkv.push cimport push_install
from ucxkv.quiesce cimport quiesce_install
from ucxkv.service cimport prune_remotes, service_main
from ucxkv.stream cimport stream_install
from ucxkv.transfer cimport totals_dict, transfer_end, transfer_new
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
    ucp_worker_release_address,
    ucs_global_opts_set_value,
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


cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int command, ...)
    int F_DUPFD_CLOEXEC


cdef extern from "<time.h>" nogil:
    int clock_gettime(int clock, timespec* ts)
    int CLOCK_REALTIME


cdef enum:
    CLOSE_SECONDS = 2


ENGINE_LIMITS = {
    "links": MAX_LINKS,
    "caches": MAX_WORDS - OWN_WORDS,
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
    streams.  At most `notices` notices of peers are queued.  Closing is idempotent; a collected
    engine closes itself, except in a forked child, which leaves everything to the parent.
    """

    cdef Core* core
    cdef bint _closed
    cdef readonly object incarnation
    cdef readonly bytes rma_address
    cdef readonly bytes words_rkey
    cdef dict _am_addresses

    def __init__(self, uint64_t incarnation, rma_settings=None, *, uint32_t notices=4096):
        cdef int error
        if self.core != NULL:
            raise RuntimeError("already initialised")
        self.incarnation = incarnation
        self.rma_address = b""
        self.words_rkey = b""
        self._am_addresses = {}
        self.core = core_new()
        self.core.cap_notices = notices
        if rma_settings is not None:
            worker_open(&self.core.rma, UCP_FEATURE_RMA, rma_settings)
            self.rma_address = worker_address(&self.core.rma)
            self.core.words_memh = self._map_table(
                self.core.words, MAX_WORDS,
                UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ)
            self.core.scratch_memh = self._map_table(
                self.core.scratch, SCRATCH_WORDS,
                UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE)
            self.words_rkey = self._pack(self.core.words_memh)
        with nogil:
            error = pthread_create(&self.core.thread, NULL, service_main, self.core)
        if error:
            raise OSError(error, "cannot start the service thread")
        self.core.thread_running = True
        if rma_settings is not None:
            with nogil:
                error = pthread_create(&self.core.copier, NULL, cma_main, self.core)
            if error:
                raise OSError(error, "cannot start the copying thread")
            self.core.copier_running = True

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
              "register the engine's tables")
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

        Raises RuntimeError if a thread cannot be stopped within 2 s; all memory is then left alone.
        """
        if self._closed or self.core.pid != getpid():
            return
        if not self._shut():
            raise RuntimeError(
                "a thread is stuck inside UCX, or in a copy of memory that does not come")

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
            clock_gettime(CLOCK_REALTIME, &until)
            until.tv_sec += CLOSE_SECONDS
            if core.thread_running:
                error = pthread_timedjoin_np(core.thread, NULL, &until)
            if core.copier_running and not error:
                # All links are closed: it is not copying.
                core_lock(core)
                core.stop_copier = True
                core_wake_copier(core)
                core_unlock(core)
                error = pthread_timedjoin_np(core.copier, NULL, &until)
        if error:
            return False
        core.thread_running = False
        core.copier_running = False
        with nogil:
            end_waiting(core)
            core_lock(core)
            holds_forget(core)
            notices_forget(core)
            close(core.wake_fd)
            close(core.notify_fd)
            close(core.notice_fd)
            core.wake_fd = -1
            core.notify_fd = -1
            core.notice_fd = -1
            core_unlock(core)
            for i in range(core.n_am):
                worker_close(&core.am[i])
            core.n_am = 0
            pthread_mutex_lock(&core.mapping)
            if core.rma.context != NULL:
                if core.words_memh != NULL:
                    ucp_mem_unmap(core.rma.context, core.words_memh)
                if core.scratch_memh != NULL:
                    ucp_mem_unmap(core.rma.context, core.scratch_memh)
                core.words_memh = NULL
                core.scratch_memh = NULL
            if not core.abandoned:
                worker_close(&core.rma)
            core.rma.context = NULL
            pthread_mutex_unlock(&core.mapping)
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
        return self.core.words[WORD_PROOF]

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
            check(message_install(self.core, w.worker), "install message handlers")
            check(stream_install(self.core, w.worker), "install message handlers")
            check(push_install(self.core, w.worker), "install message handlers")
            check(quiesce_install(self.core, w.worker), "install message handlers")
            check(notice_install(self.core, w.worker), "install message handlers")
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
                 pushable=False, peers=None):
        """Register memory: one address per tensor of `blocks * block_bytes` bytes each.

        With `peers` only links to these clusters may read it or push to it.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        return _LocalCache._register(self, <size_t>self.core, cache_id, addresses, blocks,
                                     block_bytes, readable, writable, pushable, peers)

    def new_transfer(self, uint64_t deadline, bint attended):
        """A transfer that ends at `deadline` (monotonic nanoseconds) if not before.

        `attended` says that the caller is going to wait for it all the time, so that the service
        thread need not be woken for the deadline.
        """
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
        return handle_create(self, self.core, t)

    def take_notice(self):
        """The oldest notice of a peer as (cluster id, bytes); None if there is none."""
        return None if self._closed else notice_take(self.core)

    def dup_notice_fd(self):
        """A descriptor that is readable while there are notices, or the engine has been closed.

        It is the caller's to close, and is only to be polled.  OSError where there is none left.
        """
        cdef int fd = -1
        cdef bint closed
        with nogil:
            core_lock(self.core)
            closed = self.core.notice_fd < 0
            if not closed:
                fd = fcntl(self.core.notice_fd, F_DUPFD_CLOEXEC, 0)
            core_unlock(self.core)
        if closed:
            raise RuntimeError("the engine is closed")
        if fd < 0:
            raise OSError(errno, "no descriptor for notices")
        return fd

    @property
    def closed(self):
        """`close` has been called."""
        return bool(self._closed)

    def totals(self):
        """Counters over all ended transfers; latencies in 8 buckets per doubling of ns."""
        cdef Core* core = self.core
        cdef Totals totals
        cdef uint32_t running, holds, queued, notices, regions
        cdef uint64_t received, dropped, mapped, mapping
        with nogil:
            pthread_mutex_lock(&core.mapping)
            regions = core.mapped_regions
            mapped = core.mapped_bytes
            mapping = core.mapping_ns
            pthread_mutex_unlock(&core.mapping)
            core_lock(core)
            totals = core.totals
            running = MAX_TRANSFERS - core.n_free_transfers
            holds = core.n_holds
            queued = core.n_queued
            notices = core.n_notices
            received = core.notices_received
            dropped = core.dropped
            core_unlock(core)
        cdef dict counted = totals_dict(&totals)
        counted["running"] = running
        counted["dropped"] = dropped
        counted["holds"] = holds
        counted["registered_regions"] = regions
        counted["registered_bytes"] = mapped
        counted["registration_ns"] = mapping
        counted["notices_received"] = received
        counted["notices_queued"] = queued
        counted["notices_waiting"] = notices - queued
        return counted


cdef void end_waiting(Core* core) noexcept nogil:
    cdef Transfer* t
    core_lock(core)
    while core.first_transfer != NULL:
        t = core.first_transfer
        transfer_end(t, ST_FAILED, UCS_OK, b"the engine was finalized")
        if core.first_transfer == t:
            break
    core_unlock(core)
