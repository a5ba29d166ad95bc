"""The path "get": one-sided reads of a peer's memory.

Each transfer keeps a ring of GETs in flight, in stream order, and counts the bytes that have landed
without a gap.  What has landed is believed only after a later GET of the cache's generation word
has shown that the cache was still registered: see ``memory``.

All functions want the engine's lock to be held.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from ucxkv.cma cimport cma_trial
from ucxkv.core cimport (
    CLOSED,
    GET_MAX,
    GET_RING,
    GET_WINDOW,
    MAX_TRANSFERS,
    NOTHING,
    OPEN,
    OWN_WORDS,
    PATH_GET,
    RUNNING,
    ST_FAILED,
    TO_CHECK,
    TO_POST,
    WORD_PID,
    WORD_PROOF,
    GetOp,
    Link,
    RemoteMem,
    Transfer,
    core_notify,
    core_timer,
)
from ucxkv.endpoint cimport link_error, plane_fail
from ucxkv.spans cimport cursor_advance, cursor_run, cursor_seek
from ucxkv.transfer cimport (
    transfer_advance,
    transfer_collect,
    transfer_due,
    transfer_end,
    transfer_settle,
    transfer_unref,
    transfer_word_gone,
)
from ucxkv.ucp cimport (
    UCP_OP_ATTR_FIELD_CALLBACK,
    UCP_OP_ATTR_FIELD_MEMH,
    UCP_OP_ATTR_FIELD_USER_DATA,
    UCS_ERR_CANCELED,
    UCS_OK,
    UCS_PTR_IS_ERR,
    UCS_PTR_STATUS,
    ucp_ep_rkey_unpack,
    ucp_get_nbx,
    ucp_mem_h,
    ucp_request_free,
    ucp_request_param_t,
    ucp_rkey_h,
    ucp_send_nbx_callback_t,
    ucs_status_t,
)


cdef enum:
    TRIAL_NS = 500000000
    # A transfer gives up when this many endpoints in a row broke without one byte of progress.
    MAX_ERRORS = 4
    POSTS_A_TURN = 256


cdef bint post(Link* link, GetOp* op, void* buffer, uint64_t length, uint64_t remote,
               ucp_rkey_h rkey, ucp_mem_h memh, ucp_send_nbx_callback_t callback) noexcept nogil:
    """Post one GET; False if the endpoint broke."""
    cdef ucp_request_param_t param
    cdef void* request
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = (UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
                          | UCP_OP_ATTR_FIELD_MEMH)
    param.cb.send = callback
    param.user_data = op
    param.memh = memh
    op.link = link
    op.length = length
    op.busy = True
    op.done = False
    link.rma.outstanding += 1
    link.get_bytes += length
    if op.transfer != NULL:
        op.transfer.outstanding += 1
    request = ucp_get_nbx(link.rma.ep, buffer, length, remote, rkey, &param)
    if request == NULL:
        callback(NULL, UCS_OK, op)
    elif UCS_PTR_IS_ERR(request):
        callback(NULL, UCS_PTR_STATUS(request), op)
        return False
    return True


cdef bint over(GetOp* op, void* request, ucs_status_t status) noexcept nogil:
    """Book the end of one GET; True if it has landed."""
    cdef Link* link = op.link
    if request != NULL:
        ucp_request_free(request)
    op.busy = False
    link.rma.outstanding -= 1
    link.get_bytes -= op.length
    link.dirty = True
    if op.transfer != NULL:
        op.transfer.outstanding -= 1
    if status == UCS_OK:
        link.rma.backoff = 0
        return True
    # A cancelled operation is the echo of a close that was begun for its own reason.
    if status != UCS_ERR_CANCELED:
        plane_fail(link, &link.rma, status)
    return False


cdef void on_data(void* request, ucs_status_t status, void* user_data) noexcept nogil:
    cdef GetOp* op = <GetOp*>user_data
    cdef Transfer* t = op.transfer
    op.done = over(op, request, status)
    if t.state == RUNNING:
        transfer_collect(t)
        find_due(t)
    else:
        transfer_settle(t)


cdef void on_word(void* request, ucs_status_t status, void* user_data) noexcept nogil:
    cdef GetOp* op = <GetOp*>user_data
    cdef Transfer* t = op.transfer
    cdef bint landed = over(op, request, status)
    if t.state != RUNNING:
        transfer_settle(t)
    elif not landed:
        return
    elif t.core.scratch[t.index] != t.word:
        transfer_word_gone(t)
    else:
        t.verify_first = False
        # That may be its end.
        t.refs += 1
        transfer_advance(t, t.check_upto)
        find_due(t)
        transfer_unref(t)


cdef uint64_t* trial_words(Link* link) noexcept nogil:
    return &link.core.scratch[MAX_TRANSFERS + OWN_WORDS * link.slot]


cdef void on_trial(void* request, ucs_status_t status, void* user_data) noexcept nogil:
    cdef Link* link = (<GetOp*>user_data).link
    cdef bint landed = over(<GetOp*>user_data, request, status)
    link.reached = landed
    if link.get_trial == 1 or link.get_late:
        decide_trial(link, landed and trial_words(link)[WORD_PROOF] == link.word0)


cdef void decide_trial(Link* link, bint ok) noexcept nogil:
    link.get_trial = 2
    link.get_late = False
    link.get_ok = ok
    if ok:
        cma_trial(link, trial_words(link)[WORD_PID])
    else:
        link.rma.wanted = False
        plane_fail(link, &link.rma, UCS_OK)
    link.dirty = True
    core_notify(link.core)


cdef bint words_unpacked(Link* link) noexcept nogil:
    cdef ucs_status_t status
    if link.words_rkey == NULL:
        status = ucp_ep_rkey_unpack(link.rma.ep, link.words_rkey_packed, &link.words_rkey)
        if status != UCS_OK:
            link.words_rkey = NULL
            link_error(link, status)
            return False
    return True


cdef void get_trial(Link* link, uint64_t now) noexcept nogil:
    """Try each endpoint with a GET of the first words of the peer's table.

    The first answer tells whether GETs reach the peer.  A link does not wait long for it, but takes
    it whenever it comes.  Until it has come nothing else is posted: an endpoint that is still being
    connected keeps operations for as long as the peer does not answer, and fences would wait too.
    """
    if link.get_trial != 2:
        if link.trial_by == 0:
            link.trial_by = now + TRIAL_NS
            core_timer(link.core, link.trial_by, True)
        # Two hosts, or two containers, may have no transport for GETs in common.
        if link.rma.state == CLOSED and link.rma.error != UCS_OK:
            decide_trial(link, False)
        elif now >= link.trial_by and link.trial.busy:
            link.get_trial = 2
            link.get_late = True
            core_notify(link.core)
        elif now >= link.trial_by:
            decide_trial(link, False)
    if (not link.rma.wanted or link.rma.state != OPEN or link.rma.failed or link.reached
            or link.trial.busy):
        return
    if link.get_trial == 0:
        link.get_trial = 1
    if words_unpacked(link):
        trial_words(link)[WORD_PROOF] = 0
        post(link, &link.trial, trial_words(link), OWN_WORDS * sizeof(uint64_t),
             link.words_address, link.words_rkey, link.core.scratch_memh, on_trial)
    elif link.get_trial == 1:
        decide_trial(link, False)
    else:
        plane_fail(link, &link.rma, link.error)


cdef bint rkey_unpacked(Link* link, RemoteMem* remote, uint32_t region) noexcept nogil:
    cdef ucs_status_t status
    if remote.rkeys[region] == NULL:
        status = ucp_ep_rkey_unpack(link.rma.ep, remote.packed[region], &remote.rkeys[region])
        if status != UCS_OK:
            remote.rkeys[region] = NULL
            link_error(link, status)
            return False
    return True


cdef bint check_due(Transfer* t) noexcept nogil:
    if t.check.busy or t.noticing:
        return False
    if t.verify_first:
        return True
    if t.landed <= t.good:
        return False
    return t.landed == t.total or t.landed // t.layer_bytes != t.good // t.layer_bytes


cdef void find_due(Transfer* t) noexcept nogil:
    """Have done for it next what there is to do, if it is running."""
    if t.state != RUNNING:
        return
    if check_due(t):
        transfer_due(t, TO_CHECK)
    elif not t.verify_first and t.posted < t.total and t.queued < GET_RING:
        transfer_due(t, TO_POST)
    else:
        transfer_due(t, NOTHING)


cdef bint post_check(Link* link, Transfer* t) noexcept nogil:
    if not words_unpacked(link):
        transfer_end(t, ST_FAILED, link.error, b"the rkey of the generation words is unusable")
        return True
    t.check.transfer = t
    t.check_upto = t.landed
    return post(link, &t.check, &link.core.scratch[t.index], sizeof(uint64_t),
                link.words_address + t.word_slot * sizeof(uint64_t), link.words_rkey,
                link.core.scratch_memh, on_word)


cdef bint post_data(Link* link, Transfer* t) noexcept nogil:
    cdef uint64_t source = 0, target = 0, length, other
    cdef uint32_t tensor, region
    cdef GetOp* op
    # Spans are counted as the destination has them, whatever they are cut into on their way.
    t.spans += t.dst_cursor.run == 0
    length = cursor_run(&t.src_cursor, &t.src_geo, GET_MAX, &source)
    other = cursor_run(&t.dst_cursor, &t.dst_geo, length, &target)
    if other < length:
        length = other
    region = t.far.region_of[t.src_geo.first + t.src_cursor.tensor]
    if not rkey_unpacked(link, t.far, region):
        transfer_end(t, ST_FAILED, link.error, b"an rkey of the cache is unusable")
        return True
    tensor = t.dst_geo.first + t.dst_cursor.tensor
    cursor_advance(&t.src_cursor, &t.src_geo, length)
    cursor_advance(&t.dst_cursor, &t.dst_geo, length)
    op = &t.ring[(t.head + t.queued) % GET_RING]
    t.queued += 1
    t.posted += length
    op.transfer = t
    op.end = t.posted
    return post(link, op, <void*>target, length, source, t.far.rkeys[region],
                t.near.regions[t.near.region_of[tensor]].memh, on_data)


cdef void get_pump(Link* link) noexcept nogil:
    """Post what the windows allow, in turn for all transfers that have something to post."""
    cdef int budget = POSTS_A_TURN
    cdef Transfer* t
    cdef bint posted
    if link.rma.state != OPEN or not link.get_ok or not link.reached:
        return
    while not link.rma.failed:
        t = link.due[TO_CHECK]
        if t == NULL and link.get_bytes < GET_WINDOW:
            t = link.due[TO_POST]
        if t == NULL:
            return
        if budget == 0:
            # Where GETs complete at once no window fills: let others have the lock in between.
            link.dirty = True
            return
        budget -= 1
        # A callback may end the transfer, and with it the last reference, while it is posted.
        t.refs += 1
        if t.due == TO_CHECK:
            posted = post_check(link, t)
        else:
            link.due[TO_POST] = t.due_next
            posted = post_data(link, t)
        find_due(t)
        transfer_unref(t)
        if not posted:
            return


cdef void get_plane_closed(Link* link) noexcept nogil:
    """The endpoint is gone and nothing is in flight: what has not landed is posted again."""
    cdef Transfer* t = link.transfers
    cdef Transfer* following
    cdef uint32_t left = link.n_transfers
    while left > 0:
        left -= 1
        following = t.link_next
        if t.path == PATH_GET and t.state == RUNNING and not t.direct and not t.noticing:
            t.head = 0
            t.queued = 0
            t.posted = t.landed
            cursor_seek(&t.src_cursor, &t.src_geo, t.landed)
            cursor_seek(&t.dst_cursor, &t.dst_geo, t.landed)
            if link.rma.error != UCS_OK:
                t.errors = t.errors + 1 if t.landed == t.error_landed else 1
                t.error_landed = t.landed
                t.verify_first = True
            if t.errors >= MAX_ERRORS:
                transfer_end(t, ST_FAILED, link.rma.error,
                             b"reading from the peer's memory keeps failing")
            else:
                find_due(t)
        t = following
