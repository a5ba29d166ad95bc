"""The path "stream" (see stream.pyx)."""

from libc.stdint cimport uint64_t

from ucxkv.core cimport Core, Link
from ucxkv.ucp cimport ucp_worker_h, ucs_status_t


cdef ucs_status_t stream_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void stream_prove(Link* link, uint64_t now) noexcept nogil
cdef void stream_pump(Link* link) noexcept nogil
cdef void stream_plane_closed(Link* link) noexcept nogil
cdef void stream_drop_serves(Link* link) noexcept nogil
