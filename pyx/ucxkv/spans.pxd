"""Which bytes a transfer touches, generated piece by piece (see spans.pyx)."""

from libc.stdint cimport uint32_t, uint64_t


cdef struct Geometry:
    const uint64_t* addrs       # start of each tensor of the cache
    uint32_t first              # first tensor taking part
    uint32_t count              # number of tensors taking part
    uint64_t stride             # bytes from one slot (block) to the next
    uint64_t block_len          # bytes taken from each slot (block)
    const uint32_t* blocks      # block numbers in order, or NULL: the single block `block`
    uint64_t block
    uint64_t n_blocks


cdef struct Cursor:
    uint32_t tensor             # counted from Geometry.first
    uint64_t index              # position in the block list
    uint64_t done               # bytes of that block already passed
    uint64_t run                # contiguous bytes from here on, 0 where not yet known


cdef uint64_t geometry_tensor_bytes(const Geometry* g) noexcept nogil
cdef uint64_t geometry_bytes(const Geometry* g) noexcept nogil
cdef void cursor_seek(Cursor* c, const Geometry* g, uint64_t offset) noexcept nogil
cdef uint64_t cursor_run(Cursor* c, const Geometry* g, uint64_t limit,
                         uint64_t* addr) noexcept nogil
cdef void cursor_advance(Cursor* c, const Geometry* g, uint64_t length) noexcept nogil
