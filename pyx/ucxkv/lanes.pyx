"""The transports under an endpoint: UCX's own choice, asked for where its release can tell.

All functions want the engine's lock to be held.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memset, strcmp
from posix.dlfcn cimport RTLD_LAZY, dlopen, dlsym

from ucxkv.core cimport OPEN, Plane
from ucxkv.ucp cimport UCS_OK, ucp_ep_h, ucp_get_version, ucs_status_t


cdef extern from "ucp/api/ucp.h" nogil:
    enum:
        UCP_EP_ATTR_FIELD_TRANSPORTS

    ctypedef struct ucp_transports_t:
        ucp_transport_entry_t* entries
        unsigned int num_entries
        size_t entry_size

    ctypedef struct ucp_ep_attr_t:
        uint64_t field_mask
        ucp_transports_t transports


ctypedef ucs_status_t (*query_t)(ucp_ep_h, ucp_ep_attr_t*) noexcept nogil

# Releases before 1.14 lack the function or this field of it, so it cannot be linked.
cdef query_t query = NULL


cdef void find_query() noexcept:
    global query
    cdef unsigned int major, minor, patch
    ucp_get_version(&major, &minor, &patch)
    if (major, minor) >= (1, 14):
        query = <query_t>dlsym(dlopen(NULL, RTLD_LAZY), "ucp_ep_query")


find_query()


cdef int lanes_query(Plane* plane, ucp_transport_entry_t* entries) noexcept nogil:
    """Fill up to MAX_LANES entries; how many there are, -1 if that cannot be told."""
    cdef ucp_ep_attr_t attr
    if query == NULL or plane.state != OPEN:
        return -1
    memset(&attr, 0, sizeof(attr))
    attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS
    attr.transports.entries = entries
    attr.transports.num_entries = MAX_LANES
    attr.transports.entry_size = sizeof(ucp_transport_entry_t)
    if query(plane.ep, &attr) != UCS_OK:
        return -1
    return <int>attr.transports.num_entries


cdef bint lanes_include(Plane* plane, const char* transport) noexcept nogil:
    cdef ucp_transport_entry_t[MAX_LANES] entries
    cdef int i
    for i in range(lanes_query(plane, entries)):
        if strcmp(entries[i].transport_name, transport) == 0:
            return True
    return False
