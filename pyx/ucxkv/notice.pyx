"""Notices: what a puller tells the owner of the memory when its pull has completed.

A pull with a notice ends when the owner's service thread has queued the notice for its application.
NOTICE carries it, with a number that counts up within the link, and the word of the hold that ends
with it; NOTED confirms all up to a number.  The link outlives its endpoints: when one breaks, what
is not confirmed is sent again over the next, with the same numbers, and the owner takes only what
is newer than the last it has seen.

The owner keeps one queue in the order of arrival.  Its first `cap_notices` are confirmed.  Those
behind them wait, and so do their pullers, of which each link sends at most NOTICE_WINDOW before it
has to be confirmed: nothing is ever refused, and the queue is bounded.  A link that closes takes
what it has waiting with it, since the pulls have failed.  A notice that has been sent
is seen through even if its transfer has timed out meanwhile, so that numbers have no gaps.

All functions want the engine's lock to be held.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from posix.unistd cimport getpid, read, write

from ucxkv.errors import LlmError

from ucxkv.core cimport (
    NOTICE_MAX,
    NOTICE_WINDOW,
    OPEN,
    ST_SUCCESS,
    Core,
    Link,
    Notice,
    SendOp,
    Told,
    Transfer,
    core_lock,
    core_unlock,
    core_wake,
    send_free,
    send_new,
)
from ucxkv.endpoint cimport plane_fail
from ucxkv.hold cimport hold_noticed
from ucxkv.message cimport (
    AM_NOTED,
    AM_NOTICE,
    Handler,
    Head,
    message_handlers,
    message_head,
    message_link,
    message_send,
    message_send_head,
)
from ucxkv.transfer cimport told_free, transfer_end
from ucxkv.ucp cimport (
    UCS_ERR_NO_MEMORY,
    UCS_OK,
    ucp_am_recv_param_t,
    ucp_worker_h,
    ucs_status_t,
)


cdef struct NoticeMessage:
    Head head                   # its transfer is the notice's number
    uint64_t word               # of the hold that ends with it, 0: none
    uint32_t word_slot


# --- puller --------------------------------------------------------------------------------------

cdef bint send_notice(Link* link, Told* told) noexcept nogil:
    cdef SendOp* op = send_new(link.core)
    cdef NoticeMessage* message
    if op == NULL:
        return False
    # It may be confirmed over another endpoint, and freed, before UCX has sent this.
    op.payload = malloc(told.length + 1)
    if op.payload == NULL:
        send_free(link.core, op)
        return False
    memcpy(op.payload, told + 1, told.length)
    if told.number == 0:
        link.notices_sent += 1
        told.number = link.notices_sent
    told.sent = True
    message = <NoticeMessage*>op.header
    message_head(&message.head, link, told.number)
    message.word = told.word
    message.word_slot = told.word_slot
    op.header_length = sizeof(NoticeMessage)
    message_send(link, AM_NOTICE, op, op.payload, told.length)
    return True


cdef void pump_told(Link* link) noexcept nogil:
    cdef Told* told = link.first_told
    while told != NULL and not link.am.failed:
        if not told.sent:
            if (told.number == 0
                    and link.notices_sent - link.notices_noted >= NOTICE_WINDOW):
                return
            if not send_notice(link, told):
                # Out of memory: tried again when something else moves the link, or never, and then
                # the deadlines decide.
                return
        told = told.next


cdef ucs_status_t on_noted(void* arg, const void* header, size_t header_length, void* data,
                           size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Head head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &head, sizeof(Head),
                                   param)
    cdef Told* told
    cdef Transfer* t
    if link == NULL or head.transfer > link.notices_sent:
        return UCS_OK
    if head.transfer > link.notices_noted:
        link.notices_noted = head.transfer
    told = link.first_told
    while told != NULL and told.number != 0 and told.number <= link.notices_noted:
        t = told.transfer
        told_free(link, told)
        if t != NULL:
            t.notice = NULL
            transfer_end(t, ST_SUCCESS, UCS_OK, NULL)
        told = link.first_told
    link.dirty = True
    return UCS_OK


# --- owner ---------------------------------------------------------------------------------------

cdef ucs_status_t on_notice(void* arg, const void* header, size_t header_length, void* data,
                            size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef NoticeMessage message
    cdef Core* core = <Core*>arg
    cdef Link* link = message_link(core, header, header_length, &message, sizeof(NoticeMessage),
                                   param)
    cdef Notice* notice
    cdef uint64_t one = 1, number
    if link == NULL or length > NOTICE_MAX:
        return UCS_OK
    number = message.head.transfer
    if number <= link.notices_seen:
        # Sent again: it may be the confirmation that was lost.
        link.noted_due = True
        link.dirty = True
        return UCS_OK
    if number - link.notices_queued > NOTICE_WINDOW:
        return UCS_OK
    notice = <Notice*>malloc(sizeof(Notice) + length)
    if notice == NULL:
        # Confirming a later one would confirm this one too: have them all sent again.
        plane_fail(link, &link.am, UCS_ERR_NO_MEMORY)
        return UCS_OK
    link.notices_seen = number
    notice.next = NULL
    notice.link = link
    notice.cluster_id = link.cluster_id
    notice.number = number
    notice.length = <uint32_t>length
    memcpy(notice + 1, data, length)
    if message.word:
        hold_noticed(link, message.word_slot, message.word)
    if core.last_notice == NULL:
        core.first_notice = notice
        write(core.notice_fd, &one, sizeof(one))
    else:
        core.last_notice.next = notice
    core.last_notice = notice
    if core.next_notice == NULL:
        core.next_notice = notice
    core.n_notices += 1
    core.notices_received += 1
    admit(core)
    return UCS_OK


cdef void admit(Core* core) noexcept nogil:
    """Confirm what the queue has room for."""
    cdef Notice* notice
    while core.next_notice != NULL and core.n_queued < core.cap_notices:
        notice = core.next_notice
        core.next_notice = notice.next
        core.n_queued += 1
        notice.link.notices_queued = notice.number
        notice.link.noted_due = True
        notice.link.dirty = True
        notice.link = NULL


cdef object notice_take(Core* core):
    """The oldest notice as (cluster id, bytes), or None."""
    cdef Notice* notice
    cdef uint64_t drained
    if core.pid != getpid():
        # The descriptor is the parent's too.
        raise LlmError("these notices belong to the parent process: a forked child has none")
    with nogil:
        core_lock(core)
        notice = core.first_notice
        if notice != NULL:
            core.first_notice = notice.next
            core.n_notices -= 1
            core.n_queued -= 1
            if core.first_notice == NULL:
                core.last_notice = NULL
                read(core.notice_fd, &drained, sizeof(drained))
            admit(core)
            core_wake(core)
        core_unlock(core)
    if notice == NULL:
        return None
    try:
        return notice.cluster_id, PyBytes_FromStringAndSize(<char*>(notice + 1), notice.length)
    finally:
        free(notice)


cdef void notices_forget(Core* core) noexcept nogil:
    """Free what nobody will take, and wake who waits for notices."""
    cdef Notice* notice
    cdef uint64_t one = 1
    while core.first_notice != NULL:
        notice = core.first_notice
        core.first_notice = notice.next
        free(notice)
    core.last_notice = NULL
    core.next_notice = NULL
    core.n_notices = 0
    core.n_queued = 0
    write(core.notice_fd, &one, sizeof(one))


# --- the plane -----------------------------------------------------------------------------------

cdef void notice_pump(Link* link) noexcept nogil:
    if link.am.state != OPEN or link.am.failed:
        return
    pump_told(link)
    if link.noted_due and not link.am.failed:
        link.noted_due = not message_send_head(link, AM_NOTED, link.notices_queued, 0)


cdef void notice_plane_closed(Link* link) noexcept nogil:
    """What has been sent may be lost: it is sent again, and so are confirmations."""
    cdef Told* told = link.first_told
    while told != NULL:
        told.sent = False
        told = told.next
    link.noted_due = link.notices_queued > 0


cdef void notice_link_closed(Link* link) noexcept nogil:
    """What is confirmed goes to the application all the same.

    The others are forgotten: their pulls have failed, and a peer that links again and again would
    fill the queue without bound.
    """
    cdef Core* core = link.core
    cdef Notice** place = &core.first_notice
    cdef Notice* notice
    cdef uint64_t drained
    while link.first_told != NULL:
        told_free(link, link.first_told)
    core.last_notice = NULL
    core.next_notice = NULL
    while place[0] != NULL:
        notice = place[0]
        if notice.link == link:
            place[0] = notice.next
            core.n_notices -= 1
            free(notice)
            continue
        if notice.link != NULL and core.next_notice == NULL:
            core.next_notice = notice
        core.last_notice = notice
        place = &notice.next
    if core.first_notice == NULL:
        read(core.notice_fd, &drained, sizeof(drained))


cdef ucs_status_t notice_install(Core* core, ucp_worker_h worker) noexcept nogil:
    cdef Handler[2] handlers
    handlers[0] = Handler(AM_NOTICE, on_notice)
    handlers[1] = Handler(AM_NOTED, on_noted)
    return message_handlers(core, worker, handlers, 2)
