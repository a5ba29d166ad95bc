"""UCX contexts and workers: one pair for GETs, one pair per network interface for streaming."""

from ucxkv import memlock

from libc.stdio cimport FILE, fclose
from libc.stdlib cimport free
from libc.string cimport memset

from ucxkv.ucp cimport (
    UCP_FEATURE_AM,
    UCP_FEATURE_RMA,
    UCP_FEATURE_WAKEUP,
    UCP_PARAM_FIELD_FEATURES,
    UCP_PARAM_FIELD_MT_WORKERS_SHARED,
    UCP_WORKER_ATTR_FIELD_THREAD_MODE,
    UCP_WORKER_PARAM_FIELD_THREAD_MODE,
    UCS_OK,
    UCS_THREAD_MODE_SERIALIZED,
    ucp_cleanup,
    ucp_config_modify,
    ucp_config_read,
    ucp_config_release,
    ucp_config_t,
    ucp_context_print_info,
    ucp_init_version,
    ucp_params_t,
    ucp_worker_attr_t,
    ucp_worker_create,
    ucp_worker_destroy,
    ucp_worker_get_efd,
    ucp_worker_params_t,
    ucp_worker_query,
    ucs_status_string,
    ucs_status_t,
)


cdef extern from "<stdio.h>" nogil:
    FILE* open_memstream(char** buffer, size_t* size)


cdef enum:
    # The oldest UCX this code runs on: newer ones take it as the API it was written for.
    API_MAJOR = 1
    API_MINOR = 13


class UcxError(RuntimeError):
    """UCX refused something; the message says what and why."""


cdef int check(ucs_status_t status, str what) except -1:
    if status != UCS_OK:
        raise UcxError(
            f"UCX cannot {what}: {ucs_status_string(status).decode()}{memlock.advice()}")
    return 0


cdef int worker_open(Worker* w, unsigned long features, settings) except -1:
    """Make a context with `features`, configured by the environment and `settings`, and a worker.

    `settings` are UCX variables without their prefix; they win over the environment.
    """
    cdef ucp_config_t* config
    cdef ucp_params_t params
    cdef ucp_worker_params_t worker_params
    cdef ucp_worker_attr_t attr
    cdef ucs_status_t status
    cdef bytes key, value
    check(ucp_config_read(NULL, NULL, &config), "read its configuration")
    try:
        for name, setting in settings.items():
            key = name.encode()
            value = str(setting).encode()
            check(ucp_config_modify(config, key, value), f"set {name}={setting}")
        memset(&params, 0, sizeof(params))
        params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED
        params.features = features | UCP_FEATURE_WAKEUP
        # Memory is registered by callers while the service thread drives the worker.
        params.mt_workers_shared = 1
        with nogil:
            status = ucp_init_version(API_MAJOR, API_MINOR, &params, config, &w.context)
        if status != UCS_OK:
            w.context = NULL
        check(status, "make a context")
    finally:
        ucp_config_release(config)
    memset(&worker_params, 0, sizeof(worker_params))
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE
    worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED
    with nogil:
        status = ucp_worker_create(w.context, &worker_params, &w.worker)
    try:
        if status != UCS_OK:
            w.worker = NULL
        check(status, "make a worker")
        attr.field_mask = UCP_WORKER_ATTR_FIELD_THREAD_MODE
        check(ucp_worker_query(w.worker, &attr), "tell a worker's thread mode")
        if attr.thread_mode < UCS_THREAD_MODE_SERIALIZED:
            raise UcxError("this UCX was built without thread support")
        check(ucp_worker_get_efd(w.worker, &w.event_fd), "give a worker's event descriptor")
    except UcxError:
        worker_close(w)
        raise
    return 0


cdef void worker_close(Worker* w) noexcept nogil:
    if w.worker != NULL:
        ucp_worker_destroy(w.worker)
        w.worker = NULL
    if w.context != NULL:
        ucp_cleanup(w.context)
        w.context = NULL


def describe(settings):
    """UCX's own description of a context with these settings: its memory domains and devices."""
    cdef Worker w
    cdef char* buffer = NULL
    cdef size_t size = 0
    cdef FILE* stream
    memset(&w, 0, sizeof(w))
    worker_open(&w, UCP_FEATURE_AM | UCP_FEATURE_RMA, settings)
    try:
        stream = open_memstream(&buffer, &size)
        if stream == NULL:
            raise MemoryError
        ucp_context_print_info(w.context, stream)
        fclose(stream)
        return buffer[:size].decode("utf-8", "replace")
    finally:
        free(buffer)
        worker_close(&w)
