"""Lists of block numbers, read once and then shared by all that need them.

A list is counted, since the transfers that go by it may outlive the call that gave it, and the
layers of a layered push have one in common.

What a list takes to be read is the way of its numbers through the memory, so two long ones are read
by two threads.
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
from libc.string cimport memset

from ucxkv.pthread cimport pthread_create, pthread_join, pthread_t


cdef extern from * nogil:
    uint64_t __atomic_add_fetch(uint64_t* counter, uint64_t value, int order)
    uint64_t __atomic_sub_fetch(uint64_t* counter, uint64_t value, int order)
    int __ATOMIC_ACQ_REL


cdef enum:
    # What counts a list lies before its numbers.
    HEADER = 2
    # Looked at while they are in the cache still.
    PIECE = 4096
    # Of as many numbers, a list is worth a thread.
    LONG = 131072


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


cdef struct Reading:
    # The array, whose element type is told by width and sign, and the list it becomes.
    Py_buffer view
    bint is_signed
    bint compared               # with one another
    uint32_t* numbers
    uint64_t size
    uint32_t largest
    bint representable
    bint ascending
    bint distinct
    bint failed                 # for want of memory


cdef class BlockList:
    """Block numbers from a contiguous array of 32-bit or 64-bit integers, which is copied.

    `size` is how many there are, `largest` the largest of them (0 if there is none),
    `representable` whether all are numbers that a block can have, from 0 to 2**32 - 1, and
    `distinct` whether they are that and none occurs twice.  To find that out takes a bit of memory
    for each number up to the largest, and none where they ascend; of sources it is not asked.
    """

    def __init__(self, array not None):
        cdef Reading reading
        begin(&reading, array, True)
        with nogil:
            read_list(&reading)
        take_over(self, &reading)

    def __dealloc__(self):
        blocks_drop(self.numbers)

    def __len__(self):
        return self.size


cdef tuple read_both(sources, targets):
    """Two arrays as lists, by two threads if they are long."""
    cdef BlockList source_list = BlockList.__new__(BlockList)
    cdef BlockList target_list = BlockList.__new__(BlockList)
    cdef Reading source, target
    cdef pthread_t thread
    cdef bint apart = False
    begin(&source, sources, False)
    try:
        begin(&target, targets, True)
    except BaseException:
        PyBuffer_Release(&source.view)
        raise
    with nogil:
        if min(source.size, target.size) >= LONG:
            apart = pthread_create(&thread, NULL, read_apart, &source) == 0
        read_list(&target)
        if apart:
            pthread_join(thread, NULL)
        else:
            read_list(&source)
    try:
        take_over(source_list, &source)
    finally:
        take_over(target_list, &target)
    return source_list, target_list


cdef int begin(Reading* reading, array, bint compared) except -1:
    """Lays hold of the array's memory; ValueError if it is none that can be read."""
    cdef bytes kind
    memset(reading, 0, sizeof(Reading))
    reading.compared = compared
    PyObject_GetBuffer(array, &reading.view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
    kind = reading.view.format
    reading.is_signed = kind in (b"i", b"l", b"q")
    if reading.view.ndim != 1 or not (reading.is_signed or kind in (b"I", b"L", b"Q")):
        PyBuffer_Release(&reading.view)
        raise ValueError(f"no flat array of 32-bit or 64-bit integers: {kind!r}")
    reading.size = reading.view.len // reading.view.itemsize
    return 0


cdef int take_over(BlockList blocks, Reading* reading) except -1:
    """Lets go of the array; MemoryError if there was too little of it for the list."""
    PyBuffer_Release(&reading.view)
    blocks_drop(blocks.numbers)
    blocks.numbers = reading.numbers
    blocks.size = reading.size
    blocks.largest = reading.largest
    blocks.representable = reading.representable
    blocks.distinct = reading.distinct
    if reading.failed:
        raise MemoryError("no memory for a list of blocks")
    return 0


cdef void* read_apart(void* reading) noexcept nogil:
    read_list(<Reading*>reading)
    return NULL


cdef void read_list(Reading* reading) noexcept nogil:
    reading.numbers = blocks_new(reading.size)
    if reading.numbers == NULL:
        reading.failed = True
    elif reading.view.itemsize == sizeof(uint32_t):
        if reading.is_signed:
            copy(reading, <const int32_t*>reading.view.buf)
        else:
            copy(reading, <const uint32_t*>reading.view.buf)
    elif reading.is_signed:
        copy(reading, <const int64_t*>reading.view.buf)
    else:
        copy(reading, <const uint64_t*>reading.view.buf)
    if reading.compared and reading.representable:
        compare(reading)


cdef void copy(Reading* reading, const Number* source) noexcept nogil:
    cdef uint32_t* target = reading.numbers
    cdef uint64_t size = reading.size, seen = 0, start = 0, stop, i
    cdef uint32_t falls = 0, largest = 0
    while start < size:
        stop = min(start + PIECE, size)
        for i in range(start, stop):
            # A negative number has its upper bits set, whatever its width.
            seen |= <uint64_t>source[i]
            target[i] = <uint32_t>source[i]
        for i in range(max(start, <uint64_t>1), stop):
            falls |= target[i] <= target[i - 1]
        start = stop
    reading.representable = seen >> 32 == 0
    reading.ascending = falls == 0
    if falls == 0:
        largest = target[size - 1] if size > 0 else 0
    else:
        for i in range(size):
            largest = max(largest, target[i])
    reading.largest = largest


cdef void compare(Reading* reading) noexcept nogil:
    """Finds out whether a number occurs twice."""
    cdef uint64_t* seen
    cdef uint64_t bit, i
    reading.distinct = True
    if reading.ascending:
        return
    seen = <uint64_t*>calloc(reading.largest // 64 + 1, sizeof(uint64_t))
    if seen == NULL:
        reading.failed = True
        return
    for i in range(reading.size):
        bit = <uint64_t>1 << (reading.numbers[i] % 64)
        if seen[reading.numbers[i] // 64] & bit:
            reading.distinct = False
            break
        seen[reading.numbers[i] // 64] |= bit
    free(seen)
