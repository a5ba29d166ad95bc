"""The path "get" on one host: many spans read by one call of process_vm_readv.

UCX's transport for memory of other processes, CMA, spends a system call on each span.  Where a
link's GETs go through it, the bytes are copied here instead, a batch of spans at a time, by the
threads that wait for the transfer and, for one that nobody waits for or that has much left, by a
thread of the engine that does nothing else: a copy takes as long as the owner's memory does, which
may have to be swapped in, or be locked while the owner forks.  Several threads may copy for one
transfer: each claims the next batch under the engine's lock, copies it without, and books it.

The last range of each batch is the generation word of the cache, or the word of the hold.  The
kernel fills the ranges of a call in their order, so the right word shows that the memory was still
what it should be after the batch had been read; and, being 64 random bits, that the process was
still the one that was meant: a process id can be given to another one at any time, which no check
before the call would notice.

A batch that comes short is an error, unless the word has changed.  It is not left to UCX, which
(seen in 1.22) takes a GET for complete when the kernel could read only the beginning of it.
"""

from libc.errno cimport EPERM, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy
from posix.fcntl cimport O_CLOEXEC, O_NONBLOCK, O_RDONLY, fcntl, open
from posix.types cimport off_t
from posix.unistd cimport close, read

from ucxkv.core cimport (
    GET_MAX,
    GET_RING,
    NOTHING,
    RUNNING,
    ST_FAILED,
    TO_COPY,
    Core,
    GetOp,
    Link,
    RemoteMem,
    Transfer,
    core_lock,
    core_unlock,
    core_wake,
    core_wake_copier,
)
from ucxkv.lanes cimport lanes_use
from ucxkv.landing cimport land, landed, lands_past_caches
from ucxkv.spans cimport cursor_advance, cursor_run
from ucxkv.transfer cimport (
    remote_free,
    transfer_advance,
    transfer_collect,
    transfer_due,
    transfer_end,
    transfer_settle,
    transfer_unref,
    transfer_word_gone,
)
from ucxkv.ucp cimport UCS_OK


cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    ssize_t process_vm_readv(int pid, const iovec* local, unsigned long local_count,
                             const iovec* remote, unsigned long remote_count, unsigned long flags)


cdef extern from *:
    """
    #define load_barrier() __atomic_thread_fence(__ATOMIC_ACQUIRE)
    """
    void load_barrier() noexcept nogil


cdef extern from "<fcntl.h>" nogil:
    int F_GET_SEALS
    int F_SEAL_SHRINK


cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset)
    int PROT_READ
    int MAP_SHARED
    void* MAP_FAILED


cdef extern from "<sys/stat.h>" nogil:
    ctypedef struct stat_t "struct stat":
        uint64_t st_ino
        off_t st_size
    int fstat(int fd, stat_t* found)


cdef enum:
    # More ranges in one call gain nothing (measured), and this many times 4 KiB is GET_MAX.
    MAX_RANGES = 256
    # Others wait for their turn.
    COPIER_BYTES = 262144
    # A transfer with this much left is worth a second thread.
    SHARED_BYTES = 2097152
    # Linux: no process id has more bits.
    PID_MAX = 4194304


cdef struct Ranges:
    iovec of[MAX_RANGES + 1]
    uint32_t count


cdef struct Batch:
    Ranges far
    Ranges near
    uint64_t length             # with the word
    uint64_t word
    int pid
    char* mapped                # where the owner's memory from `far_base` on is here, or NULL
    uint64_t far_base
    bint large
    GetOp* op


cdef void cma_trial(Link* link, uint64_t pid) noexcept nogil:
    """Find out whether the peer, which says that it is `pid`, can be read without UCX.

    To be asked when a GET has worked.  A user who has UCX leave CMA alone means this as well.
    """
    cdef uint64_t word = 0
    if (pid > 0 and pid < PID_MAX and lanes_use(&link.rma, b"cma")
            and read_word(<int>pid, link.words_address, &word) and word == link.word0):
        link.cma_pid = <int>pid


cdef bint read_word(int pid, uint64_t address, uint64_t* word) noexcept nogil:
    cdef iovec near, far
    near.iov_base = word
    near.iov_len = sizeof(uint64_t)
    far.iov_base = <void*>address
    far.iov_len = sizeof(uint64_t)
    return process_vm_readv(pid, &near, 1, &far, 1, 0) == sizeof(uint64_t)


