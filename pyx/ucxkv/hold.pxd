"""Holds of registered memory (see hold.pyx)."""

from libc.stdint cimport uint32_t, uint64_t

from ucxkv.core cimport CacheMem, Core, Hold, Link


cdef class NativeHold:
    cdef Core* core
    cdef Hold* hold
    cdef object _engine         # keeps `core` alive


cdef NativeHold hold_create(object engine, Core* core, CacheMem* mem, uint64_t expires)
cdef bint hold_covers(Core* core, uint32_t slot, uint64_t word, const CacheMem* mem) noexcept nogil
cdef void hold_noticed(const Link* link, uint32_t slot, uint64_t word) noexcept nogil
cdef void holds_expire(Core* core, uint64_t now) noexcept nogil
cdef void holds_unregister(Core* core, const CacheMem* mem) noexcept nogil
cdef void holds_forget(Core* core) noexcept nogil
