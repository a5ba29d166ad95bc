"""Links and their two endpoints (see endpoint.pyx)."""

from libc.stdint cimport uint64_t

from ucxkv.core cimport Core, Link, Plane
from ucxkv.ucp cimport ucs_status_t


cdef class NativeLink:
    cdef Core* core
    cdef Link* link
    cdef int worker
    cdef object _engine         # keeps `core` alive


cdef NativeLink link_create(object engine, Core* core, int worker)
cdef void link_unref(Link* link) noexcept nogil
cdef void link_error(Link* link, ucs_status_t status) noexcept nogil
cdef void plane_fail(Link* link, Plane* plane, ucs_status_t status) noexcept nogil
cdef bint plane_step(Link* link, Plane* plane, uint64_t now) noexcept nogil
cdef void remotes_forget(Link* link) noexcept nogil
