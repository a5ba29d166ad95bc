"""Messages between linked engines: active messages of UCX over a link's streaming endpoint.

Every message begins with a :c:struct:`Head`: the receiving link's slot and token, without which it
is dropped, and the number of the transfer it is about.  Which messages there are is told where they
are handled: ``stream``, ``push`` and ``notice``; here are PING and PONG, which prove that a
streaming endpoint works in both directions.  A PING has, instead of a transfer's number, how often
its sender had to open an endpoint anew.

All functions want the engine's lock to be held.
"""

from libc.stdint cimport int16_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from ucxkv.core cimport (
    MAX_LINKS,
    OPEN,
    REQUEST_BLOCKS,
    Core,
    Link,
    SendOp,
    Serve,
    core_notify,
    core_timer,
    send_free,
    send_new,
)
from ucxkv.endpoint cimport plane_fail
from ucxkv.spans cimport Geometry
from ucxkv.ucp cimport (
    UCP_AM_FLAG_WHOLE_MSG,
    UCP_AM_HANDLER_PARAM_FIELD_ARG,
    UCP_AM_HANDLER_PARAM_FIELD_CB,
    UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
    UCP_AM_HANDLER_PARAM_FIELD_ID,
    UCP_AM_RECV_ATTR_FLAG_RNDV,
    UCP_AM_SEND_FLAG_EAGER,
    UCP_OP_ATTR_FIELD_CALLBACK,
    UCP_OP_ATTR_FIELD_FLAGS,
    UCP_OP_ATTR_FIELD_USER_DATA,
    UCS_ERR_CANCELED,
    UCS_OK,
    UCS_PTR_IS_ERR,
    UCS_PTR_STATUS,
    ucp_am_handler_param_t,
    ucp_am_recv_param_t,
    ucp_am_send_nbx,
    ucp_request_free,
    ucp_request_param_t,
    ucp_worker_h,
    ucp_worker_set_am_recv_handler,
    ucs_status_t,
)


cdef enum:
    PING_AGAIN_NS = 200000000


cdef void on_sent(void* request, ucs_status_t status, void* user_data) noexcept nogil:
    cdef SendOp* op = <SendOp*>user_data
    cdef Link* link = op.link
    cdef Core* core = link.core
    cdef Serve* serve = op.serve
    if request != NULL:
        ucp_request_free(request)
    link.am.outstanding -= 1
    link.dirty = True
    if status != UCS_OK and status != UCS_ERR_CANCELED:
        plane_fail(link, &link.am, status)
    if core.starved and op.buffer != NULL:
        core.starved = False
        mark_all(core)
    if serve != NULL:
        link.stream_bytes -= op.length
        serve.outstanding -= 1
        if serve.orphan and serve.outstanding == 0:
            free(serve)
    send_free(core, op)


cdef void mark_all(Core* core) noexcept nogil:
    cdef Link* link = core.first_link
    while link != NULL:
        link.dirty = True
        link = link.next


cdef void message_send(Link* link, unsigned int am, SendOp* op, const void* payload,
                       uint64_t length) noexcept nogil:
    """Hand `op`, whose header is filled, to UCX; it comes back through on_sent."""
    cdef ucp_request_param_t param
    cdef void* request
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = (UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
                          | UCP_OP_ATTR_FIELD_FLAGS)
    param.flags = UCP_AM_SEND_FLAG_EAGER
    param.cb.send = on_sent
    param.user_data = op
    op.link = link
    link.am.outstanding += 1
    request = ucp_am_send_nbx(link.am.ep, am, op.header, op.header_length, payload, length, &param)
    if request == NULL:
        on_sent(NULL, UCS_OK, op)
    elif UCS_PTR_IS_ERR(request):
        on_sent(NULL, UCS_PTR_STATUS(request), op)


cdef void message_head(Head* head, const Link* link, uint64_t transfer) noexcept nogil:
    head.slot = <uint16_t>link.peer_slot
    head.epoch = <uint16_t>link.repairs
    head.status = 0
    head.token = link.peer_token
    head.transfer = transfer


cdef bint message_send_head(Link* link, unsigned int am, uint64_t transfer,
                            uint32_t status) noexcept nogil:
    cdef SendOp* op = send_new(link.core)
    cdef Head* head
    if op == NULL:
        return False
    head = <Head*>op.header
    message_head(head, link, transfer)
    head.status = status
    op.header_length = sizeof(Head)
    message_send(link, am, op, NULL, 0)
    return True


