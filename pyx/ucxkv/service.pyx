"""The service thread: one per engine, in native code from beginning to end.

It progresses the UCX workers, answers peers' requests, posts operations as windows open, runs the
timers (deadlines, fences, repairs) and sleeps on the workers' event descriptors when there is
nothing to do.  It never takes the GIL.
"""

from libc.stdint cimport uint64_t
from posix.unistd cimport read

from ucxkv.core cimport (
    CLOSED,
    FENCING,
    MAX_AM_WORKERS,
    ST_FAILED,
    ST_TIMEOUT,
    Core,
    Link,
    RemoteMem,
    Transfer,
    Worker,
    core_idle,
    core_lock,
    core_notify,
    core_timer,
    core_unlock,
)
from ucxkv.endpoint cimport link_unref, plane_fail, plane_step, remotes_forget
from ucxkv.get cimport get_plane_closed, get_pump, get_trial
from ucxkv.hold cimport holds_expire
from ucxkv.message cimport message_prove
from ucxkv.notice cimport notice_link_closed, notice_plane_closed, notice_pump
from ucxkv.pthread cimport now_ns, timespec, to_timespec
from ucxkv.push cimport push_link_closed, push_plane_closed, push_pump
from ucxkv.stream cimport stream_drop_serves, stream_plane_closed, stream_pump
from ucxkv.transfer cimport remote_unref, transfer_end, transfer_end_all
from ucxkv.ucp cimport (
    UCS_OK,
    ucp_rkey_destroy,
    ucp_worker_arm,
    ucp_worker_progress,
)


cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int ppoll(pollfd* fds, unsigned long count, const timespec* timeout, const void* sigmask)
    short POLLIN


cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef enum:
    PROGRESS_ROUNDS = 64
    # Wake-ups have been seen to go missing, so no sleep is unbounded; the busier, the shorter.
    SLEEP_IDLE_NS = 1000000000
    SLEEP_BUSY_NS = 5000000
    SLEEP_CLOSING_NS = 500000
    # A TCP connection whose peer has not answered yet is always ready to be written to, for UCX.
    VAIN_WAKES = 4
    SLEEP_VAIN_NS = 200000
    LINGER_NS = 100000000
    SLEEP_WATCHED_NS = 100000


cdef void prune_remotes(Link* link) noexcept nogil:
    """Let go of caches that were retired and are read by nobody."""
    cdef RemoteMem** place = &link.remotes
    cdef RemoteMem* remote
    cdef unsigned int i
    while place[0] != NULL:
        remote = place[0]
        if link.closed or (remote.retired and remote.refs == 1):
            for i in range(remote.n_regions):
                if remote.rkeys[i] != NULL:
                    ucp_rkey_destroy(remote.rkeys[i])
                    remote.rkeys[i] = NULL
            remote.link = NULL
            place[0] = remote.next
            remote_unref(remote)
        else:
            place = &remote.next


cdef void close_step(Link* link, uint64_t now) noexcept nogil:
    """Take a closing link apart.

    It counts as closed when nothing can be written or read for it any more; messages that the peer
    does not take may linger in buffers of our own until it does, or is gone.
    """
    transfer_end_all(link, ST_FAILED, b"the link was closed")
    link.am.wanted = False
    link.rma.wanted = False
    plane_fail(link, &link.am, UCS_OK)
    plane_fail(link, &link.rma, UCS_OK)
    if link.closed or link.rma.state != CLOSED or link.n_transfers > 0:
        return
    stream_drop_serves(link)
    push_link_closed(link)
    notice_link_closed(link)
    if link.linger_until == 0:
        link.linger_until = now + LINGER_NS
        core_timer(link.core, link.linger_until, True)
    if link.am.state == CLOSED or now >= link.linger_until:
        link.closed = True
        core_idle(link.core)
        core_notify(link.core)


cdef void expire_fences(Link* link, uint64_t now) noexcept nogil:
    """Close the RMA endpoint under operations that a fence has waited for long enough."""
    cdef Transfer* t = link.transfers
    cdef unsigned int left = link.n_transfers
    if link.drop_rma_at == 0 or now < link.drop_rma_at:
        return
    link.drop_rma_at = 0
    while left > 0:
        left -= 1
        if t.state == FENCING and t.outstanding > 0:
            plane_fail(link, &link.rma, UCS_OK)
            return
        t = t.link_next


cdef void link_step(Link* link, uint64_t now) noexcept nogil:
    """Everything that one link may have to do now."""
    link.dirty = False
    if link.closing:
        close_step(link, now)
    expire_fences(link, now)
    if plane_step(link, &link.am, now):
        stream_plane_closed(link)
        push_plane_closed(link)
        notice_plane_closed(link)
        link.dirty = True
    if plane_step(link, &link.rma, now):
        remotes_forget(link)
        get_plane_closed(link)
        link.dirty = True
    if link.closing:
        if not link.closed and link.am.state == CLOSED and link.rma.state == CLOSED:
            link.dirty = True
        return
    if link.connected:
        message_prove(link, now)
        get_trial(link, now)
        push_pump(link)
        stream_pump(link)
        get_pump(link)
        notice_pump(link)
    prune_remotes(link)


cdef void next_timer(Core* core, uint64_t when, uint64_t now) noexcept nogil:
    if when > now and when < core.next_deadline:
        core.next_deadline = when


