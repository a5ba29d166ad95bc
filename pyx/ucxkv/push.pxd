"""Pushes (see push.pyx)."""

from ucxkv.core cimport Core, Link
from ucxkv.ucp cimport ucp_worker_h, ucs_status_t


cdef ucs_status_t push_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void push_pump(Link* link) noexcept nogil
cdef void push_plane_closed(Link* link) noexcept nogil
cdef void push_link_closed(Link* link) noexcept nogil
