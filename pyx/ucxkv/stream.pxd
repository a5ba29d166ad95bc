"""The path "stream" (see stream.pyx)."""

from libc.stdint cimport uint32_t, uint64_t

from ucxkv.core cimport Core, Link, SendOp
from ucxkv.spans cimport Geometry
from ucxkv.ucp cimport ucp_am_recv_callback_t, ucp_am_recv_param_t, ucp_worker_h, ucs_status_t


cdef enum:
    AM_PING = 1
    AM_PONG = 2
    AM_REQUEST = 3
    AM_BLOCKS = 4
    AM_DATA = 5
    AM_END = 6
    AM_CANCEL = 7
    AM_OFFER = 8
    AM_OFFER_BLOCKS = 9
    AM_ANSWER = 10
    AM_BARRIER = 11
    AM_ECHO = 12
    # Block numbers that one link's requests may hold at this side (64 MiB of them).
    MAX_BLOCKS = 16777216


cdef struct Head:
    uint32_t slot
    uint32_t status
    uint64_t token
    uint64_t transfer


cdef void am_send(Link* link, unsigned int am, SendOp* op, const void* payload,
                  uint64_t length) noexcept nogil
cdef bint am_send_head(Link* link, unsigned int am, uint64_t transfer,
                       uint32_t status) noexcept nogil
cdef uint64_t am_send_blocks(Link* link, unsigned int am, SendOp* op, const Geometry* g,
                             uint64_t position) noexcept nogil
cdef void am_head(Head* head, const Link* link, uint64_t transfer) noexcept nogil
cdef Link* am_addressed(Core* core, const Head* head, size_t header_length, size_t expected,
                        const ucp_am_recv_param_t* param) noexcept nogil
cdef ucs_status_t am_install(Core* core, ucp_worker_h worker, unsigned int am,
                             ucp_am_recv_callback_t callback) noexcept nogil


cdef ucs_status_t stream_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void stream_prove(Link* link, uint64_t now) noexcept nogil
cdef void stream_pump(Link* link) noexcept nogil
cdef void stream_plane_closed(Link* link) noexcept nogil
cdef void stream_drop_serves(Link* link) noexcept nogil