cdef void map_shared(RemoteMem* far, Link* link, int pid) noexcept nogil:
    """Map the memory of a cache whose owner shares it, if it is what it should be."""
    cdef char[32] path
    cdef stat_t found
    cdef uint64_t word = 0
    cdef void* mapped
    cdef int fd, seals
    if far.shared_length == 0:
        return
    snprintf(path, sizeof(path), b"/proc/%d/fd/%d", pid, far.shared_fd)
    # What the peer names may be a pipe, whose opening would wait for a writer.
    fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC)
    if fd < 0:
        return
    seals = fcntl(fd, F_GET_SEALS)
    # A file that can get shorter would be the end of who reads it.  The word is asked for last:
    # then it was that process whose descriptor this is.
    if (seals >= 0 and seals & F_SEAL_SHRINK and fstat(fd, &found) == 0
            and found.st_ino == far.shared_inode and found.st_size >= <off_t>far.shared_length
            and read_word(pid, link.words_address, &word) and word == link.word0):
        mapped = mmap(NULL, far.shared_length, PROT_READ, MAP_SHARED, fd, 0)
        if mapped != MAP_FAILED:
            far.mapped = mapped
    close(fd)


cdef void gather(const Batch* batch) noexcept nogil:
    """Copy what `far` names from where it is mapped; the word is not part of it."""
    cdef uint64_t left = batch.length - sizeof(uint64_t)
    cdef uint64_t far_done = 0, near_done = 0, length
    cdef uint32_t i = 0, j = 0
    cdef const char* source
    cdef char* target
    while left > 0:
        length = min(batch.far.of[i].iov_len - far_done, batch.near.of[j].iov_len - near_done)
        length = min(length, left)
        source = batch.mapped + (<uint64_t>batch.far.of[i].iov_base + far_done - batch.far_base)
        target = <char*>batch.near.of[j].iov_base + near_done
        if batch.large:
            land(target, source, length)
        else:
            memcpy(target, source, length)
        left -= length
        far_done += length
        near_done += length
        if far_done == batch.far.of[i].iov_len:
            i += 1
            far_done = 0
        if near_done == batch.near.of[j].iov_len:
            j += 1
            near_done = 0
    if batch.large:
        landed()


cdef inline void add(Ranges* ranges, uint64_t address, uint64_t length) noexcept nogil:
    cdef iovec* last
    if ranges.count > 0:
        last = &ranges.of[ranges.count - 1]
        if <uint64_t>last.iov_base + last.iov_len == address:
            last.iov_len += length
            return
    ranges.of[ranges.count].iov_base = <void*>address
    ranges.of[ranges.count].iov_len = length
    ranges.count += 1


cdef bint claim(Transfer* t, Batch* batch, uint64_t limit) noexcept nogil:
    """Fill `batch` with the next spans, at most `limit` bytes; False if there are none to claim."""
    cdef uint64_t source = 0, target = 0, length
    if t.due != TO_COPY:
        return False
    if not t.far.map_tried:
        t.far.map_tried = True
        map_shared(t.far, t.link, t.direct)
    batch.pid = t.direct
    batch.mapped = <char*>t.far.mapped
    batch.far_base = t.far.shared_base
    batch.large = lands_past_caches(t.total, t.dst_geo.block_len)
    batch.length = 0
    batch.far.count = 0
    batch.near.count = 0
    while batch.length < limit and batch.far.count < MAX_RANGES and batch.near.count < MAX_RANGES:
        # Spans are counted as the destination has them, whatever they are cut into on their way.
        t.spans += t.dst_cursor.run == 0
        length = cursor_run(&t.src_cursor, &t.src_geo, limit - batch.length, &source)
        length = cursor_run(&t.dst_cursor, &t.dst_geo, length, &target)
        add(&batch.far, source, length)
        add(&batch.near, target, length)
        cursor_advance(&t.src_cursor, &t.src_geo, length)
        cursor_advance(&t.dst_cursor, &t.dst_geo, length)
        batch.length += length
        if t.posted + batch.length == t.total:
            break
    t.posted += batch.length
    batch.op = &t.ring[(t.head + t.queued) % GET_RING]
    batch.op.end = t.posted
    batch.op.done = False
    t.queued += 1
    if t.posted == t.total or t.queued == GET_RING:
        transfer_due(t, NOTHING)
    t.copying += 1
    t.refs += 1
    add(&batch.far, word_address(t), sizeof(uint64_t))
    add(&batch.near, <uint64_t>&batch.word, sizeof(uint64_t))
    batch.length += sizeof(uint64_t)
    return True