cdef void run_timers(Core* core, uint64_t now) noexcept nogil:
    """End what is past its deadline and find out when to look again."""
    cdef Transfer* t = core.first_transfer
    cdef Transfer* following
    cdef Link* link = core.first_link
    cdef const char* late
    if now < core.next_deadline:
        return
    core.next_deadline = <uint64_t>-1
    holds_expire(core, now)
    while t != NULL:
        following = t.next
        if t.state < FENCING:
            if now >= t.deadline:
                late = b"the owner has not confirmed the notice"
                transfer_end(t, ST_TIMEOUT, UCS_OK, late if t.noticing else NULL)
            else:
                next_timer(core, t.deadline, now)
        t = following
    while link != NULL:
        link.dirty = True
        next_timer(core, link.drop_rma_at, now)
        next_timer(core, link.am.retry_at, now)
        next_timer(core, link.rma.retry_at, now)
        next_timer(core, link.trial_by, now)
        next_timer(core, link.linger_until, now)
        if not link.proven:
            next_timer(core, link.ping_at, now)
        link = link.next


cdef bint progress(Core* core) noexcept nogil:
    """One round over all workers; True if any of them did something."""
    cdef bint moved = False
    cdef int i
    for i in range(core.n_am):
        moved = progress_worker(&core.am[i]) or moved
    if core.rma.worker != NULL:
        moved = progress_worker(&core.rma) or moved
    return moved


cdef inline bint progress_worker(Worker* worker) noexcept nogil:
    if ucp_worker_progress(worker.worker) == 0:
        return False
    worker.vain = 0
    return True


cdef bint step_links(Core* core, uint64_t now) noexcept nogil:
    """Step the links that ask for it; True if any asks again."""
    cdef Link** place = &core.first_link
    cdef Link* link
    cdef bint again = False
    while place[0] != NULL:
        link = place[0]
        if link.dirty or core.n_closing > 0:
            link_step(link, now)
            again = again or link.dirty
        if link.closed and link.am.state == CLOSED and link.rma.state == CLOSED:
            prune_remotes(link)
            place[0] = link.next
            if core.next_copy == link:
                core.next_copy = link.next
            core.links[link.slot] = NULL
            link_unref(link)
        else:
            place = &link.next
    return again


cdef bint arm(Core* core) noexcept nogil:
    """True if every worker will raise its event descriptor; False if one has work already."""
    cdef int i
    for i in range(core.n_am):
        if ucp_worker_arm(core.am[i].worker) != UCS_OK:
            return False
    return core.rma.worker == NULL or ucp_worker_arm(core.rma.worker) == UCS_OK


cdef uint64_t sleep_limit(Core* core) noexcept nogil:
    cdef Link* link = core.first_link
    if core.n_closing > 0:
        return SLEEP_CLOSING_NS
    while link != NULL:
        # A trial may take for ever.
        if link.am.outstanding > 0 or link.rma.outstanding > <unsigned int>link.get_late:
            return SLEEP_BUSY_NS
        link = link.next
    return SLEEP_IDLE_NS


cdef void nap(Core* core, uint64_t now) noexcept nogil:
    """Sleep until a worker, another thread or a timer wants something; called with the lock."""
    cdef pollfd fds[MAX_AM_WORKERS + 2]
    cdef Worker* workers[MAX_AM_WORKERS + 2]
    cdef unsigned long count = 1, place
    cdef uint64_t until = now + sleep_limit(core), drained
    cdef timespec duration
    cdef int i
    if core.next_deadline < until:
        until = core.next_deadline
    if until <= now:
        return
    for i in range(core.n_am):
        workers[count] = &core.am[i]
        count += 1
    if core.rma.worker != NULL:
        workers[count] = &core.rma
        count += 1
    fds[0].fd = core.wake_fd
    fds[0].events = POLLIN
    for place in range(1, count):
        fds[place].fd = workers[place].event_fd
        fds[place].events = POLLIN
        fds[place].revents = 0
        if core.watchers > 0:
            # They look themselves, and being woken beside them would cost both.
            fds[place].fd = -1
            until = min(until, now + SLEEP_WATCHED_NS)
        elif workers[place].vain >= VAIN_WAKES:
            # Left alone this once.
            fds[place].fd = -1
            workers[place].vain -= 1
            until = min(until, now + SLEEP_VAIN_NS)
    core.asleep = True
    core.sleep_until = until
    core_unlock(core)
    duration = to_timespec(until - now)
    ppoll(fds, count, &duration, NULL)
    core_lock(core)
    for place in range(1, count):
        workers[place].vain += fds[place].revents != 0
    core.asleep = False
    core.sleep_until = 0
    read(core.wake_fd, &drained, sizeof(drained))


cdef bint all_closed(Core* core) noexcept nogil:
    """Have every link close; True when all have."""
    cdef Link* link = core.first_link
    cdef bint closed = True
    while link != NULL:
        link.closing = True
        link.dirty = True
        closed = closed and link.closed
        link = link.next
    return closed


cdef void* service_main(void* arg) noexcept nogil:
    cdef Core* core = <Core*>arg
    cdef uint64_t now
    cdef int rounds
    cdef bint moved, again
    core_lock(core)
    while True:
        rounds = 0
        moved = False
        while rounds < PROGRESS_ROUNDS and progress(core):
            moved = True
            rounds += 1
        now = now_ns()
        run_timers(core, now)
        again = step_links(core, now)
        if core.stop and all_closed(core):
            break
        if moved or again or now < core.awake_until or not arm(core):
            core_unlock(core)
            if not moved:
                sched_yield()
            core_lock(core)
            continue
        nap(core, now)
    core_unlock(core)
    return NULL