cdef uint64_t message_send_blocks(Link* link, unsigned int am, SendOp* op, const Geometry* g,
                                  uint64_t position) noexcept nogil:
    """Send the next block numbers of a list with `op`; how many, 0 if memory is out."""
    cdef uint64_t count = min(g.n_blocks - position, <uint64_t>REQUEST_BLOCKS)
    # The transfer may end, and free its list, before UCX has sent this.
    op.payload = malloc(count * sizeof(uint32_t))
    if op.payload == NULL:
        send_free(link.core, op)
        return 0
    memcpy(op.payload, g.blocks + position, count * sizeof(uint32_t))
    message_send(link, am, op, op.payload, count * sizeof(uint32_t))
    return count


cdef Link* message_link(Core* core, const void* header, size_t header_length, void* copy,
                        size_t expected, const ucp_am_recv_param_t* param) noexcept nogil:
    """The link a message is for, or NULL: anyone can send packets to UCX's port.

    The header, which must have `expected` bytes and begin with a Head, is copied to `copy`: UCX
    aligns it to nothing.
    """
    cdef const Head* head = <const Head*>copy
    cdef Link* link
    if header_length != expected or param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV:
        core.dropped += 1
        return NULL
    memcpy(copy, header, expected)
    if head.slot >= MAX_LINKS or core.links[head.slot] == NULL:
        core.dropped += 1
        return NULL
    link = core.links[head.slot]
    if link.token != head.token or link.closing:
        link.dropped += 1
        return NULL
    # What an endpoint had sent before it broke may arrive after what its successor has sent, and
    # has been sent again: an offer, say, after all that was to be settled before the next one.
    if <int16_t>(head.epoch - <uint16_t>link.peer_repairs) < 0:
        return NULL
    return link


cdef ucs_status_t on_ping(void* arg, const void* header, size_t header_length, void* data,
                          size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Head head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &head, sizeof(Head),
                                   param)
    if link == NULL:
        return UCS_OK
    if head.transfer > link.peer_repairs:
        link.peer_repairs = head.transfer
        link.renewed = True
        link.dirty = True
    if link.am.outstanding <= MAX_OUTSTANDING:
        link.pong_due = True
        link.dirty = True
    return UCS_OK


cdef ucs_status_t on_pong(void* arg, const void* header, size_t header_length, void* data,
                          size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Head head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &head, sizeof(Head),
                                   param)
    if link != NULL and not link.proven and link.am.state == OPEN and not link.am.failed:
        link.proven = True
        link.ever_proven = True
        link.am.backoff = 0
        link.dirty = True
        core_notify(link.core)
    return UCS_OK


cdef ucs_status_t message_handlers(Core* core, ucp_worker_h worker, const Handler* handlers,
                                   int count) noexcept nogil:
    """Have the worker call these handlers, with `core`; each gets whole messages only."""
    cdef ucp_am_handler_param_t param
    cdef ucs_status_t status = UCS_OK
    cdef int i
    memset(&param, 0, sizeof(param))
    param.field_mask = (UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS
                        | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG)
    param.flags = UCP_AM_FLAG_WHOLE_MSG
    param.arg = core
    for i in range(count):
        param.id = handlers[i].am
        param.cb = handlers[i].callback
        status = ucp_worker_set_am_recv_handler(worker, &param)
        if status != UCS_OK:
            break
    return status


cdef ucs_status_t message_install(Core* core, ucp_worker_h worker) noexcept nogil:
    cdef Handler[2] handlers
    handlers[0] = Handler(AM_PING, on_ping)
    handlers[1] = Handler(AM_PONG, on_pong)
    return message_handlers(core, worker, handlers, 2)


cdef void message_prove(Link* link, uint64_t now) noexcept nogil:
    """Ping until the peer has answered over the endpoint as it is now; answer its pings."""
    if link.am.state != OPEN or link.am.failed:
        return
    if link.pong_due:
        link.pong_due = False
        message_send_head(link, AM_PONG, 0, 0)
    if not link.proven and now >= link.ping_at:
        link.ping_at = now + PING_AGAIN_NS
        core_timer(link.core, link.ping_at, True)
        message_send_head(link, AM_PING, link.repairs, 0)
