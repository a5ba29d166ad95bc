"""The path "get" (see get.pyx)."""

from libc.stdint cimport uint64_t

from ucxkv.core cimport Link


cdef void get_pump(Link* link) noexcept nogil
cdef void get_plane_closed(Link* link) noexcept nogil
cdef void get_trial(Link* link, uint64_t now) noexcept nogil
