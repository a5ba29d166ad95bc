"""Declarations of the parts of UCP and UCS that ucxkv uses; nothing newer than UCX 1.13."""

from libc.stdint cimport uint64_t
from libc.stdio cimport FILE


cdef extern from "ucs/type/status.h" nogil:
    ctypedef int ucs_status_t
    ctypedef void* ucs_status_ptr_t
    enum:
        UCS_OK
        UCS_INPROGRESS
        UCS_ERR_BUSY
        UCS_ERR_CANCELED
        UCS_ERR_NO_MEMORY
        UCS_ERR_TIMED_OUT
    const char* ucs_status_string(ucs_status_t status)
    bint UCS_PTR_IS_ERR(void* ptr)
    bint UCS_PTR_IS_PTR(void* ptr)
    ucs_status_t UCS_PTR_STATUS(void* ptr)


cdef extern from "ucs/config/global_opts.h" nogil:
    ucs_status_t ucs_global_opts_set_value(const char* name, const char* value)


cdef extern from "ucs/type/thread_mode.h" nogil:
    ctypedef int ucs_thread_mode_t
    enum:
        UCS_THREAD_MODE_SERIALIZED


cdef extern from "ucp/api/ucp.h" nogil:
    ctypedef void* ucp_context_h
    ctypedef void* ucp_worker_h
    ctypedef void* ucp_ep_h
    ctypedef void* ucp_mem_h
    ctypedef void* ucp_rkey_h
    ctypedef struct ucp_config_t:
        pass
    ctypedef struct ucp_address_t:
        pass
    ctypedef uint64_t ucp_datatype_t

    enum:
        UCP_PARAM_FIELD_FEATURES
        UCP_PARAM_FIELD_MT_WORKERS_SHARED
        UCP_PARAM_FIELD_ESTIMATED_NUM_EPS
        UCP_FEATURE_RMA
        UCP_FEATURE_AM
        UCP_FEATURE_WAKEUP
        UCP_WORKER_PARAM_FIELD_THREAD_MODE
        UCP_WORKER_ATTR_FIELD_THREAD_MODE
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
        UCP_EP_PARAM_FIELD_ERR_HANDLER
        UCP_ERR_HANDLING_MODE_PEER
        UCP_EP_CLOSE_FLAG_FORCE
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS
        UCP_MEM_MAP_PARAM_FIELD_LENGTH
        UCP_MEM_MAP_PARAM_FIELD_PROT
        UCP_MEM_MAP_PROT_LOCAL_READ
        UCP_MEM_MAP_PROT_LOCAL_WRITE
        UCP_MEM_MAP_PROT_REMOTE_READ
        UCP_AM_FLAG_WHOLE_MSG
        UCP_AM_SEND_FLAG_EAGER
        UCP_AM_HANDLER_PARAM_FIELD_ID
        UCP_AM_HANDLER_PARAM_FIELD_FLAGS
        UCP_AM_HANDLER_PARAM_FIELD_CB
        UCP_AM_HANDLER_PARAM_FIELD_ARG
        UCP_AM_RECV_ATTR_FLAG_RNDV
        UCP_OP_ATTR_FIELD_CALLBACK
        UCP_OP_ATTR_FIELD_USER_DATA
        UCP_OP_ATTR_FIELD_FLAGS
        UCP_OP_ATTR_FIELD_MEMH

    ctypedef struct ucp_params_t:
        uint64_t field_mask
        uint64_t features
        int mt_workers_shared
        size_t estimated_num_eps

    ctypedef struct ucp_worker_params_t:
        uint64_t field_mask
        ucs_thread_mode_t thread_mode

    ctypedef struct ucp_worker_attr_t:
        uint64_t field_mask
        ucs_thread_mode_t thread_mode

    ctypedef void (*ucp_err_handler_cb_t)(void* arg, ucp_ep_h ep,
                                          ucs_status_t status) noexcept nogil

    ctypedef struct ucp_err_handler_t:
        ucp_err_handler_cb_t cb
        void* arg

    ctypedef struct ucp_ep_params_t:
        uint64_t field_mask
        const ucp_address_t* address
        int err_mode
        ucp_err_handler_t err_handler

    ctypedef struct ucp_mem_map_params_t:
        uint64_t field_mask
        void* address
        size_t length
        unsigned int prot

    ctypedef struct ucp_am_recv_param_t:
        uint64_t recv_attr
        ucp_ep_h reply_ep

    ctypedef ucs_status_t (*ucp_am_recv_callback_t)(
        void* arg, const void* header, size_t header_length, void* data, size_t length,
        const ucp_am_recv_param_t* param) noexcept nogil

    ctypedef struct ucp_am_handler_param_t:
        uint64_t field_mask
        unsigned int id
        unsigned int flags
        ucp_am_recv_callback_t cb
        void* arg

    ctypedef void (*ucp_send_nbx_callback_t)(void* request, ucs_status_t status,
                                             void* user_data) noexcept nogil

    ctypedef union _ucp_request_cb:
        ucp_send_nbx_callback_t send

    ctypedef struct ucp_request_param_t:
        unsigned int op_attr_mask
        unsigned int flags
        _ucp_request_cb cb
        void* user_data
        ucp_mem_h memh

    ucs_status_t ucp_config_read(const char* env_prefix, const char* filename,
                                 ucp_config_t** config_p)
    ucs_status_t ucp_config_modify(ucp_config_t* config, const char* name, const char* value)
    void ucp_config_release(ucp_config_t* config)
    ucs_status_t ucp_init_version(unsigned int api_major, unsigned int api_minor,
                                  const ucp_params_t* params, const ucp_config_t* config,
                                  ucp_context_h* context_p)
    void ucp_cleanup(ucp_context_h context)
    void ucp_context_print_info(ucp_context_h context, FILE* stream)
    void ucp_ep_print_info(ucp_ep_h ep, FILE* stream)
    const char* ucp_get_version_string()
    void ucp_get_version(unsigned int* major, unsigned int* minor, unsigned int* release)

    ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t* params,
                                   ucp_worker_h* worker_p)
    ucs_status_t ucp_worker_query(ucp_worker_h worker, ucp_worker_attr_t* attr)
    void ucp_worker_destroy(ucp_worker_h worker)
    ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t** address_p,
                                        size_t* length)
    void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t* address)
    unsigned int ucp_worker_progress(ucp_worker_h worker)
    ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int* fd)
    ucs_status_t ucp_worker_arm(ucp_worker_h worker)
    ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker,
                                                const ucp_am_handler_param_t* param)

    ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t* params, ucp_ep_h* ep_p)
    ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t* param)

    ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t* params,
                             ucp_mem_h* memh_p)
    ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh)
    ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void** buffer, size_t* size)
    void ucp_rkey_buffer_release(void* buffer)
    ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void* rkey_buffer, ucp_rkey_h* rkey_p)
    void ucp_rkey_destroy(ucp_rkey_h rkey)

    ucs_status_ptr_t ucp_get_nbx(ucp_ep_h ep, void* buffer, size_t count, uint64_t remote_addr,
                                 ucp_rkey_h rkey, const ucp_request_param_t* param)
    ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h ep, unsigned int id, const void* header,
                                     size_t header_length, const void* buffer, size_t count,
                                     const ucp_request_param_t* param)
    ucs_status_t ucp_request_check_status(void* request)
    void ucp_request_free(void* request)
