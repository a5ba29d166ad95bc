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

from ucxkv.blocks cimport blocks_drop
from ucxkv.core cimport (
    DONE,
    FAILURES,
    FENCING,
    GET_RING,
    LATENCY_BUCKETS,
    MAX_TRANSFERS,
    NOTHING,
    PATH_GET,
    PATH_PUSH,
    PATH_STREAM,
    RUNNING,
    ST_CACHE_NOT_EXIST,
    ST_FAILED,
    ST_FEATURE_NOT_ENABLED,
    ST_HOLD_ENDED,
    ST_NOT_YET_LINK,
    ST_OUT_OF_MEMORY,
    ST_SUCCESS,
    ST_TIMEOUT,
    TO_COPY,
    TO_OFFER,
    TO_POST,
    TO_REQUEST,
    WAITING,
    Answer,
    Core,
    Link,
    RemoteMem,
    Told,
    Totals,
    Transfer,
    core_idle,
    core_notify,
    core_timer,
    core_wake_copier,
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


cdef extern from "<sys/mman.h>" nogil:
    int munmap(void* addr, size_t length)


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
    blocks_drop(t.src_blocks)
    blocks_drop(t.dst_blocks)
    free(t.notice)
    pthread_cond_destroy(&t.cond)
    pthread_mutex_destroy(&t.mutex)
    free(t)


cdef void remote_unref(RemoteMem* r) noexcept nogil:
    """Give one reference back; the last one frees (its rkeys go with the endpoint)."""
    r.refs -= 1
    if r.refs > 0:
        return
    if r.mapped != NULL and r.core.copier_running and not r.core.stop_copier:
        # Unmapping much takes long, and others want the lock.
        r.next = r.core.unmaps
        r.core.unmaps = r
        core_wake_copier(r.core)
    else:
        remote_free(r)


cdef void remote_free(RemoteMem* r) noexcept nogil:
    cdef uint32_t i
    if r.mapped != NULL:
        munmap(r.mapped, r.shared_length)
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


cdef void join_ring(Transfer* t) noexcept nogil:
    cdef Link* link = t.link
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


cdef void leave_ring(Transfer* t) noexcept nogil:
    cdef Link* link = t.link
    link.n_transfers -= 1
    if t.link_next == t:
        link.transfers = NULL
    else:
        t.link_prev.link_next = t.link_next
        t.link_next.link_prev = t.link_prev
        if link.transfers == t:
            link.transfers = t.link_next


cdef void leave_queue(Transfer* t) noexcept nogil:
    cdef Transfer** first = &t.link.due[t.due]
    if t.due_next == t:
        first[0] = NULL
    else:
        t.due_prev.due_next = t.due_next
        t.due_next.due_prev = t.due_prev
        if first[0] == t:
            first[0] = t.due_next


cdef void transfer_due(Transfer* t, uint32_t due) noexcept nogil:
    """Have that done for it next, after the others of its link that need the same."""
    cdef Transfer** first
    if t.due == due:
        return
    if t.due != NOTHING:
        leave_queue(t)
        t.core.n_to_copy -= t.due == TO_COPY
    t.due = due
    if due == NOTHING:
        return
    first = &t.link.due[due]
    if first[0] == NULL:
        t.due_prev = t
        t.due_next = t
        first[0] = t
    else:
        t.due_next = first[0]
        t.due_prev = first[0].due_prev
        t.due_prev.due_next = t
        t.due_next.due_prev = t
    if due == TO_COPY:
        t.core.n_to_copy += 1
    else:
        t.link.dirty = True


cdef void transfer_asked(Transfer* t, bint asked) noexcept nogil:
    """Note that the peer has been asked for a stream or offered a push, or that it knows of it no
    more."""
    cdef uint32_t* count = &t.link.n_offered if t.path == PATH_PUSH else &t.link.n_requested
    if t.requested == asked:
        return
    t.requested = asked
    if asked:
        count[0] += 1
        transfer_due(t, NOTHING)
    else:
        count[0] -= 1
        # Another one may be asked for now.
        t.link.dirty = True


cdef void transfer_ask(Transfer* t) noexcept nogil:
    """Have the peer asked for a stream, or offered a push, again if it was before."""
    transfer_asked(t, False)
    transfer_due(t, TO_OFFER if t.path == PATH_PUSH else TO_REQUEST)


cdef void transfer_release(Transfer* t) noexcept nogil:
    """Offer a push that was withheld."""
    t.withheld = False
    transfer_ask(t)


cdef void transfer_end_all(Link* link, uint32_t status, const char* reason) noexcept nogil:
    """End all transfers of a link."""
    cdef Transfer* t = link.transfers
    cdef Transfer* following
    cdef uint32_t left = link.n_transfers
    while left > 0:
        left -= 1
        following = t.link_next
        transfer_end(t, status, UCS_OK, reason)
        t = following


cdef void transfer_begin(Transfer* t, Link* link) noexcept nogil:
    """Put `t`, whose memory and geometry are set, on its link."""
    t.link = link
    store_state(&t.state, RUNNING, __ATOMIC_RELEASE)
    if t.path == PATH_PUSH:
        t.near.pushes += 1
    else:
        t.near.pulls += 1
    t.far.refs += 1
    t.far.active += 1
    join_ring(t)
    if t.offer:
        link.n_answering += 1
    t.direct = link.cma_pid if t.path == PATH_GET else 0
    link.dirty = True
    if t.total == 0:
        landed(t)
    elif t.path != PATH_GET:
        if not t.withheld:
            transfer_ask(t)
    elif t.direct:
        transfer_due(t, TO_COPY)
        if t.offer:
            core_wake_copier(t.core)
    else:
        transfer_due(t, TO_POST)


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
    if good <= t.good or t.state != RUNNING:
        return
    t.good = good
    if good == t.total:
        landed(t)
    elif good // t.layer_bytes != t.layers_done:
        show_layers(t, <uint32_t>(good // t.layer_bytes))


cdef void transfer_word_gone(Transfer* t) noexcept nogil:
    """What has landed last may be another's: its word was changed before the memory was reused."""
    if t.held:
        transfer_end(t, ST_HOLD_ENDED, UCS_OK, b"its hold has ended")
    else:
        transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK, b"its owner has unregistered it")


cdef void show_layers(Transfer* t, uint32_t layers) noexcept nogil:
    pthread_mutex_lock(&t.mutex)
    store_layers(&t.layers_done, layers, __ATOMIC_RELEASE)
    signal_waiters(t)
    pthread_mutex_unlock(&t.mutex)


cdef void landed(Transfer* t) noexcept nogil:
    """All bytes are in place: the end, unless its owner has to be told first."""
    cdef Link* link = t.link
    if t.notice == NULL:
        transfer_end(t, ST_SUCCESS, UCS_OK, NULL)
        return
    t.noticing = True
    transfer_due(t, NOTHING)
    transfer_asked(t, False)
    # Its owner may have the memory back meanwhile.
    release_far(t)
    show_layers(t, t.layers)
    t.notice.prev = link.last_told
    if link.last_told != NULL:
        link.last_told.next = t.notice
    else:
        link.first_told = t.notice
    link.last_told = t.notice
    link.dirty = True


cdef void release_far(Transfer* t) noexcept nogil:
    t.far.active -= 1
    if t.far.retired and t.far.active == 0:
        core_notify(t.core)


cdef void told_free(Link* link, Told* told) noexcept nogil:
    """Take what a link had to tell off its list."""
    if told.prev != NULL:
        told.prev.next = told.next
    else:
        link.first_told = told.next
    if told.next != NULL:
        told.next.prev = told.prev
    else:
        link.last_told = told.prev
    free(told)


cdef void leave_notice(Transfer* t) noexcept nogil:
    if t.notice == NULL:
        return
    # What was sent once has a number that the owner waits for: it is seen through to the end.
    if t.notice.number == 0:
        told_free(t.link, t.notice)
    else:
        t.notice.transfer = NULL
    t.notice = NULL


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
    transfer_due(t, NOTHING)
    store_state(&t.state, FENCING, __ATOMIC_RELEASE)
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


cdef int failure_kind(uint32_t status) noexcept nogil:
    """Where failures with that status are counted: an index into Totals.failures."""
    if status == ST_CACHE_NOT_EXIST:
        return 1
    if status == ST_NOT_YET_LINK:
        return 2
    if status == ST_FEATURE_NOT_ENABLED:
        return 3
    if status == ST_TIMEOUT:
        return 4
    if status == ST_OUT_OF_MEMORY:
        return 5
    if status == ST_HOLD_ENDED:
        return 6
    return 0


FAILURE_STATUS = (<uint32_t>ST_FAILED, ST_CACHE_NOT_EXIST, ST_NOT_YET_LINK, ST_FEATURE_NOT_ENABLED,
                  ST_TIMEOUT, ST_OUT_OF_MEMORY, ST_HOLD_ENDED)
assert len(FAILURE_STATUS) == FAILURES


cdef dict totals_dict(const Totals* totals):
    """As Python sees them: failures by status value, the number of latencies near each ns."""
    cdef int i
    latency = {}
    for i in range(LATENCY_BUCKETS):
        if totals.latency[i]:
            # Inverse of the bucket's computation: the middle of what falls into it.
            octave, step = divmod(i, 8)
            if i >= 16:
                octave, step = octave - 1, step + 8
            else:
                octave, step = 0, i
            latency[(step + 0.5) * (1 << octave)] = totals.latency[i]
    return {
        "transfers": totals.transfers,
        "spans": totals.spans,
        "bytes_get": totals.bytes_get,
        "bytes_stream": totals.bytes_stream,
        "bytes_pushed": totals.bytes_pushed,
        "bytes_served": totals.bytes_served,
        "failures": {
            status: totals.failures[i]
            for i, status in enumerate(FAILURE_STATUS) if totals.failures[i]
        },
        "latency_ns": latency,
        "latency_sum_ns": totals.latency_sum,
    }


cdef void count_end(const Transfer* t, Totals* totals) noexcept nogil:
    cdef uint64_t ns = t.ended - t.submitted
    cdef uint32_t octave = 0, bucket
    totals.transfers += 1
    if t.status != ST_SUCCESS:
        totals.failures[failure_kind(t.status)] += 1
        return
    totals.spans += t.spans
    if t.path == PATH_GET:
        totals.bytes_get += t.total
    elif t.path == PATH_STREAM:
        totals.bytes_stream += t.total
    else:
        totals.bytes_pushed += t.total
    while (ns >> octave) >= 16:
        octave += 1
    bucket = octave * 8 + <uint32_t>(ns >> octave)
    if bucket >= LATENCY_BUCKETS:
        bucket = LATENCY_BUCKETS - 1
    totals.latency[bucket] += 1
    totals.latency_sum += ns


cdef void leave_link(Transfer* t) noexcept nogil:
    cdef Link* link = t.link
    leave_ring(t)
    transfer_asked(t, False)
    link.dirty = True
    if link.watched and link.n_transfers == 0:
        core_notify(t.core)
    if t.noticing:
        leave_notice(t)
    else:
        release_far(t)
    if t.path == PATH_PUSH:
        t.near.pushes -= 1
    else:
        t.near.pulls -= 1
    if t.near.retiring or t.offer:
        core_idle(t.core)
    if t.offer:
        link.n_answering -= 1
        link.blocks_held -= t.blocks_held
        answer_later(link, t.offer, t.status, t.path, t.spans)


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
    # What answers a peer's offer is counted as the peer's push.
    if not t.offer:
        count_end(t, &core.totals)
        if t.link != NULL:
            count_end(t, &t.link.totals)
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
    if t.status == ST_SUCCESS:
        store_layers(&t.layers_done, t.layers, __ATOMIC_RELEASE)
    # Last: whoever looks without the lock takes what it finds beside it.
    store_state(&t.state, DONE, __ATOMIC_RELEASE)
    signal_waiters(t)
    pthread_mutex_unlock(&t.mutex)
    transfer_unref(t)
