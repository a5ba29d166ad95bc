"""The path "get" on one host, without UCX (see cma.pyx)."""

from libc.stdint cimport uint64_t

from ucxkv.core cimport Link, Transfer


cdef void cma_trial(Link* link, uint64_t pid) noexcept nogil
cdef bint cma_drive(Transfer* t) noexcept nogil
cdef void* cma_main(void* arg) noexcept nogil
