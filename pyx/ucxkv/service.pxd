"""The service thread (see service.pyx)."""

from libc.stdint cimport uint64_t

from ucxkv.core cimport Core, Link


cdef void link_step(Link* link, uint64_t now) noexcept nogil
cdef void run_timers(Core* core, uint64_t now) noexcept nogil
cdef void prune_remotes(Link* link) noexcept nogil
cdef void* service_main(void* arg) noexcept nogil
