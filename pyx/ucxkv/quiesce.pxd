"""Destinations of pushes that were taken back (see quiesce.pyx)."""

from libc.stdint cimport uint32_t, uint64_t

from ucxkv.core cimport CacheMem, Core, Link
from ucxkv.ucp cimport ucp_worker_h, ucs_status_t


cdef bint quiesce_begin(Core* core, CacheMem* mem, const uint32_t* blocks,
                        uint64_t n_blocks) noexcept nogil
cdef bint quiesce_wait(Core* core, CacheMem* mem, uint64_t end) noexcept nogil
cdef bint quiesced(const Link* link, uint32_t slot, uint64_t generation, const uint32_t* blocks,
                   uint64_t n_blocks, uint64_t block) noexcept nogil

cdef ucs_status_t quiesce_install(Core* core, ucp_worker_h worker) noexcept nogil
cdef void quiesce_pump(Link* link) noexcept nogil
cdef void quiesce_renewed(Link* link) noexcept nogil
cdef void quiesce_plane_closed(Link* link) noexcept nogil
cdef void quiesce_link_closed(Link* link) noexcept nogil
