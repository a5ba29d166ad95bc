"""UCX contexts and workers (see context.pyx)."""

from ucxkv.core cimport Worker
from ucxkv.ucp cimport ucs_status_t


cdef int worker_open(Worker* w, unsigned long features, settings) except -1
cdef void worker_close(Worker* w) noexcept nogil
cdef int check(ucs_status_t status, str what) except -1
