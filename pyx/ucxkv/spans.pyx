"""From geometry to spans.

Both sides of a transfer are the same stream of bytes: tensor after tensor, and within a tensor
block after block.  A :c:struct:`Geometry` describes one side, a :c:struct:`Cursor` is a position
in its stream.  Spans are generated where they are needed instead of being kept in arrays, so a
transfer of a million spans costs no more memory than one of a single span, and a transfer can be
taken up again at any byte.  Neighbouring blocks come out as one run.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc


cdef uint64_t geometry_tensor_bytes(const Geometry* g) noexcept nogil:
    return g.block_len * g.n_blocks


cdef uint64_t geometry_bytes(const Geometry* g) noexcept nogil:
    return geometry_tensor_bytes(g) * g.count


cdef void cursor_seek(Cursor* c, const Geometry* g, uint64_t offset) noexcept nogil:
    """Put `c` at byte `offset` of the stream; the end of the stream is a valid position."""
    cdef uint64_t per_tensor = geometry_tensor_bytes(g)
    c.run = 0
    if per_tensor == 0:
        c.tensor = g.count
        c.index = 0
        c.done = 0
        return
    c.tensor = <uint32_t>(offset // per_tensor)
    offset %= per_tensor
    c.index = offset // g.block_len
    c.done = offset % g.block_len


cdef inline uint64_t block_at(const Geometry* g, uint64_t index) noexcept nogil:
    return g.blocks[index] if g.blocks != NULL else g.block


cdef uint64_t cursor_run(Cursor* c, const Geometry* g, uint64_t limit,
                         uint64_t* addr) noexcept nogil:
    """Length (at most `limit`) and address of the contiguous bytes at `c`; 0 at the end."""
    cdef uint64_t index, block
    if c.tensor >= g.count:
        return 0
    block = block_at(g, c.index)
    addr[0] = g.addrs[g.first + c.tensor] + block * g.stride + c.done
    if c.run == 0:
        # Kept, so that a long run cut into many pieces is looked through only once.
        c.run = g.block_len - c.done
        if g.block_len == g.stride:
            index = c.index + 1
            while index < g.n_blocks and block_at(g, index) == block + 1:
                block += 1
                index += 1
                c.run += g.block_len
    return c.run if c.run < limit else limit


cdef void cursor_advance(Cursor* c, const Geometry* g, uint64_t length) noexcept nogil:
    """Move `c` by `length` bytes, at most to the end of the run that it is in."""
    cdef uint64_t left = g.block_len - c.done
    c.run -= length
    if length < left:
        c.done += length
        return
    length -= left
    c.index += 1 + length // g.block_len
    c.done = length % g.block_len
    if c.index >= g.n_blocks:
        c.index = 0
        c.tensor += 1


cdef class Side:
    """One side of a transfer, for tests and tools: a geometry that owns its arrays.

    `addrs` are the tensors' addresses; `count` of them from `first` on take part.  Of each,
    `block_len` bytes are taken from every block in `blocks` (or from the one block `block`), block
    k beginning `k * stride` bytes into the tensor.
    """

    cdef Geometry g
    cdef uint64_t* _addrs
    cdef uint32_t* _blocks

    def __init__(self, addrs, Py_ssize_t first, Py_ssize_t count, uint64_t stride,
                 uint64_t block_len, blocks=None, uint64_t block=0):
        cdef Py_ssize_t i
        if first < 0 or count < 0 or first + count > len(addrs):
            raise ValueError("tensors out of range")
        if self._addrs != NULL:
            raise RuntimeError("already initialised")
        self._addrs = <uint64_t*>malloc(max(1, len(addrs)) * sizeof(uint64_t))
        if self._addrs == NULL:
            raise MemoryError
        for i in range(len(addrs)):
            self._addrs[i] = addrs[i]
        if blocks is not None:
            self._blocks = <uint32_t*>malloc(max(1, len(blocks)) * sizeof(uint32_t))
            if self._blocks == NULL:
                raise MemoryError
            for i in range(len(blocks)):
                self._blocks[i] = blocks[i]
        self.g.addrs = self._addrs
        self.g.first = <uint32_t>first
        self.g.count = <uint32_t>count
        self.g.stride = stride
        self.g.block_len = block_len
        self.g.blocks = self._blocks
        self.g.block = block
        self.g.n_blocks = 1 if blocks is None else len(blocks)

    def __dealloc__(self):
        free(self._addrs)
        free(self._blocks)


def expand(Side side, uint64_t offset=0, uint64_t limit=1 << 62):
    """The runs of `side` from stream byte `offset` on, as a list of (address, length)."""
    cdef Cursor c
    cdef uint64_t addr = 0, length
    runs = []
    cursor_seek(&c, &side.g, offset)
    while True:
        length = cursor_run(&c, &side.g, limit, &addr)
        if length == 0:
            return runs
        runs.append((addr, length))
        cursor_advance(&c, &side.g, length)


def pairs(Side source, Side destination, uint64_t offset=0, uint64_t limit=1 << 62):
    """The spans from `source` to `destination`, as a list of (source, destination, length)."""
    cdef Cursor s, d
    cdef uint64_t src = 0, dst = 0, length
    if geometry_tensor_bytes(&source.g) != geometry_tensor_bytes(&destination.g):
        raise ValueError("the two sides differ in bytes per tensor")
    spans = []
    cursor_seek(&s, &source.g, offset)
    cursor_seek(&d, &destination.g, offset)
    while True:
        length = cursor_run(&s, &source.g, limit, &src)
        length = min(length, cursor_run(&d, &destination.g, limit, &dst))
        if length == 0:
            return spans
        spans.append((src, dst, length))
        cursor_advance(&s, &source.g, length)
        cursor_advance(&d, &destination.g, length)
