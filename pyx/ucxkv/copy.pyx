"""Copies inside one engine: from a cache of ours into another, or into other slots of the same.

A copy holds both caches as a transfer holds its destination, so that neither is given back under
it.  Unregistering does not wait for its end: it goes piece by piece, and looks between two of them
whether it may go on.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcpy, memset

from ucxkv.blocks cimport BlockList
from ucxkv.core cimport CacheMem, core_idle, core_lock, core_unlock
from ucxkv.memory cimport LocalCache
from ucxkv.pthread cimport now_ns
from ucxkv.spans cimport Cursor, Geometry, cursor_advance, cursor_run, cursor_seek, geometry_bytes


cdef extern from *:
    """
    #define load_flag(place) __atomic_load_n(place, __ATOMIC_RELAXED)
    """
    bint load_flag(const bint* place) noexcept nogil


cdef enum:
    PIECE = 1048576             # bytes copied before the caches are looked at again
    PIECE_SPANS = 4096
    SIGNAL_NS = 50000000


cdef enum Step:
    MORE = 0
    COMPLETE = 1
    UNREGISTERED = 2


@cython.no_gc
cdef class Copy:
    """Of `tensors` tensors of each cache, from `src_first` and `dst_first` on, `block_len` bytes
    from byte `offset` of each block on: of the single blocks `src_block` and `dst_block`, or of the
    lists.
    """

    cdef LocalCache _source
    cdef LocalCache _target
    cdef BlockList _src_blocks  # kept for their numbers
    cdef BlockList _dst_blocks
    cdef Geometry _src
    cdef Geometry _dst
    cdef uint64_t _offset

    def __init__(self, LocalCache source not None, LocalCache target not None, *,
                 uint32_t src_first, uint32_t dst_first, uint32_t tensors, uint64_t block_len,
                 uint64_t src_block=0, uint64_t dst_block=0,
                 BlockList src_blocks=None, BlockList dst_blocks=None,
                 uint64_t offset=0):
        if self._source is not None:
            raise RuntimeError("already initialised")
        self._source = source
        self._target = target
        self._src_blocks = src_blocks
        self._dst_blocks = dst_blocks
        self._offset = offset
        set_side(&self._src, source.mem, src_first, tensors, block_len, src_block, src_blocks)
        set_side(&self._dst, target.mem, dst_first, tensors, block_len, dst_block, dst_blocks)
        if source.core != target.core:
            raise ValueError("the caches belong to two engines")
        if (not fits(&self._src, source.mem, offset, src_blocks)
                or not fits(&self._dst, target.mem, offset, dst_blocks)
                or geometry_bytes(&self._src) != geometry_bytes(&self._dst)):
            raise ValueError("a copy would leave the memory of its caches")

    @property
    def total(self):
        """Bytes it copies in all."""
        return geometry_bytes(&self._dst)

    def overlaps(self):
        """Whether bytes that it writes are among those it reads."""
        cdef int result
        with nogil:
            result = sides_overlap(&self._src, &self._dst)
        if result < 0:
            raise MemoryError
        return bool(result)

    def run(self):
        """Copy.  Returns the number of contiguous pieces, or None if one of the caches was, or is
        being, unregistered: part of the bytes may have been written then.

        Signal handlers run meanwhile; if one raises, nothing is written any more.
        """
        cdef Cursor src, dst
        cdef uint64_t spans = 0
        cdef Step step
        if not self._hold():
            return None
        try:
            cursor_seek(&src, &self._src, 0)
            cursor_seek(&dst, &self._dst, 0)
            while True:
                with nogil:
                    step = self._step(&src, &dst, &spans, now_ns() + SIGNAL_NS)
                if step == COMPLETE:
                    return spans
                if step == UNREGISTERED:
                    return None
                PyErr_CheckSignals()
        finally:
            self._release()

    cdef bint _hold(self) noexcept:
        cdef bint held
        with nogil:
            core_lock(self._source.core)
            held = not (self._source.mem.retiring or self._target.mem.retiring)
            if held:
                self._source.mem.pulls += 1
                self._target.mem.pulls += 1
            core_unlock(self._source.core)
        return held

    cdef void _release(self) noexcept:
        with nogil:
            core_lock(self._source.core)
            self._source.mem.pulls -= 1
            self._target.mem.pulls -= 1
            if self._source.mem.retiring or self._target.mem.retiring:
                core_idle(self._source.core)
            core_unlock(self._source.core)

    cdef Step _step(self, Cursor* src, Cursor* dst, uint64_t* spans,
                    uint64_t until) noexcept nogil:
        """Go on until all is copied, or until the time `until`."""
        cdef uint64_t left, length
        cdef uint64_t read = 0, write = 0
        cdef int _count
        while True:
            if (load_flag(&self._source.mem.retiring) or load_flag(&self._target.mem.retiring)):
                return UNREGISTERED
            left = PIECE
            for _count in range(PIECE_SPANS):
                length = cursor_run(src, &self._src, left, &read)
                length = min(length, cursor_run(dst, &self._dst, left, &write))
                if length == 0:
                    break
                memcpy(<void*>(write + self._offset), <void*>(read + self._offset), length)
                cursor_advance(src, &self._src, length)
                cursor_advance(dst, &self._dst, length)
                spans[0] += 1
                left -= length
            if dst.tensor >= self._dst.count:
                return COMPLETE
            if now_ns() >= until:
                return MORE


cdef void set_side(Geometry* g, const CacheMem* mem, uint32_t first, uint32_t count,
                   uint64_t block_len, uint64_t block, BlockList blocks) noexcept:
    memset(g, 0, sizeof(Geometry))
    g.addrs = mem.addrs
    g.first = first
    g.count = count
    g.stride = mem.block_bytes
    g.block_len = block_len
    g.block = block
    g.n_blocks = 1
    if blocks is not None:
        g.blocks = blocks.numbers
        g.n_blocks = blocks.size


cdef bint fits(const Geometry* g, const CacheMem* mem, uint64_t offset,
               BlockList blocks) noexcept:
    if g.count > mem.num_tensors or g.first > mem.num_tensors - g.count:
        return False
    if g.block_len > mem.block_bytes or offset > mem.block_bytes - g.block_len:
        return False
    if blocks is None:
        return g.block < mem.blocks
    return blocks.representable and (blocks.size == 0 or blocks.largest < mem.blocks)


cdef int by_number(const void* a, const void* b) noexcept nogil:
    cdef uint32_t one = (<const uint32_t*>a)[0]
    cdef uint32_t other = (<const uint32_t*>b)[0]
    return (one > other) - (one < other)


cdef int by_address(const void* a, const void* b) noexcept nogil:
    cdef uint64_t one = (<const uint64_t*>a)[0]
    cdef uint64_t other = (<const uint64_t*>b)[0]
    return (one > other) - (one < other)


cdef uint32_t* sorted_blocks(const Geometry* g) noexcept nogil:
    """The block numbers of a side in order, to be freed; NULL without memory."""
    cdef uint32_t* blocks = <uint32_t*>malloc((g.n_blocks + 1) * sizeof(uint32_t))
    if blocks == NULL:
        return NULL
    if g.blocks == NULL:
        blocks[0] = <uint32_t>g.block
    else:
        memcpy(blocks, g.blocks, g.n_blocks * sizeof(uint32_t))
        qsort(blocks, g.n_blocks, sizeof(uint32_t), by_number)
    return blocks


cdef uint64_t* sorted_tensors(const Geometry* g) noexcept nogil:
    cdef uint64_t* starts = <uint64_t*>malloc((g.count + 1) * sizeof(uint64_t))
    if starts != NULL:
        memcpy(starts, g.addrs + g.first, g.count * sizeof(uint64_t))
        qsort(starts, g.count, sizeof(uint64_t), by_address)
    return starts


cdef int sides_overlap(const Geometry* src, const Geometry* dst) noexcept nogil:
    """1 if a byte of one side is one of the other's too, 0 if not, -1 without memory."""
    cdef uint32_t* src_blocks
    cdef uint32_t* dst_blocks
    cdef uint64_t* src_tensors
    cdef uint64_t* dst_tensors
    cdef int result = -1
    if geometry_bytes(src) == 0 or geometry_bytes(dst) == 0:
        return 0
    src_blocks = sorted_blocks(src)
    dst_blocks = sorted_blocks(dst)
    src_tensors = sorted_tensors(src)
    dst_tensors = sorted_tensors(dst)
    if (src_blocks != NULL and dst_blocks != NULL and src_tensors != NULL
            and dst_tensors != NULL):
        result = tensors_overlap(src, dst, src_blocks, dst_blocks, src_tensors, dst_tensors)
    free(src_blocks)
    free(dst_blocks)
    free(src_tensors)
    free(dst_tensors)
    return result


