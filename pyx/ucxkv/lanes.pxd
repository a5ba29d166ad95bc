"""The transports under an endpoint (see lanes.pyx)."""

from ucxkv.core cimport Core, Plane


cdef extern from "ucp/api/ucp.h" nogil:
    ctypedef struct ucp_transport_entry_t:
        const char* transport_name
        const char* device_name


cdef enum:
    MAX_LANES = 16


cdef int lanes_query(Plane* plane, ucp_transport_entry_t* entries) noexcept nogil
cdef bint lanes_use(Plane* plane, const char* transport) noexcept nogil
cdef bint lanes_old_release() noexcept nogil
cdef list lanes_names(Core* core, Plane* plane)
