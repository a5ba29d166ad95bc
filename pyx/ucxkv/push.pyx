"""Pushes: offers that the receiver pulls.

The sender's OFFER names memory of both sides.  The receiver's service thread checks it against its
own catalogue, pulls with the machinery of every other pull, and sends an ANSWER, which ends the
sender's transfer.  So no process's memory is ever written by another.

How a receiver takes a destination back is told in ``quiesce``.

All functions want the engine's lock to be held.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ucxkv.blocks cimport blocks_drop, blocks_new
from ucxkv.core cimport (
    MAX_SERVES,
    MAX_WORDS,
    OPEN,
    PATH_GET,
    PATH_PUSH,
    PATH_STREAM,
    ST_CACHE_NOT_EXIST,
    ST_FAILED,
    ST_FEATURE_NOT_ENABLED,
    ST_OUT_OF_MEMORY,
    ST_PARAM_INVALID,
    ST_SUCCESS,
    ST_TIMEOUT,
    TO_OFFER,
    Answer,
    CacheMem,
    Core,
    Incoming,
    Link,
    Offer,
    RemoteMem,
    SendOp,
    Transfer,
    cache_shown,
    core_timer,
    send_new,
)
from ucxkv.message cimport (
    AM_ANSWER,
    AM_OFFER,
    AM_OFFER_BLOCKS,
    MAX_OUTSTANDING,
    Handler,
    Head,
    message_handlers,
    message_head,
    message_link,
    message_send,
    message_send_blocks,
)
from ucxkv.pthread cimport now_ns
from ucxkv.quiesce cimport (
    quiesce_link_closed,
    quiesce_plane_closed,
    quiesce_pump,
    quiesced,
)
from ucxkv.spans cimport Geometry, cursor_seek, geometry_bytes
from ucxkv.stream cimport MAX_BLOCKS
from ucxkv.transfer cimport (
    answer_later,
    remote_unref,
    transfer_asked,
    transfer_begin,
    transfer_end,
    transfer_find,
    transfer_new,
    transfer_number,
    transfer_renumber,
    transfer_unref,
)
from ucxkv.ucp cimport UCS_OK, ucp_am_recv_param_t, ucp_worker_h, ucs_status_t


cdef enum:
    SRC_LIST = 1
    DST_LIST = 2


cdef struct OfferMessage:
    Head head
    Offer offer


cdef struct BlocksMessage:
    Head head                   # its status says which list
    uint64_t position


cdef struct AnswerMessage:
    Head head
    Answer answer


# --- sender --------------------------------------------------------------------------------------

cdef bint offer_list(Link* link, Transfer* t, const Geometry* g, uint32_t which) noexcept nogil:
    cdef SendOp* op
    cdef BlocksMessage* message
    cdef uint64_t done = 0, count
    while done < g.n_blocks and not link.am.failed:
        op = send_new(link.core)
        if op == NULL:
            return False
        message = <BlocksMessage*>op.header
        message_head(&message.head, link, transfer_number(t))
        message.head.status = which
        message.position = done
        op.header_length = sizeof(BlocksMessage)
        count = message_send_blocks(link, AM_OFFER_BLOCKS, op, g, done)
        if count == 0:
            return False
        done += count
    return True


cdef bint send_offer(Link* link, Transfer* t, uint64_t now) noexcept nogil:
    cdef SendOp* op = send_new(link.core)
    cdef OfferMessage* message
    cdef Offer* offer
    if op == NULL:
        return False
    transfer_renumber(t)
    transfer_asked(t, True)
    message = <OfferMessage*>op.header
    message_head(&message.head, link, transfer_number(t))
    offer = &message.offer
    offer.src_cache_id = t.near.cache_id
    offer.src_generation = t.near.generation
    offer.src_slot = t.near.slot
    offer.src_first = t.src_geo.first
    offer.src_block = t.src_geo.block
    offer.src_has_blocks = t.src_geo.blocks != NULL
    offer.dst_cache_id = t.far.cache_id
    offer.dst_generation = t.far.generation
    offer.dst_slot = t.far.slot
    offer.dst_first = t.dst_geo.first
    offer.dst_block = t.dst_geo.block
    offer.dst_has_blocks = t.dst_geo.blocks != NULL
    offer.tensors = t.dst_geo.count
    offer.tensors_per_layer = <uint32_t>(t.layer_bytes
                                         // (t.dst_geo.block_len * t.dst_geo.n_blocks))
    offer.block_len = t.dst_geo.block_len
    offer.n_blocks = t.dst_geo.n_blocks
    offer.budget = t.deadline - now if t.deadline > now else 1
    op.header_length = sizeof(OfferMessage)
    message_send(link, AM_OFFER, op, NULL, 0)
    if t.src_geo.blocks != NULL and not offer_list(link, t, &t.src_geo, SRC_LIST):
        return False
    return t.dst_geo.blocks == NULL or offer_list(link, t, &t.dst_geo, DST_LIST)


cdef void pump_offers(Link* link) noexcept nogil:
    cdef Transfer* t
    cdef uint64_t now = 0
    while (link.due[TO_OFFER] != NULL and link.n_offered < MAX_SERVES // 2
           and not link.am.failed):
        t = link.due[TO_OFFER]
        now = now or now_ns()
        if t.stale:
            transfer_end(t, ST_FAILED, UCS_OK, b"the receiver quiesced its destination")
        elif not send_offer(link, t, now):
            transfer_end(t, ST_OUT_OF_MEMORY, UCS_OK, b"no memory for the offer")


cdef ucs_status_t on_answer(void* arg, const void* header, size_t header_length, void* data,
                            size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef AnswerMessage message
    cdef const Head* head = &message.head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &message,
                                   sizeof(AnswerMessage), param)
    cdef Transfer* t
    if link == NULL:
        return UCS_OK
    t = transfer_find(link.core, link, head.transfer)
    if t == NULL or t.path != PATH_PUSH or not t.requested:
        return UCS_OK
    # There is nothing to cancel.
    transfer_asked(t, False)
    if head.status == ST_SUCCESS:
        t.good = t.total
        t.spans = message.answer.spans
        t.taken = PATH_GET if message.answer.path == PATH_GET else PATH_STREAM
        transfer_end(t, ST_SUCCESS, UCS_OK, NULL)
    elif head.status == ST_CACHE_NOT_EXIST:
        transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK, b"one of the caches was unregistered")
    elif head.status == ST_FEATURE_NOT_ENABLED:
        transfer_end(t, ST_FEATURE_NOT_ENABLED, UCS_OK,
                     b"the peer's cache was not registered with access 'rw'")
    elif head.status == ST_TIMEOUT:
        transfer_end(t, ST_TIMEOUT, UCS_OK, b"the receiver did not finish in time")
    elif head.status == ST_PARAM_INVALID:
        transfer_end(t, ST_FAILED, UCS_OK, b"the receiver refuses the offer as out of range")
    else:
        transfer_end(t, ST_FAILED, UCS_OK, b"the receiver gave it up")
    return UCS_OK


# --- receiver ------------------------------------------------------------------------------------

cdef uint32_t check_offer(Link* link, const Offer* offer, CacheMem** mem) noexcept nogil:
    """Whether an offer may be taken: everything in it comes from another process."""
    cdef CacheMem* target
    if offer.dst_slot >= MAX_WORDS:
        return ST_PARAM_INVALID
    target = link.core.caches[offer.dst_slot]
    if (target == NULL or target.cache_id != offer.dst_cache_id
            or target.generation != offer.dst_generation or target.retiring
            or not cache_shown(target, link)):
        return ST_CACHE_NOT_EXIST
    if not target.pushable or not target.writable:
        return ST_FEATURE_NOT_ENABLED
    if (offer.tensors == 0 or offer.tensors > target.num_tensors
            or offer.dst_first > target.num_tensors - offer.tensors
            or offer.tensors_per_layer == 0
            or offer.dst_block >= target.blocks
            or offer.block_len == 0 or offer.block_len > target.block_bytes
            or offer.n_blocks == 0 or offer.n_blocks > MAX_BLOCKS
            or (not offer.dst_has_blocks and offer.n_blocks != 1)):
        return ST_PARAM_INVALID
    mem[0] = target
    return ST_SUCCESS


cdef RemoteMem* find_source(Link* link, const Offer* offer) noexcept nogil:
    """What the catalogue says of an offer's source, with a reference; NULL: nothing."""
    cdef RemoteMem* remote = link.remotes
    while remote != NULL:
        if (remote.cache_id == offer.src_cache_id and remote.generation == offer.src_generation
                and not remote.retired):
            remote.refs += 1
            return remote
        remote = remote.next
    return NULL


