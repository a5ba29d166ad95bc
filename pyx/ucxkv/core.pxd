"""The state that the native modules share, and the lock that guards it (see core.pyx)."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from ucxkv.pthread cimport pthread_cond_t, pthread_mutex_t, pthread_t, timespec
from ucxkv.spans cimport Cursor, Geometry
from ucxkv.ucp cimport ucp_context_h, ucp_ep_h, ucp_mem_h, ucp_rkey_h, ucp_worker_h, ucs_status_t


cdef enum:
    MAX_AM_WORKERS = 16
    MAX_LINKS = 8192
    MAX_WORDS = 65537           # generation words: caches (and holds) that can exist at once
    WORD_PROOF = 0              # words of the engine's own: 64 random bits that prove the process,
    WORD_PID = 1                # and the process id
    OWN_WORDS = 2
    MAX_TRANSFERS = 65536
    SCRATCH_WORDS = MAX_TRANSFERS + OWN_WORDS * MAX_LINKS
    GET_RING = 64               # GETs in flight of one transfer
    GET_MAX = 1048576           # bytes of one GET
    GET_WINDOW = 4194304        # bytes of GETs in flight on one link: bounds the drain of a fence
    STREAM_CHUNK = 262144       # bytes of one streamed message
    STREAM_WINDOW = 2097152     # bytes of streamed messages in flight on one link
    PACK_BUFFERS = 128          # kept for reuse; more exist only where each link has its share
    MAX_SERVES = 1024           # requests that one peer may have open
    LATENCY_BUCKETS = 320       # 8 to each doubling of nanoseconds
    REQUEST_BLOCKS = 16000      # block numbers in one message: below 64 KiB
    SIGNAL_NS = 50000000        # a waiting caller looks for signals this often
    NOTICE_MAX = 4096           # bytes of one notice
    NOTICE_WINDOW = 64          # notices of one link on their way


cdef enum Path:
    PATH_GET = 1
    PATH_STREAM = 2
    PATH_PUSH = 3               # an offer of ours, which the peer pulls


cdef enum TransferState:
    WAITING = 0                 # created, not submitted: link or cache are being looked up
    RUNNING = 1
    FENCING = 2                 # its end is decided; operations that may still write are draining
    DONE = 3


cdef enum:
    # Transfer.due: what a running transfer needs next of whoever steps its link or copies for it.
    NOTHING = 0                 # it waits for the peer, for what is in flight, or to be released
    TO_REQUEST = 1
    TO_OFFER = 2
    TO_CHECK = 3                # by a GET of its word
    TO_POST = 4
    TO_COPY = 5
    N_DUE = 6


cdef enum PlaneState:
    CLOSED = 0
    OPEN = 1
    CLOSING = 2


cdef enum:
    # Status values of SPEC section 2 that native code sets.
    ST_SUCCESS = 0
    ST_FAILED = 0xFFFFFFFF
    ST_CACHE_NOT_EXIST = 0x5010B002
    ST_PARAM_INVALID = 0x5010B005
    ST_NOT_YET_LINK = 0x5010B007
    ST_FEATURE_NOT_ENABLED = 0x5010B019
    ST_TIMEOUT = 0x5010B01A
    ST_OUT_OF_MEMORY = 0x5010B01C
    ST_HOLD_ENDED = 0x5010B101
    # Only on the wire: the request has to be made again.
    ST_RETRY = 1


cdef enum:
    # Kinds of failure that are counted apart: see status_kind in transfer.pyx.
    FAILURES = 7


cdef enum HoldState:
    HOLD_ACTIVE = 0
    HOLD_NOTICED = 1
    HOLD_RELEASED = 2
    HOLD_EXPIRED = 3
    HOLD_UNREGISTERED = 4


cdef struct Worker:
    ucp_context_h context
    ucp_worker_h worker
    int event_fd
    uint32_t vain               # how often in a row it had something to do that was nothing


cdef struct Plane:
    # One UCX endpoint of a link, opened again as often as it breaks.
    ucp_ep_h ep
    PlaneState state
    bint wanted                 # open (again) when closed
    bint failed
    ucs_status_t error
    void* close_request
    uint32_t outstanding        # operations whose completion UCX still owes
    uint64_t retry_at
    uint64_t backoff
    void* address
    Worker* worker


cdef struct GetOp:
    Transfer* transfer
    Link* link
    uint64_t end                # stream offset behind this operation's bytes
    uint64_t length
    uint64_t attempt
    bint done
    bint busy


cdef struct Transfer:
    Core* core
    int refs
    Transfer* prev              # all transfers
    Transfer* next
    Transfer* link_prev         # those of one link
    Transfer* link_next
    uint32_t due
    Transfer* due_prev          # those of one link that need the same
    Transfer* due_next
    Link* link
    Path path
    TransferState state
    uint32_t status
    ucs_status_t ucs
    char reason[160]
    uint32_t index              # place in Core.transfers and in the scratch words
    uint32_t attempt
    uint64_t deadline
    uint64_t submitted
    uint64_t ended
    CacheMem* near              # our memory: the destination of a pull, the source of a push
    RemoteMem* far              # the peer's
    Geometry src_geo
    Geometry dst_geo
    uint32_t* src_blocks
    uint32_t* dst_blocks
    uint32_t word_slot          # what must be in the owner's table after its bytes have landed:
    uint64_t word               # the generation of its cache, or the word of a hold
    bint held
    uint64_t total
    uint64_t layer_bytes
    uint32_t layers
    uint64_t good               # bytes known to be right, in stream order
    uint32_t layers_done
    uint64_t spans
    Cursor src_cursor
    Cursor dst_cursor
    # path "get"
    GetOp ring[GET_RING]
    uint32_t head
    uint32_t queued
    uint32_t outstanding
    uint64_t posted
    uint64_t landed
    GetOp check
    uint64_t check_upto
    bint verify_first
    uint32_t errors
    uint64_t error_landed
    uint64_t fence_by
    int direct                  # process id of the owner, where cma.pyx copies instead; otherwise 0
    uint32_t copying            # threads inside a copy for it
    uint32_t drivers            # callers that wait for it and copy meanwhile
    uint64_t offer              # of a pull that answers a peer's offer: the peer's number for it
    uint64_t blocks_held        # of such a pull: its part of Link.blocks_held
    Path taken                  # of a push: the path on which the peer pulled it
    bint withheld               # a push that is not to be offered yet
    bint stale                  # of a push: not to be offered again, its destination was quiesced
    # paths "stream" and "push"
    bint requested              # the peer has a request or an offer of it
    uint64_t received
    # what its owner is told when all has landed
    Told* notice                # NULL: nothing
    bint noticing               # all has landed; the owner has not confirmed the notice yet
    # waiting callers
    pthread_mutex_t mutex
    pthread_cond_t cond
    int event_fd


cdef struct SendOp:
    SendOp* next
    Link* link
    Serve* serve
    void* buffer                # pack buffer, or NULL
    uint64_t length
    void* payload               # malloc'd with the message, or NULL
    uint8_t header[192]         # aligned: structs are written to it
    uint32_t header_length


cdef struct Serve:
    Serve* next
    Link* link
    CacheMem* cache
    uint32_t word_slot          # as of Transfer; the word is 0 without a hold
    uint64_t word
    uint64_t transfer           # the puller's number
    uint64_t offer              # of ours, without which it may not be served; 0: it may
    Geometry geo
    Cursor cursor
    uint32_t* blocks
    uint64_t n_blocks_known
    uint64_t total
    uint64_t offset             # next byte to send
    uint32_t outstanding
    bint ended                  # nothing more to send but the reason
    bint orphan                 # off its link's list: the last send to end frees it
    uint32_t status


cdef struct Offer:
    # A peer's push, on the wire and while its block lists are being collected.
    int64_t src_cache_id
    uint64_t src_generation
    uint32_t src_slot
    uint32_t src_first
    uint64_t src_block
    int64_t dst_cache_id
    uint64_t dst_generation
    uint32_t dst_slot
    uint32_t dst_first
    uint64_t dst_block
    uint32_t tensors
    uint32_t tensors_per_layer
    uint64_t block_len          # bytes of each destination block
    uint64_t n_blocks           # destination blocks
    uint64_t budget             # nanoseconds until the sender's deadline
    uint32_t src_has_blocks
    uint32_t dst_has_blocks


cdef struct Incoming:
    Incoming* next
    uint64_t number             # the sender's; 0: over
    uint64_t blocks_held        # its part of Link.blocks_held
    Offer offer
    uint32_t* src_blocks
    uint32_t* dst_blocks
    uint64_t src_known
    uint64_t dst_known


cdef struct Answer:
    uint64_t number
    uint32_t status
    uint32_t path
    uint64_t spans


cdef struct Quiet:
    # Offers into these blocks are refused until the peer has echoed the barrier.
    Quiet* next                 # those of one link, by their barriers
    uint64_t barrier
    uint32_t slot
    uint64_t generation
    uint32_t* blocks            # ascending; NULL: all
    uint64_t n_blocks


cdef struct Told:
    # What a puller has to tell; bytes follow.
    Told* prev                  # those of one link, in the order of completion
    Told* next
    Transfer* transfer          # NULL: it has ended
    uint64_t number             # 0: never sent
    bint sent                   # over the present endpoint
    uint64_t word               # of the hold that ends with it, 0: none
    uint32_t word_slot
    uint32_t length


cdef struct Notice:
    # What a puller told, until the application takes it.
    Notice* next
    Link* link                  # NULL: confirmed
    uint64_t cluster_id
    uint64_t number
    uint32_t length
    # its bytes follow


cdef struct Hold:
    int refs
    uint32_t place              # in Core.expiring
    CacheMem* mem
    uint32_t slot
    uint64_t word
    uint64_t expires
    HoldState state


cdef struct Totals:
    uint64_t transfers          # ended, whatever their status
    uint64_t spans
    uint64_t bytes_get          # pulled
    uint64_t bytes_stream
    uint64_t bytes_pushed
    uint64_t bytes_served       # streamed to peers
    uint64_t failures[FAILURES]
    uint64_t latency[LATENCY_BUCKETS]
    uint64_t latency_sum        # nanoseconds


cdef struct Region:
    ucp_mem_h memh
    uint64_t start
    uint64_t length


cdef struct CacheMem:
    # Registered memory of this process.
    int64_t cache_id
    uint64_t generation
    uint32_t slot
    uint32_t num_tensors
    uint64_t blocks
    uint64_t block_bytes
    uint64_t* addrs
    uint32_t* region_of
    Region* regions
    uint32_t n_regions
    bint readable               # peers may read it
    bint writable               # may be pulled into
    bint pushable               # peers may have it pulled into
    bint limited                # only these clusters may read it or push to it
    uint64_t* peers             # ascending
    size_t n_peers
    bint retiring
    bint retired
    uint32_t pulls              # transfers into it, and copies into or from it
    uint32_t serves             # requests that read it
    uint32_t pushes             # offers of it
    uint32_t holds              # active ones


cdef struct RemoteMem:
    # Memory of a peer, as its catalogue told.
    Core* core
    int refs
    RemoteMem* next             # of the same link, or to be unmapped
    Link* link
    int64_t cache_id
    uint64_t generation
    uint32_t slot
    uint64_t quieted            # how often its owner has quiesced a part of it
    uint32_t num_tensors
    uint64_t blocks
    uint64_t block_bytes
    uint64_t* addrs
    uint32_t* region_of
    uint32_t n_regions
    void** packed
    ucp_rkey_h* rkeys
    bint retired
    uint32_t active
    # Memory that the owner shares by a file, which processes of its host can map.
    int shared_fd               # the owner's descriptor
    uint64_t shared_inode
    uint64_t shared_base        # the owner's address of its first byte
    uint64_t shared_length      # 0: it shares none
    void* mapped                # where we have mapped it; NULL: not
    bint map_tried


cdef struct Link:
    Core* core
    int refs
    Link* next
    uint32_t slot
    uint64_t token
    uint32_t peer_slot
    uint64_t peer_token
    bint connected
    bint closing
    bint closed                 # as far as anyone outside can tell
    uint64_t linger_until       # a closing link waits so long for its last messages to leave
    Plane am
    Plane rma
    # proofs
    bint ping_due
    bint pong_due
    bint proven                 # a PONG has come over the present endpoint
    bint ever_proven
    uint64_t ping_at
    uint64_t barriers_heard     # those of the peer
    uint64_t peer_repairs       # the peer's `repairs` of its end, as its last PING has told
    bint renewed                # they have grown: what the peer had sent may be lost
    int get_trial               # 0 not begun, 1 running, 2 decided
    bint get_ok
    bint get_late               # decided without an answer, which may still come
    bint reached                # a GET has landed over the present endpoint
    uint64_t trial_by
    GetOp trial
    uint64_t words_address
    void* words_rkey_packed
    ucp_rkey_h words_rkey
    uint64_t word0
    int cma_pid                 # of the peer, where cma.pyx can read it; 0 elsewhere
    RemoteMem* remotes
    Transfer* transfers         # circular
    uint32_t n_transfers
    Transfer* due[N_DUE]        # circular, in turn; nobody looks for work among all transfers
    uint32_t n_requested
    uint32_t n_offered
    bint watched                # someone waits for transfers or serves to become none
    uint64_t get_bytes          # in flight
    Serve* serves
    uint32_t n_serves
    uint64_t blocks_held        # block numbers in those requests
    uint64_t stream_bytes       # in flight
    uint64_t* cancels
    uint32_t n_cancels
    uint32_t cap_cancels
    Incoming* incoming          # offers whose block lists are not complete
    uint32_t n_incoming
    uint32_t n_answering        # pulls that answer offers
    Answer* answers             # to offers, not sent yet
    uint32_t n_answers
    uint32_t cap_answers
    Quiet* quiets
    uint64_t barriers           # numbers given out
    uint64_t barriers_sent      # the last of them over the present endpoint
    uint64_t echoed             # the last that the peer has answered
    uint64_t echo_due           # the peer's last that we have to answer, 0: none
    # notices: ours to the peer
    Told* first_told
    Told* last_told
    uint64_t notices_sent       # numbers given out
    uint64_t notices_noted      # the last number that the peer has confirmed
    # the peer's to us
    uint64_t notices_seen       # the last number
    uint64_t notices_queued     # the last number that we may confirm
    bint noted_due
    ucs_status_t error
    bint dirty
    uint64_t drop_rma_at        # force-close the RMA endpoint at this time, 0: never
    uint64_t cluster_id
    Totals totals
    uint64_t bytes_direct       # read without UCX, whatever became of the transfer
    uint64_t repairs
    uint64_t dropped            # messages without a valid token


cdef struct Core:
    pthread_mutex_t gate
    pthread_mutex_t lock
    pthread_mutex_t mapping     # held while memory is mapped, unmapped or described to peers
    uint32_t mapped_regions     # these three: of caches, guarded by `mapping`
    uint64_t mapped_bytes
    uint64_t mapping_ns         # all that was spent in registering, also of what has gone since
    pthread_mutex_t idle_mutex  # taken after `lock`
    pthread_cond_t idle         # a retiring cache or a link has become idle
    pthread_t thread
    bint thread_running
    bint stop
    bint asleep
    uint64_t awake_until        # the service thread looks for what may come before it sleeps
    uint32_t watchers           # callers that progress the workers themselves for a moment
    pthread_t copier
    bint copier_running
    bint copier_asleep
    bint stop_copier
    int copier_fd
    uint64_t sleep_until
    int wake_fd
    int notify_fd
    int pid
    Worker rma
    bint abandoned              # an endpoint of it could not be closed, so it never will be
    Worker am[MAX_AM_WORKERS]
    int n_am
    Link** links                # by slot
    Link* first_link
    RemoteMem* unmaps           # what nobody refers to any more, for the copying thread
    Link* next_copy             # whose turn it is with the copying thread; NULL: the first
    uint32_t n_to_copy          # transfers with something for cma.pyx to copy
    Transfer** transfers        # by index
    uint32_t* free_transfers
    uint32_t n_free_transfers
    uint32_t attempts           # source of numbers for transfers on the wire
    Transfer* first_transfer
    uint64_t next_deadline
    uint64_t* words
    uint32_t* free_words
    uint32_t n_free_words
    uint64_t* scratch           # where GETs of words land: one per transfer, OWN_WORDS per link
    ucp_mem_h words_memh
    ucp_mem_h scratch_memh
    CacheMem** caches           # by word
    Hold** holds                # by word
    Hold** expiring             # a heap of the active ones: none expires before its parent
    uint32_t n_holds
    Notice* first_notice
    Notice* last_notice
    Notice* next_notice         # the first that is not confirmed: beyond the queue's capacity
    uint32_t n_notices
    uint32_t n_queued           # of them, those that are confirmed
    uint32_t cap_notices
    uint64_t notices_received
    int notice_fd               # readable when there is a notice, or the engine is closed
    SendOp* free_sends
    void** pack_buffers
    int n_pack_buffers
    int pack_made
    bint starved                # a chunk waits for a pack buffer
    uint32_t n_closing          # endpoints being closed: their progress raises no event
    Totals totals
    uint64_t dropped            # messages that name no link of ours


cdef extern from *:
    """
    #define store_barrier() __sync_synchronize()
    """
    void store_barrier() noexcept nogil


cdef bint cache_shown(const CacheMem* mem, const Link* link) noexcept nogil
cdef void core_lock(Core* core) noexcept nogil
cdef void core_unlock(Core* core) noexcept nogil
cdef void core_timer(Core* core, uint64_t when, bint wake) noexcept nogil
cdef void core_wait(Core* core, const timespec* until) noexcept nogil
cdef void core_idle(Core* core) noexcept nogil
cdef void core_wake(Core* core) noexcept nogil
cdef void core_wake_copier(Core* core) noexcept nogil
cdef void core_notify(Core* core) noexcept nogil
cdef uint64_t random64() noexcept nogil
cdef SendOp* send_new(Core* core) noexcept nogil
cdef void send_free(Core* core, SendOp* op) noexcept nogil
cdef void* pack_take(Core* core, bint entitled) noexcept nogil
cdef void pack_give(Core* core, void* buffer) noexcept nogil
cdef Core* core_new() except NULL
cdef void core_free(Core* core) noexcept nogil
