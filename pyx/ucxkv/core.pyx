"""The engine's native state, its lock, and the pools it draws from.

One lock guards everything in a :c:struct:`Core`, its UCX workers included (their thread mode is
SERIALIZED).  It is never held while the GIL is being acquired, so a thread that holds the GIL may
take it.  It has two mutexes: whoever waits for it holds `gate`, so a thread that asks for it again
and again, as the service thread does while there is work, cannot starve the others.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset
from posix.unistd cimport close, getpid, write

from ucxkv.pthread cimport (
    CLOCK_MONOTONIC,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_init,
    pthread_cond_timedwait,
    pthread_condattr_destroy,
    pthread_condattr_init,
    pthread_condattr_setclock,
    pthread_condattr_t,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    timespec,
)


cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initval, int flags)
    int EFD_NONBLOCK
    int EFD_CLOEXEC


cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void* addr, size_t length)
    int PROT_READ
    int PROT_WRITE
    int MAP_PRIVATE
    int MAP_ANONYMOUS
    void* MAP_FAILED


cdef extern from "<sys/random.h>" nogil:
    ssize_t getrandom(void* buffer, size_t length, unsigned int flags)


cdef bint cache_shown(const CacheMem* mem, const Link* link) noexcept nogil:
    """Whether the cluster at the other end of the link may read the cache or push to it."""
    cdef size_t low = 0, high = mem.n_peers, middle
    if not mem.limited:
        return True
    # Before it is connected nobody has said which cluster it leads to.
    if not link.connected:
        return False
    while low < high:
        middle = (low + high) // 2
        if mem.peers[middle] < link.cluster_id:
            low = middle + 1
        else:
            high = middle
    return low < mem.n_peers and mem.peers[low] == link.cluster_id


cdef void core_lock(Core* core) noexcept nogil:
    pthread_mutex_lock(&core.gate)
    pthread_mutex_lock(&core.lock)
    pthread_mutex_unlock(&core.gate)


cdef void core_unlock(Core* core) noexcept nogil:
    pthread_mutex_unlock(&core.lock)


cdef void core_wait(Core* core, const timespec* until) noexcept nogil:
    """Wait for core_idle, at most until `until`; the lock is given up meanwhile.

    Not by a condition of the lock itself: waking up has to go through the gate like everything
    else, or the service thread would starve it.
    """
    pthread_mutex_lock(&core.idle_mutex)
    core_unlock(core)
    pthread_cond_timedwait(&core.idle, &core.idle_mutex, until)
    pthread_mutex_unlock(&core.idle_mutex)
    core_lock(core)


cdef void core_idle(Core* core) noexcept nogil:
    """Something that core_wait may be waiting for has happened; called with the lock held."""
    pthread_mutex_lock(&core.idle_mutex)
    pthread_cond_broadcast(&core.idle)
    pthread_mutex_unlock(&core.idle_mutex)


cdef void core_wake(Core* core) noexcept nogil:
    """Get the engine's threads out of their sleep; called with the lock held."""
    cdef uint64_t one = 1
    if core.asleep:
        core.asleep = False
        write(core.wake_fd, &one, sizeof(one))
    if core.n_to_copy > 0:
        core_wake_copier(core)


cdef void core_wake_copier(Core* core) noexcept nogil:
    cdef uint64_t one = 1
    if core.copier_asleep:
        core.copier_asleep = False
        write(core.copier_fd, &one, sizeof(one))


cdef void core_notify(Core* core) noexcept nogil:
    cdef uint64_t one = 1
    write(core.notify_fd, &one, sizeof(one))


cdef void core_timer(Core* core, uint64_t when, bint wake) noexcept nogil:
    """Have the engine's timers looked at not later than `when` (nanoseconds, monotonic).

    Without `wake` the caller promises to see to it itself.
    """
    if when < core.next_deadline:
        core.next_deadline = when
    if wake and when < core.sleep_until:
        core_wake(core)


cdef uint64_t random64() noexcept nogil:
    """64 random bits, never 0."""
    cdef uint64_t value = 0
    while value == 0:
        getrandom(&value, sizeof(value), 0)
    return value


cdef SendOp* send_new(Core* core) noexcept nogil:
    cdef SendOp* op = core.free_sends
    if op != NULL:
        core.free_sends = op.next
    else:
        op = <SendOp*>malloc(sizeof(SendOp))
        if op == NULL:
            return NULL
    memset(op, 0, sizeof(SendOp))
    return op


cdef void send_free(Core* core, SendOp* op) noexcept nogil:
    if op.buffer != NULL:
        pack_give(core, op.buffer)
    free(op.payload)
    op.next = core.free_sends
    core.free_sends = op


