"""Lists of block numbers, read once and then shared by all that need them.

A list is counted, since the transfers that go by it may outlive the call that gave it, and the
layers of a layered push have one in common.
"""

from cpython.buffer cimport (
    PyBUF_CONTIG_RO,
    PyBUF_FORMAT,
    Py_buffer,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc


cdef extern from * nogil:
    uint64_t __atomic_add_fetch(uint64_t* counter, uint64_t value, int order)
    uint64_t __atomic_sub_fetch(uint64_t* counter, uint64_t value, int order)
    int __ATOMIC_ACQ_REL


cdef enum:
    # What counts a list lies before its numbers.
    HEADER = 2
    # Looked at while they are in the cache still.
    PIECE = 4096


ctypedef fused Number:
    int32_t
    uint32_t
    int64_t
    uint64_t


cdef uint32_t* blocks_new(uint64_t count) noexcept nogil:
    """Room for so many numbers, with one share for the caller; NULL if there is none."""
    cdef uint32_t* room = <uint32_t*>malloc((count + HEADER) * sizeof(uint32_t))
    if room == NULL:
        return NULL
    (<uint64_t*>room)[0] = 1
    return room + HEADER


cdef uint32_t* blocks_share(uint32_t* blocks) noexcept nogil:
    """One more share of a list, which may be NULL."""
    if blocks != NULL:
        __atomic_add_fetch(<uint64_t*>(blocks - HEADER), 1, __ATOMIC_ACQ_REL)
    return blocks


cdef void blocks_drop(uint32_t* blocks) noexcept nogil:
    """Give a share back; with the last one the list, which may be NULL, goes."""
    if (blocks != NULL
            and __atomic_sub_fetch(<uint64_t*>(blocks - HEADER), 1, __ATOMIC_ACQ_REL) == 0):
        free(blocks - HEADER)


cdef class BlockList:
    """Block numbers from a contiguous array of 32-bit or 64-bit integers, which is copied.

    `size` is how many there are, `largest` the largest of them (0 if there is none), and
    `representable` whether all are numbers that a block can have: from 0 to 2**32 - 1.
    """

    def __cinit__(self, array not None):
        cdef Py_buffer view
        PyObject_GetBuffer(array, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
        try:
            read(self, &view)
        finally:
            PyBuffer_Release(&view)

    def __dealloc__(self):
        blocks_drop(self.numbers)

    def __len__(self):
        return self.size

    def distinct(self):
        """Whether no number occurs twice.

        Takes a bit of memory for each number up to the largest, and none where they ascend.
        """
        cdef uint64_t* seen
        cdef uint64_t bit, i
        cdef bint result = True
        if self.ascending:
            return True
        with nogil:
            seen = <uint64_t*>calloc(self.largest // 64 + 1, sizeof(uint64_t))
            if seen != NULL:
                for i in range(self.size):
                    bit = <uint64_t>1 << (self.numbers[i] % 64)
                    if seen[self.numbers[i] // 64] & bit:
                        result = False
                        break
                    seen[self.numbers[i] // 64] |= bit
        if seen == NULL:
            raise MemoryError("no memory to compare a list of blocks")
        free(seen)
        return bool(result)


cdef int read(BlockList blocks, const Py_buffer* view) except -1:
    cdef bytes kind = view.format
    cdef bint is_signed = kind in (b"i", b"l", b"q")
    if view.ndim != 1 or not (is_signed or kind in (b"I", b"L", b"Q")):
        raise ValueError(f"no flat array of 32-bit or 64-bit integers: {kind!r}")
    blocks.size = view.len // view.itemsize
    blocks.numbers = blocks_new(blocks.size)
    if blocks.numbers == NULL:
        raise MemoryError("no memory for a list of blocks")
    with nogil:
        if view.itemsize == sizeof(uint32_t):
            if is_signed:
                take(blocks, <const int32_t*>view.buf)
            else:
                take(blocks, <const uint32_t*>view.buf)
        elif is_signed:
            take(blocks, <const int64_t*>view.buf)
        else:
            take(blocks, <const uint64_t*>view.buf)
    return 0


cdef void take(BlockList blocks, const Number* source) noexcept nogil:
    cdef uint32_t* target = blocks.numbers
    cdef uint64_t size = blocks.size, seen = 0, begin = 0, end, i
    cdef uint32_t falls = 0, largest = 0
    while begin < size:
        end = min(begin + PIECE, size)
        for i in range(begin, end):
            # A negative number has its upper bits set, whatever its width.
            seen |= <uint64_t>source[i]
            target[i] = <uint32_t>source[i]
        for i in range(max(begin, <uint64_t>1), end):
            falls |= target[i] <= target[i - 1]
        begin = end
    blocks.representable = seen >> 32 == 0
    blocks.ascending = falls == 0
    if falls == 0:
        largest = target[size - 1] if size > 0 else 0
    else:
        for i in range(size):
            largest = max(largest, target[i])
    blocks.largest = largest
