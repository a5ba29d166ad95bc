"""What Python sees of one transfer (see handle.pyx)."""

from ucxkv.core cimport CacheMem, Core, Link, RemoteMem, Transfer


cdef class TransferHandle:
    cdef Core* core
    cdef Transfer* t
    cdef object _engine         # keeps `core` alive
    cdef int ours(self) except -1
    cdef bint startable(self, Link* link, RemoteMem* remote, CacheMem* local) noexcept nogil
    cdef void start(self, Link* link, bint attended) noexcept nogil


cdef TransferHandle handle_create(object engine, Core* core, Transfer* t)