cdef RemoteMem* nameless_source(const Offer* offer) noexcept nogil:
    """Enough of a source to have it streamed: one that is not told to peers, or not yet."""
    cdef RemoteMem* remote = <RemoteMem*>calloc(1, sizeof(RemoteMem))
    if remote != NULL:
        remote.refs = 1
        remote.cache_id = offer.src_cache_id
        remote.generation = offer.src_generation
        remote.slot = offer.src_slot
    return remote


cdef uint32_t take_offer(Link* link, Incoming* incoming) noexcept nogil:
    """Start the pull that answers a complete offer; any status but success is the answer."""
    cdef Core* core = link.core
    cdef const Offer* offer = &incoming.offer
    cdef CacheMem* mem = NULL
    cdef RemoteMem* remote
    cdef Transfer* t
    cdef uint64_t i, src_len, deadline
    cdef uint32_t status = check_offer(link, offer, &mem)
    if status != ST_SUCCESS:
        return status
    if quiesced(link, offer.dst_slot, offer.dst_generation, incoming.dst_blocks,
                incoming.dst_known, offer.dst_block):
        return ST_FAILED
    if incoming.dst_blocks != NULL:
        for i in range(offer.n_blocks):
            if incoming.dst_blocks[i] >= mem.blocks:
                return ST_PARAM_INVALID
    src_len = offer.block_len if incoming.src_blocks != NULL else offer.block_len * offer.n_blocks
    remote = find_source(link, offer)
    if remote == NULL:
        remote = nameless_source(offer)
    if remote == NULL:
        return ST_OUT_OF_MEMORY
    deadline = now_ns()
    deadline = deadline + offer.budget if offer.budget < <uint64_t>-1 - deadline else <uint64_t>-1
    t = transfer_new(core, deadline)
    if t == NULL:
        remote_unref(remote)
        return ST_OUT_OF_MEMORY
    core_timer(core, deadline, True)
    t.offer = incoming.number
    t.blocks_held = incoming.blocks_held
    incoming.blocks_held = 0
    t.far = remote
    t.near = mem
    t.word_slot = remote.slot
    t.word = remote.generation
    t.src_blocks = incoming.src_blocks
    t.dst_blocks = incoming.dst_blocks
    incoming.src_blocks = NULL
    incoming.dst_blocks = NULL
    t.src_geo.addrs = remote.addrs
    t.src_geo.first = offer.src_first
    t.src_geo.count = offer.tensors
    t.src_geo.stride = remote.block_bytes
    t.src_geo.block_len = src_len
    t.src_geo.blocks = t.src_blocks
    t.src_geo.block = offer.src_block
    t.src_geo.n_blocks = offer.n_blocks if t.src_blocks != NULL else 1
    t.dst_geo.addrs = mem.addrs
    t.dst_geo.first = offer.dst_first
    t.dst_geo.count = offer.tensors
    t.dst_geo.stride = mem.block_bytes
    t.dst_geo.block_len = offer.block_len
    t.dst_geo.blocks = t.dst_blocks
    t.dst_geo.block = offer.dst_block
    t.dst_geo.n_blocks = offer.n_blocks
    t.total = geometry_bytes(&t.dst_geo)
    t.layer_bytes = offer.block_len * offer.n_blocks * offer.tensors_per_layer
    t.layers = (offer.tensors + offer.tensors_per_layer - 1) // offer.tensors_per_layer
    if link.get_ok and remote.addrs != NULL and readable_by_get(remote, t, src_len):
        t.path = PATH_GET
        cursor_seek(&t.src_cursor, &t.src_geo, 0)
    else:
        t.path = PATH_STREAM
    cursor_seek(&t.dst_cursor, &t.dst_geo, 0)
    transfer_begin(t, link)
    # transfer_begin has taken references of its own; the engine alone waits for this one.
    remote_unref(remote)
    transfer_unref(t)
    return ST_SUCCESS


