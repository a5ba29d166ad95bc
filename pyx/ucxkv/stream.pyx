"""The path "stream": the owner's service thread sends what a request names.

Over active messages, all of them answered natively:

========  ==================  ================================================================
REQUEST   puller to owner     cache, generation, tensors, slot or blocks, and the byte to begin at
BLOCKS    puller to owner     further block numbers of a long request
DATA      owner to puller     bytes at one offset of the stream
END       owner to puller     why there will be no more
CANCEL    puller to owner     forget a request
========  ==================  ================================================================

The owner copies what it sends into buffers of its own, with the lock held and the cache registered,
so what arrives is what the cache held, unregistering never waits for a peer that does not read, and
a message that UCX cannot take back refers to nobody's memory.  (Sending from where they lie was
not measurably faster.)

All functions want the engine's lock to be held.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from ucxkv.core cimport (
    MAX_SERVES,
    MAX_WORDS,
    OPEN,
    PATH_PUSH,
    PATH_STREAM,
    ST_CACHE_NOT_EXIST,
    ST_FAILED,
    ST_HOLD_ENDED,
    ST_PARAM_INVALID,
    ST_RETRY,
    ST_SUCCESS,
    STREAM_CHUNK,
    STREAM_WINDOW,
    TO_REQUEST,
    CacheMem,
    Core,
    Incoming,
    Link,
    SendOp,
    Serve,
    Transfer,
    cache_shown,
    core_idle,
    core_notify,
    pack_take,
    send_free,
    send_new,
)
from ucxkv.hold cimport hold_covers
from ucxkv.landing cimport land, landed, lands_past_caches
from ucxkv.message cimport (
    AM_BLOCKS,
    AM_CANCEL,
    AM_DATA,
    AM_END,
    AM_REQUEST,
    MAX_OUTSTANDING,
    Handler,
    Head,
    message_handlers,
    message_head,
    message_link,
    message_send,
    message_send_blocks,
    message_send_head,
)
from ucxkv.pthread cimport now_ns
from ucxkv.quiesce cimport quiesce_renewed
from ucxkv.spans cimport Geometry, cursor_advance, cursor_run, cursor_seek, geometry_bytes
from ucxkv.transfer cimport (
    cancel_later,
    transfer_advance,
    transfer_ask,
    transfer_asked,
    transfer_end,
    transfer_find,
    transfer_number,
    transfer_renumber,
)
from ucxkv.ucp cimport UCS_OK, ucp_am_recv_param_t, ucp_worker_h, ucs_status_t


cdef enum:
    ENTITLED = 2 * STREAM_CHUNK
    # Small pulls come one after the other: the next one finds the owner awake.
    AWAKE_NS = 50000
    CHUNKS_A_TURN = 8
    # Requests that a puller has open at one owner: the others wait for their turn.
    MAX_REQUESTS = 512


cdef struct Request:
    Head head
    int64_t cache_id
    uint64_t generation
    uint32_t cache_slot
    uint32_t first_tensor
    uint32_t tensors
    uint32_t has_blocks
    uint64_t block
    uint64_t n_blocks
    uint64_t block_len
    uint64_t start
    uint64_t offer              # of ours that this request answers, 0: none
    uint64_t word               # of the hold that it needs, 0: none
    uint32_t word_slot


cdef struct Blocks:
    Head head
    uint64_t position


cdef struct Data:
    Head head
    uint64_t offset


# --- puller --------------------------------------------------------------------------------------

cdef bint send_request(Link* link, Transfer* t) noexcept nogil:
    cdef SendOp* op = send_new(link.core)
    cdef Request* request
    cdef Blocks* more
    cdef uint64_t done, count
    if op == NULL:
        return False
    transfer_renumber(t)
    t.received = t.good
    cursor_seek(&t.dst_cursor, &t.dst_geo, t.good)
    transfer_asked(t, True)
    request = <Request*>op.header
    message_head(&request.head, link, transfer_number(t))
    request.cache_id = t.far.cache_id
    request.generation = t.far.generation
    request.cache_slot = t.far.slot
    request.first_tensor = t.src_geo.first
    request.tensors = t.src_geo.count
    request.has_blocks = t.src_geo.blocks != NULL
    request.block = t.src_geo.block
    request.n_blocks = t.src_geo.n_blocks
    request.block_len = t.src_geo.block_len
    request.start = t.good
    request.offer = t.offer
    request.word = t.word if t.held else 0
    request.word_slot = t.word_slot
    op.header_length = sizeof(Request)
    if t.src_geo.blocks == NULL:
        message_send(link, AM_REQUEST, op, NULL, 0)
        return True
    count = message_send_blocks(link, AM_REQUEST, op, &t.src_geo, 0)
    done = count
    while count > 0 and done < t.src_geo.n_blocks and not link.am.failed:
        op = send_new(link.core)
        if op == NULL:
            return False
        more = <Blocks*>op.header
        message_head(&more.head, link, transfer_number(t))
        more.position = done
        op.header_length = sizeof(Blocks)
        count = message_send_blocks(link, AM_BLOCKS, op, &t.src_geo, done)
        done += count
    return count > 0


cdef void pump_requests(Link* link) noexcept nogil:
    cdef Transfer* t
    while (link.due[TO_REQUEST] != NULL and link.n_requested < MAX_REQUESTS
           and not link.am.failed):
        t = link.due[TO_REQUEST]
        if not send_request(link, t):
            transfer_end(t, ST_FAILED, UCS_OK, b"no memory for the request")


cdef void pump_cancels(Link* link) noexcept nogil:
    while link.n_cancels > 0:
        link.n_cancels -= 1
        message_send_head(link, AM_CANCEL, link.cancels[link.n_cancels], 0)


cdef ucs_status_t on_data(void* arg, const void* header, size_t header_length, void* data,
                          size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Data message
    cdef const uint8_t* source = <const uint8_t*>data
    cdef Link* link = message_link(<Core*>arg, header, header_length, &message, sizeof(Data),
                                   param)
    cdef Transfer* t
    cdef uint64_t run, target = 0
    cdef bint large
    if link == NULL:
        return UCS_OK
    t = transfer_find(link.core, link, message.head.transfer)
    if t == NULL or t.path != PATH_STREAM or not t.requested:
        return UCS_OK
    if message.offset != t.received or length > t.total - t.received:
        # Never seen: UCX keeps the order of one endpoint's messages.
        transfer_end(t, ST_FAILED, UCS_OK, b"the peer streams what was not asked for")
        return UCS_OK
    t.received += length
    large = lands_past_caches(t.total, t.dst_geo.block_len)
    while length > 0:
        t.spans += t.dst_cursor.run == 0
        run = cursor_run(&t.dst_cursor, &t.dst_geo, length, &target)
        if large:
            land(<void*>target, source, run)
        else:
            memcpy(<void*>target, source, run)
        cursor_advance(&t.dst_cursor, &t.dst_geo, run)
        source += run
        length -= run
    if large:
        landed()
    transfer_advance(t, t.received)
    return UCS_OK


cdef ucs_status_t on_end(void* arg, const void* header, size_t header_length, void* data,
                         size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Head head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &head, sizeof(Head),
                                   param)
    cdef Transfer* t
    if link == NULL:
        return UCS_OK
    t = transfer_find(link.core, link, head.transfer)
    if t == NULL or t.path != PATH_STREAM or not t.requested:
        return UCS_OK
    transfer_asked(t, False)
    if head.status == ST_RETRY:
        transfer_ask(t)
    elif head.status == ST_CACHE_NOT_EXIST:
        transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK, b"its owner has unregistered it")
    elif head.status == ST_HOLD_ENDED:
        transfer_end(t, ST_HOLD_ENDED, UCS_OK, b"its hold has ended")
    elif head.status == ST_PARAM_INVALID:
        transfer_end(t, ST_FAILED, UCS_OK, b"the owner refuses the request as out of range")
    else:
        transfer_end(t, ST_FAILED, UCS_OK, b"the owner could not serve the request")
    return UCS_OK


# --- owner ---------------------------------------------------------------------------------------

cdef Transfer* offer_of(Link* link, uint64_t number) noexcept nogil:
    """The push that the peer knows by that number, as long as it is offered; NULL: none."""
    cdef Transfer* t = transfer_find(link.core, link, number)
    return t if t != NULL and t.path == PATH_PUSH and t.requested else NULL


cdef bint answers(const Request* r, const CacheMem* mem, const Transfer* t) noexcept nogil:
    """Whether the request asks for what the push `t` offers of `mem`, its block list aside."""
    cdef const Geometry* g
    if t == NULL or t.near != mem:
        return False
    g = &t.src_geo
    return (r.first_tensor == g.first and r.tensors == g.count and r.block == g.block
            and r.block_len == g.block_len and r.n_blocks == g.n_blocks
            and (r.has_blocks != 0) == (g.blocks != NULL))


cdef uint32_t check_request(Core* core, Link* link, const Request* r, CacheMem** cache,
                            bint* offered) noexcept nogil:
    """Whether the request may be served: everything in it comes from another process.

    With `offered` it may be for the sake of an offer alone.
    """
    cdef CacheMem* mem
    if r.cache_slot >= MAX_WORDS:
        return ST_PARAM_INVALID
    mem = core.caches[r.cache_slot]
    if mem == NULL or mem.cache_id != r.cache_id or mem.generation != r.generation:
        return ST_CACHE_NOT_EXIST
    offered[0] = mem.retiring or not mem.readable or not cache_shown(mem, link)
    if offered[0] and not answers(r, mem, offer_of(link, r.offer)):
        return ST_CACHE_NOT_EXIST
    if (r.tensors == 0 or r.first_tensor >= mem.num_tensors
            or r.tensors > mem.num_tensors - r.first_tensor
            or r.block >= mem.blocks or r.block_len == 0 or r.block_len > mem.block_bytes
            or r.n_blocks == 0 or r.n_blocks > MAX_BLOCKS
            or (not r.has_blocks and r.n_blocks != 1)
            # The product of what a peer names must not wrap.
            or r.block_len > (<uint64_t>1 << 62) // r.tensors // r.n_blocks):
        return ST_PARAM_INVALID
    if r.start > r.tensors * r.n_blocks * r.block_len:
        return ST_PARAM_INVALID
    if r.word and not hold_covers(core, r.word_slot, r.word, mem):
        return ST_HOLD_ENDED
    cache[0] = mem
    return ST_SUCCESS


cdef bint take_blocks(Serve* serve, uint64_t position, const uint32_t* blocks,
                      uint64_t count) noexcept nogil:
    """Add block numbers to a request; False if they are not what it still lacks."""
    cdef uint64_t i, limit = serve.cache.blocks if serve.cache != NULL else 0
    cdef const Transfer* push
    if position != serve.n_blocks_known or count > serve.geo.n_blocks - position:
        return False
    if serve.offer:
        push = offer_of(serve.link, serve.offer)
        if push == NULL or memcmp(push.src_blocks + position, blocks, count * sizeof(uint32_t)):
            return False
    for i in range(count):
        if blocks[i] >= limit:
            return False
    memcpy(serve.blocks + position, blocks, count * sizeof(uint32_t))
    serve.n_blocks_known += count
    return True


cdef void end_serve(Serve* serve, uint32_t status) noexcept nogil:
    if not serve.ended:
        serve.ended = True
        serve.status = status
    if serve.cache != NULL:
        serve.cache.serves -= 1
        if serve.cache.retiring and serve.cache.serves == 0:
            core_idle(serve.link.core)
        serve.cache = NULL
    serve.link.dirty = True


cdef ucs_status_t on_request(void* arg, const void* header, size_t header_length, void* data,
                             size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Request r
    cdef Core* core = <Core*>arg
    cdef Link* link = message_link(core, header, header_length, &r, sizeof(Request), param)
    cdef CacheMem* mem = NULL
    cdef Serve* serve
    cdef Serve** tail
    cdef uint32_t status
    cdef bint offered = False
    # A peer that asks but does not read gets nothing queued for it without bound.
    if link == NULL or link.n_serves >= MAX_SERVES or link.am.outstanding > MAX_OUTSTANDING:
        return UCS_OK
    status = check_request(core, link, &r, &mem, &offered)
    serve = <Serve*>calloc(1, sizeof(Serve))
    if serve == NULL:
        return UCS_OK
    serve.link = link
    serve.transfer = r.head.transfer
    if status == ST_SUCCESS and r.has_blocks and r.n_blocks > MAX_BLOCKS - link.blocks_held:
        status = ST_FAILED
    elif status == ST_SUCCESS and r.has_blocks:
        serve.blocks = <uint32_t*>malloc(r.n_blocks * sizeof(uint32_t))
        if serve.blocks == NULL:
            status = ST_FAILED
    if status == ST_SUCCESS:
        mem.serves += 1
        serve.cache = mem
        serve.word_slot = r.word_slot
        serve.word = r.word
        serve.offer = r.offer if offered else 0
        serve.geo.addrs = mem.addrs
        serve.geo.first = r.first_tensor
        serve.geo.count = r.tensors
        serve.geo.stride = mem.block_bytes
        serve.geo.block_len = r.block_len
        serve.geo.blocks = serve.blocks
        serve.geo.block = r.block
        serve.geo.n_blocks = r.n_blocks
        link.blocks_held += r.n_blocks if r.has_blocks else 0
        serve.total = geometry_bytes(&serve.geo)
        if serve.total <= STREAM_CHUNK:
            core.awake_until = now_ns() + AWAKE_NS
        serve.offset = r.start
        cursor_seek(&serve.cursor, &serve.geo, r.start)
        if r.has_blocks and not take_blocks(serve, 0, <const uint32_t*>data,
                                            length // sizeof(uint32_t)):
            status = ST_PARAM_INVALID
    if status != ST_SUCCESS:
        end_serve(serve, status)
    tail = &link.serves
    while tail[0] != NULL:
        tail = &tail[0].next
    tail[0] = serve
    link.n_serves += 1
    link.dirty = True
    return UCS_OK


cdef Serve* find_serve(Link* link, uint64_t number) noexcept nogil:
    cdef Serve* serve = link.serves
    while serve != NULL and serve.transfer != number:
        serve = serve.next
    return serve


cdef ucs_status_t on_blocks(void* arg, const void* header, size_t header_length, void* data,
                            size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Blocks message
    cdef Link* link = message_link(<Core*>arg, header, header_length, &message, sizeof(Blocks),
                                   param)
    cdef Serve* serve
    if link == NULL:
        return UCS_OK
    serve = find_serve(link, message.head.transfer)
    if serve == NULL or serve.ended or serve.blocks == NULL:
        return UCS_OK
    if not take_blocks(serve, message.position, <const uint32_t*>data,
                       length // sizeof(uint32_t)):
        end_serve(serve, ST_PARAM_INVALID)
    link.dirty = True
    return UCS_OK


cdef ucs_status_t on_cancel(void* arg, const void* header, size_t header_length, void* data,
                            size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Head head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &head, sizeof(Head),
                                   param)
    cdef Serve* serve
    cdef Transfer* t
    cdef Incoming* offer
    cdef uint32_t left
    if link == NULL:
        return UCS_OK
    serve = find_serve(link, head.transfer)
    if serve != NULL:
        # Success here only means that there is nothing to tell the puller.
        end_serve(serve, ST_SUCCESS)
        return UCS_OK
    t = link.transfers
    left = link.n_transfers if link.n_answering > 0 else 0
    while left > 0:
        left -= 1
        if t.offer and t.offer == head.transfer:
            transfer_end(t, ST_FAILED, UCS_OK, b"the sender gave it up")
            return UCS_OK
        t = t.link_next
    offer = link.incoming
    while offer != NULL:
        if offer.number == head.transfer:
            offer.number = 0
        offer = offer.next
    return UCS_OK


cdef bint send_chunk(Link* link, Serve* serve) noexcept nogil:
    """Send the next piece of one request; False if there is no room for it now."""
    cdef SendOp* op
    cdef Data* data
    cdef uint64_t source = 0, run, length = 0
    cdef uint8_t* fill
    op = send_new(link.core)
    if op == NULL:
        return False
    # Some buffers are every link's own, lest peers that do not read starve the others.
    op.buffer = pack_take(link.core, link.stream_bytes < ENTITLED)
    if op.buffer == NULL:
        send_free(link.core, op)
        link.core.starved = True
        return False
    fill = <uint8_t*>op.buffer
    run = cursor_run(&serve.cursor, &serve.geo, STREAM_CHUNK, &source)
    while run > 0:
        memcpy(fill + length, <const void*>source, run)
        length += run
        cursor_advance(&serve.cursor, &serve.geo, run)
        run = cursor_run(&serve.cursor, &serve.geo, STREAM_CHUNK - length, &source)
    data = <Data*>op.header
    message_head(&data.head, link, serve.transfer)
    data.offset = serve.offset
    op.header_length = sizeof(Data)
    op.serve = serve
    op.length = length
    serve.offset += length
    serve.outstanding += 1
    link.stream_bytes += length
    link.totals.bytes_served += length
    link.core.totals.bytes_served += length
    message_send(link, AM_DATA, op, fill, length)
    return True


cdef bint serve_over(Link* link, Serve* serve) noexcept nogil:
    """Say why a request ended early; True if `serve` can be freed."""
    if not serve.ended and serve.offset == serve.total:
        end_serve(serve, ST_SUCCESS)
    if not serve.ended:
        return False
    if serve.status != ST_SUCCESS:
        if not message_send_head(link, AM_END, serve.transfer, serve.status):
            return False
        serve.status = ST_SUCCESS
    # Should the endpoint break before its last bytes have left, the puller has to be told.
    return serve.outstanding == 0


cdef void free_serve(Link* link, Serve** place) noexcept nogil:
    cdef Serve* serve = place[0]
    place[0] = serve.next
    link.n_serves -= 1
    if link.watched and link.n_serves == 0:
        core_notify(link.core)
    if serve.blocks != NULL:
        link.blocks_held -= serve.geo.n_blocks
    free(serve.blocks)
    if serve.outstanding > 0:
        serve.orphan = True
    else:
        free(serve)


cdef void pump_serves(Link* link) noexcept nogil:
    """Send chunks in turn for all requests, as far as the window goes; free what is over."""
    cdef Serve** place
    cdef Serve* serve
    cdef Serve* head
    cdef bint moved = True
    cdef int budget = CHUNKS_A_TURN
    while moved and link.serves != NULL:
        if budget <= 0:
            # While the puller keeps up no window fills: let others have the lock in between.
            link.dirty = True
            break
        moved = False
        place = &link.serves
        while place[0] != NULL:
            if link.am.state != OPEN or link.am.failed:
                return
            serve = place[0]
            if serve.word and link.core.words[serve.word_slot] != serve.word:
                end_serve(serve, ST_HOLD_ENDED)
            if serve.offer and not serve.ended and offer_of(link, serve.offer) == NULL:
                end_serve(serve, ST_FAILED)
            if (budget > 0 and not serve.ended and serve.offset < serve.total
                    and link.stream_bytes < STREAM_WINDOW
                    and (serve.blocks == NULL or serve.n_blocks_known == serve.geo.n_blocks)):
                if send_chunk(link, serve):
                    moved = True
                    budget -= 1
            if serve_over(link, serve):
                free_serve(link, place)
            else:
                place = &serve.next
    # The window was full: whoever was first goes last next time.
    head = link.serves
    if head != NULL and head.next != NULL:
        link.serves = head.next
        place = &link.serves
        while place[0] != NULL:
            place = &place[0].next
        place[0] = head
        head.next = NULL


# --- the plane -----------------------------------------------------------------------------------

cdef ucs_status_t stream_install(Core* core, ucp_worker_h worker) noexcept nogil:
    cdef Handler[5] handlers
    handlers[0] = Handler(AM_REQUEST, on_request)
    handlers[1] = Handler(AM_BLOCKS, on_blocks)
    handlers[2] = Handler(AM_DATA, on_data)
    handlers[3] = Handler(AM_END, on_end)
    handlers[4] = Handler(AM_CANCEL, on_cancel)
    return message_handlers(core, worker, handlers, 5)


cdef void ask_again(Link* link) noexcept nogil:
    """Make our requests and offers anew: UCX may have sent what a connection that was lost has not
    delivered, and then only the peer, whose endpoint it was, knows of the loss."""
    cdef Transfer* t = link.transfers
    cdef uint32_t left = link.n_transfers
    link.renewed = False
    quiesce_renewed(link)
    while left > 0:
        left -= 1
        if t.requested:
            cancel_later(link, transfer_number(t))
            transfer_ask(t)
        t = t.link_next


cdef void stream_pump(Link* link) noexcept nogil:
    if link.renewed:
        ask_again(link)
    if link.am.state == OPEN and not link.am.failed:
        pump_cancels(link)
        pump_requests(link)
        pump_serves(link)


cdef void stream_plane_closed(Link* link) noexcept nogil:
    """Nothing is in flight: requests are made again, and the peer is told to do the same."""
    cdef Transfer* t = link.transfers
    cdef Serve* serve = link.serves
    cdef uint32_t left = link.n_transfers
    link.ping_at = 0
    link.n_cancels = 0
    while left > 0:
        left -= 1
        if t.requested:
            transfer_ask(t)
        t = t.link_next
    while serve != NULL:
        # A request that was answered to its end may have lost its last messages too.
        if serve.status == ST_SUCCESS:
            serve.status = ST_RETRY
        end_serve(serve, ST_RETRY)
        serve = serve.next


cdef void stream_drop_serves(Link* link) noexcept nogil:
    """Forget the peer's requests."""
    while link.serves != NULL:
        end_serve(link.serves, ST_SUCCESS)
        free_serve(link, &link.serves)
