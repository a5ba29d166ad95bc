"""The life of one transfer, whatever its path.

A transfer is created with its deadline, then submitted to a link, and ends exactly once.  Its end
is decided by :c:func:`transfer_end`; if UCX still owes completions of operations that could write
into local memory it is FENCING until the last of them has come, and only then DONE: whoever waits
for it learns of its end when nothing can be written on its behalf any more.

All functions want the engine's lock to be held.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport strncpy
from posix.unistd cimport close, write

from ucxkv.core cimport (
    DONE,
    FENCING,
    GET_RING,
    LATENCY_BUCKETS,
    MAX_TRANSFERS,
    PATH_GET,
    PATH_PUSH,
    PATH_STREAM,
    RUNNING,
    ST_CACHE_NOT_EXIST,
    ST_NOT_YET_LINK,
    ST_SUCCESS,
    ST_TIMEOUT,
    WAITING,
    Answer,
    Core,
    Link,
    RemoteMem,
    Transfer,
    core_idle,
    core_notify,
    core_timer,
)
from ucxkv.pthread cimport (
    CLOCK_MONOTONIC,
    now_ns,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_init,
    pthread_condattr_destroy,
    pthread_condattr_init,
    pthread_condattr_setclock,
    pthread_condattr_t,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from ucxkv.ucp cimport UCS_OK, ucs_status_t


cdef enum:
    # How long a fence lets operations in flight end by themselves (on one host they always do)
    # before it closes the endpoint under them, which also interrupts the neighbours.
    FENCE_GRACE_NS = 10000000


cdef Transfer* transfer_new(Core* core, uint64_t deadline) noexcept nogil:
    """A transfer in state WAITING with one reference for the caller and one for the engine."""
    cdef Transfer* t
    cdef pthread_condattr_t attr
    if core.n_free_transfers == 0:
        return NULL
    t = <Transfer*>calloc(1, sizeof(Transfer))
    if t == NULL:
        return NULL
    t.core = core
    t.refs = 2
    t.state = WAITING
    t.deadline = deadline
    t.submitted = now_ns()
    t.event_fd = -1
    pthread_mutex_init(&t.mutex, NULL)
    pthread_condattr_init(&attr)
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC)
    pthread_cond_init(&t.cond, &attr)
    pthread_condattr_destroy(&attr)
    core.n_free_transfers -= 1
    t.index = core.free_transfers[core.n_free_transfers]
    transfer_renumber(t)
    core.transfers[t.index] = t
    t.next = core.first_transfer
    if t.next != NULL:
        t.next.prev = t
    core.first_transfer = t
    return t


cdef void transfer_unref(Transfer* t) noexcept nogil:
    t.refs -= 1
    if t.refs > 0:
        return
    if t.event_fd >= 0:
        close(t.event_fd)
    free(t.src_blocks)
    free(t.dst_blocks)
    pthread_cond_destroy(&t.cond)
    pthread_mutex_destroy(&t.mutex)
    free(t)


cdef void remote_unref(RemoteMem* r) noexcept nogil:
    """Give one reference back; the last one frees (its rkeys go with the endpoint)."""
    cdef uint32_t i
    r.refs -= 1
    if r.refs > 0:
        return
    if r.packed != NULL:
        for i in range(r.n_regions):
            free(r.packed[i])
    free(r.packed)
    free(r.rkeys)
    free(r.addrs)
    free(r.region_of)
    free(r)


cdef uint64_t transfer_number(const Transfer* t) noexcept nogil:
    """What names this attempt on the wire: late chunks of an earlier one do not match it."""
    return (<uint64_t>t.attempt << 32) | t.index


cdef void transfer_renumber(Transfer* t) noexcept nogil:
    t.core.attempts += 1
    t.attempt = t.core.attempts


cdef Transfer* transfer_find(Core* core, Link* link, uint64_t number) noexcept nogil:
    cdef uint32_t index = <uint32_t>number
    cdef Transfer* t
    if index >= MAX_TRANSFERS:
        return NULL
    t = core.transfers[index]
    if t == NULL or t.link != link or t.attempt != number >> 32 or t.state != RUNNING:
        return NULL
    return t


cdef void transfer_begin(Transfer* t, Link* link) noexcept nogil:
    """Put `t`, whose memory and geometry are set, on its link."""
    t.link = link
    t.state = RUNNING
    if t.path == PATH_PUSH:
        t.near.pushes += 1
    else:
        t.near.pulls += 1
    t.far.refs += 1
    t.far.active += 1
    link.n_transfers += 1
    if link.transfers == NULL:
        t.link_prev = t
        t.link_next = t
        link.transfers = t
    else:
        t.link_next = link.transfers
        t.link_prev = link.transfers.link_prev
        t.link_prev.link_next = t
        t.link_next.link_prev = t
    t.direct = link.cma_pid if t.path == PATH_GET else 0
    t.core.n_direct += t.direct != 0
    link.dirty = True
    if t.total == 0:
        transfer_end(t, ST_SUCCESS, UCS_OK, NULL)


cdef void signal_waiters(Transfer* t) noexcept nogil:
    cdef uint64_t one = 1
    pthread_cond_broadcast(&t.cond)
    if t.event_fd >= 0 and t.state == DONE:
        write(t.event_fd, &one, sizeof(one))


cdef void transfer_collect(Transfer* t) noexcept nogil:
    """Count the bytes of the ring that have landed without a gap."""
    while t.queued > 0 and t.ring[t.head].done:
        t.landed = t.ring[t.head].end
        t.ring[t.head].done = False
        t.head = (t.head + 1) % GET_RING
        t.queued -= 1


cdef void transfer_advance(Transfer* t, uint64_t good) noexcept nogil:
    """The first `good` bytes of the stream are in place and known to be right."""
    cdef uint32_t layers
    if good <= t.good or t.state != RUNNING:
        return
    t.good = good
    if good == t.total:
        transfer_end(t, ST_SUCCESS, UCS_OK, NULL)
        return
    layers = <uint32_t>(good // t.layer_bytes)
    if layers != t.layers_done:
        pthread_mutex_lock(&t.mutex)
        t.layers_done = layers
        signal_waiters(t)
        pthread_mutex_unlock(&t.mutex)


cdef void transfer_end(Transfer* t, uint32_t status, ucs_status_t ucs,
                       const char* reason) noexcept nogil:
    """Decide how `t` ends; what was decided first stays."""
    if t.state == DONE or t.state == FENCING:
        return
    t.status = status
    t.ucs = ucs
    if reason != NULL:
        strncpy(t.reason, reason, sizeof(t.reason) - 1)
    if t.state == RUNNING and t.path != PATH_GET and t.requested and status != ST_SUCCESS:
        cancel_later(t.link, transfer_number(t))
    t.state = FENCING
    if t.outstanding > 0:
        t.fence_by = now_ns() + FENCE_GRACE_NS
        if t.link.drop_rma_at == 0 or t.fence_by < t.link.drop_rma_at:
            t.link.drop_rma_at = t.fence_by
        core_timer(t.core, t.fence_by, True)
    transfer_settle(t)


cdef void cancel_later(Link* link, uint64_t number) noexcept nogil:
    # When the list is full the owner streams on into the void: harmless, the number is dead.
    if link.n_cancels < link.cap_cancels:
        link.cancels[link.n_cancels] = number
        link.n_cancels += 1
    link.dirty = True


cdef void count_end(Transfer* t) noexcept nogil:
    cdef uint64_t ns = t.ended - t.submitted
    cdef uint32_t octave = 0, bucket
    t.core.totals.transfers += 1
    if t.status == ST_SUCCESS:
        t.core.totals.bytes += t.total
        t.core.totals.spans += t.spans
        while (ns >> octave) >= 16:
            octave += 1
        bucket = octave * 8 + <uint32_t>(ns >> octave)
        if bucket >= LATENCY_BUCKETS:
            bucket = LATENCY_BUCKETS - 1
        t.core.totals.latency[bucket] += 1
    elif t.status == ST_CACHE_NOT_EXIST:
        t.core.totals.not_exist += 1
    elif t.status == ST_TIMEOUT:
        t.core.totals.timeouts += 1
    elif t.status == ST_NOT_YET_LINK:
        t.core.totals.not_linked += 1
    else:
        t.core.totals.failed += 1


cdef void leave_link(Transfer* t) noexcept nogil:
    cdef Link* link = t.link
    if t.link_next == t:
        link.transfers = NULL
    else:
        t.link_prev.link_next = t.link_next
        t.link_next.link_prev = t.link_prev
        if link.transfers == t:
            link.transfers = t.link_next
    link.n_transfers -= 1
    t.core.n_direct -= t.direct != 0
    link.dirty = True
    if link.watched and link.n_transfers == 0:
        core_notify(t.core)
    t.far.active -= 1
    if t.far.retired and t.far.active == 0:
        core_notify(t.core)
    if t.path == PATH_PUSH:
        t.near.pushes -= 1
    else:
        t.near.pulls -= 1
    if t.near.retiring or t.offer:
        core_idle(t.core)
    if t.offer:
        answer_later(link, t.offer, t.status, t.path, t.spans)
    if t.status == ST_SUCCESS:
        if t.path == PATH_GET:
            link.bytes_get += t.total
        elif t.path == PATH_STREAM:
            link.bytes_stream += t.total
        else:
            link.bytes_pushed += t.total


cdef void answer_later(Link* link, uint64_t offer, uint32_t status, uint32_t path,
                       uint64_t spans) noexcept nogil:
    """Tell the sender of an offer how it went; unsent for want of memory, its deadline decides."""
    cdef Answer* grown
    if link.n_answers == link.cap_answers:
        grown = <Answer*>realloc(link.answers, (2 * link.cap_answers + 16) * sizeof(Answer))
        if grown == NULL:
            return
        link.answers = grown
        link.cap_answers = 2 * link.cap_answers + 16
    link.answers[link.n_answers].number = offer
    link.answers[link.n_answers].status = status
    link.answers[link.n_answers].path = path
    link.answers[link.n_answers].spans = spans
    link.n_answers += 1
    link.dirty = True


cdef void transfer_settle(Transfer* t) noexcept nogil:
    """Finish a transfer whose end is decided as soon as nothing of it is in flight."""
    cdef Core* core = t.core
    if t.state != FENCING or t.outstanding > 0 or t.copying > 0:
        return
    t.ended = now_ns()
    if t.link != NULL:
        leave_link(t)
    if not t.offer:
        count_end(t)
    core.transfers[t.index] = NULL
    core.free_transfers[core.n_free_transfers] = t.index
    core.n_free_transfers += 1
    if t.prev != NULL:
        t.prev.next = t.next
    else:
        core.first_transfer = t.next
    if t.next != NULL:
        t.next.prev = t.prev
    if t.far != NULL:
        remote_unref(t.far)
    pthread_mutex_lock(&t.mutex)
    t.state = DONE
    if t.status == ST_SUCCESS:
        t.layers_done = t.layers
    signal_waiters(t)
    pthread_mutex_unlock(&t.mutex)
    transfer_unref(t)
