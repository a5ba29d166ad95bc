"""The life of one transfer, whatever its path (see transfer.pyx)."""

from libc.stdint cimport uint32_t, uint64_t

from ucxkv.core cimport (
    DONE,
    WAITING,
    Core,
    Link,
    RemoteMem,
    Told,
    Totals,
    Transfer,
    TransferState,
)
from ucxkv.ucp cimport ucs_status_t


cdef extern from * nogil:
    TransferState load_state "__atomic_load_n"(const TransferState* state, int order)
    void store_state "__atomic_store_n"(TransferState* state, TransferState value, int order)
    uint32_t load_layers "__atomic_load_n"(const uint32_t* layers, int order)
    void store_layers "__atomic_store_n"(uint32_t* layers, uint32_t value, int order)
    int __ATOMIC_ACQUIRE
    int __ATOMIC_RELEASE


cdef inline bint transfer_begun(const Transfer* t) noexcept nogil:
    """Whether it is on its way, or over; without the lock too, and then its path can be read."""
    return load_state(&t.state, __ATOMIC_ACQUIRE) != WAITING


cdef inline bint transfer_over(const Transfer* t) noexcept nogil:
    """Whether it has ended; without the lock too, and then all that it has left can be read."""
    return load_state(&t.state, __ATOMIC_ACQUIRE) == DONE


cdef inline uint32_t transfer_layers(const Transfer* t) noexcept nogil:
    """The layers that have landed; without the lock too, and then their bytes can be read."""
    return load_layers(&t.layers_done, __ATOMIC_ACQUIRE)


cdef Transfer* transfer_new(Core* core, uint64_t deadline) noexcept nogil
cdef void told_free(Link* link, Told* told) noexcept nogil
cdef dict totals_dict(const Totals* totals)
cdef void transfer_unref(Transfer* t) noexcept nogil
cdef void transfer_begin(Transfer* t, Link* link) noexcept nogil
cdef void transfer_collect(Transfer* t) noexcept nogil
cdef void transfer_due(Transfer* t, uint32_t due) noexcept nogil
cdef void transfer_ask(Transfer* t) noexcept nogil
cdef void transfer_asked(Transfer* t, bint asked) noexcept nogil
cdef void transfer_release(Transfer* t) noexcept nogil
cdef void transfer_end_all(Link* link, uint32_t status, const char* reason) noexcept nogil
cdef void transfer_advance(Transfer* t, uint64_t good) noexcept nogil
cdef void transfer_word_gone(Transfer* t) noexcept nogil
cdef void transfer_end(Transfer* t, uint32_t status, ucs_status_t ucs,
                       const char* reason) noexcept nogil
cdef void transfer_settle(Transfer* t) noexcept nogil
cdef void cancel_later(Link* link, uint64_t number) noexcept nogil
cdef void transfer_renumber(Transfer* t) noexcept nogil
cdef uint64_t transfer_number(const Transfer* t) noexcept nogil
cdef Transfer* transfer_find(Core* core, Link* link, uint64_t number) noexcept nogil
cdef void answer_later(Link* link, uint64_t offer, uint32_t status, uint32_t path,
                       uint64_t spans) noexcept nogil
cdef void remote_unref(RemoteMem* r) noexcept nogil
cdef void remote_free(RemoteMem* r) noexcept nogil
