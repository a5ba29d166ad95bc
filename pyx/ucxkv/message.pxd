"""Messages between linked engines (see message.pyx)."""

from libc.stdint cimport uint16_t, uint32_t, uint64_t

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
    AM_NOTICE = 13
    AM_NOTED = 14
    # Messages to one peer that UCX has not taken yet: one that does not read gets no more answers.
    MAX_OUTSTANDING = 8192


cdef struct Head:
    uint16_t slot
    uint16_t epoch              # how often the sender's endpoint had been repaired, modulo 2**16
    uint32_t status
    uint64_t token
    uint64_t transfer


cdef struct Handler:
    unsigned int am
    ucp_am_recv_callback_t callback


cdef void message_send(Link* link, unsigned int am, SendOp* op, const void* payload,
                       uint64_t length) noexcept nogil
cdef bint message_send_head(Link* link, unsigned int am, uint64_t transfer,
                            uint32_t status) noexcept nogil
cdef uint64_t message_send_blocks(Link* link, unsigned int am, SendOp* op, const Geometry* g,
                                  uint64_t position) noexcept nogil
cdef void message_head(Head* head, const Link* link, uint64_t transfer) noexcept nogil
cdef Link* message_link(Core* core, const void* header, size_t header_length, void* copy,
                        size_t expected, const ucp_am_recv_param_t* param) noexcept nogil
cdef ucs_status_t message_handlers(Core* core, ucp_worker_h worker, const Handler* handlers,
                                   int count) noexcept nogil

cdef ucs_status_t message_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void message_prove(Link* link, uint64_t now) noexcept nogil
