"""Lists of block numbers (see blocks.pyx)."""

from libc.stdint cimport uint32_t, uint64_t


cdef uint32_t* blocks_new(uint64_t count) noexcept nogil
cdef uint32_t* blocks_share(uint32_t* blocks) noexcept nogil
cdef void blocks_drop(uint32_t* blocks) noexcept nogil


cdef class BlockList:
    cdef uint32_t* numbers      # a share of it
    cdef readonly uint64_t size
    cdef readonly uint32_t largest
    cdef readonly bint representable
    cdef readonly bint distinct


cdef tuple read_both(sources, targets)
