"""A link and its two UCX endpoints.

A link has a *plane* for streaming (active messages) and one for GETs (RMA).  A plane that fails is
closed by force, which makes UCX complete or cancel all that was in flight on it, and opened again
at once; when it keeps failing, after a growing pause.  Only the service thread and callers that
drive progress step planes, always with the engine's lock.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport getpid

from ucxkv.core cimport (
    CLOSED,
    CLOSING,
    MAX_AM_WORKERS,
    MAX_LINKS,
    MAX_SERVES,
    OPEN,
    Core,
    Link,
    Plane,
    RemoteMem,
    Totals,
    core_lock,
    core_notify,
    core_timer,
    core_unlock,
    core_wake,
    random64,
)
from ucxkv.lanes cimport lanes_names, lanes_old_release
from ucxkv.pthread cimport now_ns
from ucxkv.transfer cimport totals_dict, transfer_end_all
from ucxkv.ucp cimport (
    UCP_EP_CLOSE_FLAG_FORCE,
    UCP_EP_PARAM_FIELD_ERR_HANDLER,
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
    UCP_ERR_HANDLING_MODE_PEER,
    UCP_OP_ATTR_FIELD_FLAGS,
    UCS_INPROGRESS,
    UCS_OK,
    UCS_PTR_IS_ERR,
    ucp_address_t,
    ucp_ep_close_nbx,
    ucp_ep_create,
    ucp_ep_h,
    ucp_ep_params_t,
    ucp_request_check_status,
    ucp_request_free,
    ucp_request_param_t,
    ucp_rkey_destroy,
    ucs_status_string,
    ucs_status_t,
)


# Debian's build of UCX 1.13 ends the process when an RDMA endpoint is closed, or destroyed with its
# worker, while messages that connect it wait to be sent ("got REQ message"); 1.14 does not.
cdef bint wiring_is_fatal = lanes_old_release()

cdef enum:
    BACKOFF_FIRST_NS = 1000000
    BACKOFF_MAX_NS = 250000000


cdef void on_am_error(void* arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil:
    cdef Link* link = <Link*>arg
    if ep == link.am.ep:
        plane_fail(link, &link.am, status)


cdef void on_rma_error(void* arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil:
    cdef Link* link = <Link*>arg
    if ep == link.rma.ep:
        plane_fail(link, &link.rma, status)


cdef void link_error(Link* link, ucs_status_t status) noexcept nogil:
    link.error = status
    link.dirty = True


cdef void plane_fail(Link* link, Plane* plane, ucs_status_t status) noexcept nogil:
    """Have `plane` closed and opened again; `status` UCS_OK means on purpose."""
    if plane.state != OPEN or (plane.failed and status == UCS_OK):
        return
    if not plane.failed or plane.error == UCS_OK:
        plane.error = status
    plane.failed = True
    if status != UCS_OK:
        link_error(link, status)
        if plane == &link.am:
            link.proven = False
            core_notify(link.core)
    link.dirty = True


cdef bint plane_open(Link* link, Plane* plane) noexcept nogil:
    cdef ucp_ep_params_t params
    cdef ucs_status_t status
    memset(&params, 0, sizeof(params))
    params.field_mask = (UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                         | UCP_EP_PARAM_FIELD_ERR_HANDLER)
    params.address = <const ucp_address_t*>plane.address
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER
    params.err_handler.cb = on_am_error if plane == &link.am else on_rma_error
    params.err_handler.arg = link
    plane.failed = False
    plane.error = UCS_OK
    if plane == &link.rma:
        link.reached = False
    status = ucp_ep_create(plane.worker.worker, &params, &plane.ep)
    if status != UCS_OK:
        plane.ep = NULL
        plane.error = status
        link_error(link, status)
        back_off(link, plane)
        return False
    plane.state = OPEN
    return True


cdef void back_off(Link* link, Plane* plane) noexcept nogil:
    plane.retry_at = now_ns() + plane.backoff
    plane.backoff = plane.backoff * 2 if plane.backoff else BACKOFF_FIRST_NS
    if plane.backoff > BACKOFF_MAX_NS:
        plane.backoff = BACKOFF_MAX_NS
    core_timer(link.core, plane.retry_at, True)


cdef void plane_close(Link* link, Plane* plane) noexcept nogil:
    cdef ucp_request_param_t param
    cdef void* request
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS
    param.flags = UCP_EP_CLOSE_FLAG_FORCE
    plane.state = CLOSING
    link.core.n_closing += 1
    request = ucp_ep_close_nbx(plane.ep, &param)
    plane.close_request = NULL if UCS_PTR_IS_ERR(request) else request


cdef void plane_abandon(Link* link, Plane* plane) noexcept nogil:
    """Have done with an endpoint that cannot be closed; its worker is left to it."""
    plane.state = CLOSED
    plane.ep = NULL
    link.core.abandoned = True
    # The trial that is under way may still end.
    link.words_rkey = NULL
    link.refs += 1


cdef bint plane_step(Link* link, Plane* plane, uint64_t now) noexcept nogil:
    """Move `plane` on; True when it has been closed, or not been opened: nothing is in flight."""
    if plane.state == OPEN and plane.failed:
        # With a message half sent, UCX's TCP transport (seen in 1.22) neither closes the socket nor
        # lets go of it: the peer waits for the rest, this side spins, and when the peer closes as
        # well uct_tcp_iface_handle_events frees the endpoint under itself.  What is in flight on
        # the streaming plane refers to buffers of our own, so there is no hurry.
        if plane == &link.am and plane.error == UCS_OK and plane.outstanding > 0:
            return False
        if plane == &link.rma and link.trial.busy and plane.error == UCS_OK and wiring_is_fatal:
            if link.closing:
                plane_abandon(link, plane)
            return link.closing
        plane_close(link, plane)
    if plane.state == CLOSING:
        if (plane.close_request != NULL
                and ucp_request_check_status(plane.close_request) != UCS_INPROGRESS):
            ucp_request_free(plane.close_request)
            plane.close_request = NULL
        if plane.close_request != NULL or plane.outstanding > 0:
            return False
        plane.state = CLOSED
        plane.ep = NULL
        link.core.n_closing -= 1
        if plane.error != UCS_OK:
            back_off(link, plane)
        link.repairs += 1
        return True
    if plane.state == CLOSED and plane.wanted and now >= plane.retry_at:
        return not plane_open(link, plane)
    return False


cdef void remotes_forget(Link* link) noexcept nogil:
    """Destroy the rkeys that were unpacked on the endpoint that has just been closed."""
    cdef RemoteMem* remote = link.remotes
    cdef uint32_t i
    while remote != NULL:
        for i in range(remote.n_regions):
            if remote.rkeys[i] != NULL:
                ucp_rkey_destroy(remote.rkeys[i])
                remote.rkeys[i] = NULL
        remote = remote.next
    if link.words_rkey != NULL:
        ucp_rkey_destroy(link.words_rkey)
        link.words_rkey = NULL


cdef void link_unref(Link* link) noexcept nogil:
    link.refs -= 1
    if link.refs > 0:
        return
    free(link.am.address)
    free(link.rma.address)
    free(link.words_rkey_packed)
    free(link.cancels)
    free(link.answers)
    free(link)


cdef enum:
    # UCX is told no length of an address or rkey and believes what is in it: with zeros behind, a
    # short one ends early instead of going on into other memory.
    BLOB_PADDING = 4096


cdef void* copy_bytes(bytes data) except? NULL:
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
    if length == 0:
        return NULL
    cdef void* copy = calloc(1, length + BLOB_PADDING)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, PyBytes_AS_STRING(data), length)
    return copy


cdef bint alike(bytes address, bytes own):
    """Whether an address begins as ours do: UCX ends the process over one of another version."""
    return len(address) >= len(own) // 2 and address[:1] == own[:1]


cdef NativeLink link_create(object engine, Core* core, int worker):
    """A link that peers can name already; it does nothing before `connect`."""
    cdef Link* link
    cdef uint32_t slot
    cdef NativeLink result
    if worker < 0 or worker >= core.n_am or worker >= MAX_AM_WORKERS:
        raise ValueError(f"no streaming worker {worker}")
    link = <Link*>calloc(1, sizeof(Link))
    if link == NULL:
        raise MemoryError
    link.cap_cancels = MAX_SERVES
    link.cancels = <uint64_t*>malloc(MAX_SERVES * sizeof(uint64_t))
    if link.cancels == NULL:
        free(link)
        raise MemoryError
    link.core = core
    link.refs = 2               # the engine and the Python object
    link.token = random64()
    link.am.worker = &core.am[worker]
    link.rma.worker = &core.rma
    core_lock(core)
    slot = 0
    while slot < MAX_LINKS and core.links[slot] != NULL:
        slot += 1
    if slot < MAX_LINKS and not core.stop:
        link.slot = slot
        core.links[slot] = link
        link.next = core.first_link
        core.first_link = link
    core_unlock(core)
    if slot == MAX_LINKS or core.links[slot] != link:
        link.refs = 1
        link_unref(link)
        raise MemoryError(f"an engine has at most {MAX_LINKS} links, none after it was closed")
    result = NativeLink.__new__(NativeLink)
    result.core = core
    result.link = link
    result.worker = worker
    result._engine = engine
    return result


@cython.no_gc
cdef class NativeLink:
    """The data plane of one link.

    Every property may be read from any thread.  The engine's `notify_fd` becomes readable when
    `ready`, `am_broken` or `closed` changes, and when `pulls` or `serving` becomes 0 after it was
    last read as something else.
    """

    def __init__(self):
        raise TypeError("links are made by NativeEngine.new_link")

    def __dealloc__(self):
        if self.link == NULL or self.core.pid != getpid():
            return
        with nogil:
            core_lock(self.core)
            self.link.closing = True
            self.link.dirty = True
            core_wake(self.core)
            link_unref(self.link)
            core_unlock(self.core)

    def connect(self, *, uint32_t peer_slot, uint64_t peer_token, bytes am_address not None,
                bytes rma_address not None, uint64_t words_address, bytes words_rkey not None,
                uint64_t word0, uint64_t cluster_id=0):
        """Create the endpoints and begin to prove them; `ready` becomes True when that is over.

        The arguments are what the peer told of itself over the control connection.
        """
        cdef Link* link = self.link
        if not alike(am_address, self._engine.worker_address(self.worker)):
            raise ValueError("the peer's worker address is not one of this UCX")
        own = self._engine.rma_address
        if rma_address and own and not alike(rma_address, own):
            raise ValueError("the peer's RMA address is not one of this UCX")
        cdef void* am = copy_bytes(am_address)
        cdef void* rma = copy_bytes(rma_address)
        cdef void* rkey = copy_bytes(words_rkey)
        cdef bint refused
        with nogil:
            core_lock(self.core)
            refused = link.connected or link.closing
            if not refused:
                link.peer_slot = peer_slot
                link.peer_token = peer_token
                link.am.address = am
                link.rma.address = rma
                link.words_rkey_packed = rkey
                link.words_address = words_address
                link.word0 = word0
                link.cluster_id = cluster_id
                link.connected = True
                link.am.wanted = True
                link.ping_due = True
                link.rma.wanted = (self.core.rma.worker != NULL and rma != NULL and rkey != NULL)
                if not link.rma.wanted:
                    link.get_trial = 2
                link.dirty = True
                core_wake(self.core)
            core_unlock(self.core)
        if refused:
            free(am)
            free(rma)
            free(rkey)
            raise RuntimeError("this link was connected or closed before")

    def fail_pulls(self, uint32_t status, str reason=""):
        """End all running pulls with `status`; each is fenced before its waiters learn of it."""
        cdef bytes text = reason.encode()[:150]
        cdef const char* c_reason = text
        with nogil:
            core_lock(self.core)
            transfer_end_all(self.link, status, c_reason)
            core_wake(self.core)
            core_unlock(self.core)

    def close(self):
        """Begin to close: fences and ends all pulls, drops the peer's requests; see `closed`."""
        with nogil:
            core_lock(self.core)
            self.link.closing = True
            self.link.dirty = True
            core_wake(self.core)
            core_unlock(self.core)

    @property
    def slot(self):
        """What the peer must put in each message to this link, together with `token`."""
        return self.link.slot

    @property
    def token(self):
        """64 random bits; a message without them is dropped."""
        return self.link.token

    @property
    def ready(self):
        """Both directions of the data plane are proven, and it is known whether GET works."""
        return bool(self.link.ever_proven and self.link.get_trial == 2 and not self.link.closing)

    @property
    def get(self):
        """One-sided GETs reach this peer."""
        return bool(self.link.get_ok)

    @property
    def direct(self):
        """New pulls on path "get" read the peer's memory without UCX; may be set to False."""
        return self.link.cma_pid != 0

    @direct.setter
    def direct(self, bint value):
        if value:
            raise ValueError("only the trial at link time can turn this on")
        self.link.cma_pid = 0

    @property
    def barriers_heard(self):
        """How often the peer has quiesced a part of a cache."""
        return self.link.barriers_heard

    @property
    def am_broken(self):
        """The streaming endpoint has failed and has not been proven again since."""
        return bool(self.link.connected and self.link.ever_proven and not self.link.proven)

    @property
    def error(self):
        """The last UCX error of the data plane, or an empty string."""
        if self.link.error == UCS_OK:
            return ""
        return ucs_status_string(self.link.error).decode()

    @property
    def pulls(self):
        """Transfers of ours that run over this link."""
        cdef uint32_t count = self.link.n_transfers
        if count:
            self.link.watched = True
        return count

    @property
    def serving(self):
        """Requests of the peer that are being streamed."""
        if self.link.n_serves:
            self.link.watched = True
        return self.link.n_serves

    @property
    def closed(self):
        """The endpoints are gone and nothing of this link is in flight."""
        return bool(self.link.closed)

    def totals(self):
        """Counters over the link's ended transfers, as NativeEngine.totals.

        Besides, its bytes read without UCX, endpoint repairs and dropped messages.
        """
        cdef Totals totals
        cdef uint64_t direct, repairs, dropped
        with nogil:
            core_lock(self.core)
            totals = self.link.totals
            direct, repairs, dropped = (self.link.bytes_direct, self.link.repairs,
                                        self.link.dropped)
            core_unlock(self.core)
        cdef dict counted = totals_dict(&totals)
        counted["bytes_direct"] = direct
        counted["repairs"] = repairs
        counted["dropped"] = dropped
        return counted

    @property
    def transports(self):
        """Names of the UCX transports in use, e.g. ("tcp/lo", "cma/memory")."""
        names = []
        for name in lanes_names(self.core, &self.link.am) + lanes_names(self.core, &self.link.rma):
            if name not in names:
                names.append(name)
        return tuple(names)
