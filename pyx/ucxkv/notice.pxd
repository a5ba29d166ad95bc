"""Notices from pullers to owners (see notice.pyx)."""

from ucxkv.core cimport Core, Link
from ucxkv.ucp cimport ucp_worker_h, ucs_status_t


cdef ucs_status_t notice_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void notice_pump(Link* link) noexcept nogil
cdef void notice_plane_closed(Link* link) noexcept nogil
cdef void notice_link_closed(Link* link) noexcept nogil
cdef object notice_take(Core* core)
cdef void notices_forget(Core* core) noexcept nogil