cdef inline uint64_t word_address(const Transfer* t) noexcept nogil:
    return t.link.words_address + t.word_slot * sizeof(uint64_t)


cdef void book(Transfer* t, const Batch* batch, bint whole, bint told) noexcept nogil:
    """Take note of a batch that was read, or not: then `told` says whether its word was."""
    t.copying -= 1
    if t.state == RUNNING:
        if told and batch.word != t.word:
            transfer_word_gone(t)
        elif whole:
            batch.op.done = True
            t.link.bytes_direct += batch.length - sizeof(uint64_t)
            transfer_collect(t)
            transfer_advance(t, t.landed)
            if t.state == RUNNING and t.posted < t.total and t.queued < GET_RING:
                transfer_due(t, TO_COPY)
        elif told:
            transfer_end(t, ST_FAILED, UCS_OK,
                         b"memory of the cache, or of its destination, cannot be accessed")
        else:
            transfer_end(t, ST_FAILED, UCS_OK, b"the peer's process cannot be read any more")
    transfer_settle(t)
    transfer_unref(t)


cdef bint copy_batch(Transfer* t, uint64_t limit) noexcept nogil:
    """Copy a batch of `t`, giving up the lock meanwhile; False if there is nothing to copy."""
    cdef Core* core = t.core
    cdef Batch batch
    cdef uint64_t address
    cdef bint whole, told, denied
    if not claim(t, &batch, limit):
        return False
    address = word_address(t)
    core_unlock(core)
    if batch.mapped != NULL:
        gather(&batch)
        # The word after all of that, as the kernel does it in the other case.
        load_barrier()
        whole = told = read_word(batch.pid, address, &batch.word)
    else:
        whole = process_vm_readv(batch.pid, batch.near.of, batch.near.count, batch.far.of,
                                 batch.far.count, 0) == <ssize_t>batch.length
        told = whole or read_word(batch.pid, address, &batch.word)
    denied = not told and errno == EPERM
    core_lock(core)
    if denied:
        # Its permissions have changed for good: later pulls are streamed, where they may be.
        t.link.cma_pid = 0
        t.link.get_ok = False
    book(t, &batch, whole, told)
    return True


cdef bint cma_drive(Transfer* t) noexcept nogil:
    """Copy a batch of `t` for a caller that waits for it; False if there is none to copy.

    The engine's lock is given up meanwhile.
    """
    if t.total - t.posted >= SHARED_BYTES:
        core_wake_copier(t.core)
    return copy_batch(t, GET_MAX)


cdef bint serve(Link* link) noexcept nogil:
    """Copy a batch for one of the link's transfers; False if none needs it.

    The engine's lock is given up meanwhile, and the link may be gone afterwards.
    """
    cdef Transfer* first = link.due[TO_COPY]
    cdef Transfer* t = first
    while t != NULL:
        # A caller that waits for a small one copies it faster than it could be handed over.
        if t.drivers == 0 or t.total - t.posted >= SHARED_BYTES:
            link.due[TO_COPY] = t.due_next
            copy_batch(t, COPIER_BYTES)
            # The batch was booked under the lock that is held still: the link is there.
            if link.dirty:
                core_wake(link.core)
            return True
        t = t.due_next if t.due_next != first else NULL
    return False


cdef bint serve_links(Core* core) noexcept nogil:
    """Copy a batch for one of the links, in turn; False if there is nothing to copy."""
    cdef Link* link = core.next_copy
    cdef bint wrapped = False
    while core.n_to_copy > 0:
        if link == NULL:
            if wrapped:
                break
            wrapped = True
            link = core.first_link
        else:
            # Who takes a link off the list moves this on.
            core.next_copy = link.next
            if serve(link):
                return True
            link = core.next_copy
    return False


cdef void* cma_main(void* arg) noexcept nogil:
    """The copying thread: works for transfers that nobody waits for, or that are large."""
    cdef Core* core = <Core*>arg
    cdef RemoteMem* remote
    cdef uint64_t drained
    core_lock(core)
    while core.unmaps != NULL or not core.stop_copier:
        if core.unmaps != NULL:
            remote = core.unmaps
            core.unmaps = remote.next
            core_unlock(core)
            remote_free(remote)
            core_lock(core)
            continue
        if serve_links(core):
            core_unlock(core)
            core_lock(core)
            continue
        core.copier_asleep = True
        core_unlock(core)
        read(core.copier_fd, &drained, sizeof(drained))
        core_lock(core)
    core_unlock(core)
    return NULL
