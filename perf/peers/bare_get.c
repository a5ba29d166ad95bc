/* The least that a program over UCX can do: one ucp_get_nbx per span, all posted, then progress. */

#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

#define MOST_REGIONS 256

typedef struct {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    int event_fd;
    size_t regions;
    ucp_mem_h memory[MOST_REGIONS];
    ucp_rkey_h keys[MOST_REGIONS];
    volatile int stopping;
    size_t outstanding;
    ucs_status_t failure;
} bare_side_t;

/* `settings`: NAME=VALUE pairs, without UCX_, separated by spaces. */
bare_side_t *bare_open(const char *settings)
{
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP,
        .mt_workers_shared = 1,
    };
    ucp_worker_params_t worker_params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_MULTI,
    };
    bare_side_t *side = calloc(1, sizeof(*side));
    char *pairs = strdup(settings);
    ucp_config_t *config = NULL;
    char *rest, *pair;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);

    for (pair = strtok_r(pairs, " ", &rest); pair && status == UCS_OK;
         pair = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(pair, '=');
        *value++ = '\0';
        status = ucp_config_modify(config, pair, value);
    }
    free(pairs);
    if (status == UCS_OK) {
        status = ucp_init(&params, config, &side->context);
    }
    if (config) {
        ucp_config_release(config);
    }
    if (status == UCS_OK) {
        status = ucp_worker_create(side->context, &worker_params, &side->worker);
    }
    if (status == UCS_OK) {
        status = ucp_worker_get_efd(side->worker, &side->event_fd);
    }
    if (status != UCS_OK) {
        free(side);
        return NULL;
    }
    return side;
}

/* Length of the worker's address, 0 if it is longer than `room`. */
size_t bare_address(bare_side_t *side, void *buffer, size_t room)
{
    ucp_address_t *address;
    size_t length;

    if (ucp_worker_get_address(side->worker, &address, &length) != UCS_OK || length > room) {
        return 0;
    }
    memcpy(buffer, address, length);
    ucp_worker_release_address(side->worker, address);
    return length;
}

int bare_connect(bare_side_t *side, const void *address)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address = address,
    };
    return ucp_ep_create(side->worker, &params, &side->endpoint);
}

int bare_register(bare_side_t *side, void *address, size_t length)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = address,
        .length = length,
    };
    if (side->regions == MOST_REGIONS) {
        return UCS_ERR_NO_MEMORY;
    }
    ucs_status_t status = ucp_mem_map(side->context, &params, &side->memory[side->regions]);
    side->regions += status == UCS_OK;
    return status;
}

/* Length of a region's key, 0 if it is longer than `room`. */
size_t bare_pack(bare_side_t *side, size_t region, void *buffer, size_t room)
{
    void *key;
    size_t length;

    if (ucp_rkey_pack(side->context, side->memory[region], &key, &length) != UCS_OK ||
        length > room) {
        return 0;
    }
    memcpy(buffer, key, length);
    ucp_rkey_buffer_release(key);
    return length;
}

int bare_unpack(bare_side_t *side, size_t region, const void *key)
{
    return ucp_ep_rkey_unpack(side->endpoint, key, &side->keys[region]);
}

static void completed(void *request, ucs_status_t status, void *user_data)
{
    bare_side_t *side = user_data;

    side->outstanding--;
    if (status != UCS_OK) {
        side->failure = status;
    }
    ucp_request_free(request);
}

static void sleep_until_event(bare_side_t *side, int milliseconds)
{
    struct pollfd waiting = {.fd = side->event_fd, .events = POLLIN};

    if (ucp_worker_arm(side->worker) == UCS_OK) {
        poll(&waiting, 1, milliseconds);
    }
}

/* Span i is `length` bytes of region i / spans_per_region. */
int bare_get(bare_side_t *side, size_t count, size_t spans_per_region, const uint64_t *here,
             const uint64_t *there, size_t length)
{
    side->failure = UCS_OK;
    for (size_t i = 0; i < count; i++) {
        size_t region = i / spans_per_region;
        ucp_request_param_t param = {
            .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                            UCP_OP_ATTR_FIELD_MEMH,
            .cb.send = completed,
            .user_data = side,
            .memh = side->memory[region],
        };
        ucs_status_ptr_t request = ucp_get_nbx(side->endpoint, (void *)here[i], length, there[i],
                                               side->keys[region], &param);
        if (UCS_PTR_IS_ERR(request)) {
            side->failure = UCS_PTR_STATUS(request);
            break;
        }
        side->outstanding += request != NULL;
    }
    while (side->outstanding) {
        if (!ucp_worker_progress(side->worker)) {
            sleep_until_event(side, 100);
        }
    }
    return side->failure;
}

/* What an owner does: make progress until `bare_stop`, asleep while there is nothing to do. */
void bare_serve(bare_side_t *side)
{
    while (!side->stopping) {
        if (!ucp_worker_progress(side->worker)) {
            sleep_until_event(side, 100);
        }
    }
}

void bare_stop(bare_side_t *side)
{
    side->stopping = 1;
    ucp_worker_signal(side->worker);
}
