# cython: language_level=3, boundscheck=False, wraparound=False
"""The least that a checked call can cost: a pull's arguments, looked at, and nothing else."""

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int64_t, uint8_t


cdef int _in_range(const int64_t[::1] blocks, Py_ssize_t limit) except -1:
    cdef Py_ssize_t i
    for i in range(blocks.shape[0]):
        if not 0 <= blocks[i] < limit:
            raise ValueError(f"block {blocks[i]}")
    return 0


cdef int _distinct(const int64_t[::1] blocks, Py_ssize_t limit) except -1:
    cdef Py_ssize_t i
    cdef uint8_t *seen = <uint8_t *>PyMem_Calloc(limit, 1)
    if seen is NULL:
        raise MemoryError
    try:
        for i in range(blocks.shape[0]):
            if seen[blocks[i]]:
                raise ValueError(f"block {blocks[i]} twice")
            seen[blocks[i]] = 1
    finally:
        PyMem_Free(seen)
    return 0


def pull_kv_blocks(
    index, cache, const int64_t[::1] source not None, const int64_t[::1] destination not None,
    parameters, *, timeout_ms=None,
):
    """Check what `LlmDataDist.pull_kv_blocks` checks of these arguments; post nothing."""
    cdef int64_t cluster_id = index.cluster_id
    cdef int64_t far_id = index.cache_id
    cdef int64_t near_id = cache.cache_id
    cdef int64_t batch = index.batch_index
    cdef int64_t first, last, other_first, other_last
    cdef int64_t each = parameters.tensor_num_per_layer
    cdef Py_ssize_t limit = cache.cache_desc.shape[0]
    first, last = parameters.src_layer_range
    other_first, other_last = parameters.dst_layer_range
    if cluster_id < 0 or far_id < 0 or near_id < 0 or batch < 0 or each < 1 or first > last:
        raise ValueError("a number is out of range")
    if last - first != other_last - other_first or source.shape[0] != destination.shape[0]:
        raise ValueError("the sides differ")
    _in_range(source, limit)
    _in_range(destination, limit)
    _distinct(destination, limit)
    return (last - first + 1) * each
