"""Taking a destination of pushes back.

A receiver that wants a slot or blocks back *quiesces* them: pulls into them that answer offers are
fenced, and offers are refused until each peer has echoed a BARRIER, so that what was sent before is
refused however late it comes.  A sender that sees the barrier does not offer again what it may have
offered before, ends what it has withheld, and lets no push begin that has been waiting for the link
since before.

The barriers of a link are numbered in the order in which they are sent, and an ECHO confirms all up
to its number.  Each is sent once over an endpoint, and names at most REQUEST_BLOCKS blocks.  A link
has at most MAX_QUIETS of one cache: beyond that they become one for the whole cache, which costs
pushes into its other blocks until the peer has answered.

All functions want the engine's lock to be held.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from ucxkv.core cimport (
    FENCING,
    OPEN,
    PATH_PUSH,
    REQUEST_BLOCKS,
    ST_FAILED,
    CacheMem,
    Core,
    Link,
    Quiet,
    RemoteMem,
    SendOp,
    Transfer,
    core_idle,
    core_wait,
    send_free,
    send_new,
)
from ucxkv.message cimport (
    AM_BARRIER,
    AM_ECHO,
    MAX_OUTSTANDING,
    Handler,
    Head,
    message_handlers,
    message_head,
    message_link,
    message_send,
    message_send_head,
)
from ucxkv.pthread cimport now_ns, timespec, to_timespec
from ucxkv.transfer cimport transfer_end
from ucxkv.ucp cimport UCS_OK, ucp_am_recv_param_t, ucp_worker_h, ucs_status_t


cdef enum:
    MAX_QUIETS = 32
    # Fences take milliseconds; this bound is for a broken UCX.
    FENCE_MAX_NS = 5000000000


cdef enum Reach:
    WHOLE_CACHE = 0
    LISTED_BLOCKS = 1           # the message's payload


cdef struct BarrierMessage:
    Head head                   # its transfer is the barrier's number, its status a Reach
    uint64_t generation
    uint32_t slot


cdef bint listed(const uint32_t* ascending, uint64_t count, uint64_t block) noexcept nogil:
    cdef uint64_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < block:
            low = middle + 1
        else:
            high = middle
    return low < count and ascending[low] == block


cdef bint touched(const uint32_t* ascending, uint64_t count, const uint32_t* blocks,
                  uint64_t n_blocks, uint64_t block) noexcept nogil:
    """Whether a destination, a list or else a single block, meets what is quiesced; NULL: all."""
    cdef uint64_t i
    if ascending == NULL:
        return True
    if blocks == NULL:
        return listed(ascending, count, block)
    for i in range(n_blocks):
        if listed(ascending, count, blocks[i]):
            return True
    return False


cdef bint quiesced(const Link* link, uint32_t slot, uint64_t generation, const uint32_t* blocks,
                   uint64_t n_blocks, uint64_t block) noexcept nogil:
    """Whether an offer of the peer into these blocks may be older than a `quiesce` of them."""
    cdef const Quiet* quiet = link.quiets
    while quiet != NULL:
        if (quiet.slot == slot and quiet.generation == generation
                and touched(quiet.blocks, quiet.n_blocks, blocks, n_blocks, block)):
            return True
        quiet = quiet.next
    return False


# --- receiver ------------------------------------------------------------------------------------

cdef void quiet_free(Quiet** place) noexcept nogil:
    cdef Quiet* quiet = place[0]
    place[0] = quiet.next
    free(quiet.blocks)
    free(quiet)


cdef bint whole_instead(Link* link, const CacheMem* mem) noexcept nogil:
    """Whether there are so many of the cache that the next has to stand for all; forget them."""
    cdef Quiet** place = &link.quiets
    cdef Quiet* quiet = link.quiets
    cdef int count = 0
    while quiet != NULL:
        count += quiet.slot == mem.slot and quiet.generation == mem.generation
        quiet = quiet.next
    if count < MAX_QUIETS:
        return False
    while place[0] != NULL:
        if place[0].slot == mem.slot and place[0].generation == mem.generation:
            quiet_free(place)
        else:
            place = &place[0].next
    return True


cdef bint add_quiet(Link* link, const CacheMem* mem, const uint32_t* blocks,
                    uint64_t n_blocks) noexcept nogil:
    cdef Quiet* quiet = <Quiet*>calloc(1, sizeof(Quiet))
    cdef Quiet** tail = &link.quiets
    if quiet == NULL:
        return False
    if blocks != NULL and not whole_instead(link, mem):
        quiet.blocks = <uint32_t*>malloc(n_blocks * sizeof(uint32_t))
        if quiet.blocks == NULL:
            free(quiet)
            return False
        memcpy(quiet.blocks, blocks, n_blocks * sizeof(uint32_t))
        quiet.n_blocks = n_blocks
    elif blocks == NULL:
        whole_instead(link, mem)
    link.barriers += 1
    quiet.barrier = link.barriers
    quiet.slot = mem.slot
    quiet.generation = mem.generation
    while tail[0] != NULL:
        tail = &tail[0].next
    tail[0] = quiet
    link.dirty = True
    return True


cdef bint quiesce_begin(Core* core, CacheMem* mem, const uint32_t* blocks,
                        uint64_t n_blocks) noexcept nogil:
    """Fence answers to offers, and have older offers refused on every link.

    `blocks` ascend; NULL stands for all of them.  False if memory is out.
    """
    cdef Transfer* t = core.first_transfer
    cdef Transfer* following
    cdef Link* link = core.first_link
    while t != NULL:
        following = t.next
        if t.offer and t.near == mem and touched(blocks, n_blocks, t.dst_geo.blocks,
                                                 t.dst_geo.n_blocks, t.dst_geo.block):
            transfer_end(t, ST_FAILED, UCS_OK, b"the destination was quiesced")
        t = following
    while link != NULL:
        if link.connected and not link.closing and not add_quiets(link, mem, blocks, n_blocks):
            return False
        link = link.next
    return True


cdef bint add_quiets(Link* link, const CacheMem* mem, const uint32_t* blocks,
                     uint64_t n_blocks) noexcept nogil:
    """As many as it takes to say each in one message."""
    cdef uint64_t begin = 0
    if blocks == NULL:
        return add_quiet(link, mem, NULL, 0)
    while begin < n_blocks:
        if not add_quiet(link, mem, blocks + begin, min(n_blocks - begin, REQUEST_BLOCKS)):
            return False
        begin += REQUEST_BLOCKS
    return True


cdef bint quiesce_wait(Core* core, CacheMem* mem, uint64_t end) noexcept nogil:
    """Wait for the fences, and until `end` for the peers; whether all have answered."""
    cdef timespec until
    cdef uint64_t now
    cdef bint fenced
    while True:
        fenced = fences_over(core, mem)
        if fenced and barriers_over(core, mem):
            return True
        now = now_ns()
        # The fences are what the caller needs, and they take milliseconds.
        if now >= end and (fenced or now >= end + FENCE_MAX_NS):
            return False
        until = to_timespec(end if now < end else now + 1000000)
        core_wait(core, &until)


cdef bint fences_over(Core* core, CacheMem* mem) noexcept nogil:
    cdef Transfer* t = core.first_transfer
    while t != NULL:
        if t.offer and t.near == mem and t.state == FENCING:
            return False
        t = t.next
    return True


cdef bint barriers_over(Core* core, CacheMem* mem) noexcept nogil:
    cdef Link* link = core.first_link
    cdef Quiet* quiet
    while link != NULL:
        quiet = link.quiets
        while quiet != NULL:
            if quiet.slot == mem.slot and quiet.generation == mem.generation:
                return False
            quiet = quiet.next
        link = link.next
    return True


cdef bint send_barrier(Link* link, const Quiet* quiet) noexcept nogil:
    cdef SendOp* op = send_new(link.core)
    cdef BarrierMessage* message
    cdef uint64_t length = 0
    if op == NULL:
        return False
    message = <BarrierMessage*>op.header
    message_head(&message.head, link, quiet.barrier)
    message.slot = quiet.slot
    message.generation = quiet.generation
    op.header_length = sizeof(BarrierMessage)
    if quiet.blocks != NULL:
        length = quiet.n_blocks * sizeof(uint32_t)
        op.payload = malloc(length)
        if op.payload == NULL:
            send_free(link.core, op)
            return False
        memcpy(op.payload, quiet.blocks, length)
        message.head.status = LISTED_BLOCKS
    message_send(link, AM_BARRIER, op, op.payload, length)
    return True


cdef ucs_status_t on_echo(void* arg, const void* header, size_t header_length, void* data,
                          size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef Head head
    cdef Link* link = message_link(<Core*>arg, header, header_length, &head, sizeof(Head),
                                   param)
    if link == NULL or head.transfer > link.barriers_sent:
        return UCS_OK
    if head.transfer > link.echoed:
        link.echoed = head.transfer
        link.dirty = True
    return UCS_OK


# --- sender --------------------------------------------------------------------------------------

cdef ucs_status_t on_barrier(void* arg, const void* header, size_t header_length, void* data,
                             size_t length, const ucp_am_recv_param_t* param) noexcept nogil:
    cdef BarrierMessage message
    cdef Link* link = message_link(<Core*>arg, header, header_length, &message,
                                   sizeof(BarrierMessage), param)
    cdef const uint32_t* blocks
    if link == NULL:
        return UCS_OK
    blocks = <const uint32_t*>data if message.head.status == LISTED_BLOCKS else NULL
    outdate(link, &message, blocks, length // sizeof(uint32_t))
    if message.head.transfer > link.echo_due:
        link.echo_due = message.head.transfer
        link.dirty = True
    return UCS_OK


cdef void outdate(Link* link, const BarrierMessage* message, const uint32_t* blocks,
                  uint64_t n_blocks) noexcept nogil:
    """Have the pushes not be offered, or offered again, that a barrier speaks of."""
    cdef Transfer* t = link.transfers
    cdef Transfer* following
    cdef RemoteMem* remote = link.remotes
    cdef uint32_t left = link.n_transfers
    # For those that wait for the link, and are not on it yet.
    link.barriers_heard += 1
    while remote != NULL:
        if remote.slot == message.slot and remote.generation == message.generation:
            remote.quieted += 1
        remote = remote.next
    while left > 0:
        left -= 1
        following = t.link_next
        if (t.path == PATH_PUSH and t.far.slot == message.slot
                and t.far.generation == message.generation
                and touched(blocks, n_blocks, t.dst_geo.blocks, t.dst_geo.n_blocks,
                            t.dst_geo.block)):
            t.stale = True
            if t.withheld:
                transfer_end(t, ST_FAILED, UCS_OK, b"the receiver quiesced its destination")
        t = following


# --- the plane -----------------------------------------------------------------------------------

cdef void quiesce_pump(Link* link) noexcept nogil:
    """To be called when the offers that have come are dealt with, and before new ones are made."""
    cdef Quiet* quiet
    if link.quiets != NULL and link.quiets.barrier <= link.echoed:
        while link.quiets != NULL and link.quiets.barrier <= link.echoed:
            quiet_free(&link.quiets)
        core_idle(link.core)
    if link.am.state != OPEN:
        return
    quiet = link.quiets
    # What a peer has not answered is not followed by much more.
    while (quiet != NULL and not link.am.failed
           and link.barriers_sent < link.echoed + MAX_QUIETS):
        if quiet.barrier > link.barriers_sent:
            if not send_barrier(link, quiet):
                return
            link.barriers_sent = quiet.barrier
        quiet = quiet.next
    if link.echo_due and not link.am.failed and link.am.outstanding <= MAX_OUTSTANDING:
        if message_send_head(link, AM_ECHO, link.echo_due, 0):
            link.echo_due = 0


cdef void quiesce_renewed(Link* link) noexcept nogil:
    """The peer's endpoint has broken, perhaps with its answers to barriers: they are sent again."""
    link.barriers_sent = link.echoed


cdef void quiesce_plane_closed(Link* link) noexcept nogil:
    """Barriers that are not answered are sent again, and so are theirs by the peer."""
    link.barriers_sent = link.echoed
    link.echo_due = 0


cdef void quiesce_link_closed(Link* link) noexcept nogil:
    while link.quiets != NULL:
        quiet_free(&link.quiets)
    core_idle(link.core)


cdef ucs_status_t quiesce_install(Core* core, ucp_worker_h worker) noexcept nogil:
    cdef Handler[2] handlers
    handlers[0] = Handler(AM_BARRIER, on_barrier)
    handlers[1] = Handler(AM_ECHO, on_echo)
    return message_handlers(core, worker, handlers, 2)