cdef bint readable_by_get(const RemoteMem* remote, const Transfer* t,
                          uint64_t src_len) noexcept nogil:
    """Whether an offer stays inside its source as the catalogue describes that."""
    cdef const Geometry* g = &t.src_geo
    cdef uint64_t i
    if (remote.n_regions == 0 or g.count > remote.num_tensors
            or g.first > remote.num_tensors - g.count
            or src_len > remote.block_bytes or g.block >= remote.blocks):
        return False
    if g.blocks != NULL:
        for i in range(g.n_blocks):
            if g.blocks[i] >= remote.blocks:
                return False
    return True


cdef bint complete(const Incoming* incoming) noexcept nogil:
    return ((incoming.src_blocks == NULL or incoming.src_known == incoming.offer.n_blocks)
            and (incoming.dst_blocks == NULL or incoming.dst_known == incoming.offer.n_blocks))


cdef void drop_incoming(Link* link, Incoming** place) noexcept nogil:
    cdef Incoming* incoming = place[0]
    place[0] = incoming.next
    link.n_incoming -= 1
    link.blocks_held -= incoming.blocks_held
    blocks_drop(incoming.src_blocks)
    blocks_drop(incoming.dst_blocks)
    free(incoming)


cdef void pump_incoming(Link* link) noexcept nogil:
    cdef Incoming** place = &link.incoming
    cdef Incoming* incoming
    cdef uint32_t status
    while place[0] != NULL:
        incoming = place[0]
        if incoming.number == 0:
            drop_incoming(link, place)
        elif complete(incoming):
            status = take_offer(link, incoming)
            if status != ST_SUCCESS:
                answer_later(link, incoming.number, status, 0, 0)
            drop_incoming(link, place)
        else:
            place = &incoming.next