cdef void* pack_take(Core* core, bint entitled) noexcept nogil:
    """A buffer of STREAM_CHUNK bytes, or NULL when all are in flight and none is owed."""
    cdef void* buffer
    if core.n_pack_buffers > 0:
        core.n_pack_buffers -= 1
        return core.pack_buffers[core.n_pack_buffers]
    if core.pack_made >= PACK_BUFFERS and not entitled:
        return NULL
    buffer = malloc(STREAM_CHUNK)
    if buffer != NULL:
        core.pack_made += 1
    return buffer


cdef void pack_give(Core* core, void* buffer) noexcept nogil:
    if core.pack_made > PACK_BUFFERS:
        core.pack_made -= 1
        free(buffer)
        return
    core.pack_buffers[core.n_pack_buffers] = buffer
    core.n_pack_buffers += 1


cdef uint64_t* map_words(size_t count) noexcept nogil:
    cdef void* address = mmap(NULL, count * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    return NULL if address == MAP_FAILED else <uint64_t*>address


cdef Core* core_new() except NULL:
    cdef Core* core = <Core*>calloc(1, sizeof(Core))
    cdef pthread_condattr_t attr
    cdef uint32_t i
    if core == NULL:
        raise MemoryError
    core.pid = getpid()
    core.next_deadline = <uint64_t>-1
    pthread_mutex_init(&core.gate, NULL)
    pthread_mutex_init(&core.lock, NULL)
    pthread_mutex_init(&core.mapping, NULL)
    pthread_mutex_init(&core.idle_mutex, NULL)
    pthread_condattr_init(&attr)
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC)
    pthread_cond_init(&core.idle, &attr)
    pthread_condattr_destroy(&attr)
    core.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    core.notify_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    core.notice_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    core.copier_fd = eventfd(0, EFD_CLOEXEC)
    core.links = <Link**>calloc(MAX_LINKS, sizeof(Link*))
    core.transfers = <Transfer**>calloc(MAX_TRANSFERS, sizeof(Transfer*))
    core.free_transfers = <uint32_t*>malloc(MAX_TRANSFERS * sizeof(uint32_t))
    core.free_words = <uint32_t*>malloc(MAX_WORDS * sizeof(uint32_t))
    core.caches = <CacheMem**>calloc(MAX_WORDS, sizeof(CacheMem*))
    core.holds = <Hold**>calloc(MAX_WORDS, sizeof(Hold*))
    core.expiring = <Hold**>calloc(MAX_WORDS, sizeof(Hold*))
    core.pack_buffers = <void**>calloc(PACK_BUFFERS, sizeof(void*))
    core.words = map_words(MAX_WORDS)
    core.scratch = map_words(SCRATCH_WORDS)
    if (core.wake_fd < 0 or core.notify_fd < 0 or core.notice_fd < 0 or core.copier_fd < 0
            or core.links == NULL or core.transfers == NULL or core.free_transfers == NULL
            or core.free_words == NULL or core.caches == NULL or core.holds == NULL
            or core.expiring == NULL or core.pack_buffers == NULL or core.words == NULL
            or core.scratch == NULL):
        core_free(core)
        raise MemoryError("no memory or descriptors for the engine's tables")
    for i in range(MAX_TRANSFERS):
        core.free_transfers[i] = MAX_TRANSFERS - 1 - i
    core.n_free_transfers = MAX_TRANSFERS
    # The first words prove this process to a peer's first GET; caches and holds take the others.
    for i in range(MAX_WORDS - OWN_WORDS):
        core.free_words[i] = MAX_WORDS - 1 - i
    core.n_free_words = MAX_WORDS - OWN_WORDS
    core.words[WORD_PROOF] = random64()
    core.words[WORD_PID] = core.pid
    return core


cdef void core_free(Core* core) noexcept nogil:
    """Release what core_new made; UCX objects and the thread must be gone."""
    cdef SendOp* op
    while core.free_sends != NULL:
        op = core.free_sends
        core.free_sends = op.next
        free(op)
    while core.n_pack_buffers > 0:
        core.n_pack_buffers -= 1
        free(core.pack_buffers[core.n_pack_buffers])
    if core.words != NULL:
        munmap(core.words, MAX_WORDS * sizeof(uint64_t))
    if core.scratch != NULL:
        munmap(core.scratch, SCRATCH_WORDS * sizeof(uint64_t))
    free(core.links)
    free(core.transfers)
    free(core.free_transfers)
    free(core.free_words)
    free(core.caches)
    free(core.holds)
    free(core.expiring)
    free(core.pack_buffers)
    if core.wake_fd >= 0:
        close(core.wake_fd)
    if core.notify_fd >= 0:
        close(core.notify_fd)
    if core.notice_fd >= 0:
        close(core.notice_fd)
    if core.copier_fd >= 0:
        close(core.copier_fd)
    pthread_cond_destroy(&core.idle)
    pthread_mutex_destroy(&core.mapping)
    pthread_mutex_destroy(&core.idle_mutex)
    pthread_mutex_destroy(&core.lock)
    pthread_mutex_destroy(&core.gate)
    free(core)
