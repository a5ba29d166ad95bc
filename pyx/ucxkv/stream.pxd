"""The path "stream" (see stream.pyx)."""

from ucxkv.core cimport Core, Link
from ucxkv.ucp cimport ucp_worker_h, ucs_status_t


cdef enum:
    # Block numbers that one link's requests may hold at this side (64 MiB of them).
    MAX_BLOCKS = 16777216


cdef ucs_status_t stream_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void stream_pump(Link* link) noexcept nogil
cdef void stream_plane_closed(Link* link) noexcept nogil
cdef void stream_drop_serves(Link* link) noexcept nogil
