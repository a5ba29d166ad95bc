"""Registered memory, local and remote (see memory.pyx)."""

from ucxkv.core cimport CacheMem, Core, RemoteMem


cdef class LocalCache:
    cdef Core* core
    cdef CacheMem* mem
    cdef object _engine         # keeps `core` alive
    cdef void unmap(self) noexcept


cdef class RemoteCache:
    cdef Core* core
    cdef RemoteMem* mem
    cdef object _link           # keeps `core` and the link alive