cdef bint tensors_overlap(const Geometry* src, const Geometry* dst,
                          const uint32_t* src_blocks, const uint32_t* dst_blocks,
                          const uint64_t* src_tensors, const uint64_t* dst_tensors) noexcept nogil:
    # From the start of a tensor: the first byte taken of it, and the one behind the last.
    cdef uint64_t src_low = src_blocks[0] * src.stride
    cdef uint64_t src_high = src_blocks[src.n_blocks - 1] * src.stride + src.block_len
    cdef uint64_t dst_low = dst_blocks[0] * dst.stride
    cdef uint64_t dst_high = dst_blocks[dst.n_blocks - 1] * dst.stride + dst.block_len
    cdef uint32_t i, j, first = 0
    cdef int64_t apart, known = 0
    cdef bint any_known = False
    for i in range(dst.count):
        # Both are in order, so what ends before this tensor begins ends before all later ones.
        while first < src.count and src_tensors[first] + src_high <= dst_tensors[i] + dst_low:
            first += 1
        for j in range(first, src.count):
            if src_tensors[j] + src_low >= dst_tensors[i] + dst_high:
                break
            apart = <int64_t>(dst_tensors[i] - src_tensors[j])
            # Slots of one cache are equally far apart in all of its tensors.
            if any_known and apart == known:
                continue
            if blocks_overlap(src, dst, src_blocks, dst_blocks, apart):
                return True
            any_known = True
            known = apart
    return False


cdef bint blocks_overlap(const Geometry* src, const Geometry* dst, const uint32_t* src_blocks,
                         const uint32_t* dst_blocks, int64_t apart) noexcept nogil:
    """The same for one tensor of each side, the destination's `apart` bytes behind the source's."""
    cdef uint64_t i, j = 0
    cdef int64_t start
    for i in range(dst.n_blocks):
        start = apart + <int64_t>(dst_blocks[i] * dst.stride)
        while (j < src.n_blocks
               and <int64_t>(src_blocks[j] * src.stride + src.block_len) <= start):
            j += 1
        if j == src.n_blocks:
            return False
        if <int64_t>(src_blocks[j] * src.stride) < start + <int64_t>dst.block_len:
            return True
    return False