cdef ucs_status_t on_offer(void* arg, const void* header, size_t header_length, void* data,
                           size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef OfferMessage message
    cdef Core* core = <Core*>arg
    cdef Link* link = message_link(core, header, header_length, &message, sizeof(OfferMessage),
                                   param)
    cdef Incoming* incoming
    cdef Incoming** tail
    cdef CacheMem* mem = NULL
    cdef uint32_t status
    cdef uint64_t lists = 0
    # A peer that offers more than any does, or does not read its answers, gets none.
    if (link == NULL or message.head.transfer == 0
            or link.n_incoming + link.n_answering + link.n_answers >= MAX_SERVES
            or link.am.outstanding > MAX_OUTSTANDING):
        return UCS_OK
    status = check_offer(link, &message.offer, &mem)
    if status == ST_SUCCESS:
        lists = message.offer.n_blocks * ((message.offer.src_has_blocks != 0)
                                          + (message.offer.dst_has_blocks != 0))
        if lists > MAX_BLOCKS - link.blocks_held:
            status = ST_OUT_OF_MEMORY
    incoming = <Incoming*>calloc(1, sizeof(Incoming)) if status == ST_SUCCESS else NULL
    if incoming == NULL:
        answer_later(link, message.head.transfer,
                     ST_OUT_OF_MEMORY if status == ST_SUCCESS else status, 0, 0)
        return UCS_OK
    incoming.number = message.head.transfer
    incoming.offer = message.offer
    incoming.blocks_held = lists
    link.blocks_held += lists
    if message.offer.src_has_blocks:
        incoming.src_blocks = blocks_new(message.offer.n_blocks)
    if message.offer.dst_has_blocks:
        incoming.dst_blocks = blocks_new(message.offer.n_blocks)
    link.n_incoming += 1
    tail = &link.incoming
    while tail[0] != NULL:
        tail = &tail[0].next
    tail[0] = incoming
    link.dirty = True
    if ((message.offer.src_has_blocks and incoming.src_blocks == NULL)
            or (message.offer.dst_has_blocks and incoming.dst_blocks == NULL)):
        answer_later(link, incoming.number, ST_OUT_OF_MEMORY, 0, 0)
        incoming.number = 0
    return UCS_OK


cdef ucs_status_t on_offer_blocks(void* arg, const void* header, size_t header_length, void* data,
                                  size_t length,
                                  const ucp_am_recv_param_t* param) noexcept nogil:
    cdef BlocksMessage message
    cdef Link* link = message_link(<Core*>arg, header, header_length, &message,
                                   sizeof(BlocksMessage), param)
    cdef Incoming* incoming
    cdef uint32_t* list
    cdef uint64_t* known
    cdef uint64_t count = length // sizeof(uint32_t)
    if link == NULL:
        return UCS_OK
    incoming = link.incoming
    while incoming != NULL and incoming.number != message.head.transfer:
        incoming = incoming.next
    if incoming == NULL or incoming.number == 0:
        return UCS_OK
    if message.head.status == SRC_LIST:
        list = incoming.src_blocks
        known = &incoming.src_known
    else:
        list = incoming.dst_blocks
        known = &incoming.dst_known
    if (list == NULL or message.position != known[0]
            or count > incoming.offer.n_blocks - known[0]):
        answer_later(link, incoming.number, ST_PARAM_INVALID, 0, 0)
        incoming.number = 0
    else:
        memcpy(list + known[0], data, count * sizeof(uint32_t))
        known[0] += count
    link.dirty = True
    return UCS_OK


cdef void pump_answers(Link* link) noexcept nogil:
    cdef SendOp* op
    cdef AnswerMessage* message
    while (link.n_answers > 0 and not link.am.failed
           and link.am.outstanding <= MAX_OUTSTANDING):
        op = send_new(link.core)
        if op == NULL:
            return
        link.n_answers -= 1
        message = <AnswerMessage*>op.header
        message.answer = link.answers[link.n_answers]
        message_head(&message.head, link, message.answer.number)
        message.head.status = message.answer.status
        op.header_length = sizeof(AnswerMessage)
        message_send(link, AM_ANSWER, op, NULL, 0)


# --- the plane -----------------------------------------------------------------------------------

cdef void push_pump(Link* link) noexcept nogil:
    if link.am.state != OPEN or link.am.failed:
        return
    pump_incoming(link)
    quiesce_pump(link)
    pump_answers(link)
    pump_offers(link)


cdef void push_plane_closed(Link* link) noexcept nogil:
    """Offers are made again by their senders."""
    cdef Incoming* incoming = link.incoming
    while incoming != NULL:
        incoming.number = 0
        incoming = incoming.next
    link.n_answers = 0
    quiesce_plane_closed(link)


cdef void push_link_closed(Link* link) noexcept nogil:
    while link.incoming != NULL:
        drop_incoming(link, &link.incoming)
    quiesce_link_closed(link)


cdef ucs_status_t push_install(Core* core, ucp_worker_h worker) noexcept nogil:
    cdef Handler[3] handlers
    handlers[0] = Handler(AM_OFFER, on_offer)
    handlers[1] = Handler(AM_OFFER_BLOCKS, on_offer_blocks)
    handlers[2] = Handler(AM_ANSWER, on_answer)
    return message_handlers(core, worker, handlers, 3)
