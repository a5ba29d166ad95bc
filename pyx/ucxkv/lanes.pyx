"""The transports under an endpoint: UCX's own choice, asked for or, before 1.14, read in what it
prints for people.

Functions without the GIL want the engine's lock to be held.
"""

import re

from libc.stdint cimport uint64_t
from libc.stdio cimport FILE, fclose
from libc.stdlib cimport free
from libc.string cimport memset, strcmp
from posix.dlfcn cimport RTLD_LAZY, dlopen, dlsym

from ucxkv.core cimport OPEN, Core, Plane, core_lock, core_unlock
from ucxkv.ucp cimport UCS_OK, ucp_ep_h, ucp_ep_print_info, ucp_get_version, ucs_status_t


cdef extern from "<stdio.h>" nogil:
    FILE* open_memstream(char** buffer, size_t* size)


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

# A line such as "lane[0]:  1:rc_verbs/mlx5_0:1.0 md[1] -> ...".
_PRINTED = re.compile(r"lane\[\d+\]: +\d+:(\w+/\S+)\.\d+ md\[")


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


cdef bint lanes_old_release() noexcept nogil:
    """Whether the UCX in use is older than 1.14."""
    return query == NULL


cdef bint lanes_use(Plane* plane, const char* transport) noexcept nogil:
    """Whether an endpoint is known to use that transport."""
    cdef ucp_transport_entry_t[MAX_LANES] entries
    cdef int i
    for i in range(lanes_query(plane, entries)):
        if strcmp(entries[i].transport_name, transport) == 0:
            return True
    return False


cdef char* printed(Plane* plane) noexcept nogil:
    """What UCX prints of an endpoint, to be freed; NULL if there is none."""
    cdef char* text = NULL
    cdef size_t size = 0
    cdef FILE* stream
    if plane.state != OPEN:
        return NULL
    stream = open_memstream(&text, &size)
    if stream == NULL:
        return NULL
    ucp_ep_print_info(plane.ep, stream)
    fclose(stream)
    return text


cdef list lanes_names(Core* core, Plane* plane):
    """Transports and devices, such as "rc_verbs/mlx5_0:1", one per lane."""
    cdef ucp_transport_entry_t[MAX_LANES] entries
    cdef char* text = NULL
    cdef int i, count
    with nogil:
        core_lock(core)
        count = lanes_query(plane, entries)
        if query == NULL:
            text = printed(plane)
        core_unlock(core)
    if text != NULL:
        try:
            return _PRINTED.findall(text.decode("utf-8", "replace"))
        finally:
            free(text)
    return [
        f"{entries[i].transport_name.decode()}/{entries[i].device_name.decode()}"
        for i in range(count)
    ]
