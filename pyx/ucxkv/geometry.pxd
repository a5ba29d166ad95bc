"""What a transfer is asked for, and what that amounts to (see geometry.pyx)."""

from libc.stdint cimport uint32_t, uint64_t

from ucxkv.blocks cimport BlockList


cdef class Call:
    # Numbers as they were passed: they may be of any size.
    cdef readonly object cluster_id
    cdef readonly object far_cache_id
    cdef readonly object near_cache_id
    cdef readonly object src_batch
    cdef readonly object dst_batch
    cdef readonly object size
    cdef readonly object tensors_per_layer
    cdef readonly tuple src_layers
    cdef readonly tuple dst_layers
    cdef readonly double timeout_ms
    cdef readonly BlockList src_blocks
    cdef readonly BlockList dst_blocks
    cdef readonly bint push
    cdef readonly bytes notice
    cdef readonly object hold


cdef class Plan:
    cdef readonly bint push
    cdef readonly uint32_t src_first
    cdef readonly uint32_t dst_first
    cdef readonly uint32_t tensors
    cdef readonly uint32_t tensors_per_layer
    cdef readonly uint64_t block_len
    cdef readonly uint64_t src_block
    cdef readonly uint64_t dst_block
    cdef readonly BlockList src_blocks
    cdef readonly BlockList dst_blocks
    cdef readonly bytes notice
    cdef readonly object hold
