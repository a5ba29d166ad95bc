"""Memory that takes part in transfers.

:class:`LocalCache` is a cache registered here: its tensors' addresses, the memory regions UCX has
mapped for them (one for all tensors that touch or overlap) and its generation word, 64 random bits
in a table that peers can read for as long as the engine lives.  Unregistering changes the word, so
that whoever still reads the memory can tell afterwards that what it has read may be another's.
:class:`RemoteCache` is what a peer's catalogue said about one of its caches.

The owner of the Python objects behind the addresses is ``ucxkv.catalogue``: it lets go of them only
after :meth:`LocalCache.retire` has said that nothing refers to the memory any more.
"""

from ucxkv import memlock

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport getpid

from ucxkv.core cimport (
    MAX_WORDS,
    OWN_WORDS,
    PATH_PUSH,
    ST_CACHE_NOT_EXIST,
    CacheMem,
    Core,
    Link,
    Region,
    RemoteMem,
    Serve,
    Transfer,
    core_lock,
    core_unlock,
    core_wait,
    core_wake,
    random64,
    store_barrier,
)
from ucxkv.endpoint cimport NativeLink
from ucxkv.hold cimport hold_create, holds_unregister
from ucxkv.pthread cimport (
    deadline_of,
    now_ns,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    timespec,
    to_timespec,
)
from ucxkv.quiesce cimport quiesce_begin, quiesce_wait
from ucxkv.transfer cimport remote_unref, transfer_end
from ucxkv.ucp cimport (
    UCP_MEM_MAP_PARAM_FIELD_ADDRESS,
    UCP_MEM_MAP_PARAM_FIELD_LENGTH,
    UCP_MEM_MAP_PARAM_FIELD_PROT,
    UCP_MEM_MAP_PROT_LOCAL_READ,
    UCP_MEM_MAP_PROT_LOCAL_WRITE,
    UCP_MEM_MAP_PROT_REMOTE_READ,
    UCS_OK,
    ucp_mem_map,
    ucp_mem_map_params_t,
    ucp_mem_unmap,
    ucp_rkey_buffer_release,
    ucp_rkey_h,
    ucp_rkey_pack,
    ucs_status_string,
    ucs_status_t,
)


# Fences take milliseconds; this bound is for a broken UCX, or memory of a peer that does not come.
FENCE_SECONDS = 5.0


cdef void region_map(Core* core, Region* region, unsigned int prot) except *:
    cdef ucp_mem_map_params_t params
    cdef ucs_status_t status = UCS_OK
    cdef bint closed
    cdef uint64_t began
    memset(&params, 0, sizeof(params))
    params.field_mask = (UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH
                         | UCP_MEM_MAP_PARAM_FIELD_PROT)
    params.address = <void*>region.start
    params.length = region.length
    params.prot = prot
    with nogil:
        # The engine may be closed at any moment by another thread.
        pthread_mutex_lock(&core.mapping)
        closed = core.rma.context == NULL
        if not closed:
            began = now_ns()
            status = ucp_mem_map(core.rma.context, &params, &region.memh)
            core.mapping_ns += now_ns() - began
            if status == UCS_OK:
                core.mapped_regions += 1
                core.mapped_bytes += region.length
        pthread_mutex_unlock(&core.mapping)
    if closed:
        raise RuntimeError("the engine is closed")
    if status != UCS_OK:
        region.memh = NULL
        raise MemoryError(
            f"UCX cannot register {region.length} bytes: {ucs_status_string(status).decode()}"
            f"{memlock.advice()}")


def merge_ranges(starts, Py_ssize_t length):
    """Regions that cover `length` bytes from each start: ([(start, length)], index per start).

    Ranges that touch or overlap share a region.
    """
    regions = []
    index = [0] * len(starts)
    first = end = 0
    for i in sorted(range(len(starts)), key=starts.__getitem__):
        start = starts[i]
        if not regions or start > end:
            regions.append((start, length))
            first = start
            end = start + length
        elif start + length > end:
            end = start + length
            regions[len(regions) - 1] = (first, end - first)
        index[i] = len(regions) - 1
    return regions, index


@cython.no_gc
cdef class LocalCache:
    """Registered memory of this process; made by ``NativeEngine.register``."""

    def __init__(self):
        raise TypeError("local caches are made by NativeEngine.register")

    @staticmethod
    def _register(engine, core_address, int64_t cache_id, addresses, uint64_t blocks,
                  uint64_t block_bytes, bint readable, bint writable, bint pushable, peers):
        cdef LocalCache self = LocalCache.__new__(LocalCache)
        self.core = <Core*><size_t>core_address
        self._engine = engine
        self._map(cache_id, addresses, blocks, block_bytes, readable, writable, pushable, peers)
        return self

    def _map(self, int64_t cache_id, addresses, uint64_t blocks, uint64_t block_bytes,
             bint readable, bint writable, bint pushable, peers):
        cdef CacheMem* mem = <CacheMem*>calloc(1, sizeof(CacheMem))
        cdef Py_ssize_t i, count = len(addresses)
        cdef unsigned int prot = UCP_MEM_MAP_PROT_LOCAL_READ
        if mem == NULL:
            raise MemoryError
        self.mem = mem
        regions, index = merge_ranges(addresses, blocks * block_bytes)
        mem.cache_id = cache_id
        mem.num_tensors = <uint32_t>count
        mem.blocks = blocks
        mem.block_bytes = block_bytes
        mem.readable = readable
        mem.writable = writable
        mem.pushable = pushable
        mem.limited = peers is not None
        if mem.limited:
            mem.peers = <uint64_t*>malloc(max(1, len(peers)) * sizeof(uint64_t))
            if mem.peers == NULL:
                raise MemoryError
            for peer in sorted(peers):
                mem.peers[mem.n_peers] = peer
                mem.n_peers += 1
        mem.addrs = <uint64_t*>malloc(max(1, count) * sizeof(uint64_t))
        mem.region_of = <uint32_t*>malloc(max(1, count) * sizeof(uint32_t))
        mem.regions = <Region*>calloc(max(1, len(regions)), sizeof(Region))
        if mem.addrs == NULL or mem.region_of == NULL or mem.regions == NULL:
            raise MemoryError
        for i in range(count):
            mem.addrs[i] = addresses[i]
            mem.region_of[i] = index[i]
        if writable:
            prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE
        if readable:
            prot |= UCP_MEM_MAP_PROT_REMOTE_READ
        for start, length in regions:
            mem.regions[mem.n_regions].start = start
            mem.regions[mem.n_regions].length = length
            if self.core.rma.context != NULL:
                region_map(self.core, &mem.regions[mem.n_regions], prot)
            mem.n_regions += 1
        with nogil:
            core_lock(self.core)
            if self.core.n_free_words > 0 and not self.core.stop:
                self.core.n_free_words -= 1
                mem.slot = self.core.free_words[self.core.n_free_words]
                mem.generation = random64()
                self.core.words[mem.slot] = mem.generation
                self.core.caches[mem.slot] = mem
            core_unlock(self.core)
        if mem.slot == 0 and self.core.stop:
            raise RuntimeError("the engine is closed")
        if mem.slot == 0:
            raise MemoryError(f"an engine has at most {MAX_WORDS - OWN_WORDS} caches at a time")

    def __dealloc__(self):
        if self.mem == NULL:
            return
        if self.core.pid == getpid() and (self.mem.slot == 0 or self.mem.retired):
            self.unmap()
            free(self.mem.peers)
            free(self.mem.addrs)
            free(self.mem.region_of)
            free(self.mem.regions)
            free(self.mem)

    cdef void unmap(self) noexcept:
        cdef uint32_t i
        cdef Core* core = self.core
        cdef CacheMem* mem = self.mem
        with nogil:
            pthread_mutex_lock(&core.mapping)
            for i in range(mem.n_regions):
                if mem.regions[i].memh != NULL and core.rma.context != NULL:
                    ucp_mem_unmap(core.rma.context, mem.regions[i].memh)
                    core.mapped_regions -= 1
                    core.mapped_bytes -= mem.regions[i].length
                mem.regions[i].memh = NULL
            pthread_mutex_unlock(&core.mapping)

    @property
    def cache_id(self):
        """The number peers name this cache by; never used again."""
        return self.mem.cache_id

    @property
    def generation(self):
        """The 64 random bits in its generation word while it is registered."""
        return self.mem.generation

    @property
    def slot(self):
        """Index of its generation word."""
        return self.mem.slot

    @property
    def regions(self):
        """Number of memory regions its tensors were merged into."""
        return self.mem.n_regions

    @property
    def pinned(self):
        """Bytes of the memory that UCX has mapped for it: pinned, where its transports need that.

        0 without an RMA context.  Tensors that share memory are counted once.
        """
        cdef uint64_t total = 0
        cdef uint32_t i
        for i in range(self.mem.n_regions):
            if self.mem.regions[i].memh != NULL:
                total += self.mem.regions[i].length
        return total

    def export(self):
        """What peers need to read it: (addresses, regions, rkeys).

        Addresses are little-endian u64 and regions u32, one of each per tensor; there is one packed
        rkey per region, or none without an RMA context.
        """
        cdef void* buffer
        cdef size_t size
        cdef uint32_t i
        cdef ucs_status_t status
        cdef bint mapped
        rkeys = []
        if self.core.rma.context != NULL:
            for i in range(self.mem.n_regions):
                with nogil:
                    pthread_mutex_lock(&self.core.mapping)
                    mapped = (self.core.rma.context != NULL
                              and self.mem.regions[i].memh != NULL)
                    if mapped:
                        status = ucp_rkey_pack(self.core.rma.context, self.mem.regions[i].memh,
                                               &buffer, &size)
                    pthread_mutex_unlock(&self.core.mapping)
                if not mapped:
                    raise RuntimeError("the engine is closed")
                if status != UCS_OK:
                    raise RuntimeError(
                        f"UCX cannot pack an rkey: {ucs_status_string(status).decode()}")
                rkeys.append(PyBytes_FromStringAndSize(<char*>buffer, size))
                ucp_rkey_buffer_release(buffer)
        return (
            PyBytes_FromStringAndSize(<char*>self.mem.addrs,
                                      self.mem.num_tensors * sizeof(uint64_t)),
            PyBytes_FromStringAndSize(<char*>self.mem.region_of,
                                      self.mem.num_tensors * sizeof(uint32_t)),
            rkeys,
        )

    @property
    def writable(self):
        """Peers' bytes may be pulled into it."""
        return bool(self.mem.writable)

    @property
    def busy(self):
        """Transfers into it and requests reading it."""
        return self.mem.pulls + self.mem.serves + self.mem.pushes

    def begin_retire(self):
        """Refuse new transfers; fence those into it, which end with KV_CACHE_NOT_EXIST."""
        cdef Transfer* t
        cdef Transfer* following
        cdef CacheMem* mem = self.mem
        with nogil:
            core_lock(self.core)
            mem.retiring = True
            t = self.core.first_transfer
            while t != NULL:
                following = t.next
                if t.near == mem and t.link != NULL and t.path != PATH_PUSH:
                    transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK,
                                 b"the destination was unregistered")
                t = following
            core_wake(self.core)
            core_unlock(self.core)

    def wait_served(self, double seconds):
        """Wait until no request reads it and no push of it runs; True if so within `seconds`."""
        cdef bint served
        cdef uint64_t end = deadline_of(seconds)
        with nogil:
            core_lock(self.core)
            served = wait_idle(self.core, self.mem, end, True)
            core_unlock(self.core)
        return bool(served)

    def hold(self, uint64_t expires):
        """Hold it until `expires` (monotonic nanoseconds), at the latest.

        KeyError if it is being unregistered, MemoryError if there are too many holds.
        """
        return hold_create(self._engine, self.core, self.mem, expires)

    def quiesce(self, const uint32_t[::1] blocks, double seconds):
        """Fence pushes into `blocks` (ascending; None: all), and refuse those offered before now.

        An empty list names nothing: nothing is done, or waited for.

        Returns True when the fences are over and every linked peer has confirmed that nothing older
        is on its way; False at the end of `seconds`, when only peers that do not answer are left:
        what they have sent before will be refused whenever it comes.
        """
        cdef bint settled
        cdef bint enough = True
        cdef const uint32_t* first = NULL
        cdef uint64_t n_blocks = 0
        cdef uint64_t end = deadline_of(seconds)
        if blocks is not None:
            n_blocks = <uint64_t>blocks.shape[0]
            if n_blocks == 0:
                return True
            first = &blocks[0]
        with nogil:
            core_lock(self.core)
            enough = quiesce_begin(self.core, self.mem, first, n_blocks)
            core_wake(self.core)
            settled = quiesce_wait(self.core, self.mem, end)
            core_unlock(self.core)
        if not enough:
            raise MemoryError("no memory to remember what was quiesced")
        return bool(settled)

    def retire(self, double seconds=FENCE_SECONDS):
        """Change the generation word and end whatever still refers to the memory.

        Returns True when nothing does; False if something still does after `seconds`, which fences
        never take, in which case the caller must keep it alive.
        """
        cdef uint64_t end = deadline_of(seconds)
        cdef bint idle
        cdef CacheMem* mem = self.mem
        cdef Core* core = self.core
        with nogil:
            core_lock(core)
            mem.retiring = True
            if not mem.retired:
                holds_unregister(core, mem)
                core.words[mem.slot] = random64()
                store_barrier()
                end_pushes(core, mem)
                end_serves(core, mem)
            core_wake(core)
            idle = wait_idle(core, mem, end, False)
            if idle and not mem.retired:
                mem.retired = True
                core.caches[mem.slot] = NULL
                core.free_words[core.n_free_words] = mem.slot
                core.n_free_words += 1
            core_unlock(core)
        if idle:
            self.unmap()
        return bool(idle)


cdef bint wait_idle(Core* core, CacheMem* mem, uint64_t end, bint serves_only) noexcept nogil:
    cdef timespec until
    while mem.serves > 0 or mem.pushes > 0 or (not serves_only and mem.pulls > 0):
        if now_ns() >= end:
            return False
        until = to_timespec(end)
        core_wait(core, &until)
    return True


cdef void end_pushes(Core* core, CacheMem* mem) noexcept nogil:
    cdef Transfer* t = core.first_transfer
    cdef Transfer* following
    while t != NULL:
        following = t.next
        if t.near == mem and t.link != NULL and t.path == PATH_PUSH:
            transfer_end(t, ST_CACHE_NOT_EXIST, UCS_OK, b"the source was unregistered")
        t = following


cdef void end_serves(Core* core, CacheMem* mem) noexcept nogil:
    """The pullers get what has been packed, and the word that there will be no more."""
    cdef Link* link = core.first_link
    cdef Serve* serve
    while link != NULL:
        serve = link.serves
        while serve != NULL:
            if serve.cache == mem:
                serve.cache = NULL
                mem.serves -= 1
                if not serve.ended:
                    serve.ended = True
                    serve.status = ST_CACHE_NOT_EXIST
                link.dirty = True
            serve = serve.next
        link = link.next


cdef bint inside_shared(const RemoteMem* mem) noexcept nogil:
    """Whether all tensors lie in the file that the owner shares."""
    cdef uint64_t length, offset
    cdef uint32_t i
    if mem.blocks and mem.block_bytes > mem.shared_length // mem.blocks:
        return False
    length = mem.blocks * mem.block_bytes
    for i in range(mem.num_tensors):
        offset = mem.addrs[i] - mem.shared_base
        if mem.addrs[i] < mem.shared_base or offset > mem.shared_length - length:
            return False
    return True


@cython.no_gc
cdef class RemoteCache:
    """A peer's cache as its catalogue described it.

    `addresses` and `regions` are packed as :meth:`LocalCache.export` gives them; the cache has
    `num_tensors` tensors of `blocks * block_bytes` bytes each.  `shared` is the file of its memory,
    if processes of the owner's host can map it: descriptor, inode, address of its first byte there,
    and length.
    """

    def __init__(self, NativeLink link not None, *, int64_t cache_id, uint64_t generation,
                 uint32_t slot, uint32_t num_tensors, uint64_t blocks, uint64_t block_bytes,
                 bytes addresses not None, bytes regions not None, list rkeys not None,
                 shared=None):
        cdef RemoteMem* mem
        cdef uint32_t i
        cdef Py_ssize_t size
        if (PyBytes_GET_SIZE(addresses) != num_tensors * sizeof(uint64_t)
                or PyBytes_GET_SIZE(regions) != num_tensors * sizeof(uint32_t)
                or slot >= MAX_WORDS):
            raise ValueError("a catalogue entry contradicts itself")
        if self.mem != NULL:
            raise RuntimeError("already initialised")
        mem = <RemoteMem*>calloc(1, sizeof(RemoteMem))
        if mem == NULL:
            raise MemoryError
        self.core = link.core
        self._link = link
        self.mem = mem
        mem.core = link.core
        mem.refs = 1
        mem.cache_id = cache_id
        mem.generation = generation
        mem.slot = slot
        mem.num_tensors = num_tensors
        mem.blocks = blocks
        mem.block_bytes = block_bytes
        mem.addrs = <uint64_t*>malloc(max(1, PyBytes_GET_SIZE(addresses)))
        mem.region_of = <uint32_t*>malloc(max(1, PyBytes_GET_SIZE(regions)))
        mem.packed = <void**>calloc(max(1, len(rkeys)), sizeof(void*))
        mem.rkeys = <ucp_rkey_h*>calloc(max(1, len(rkeys)), sizeof(ucp_rkey_h))
        if (mem.addrs == NULL or mem.region_of == NULL or mem.packed == NULL
                or mem.rkeys == NULL):
            raise MemoryError
        memcpy(mem.addrs, PyBytes_AS_STRING(addresses), PyBytes_GET_SIZE(addresses))
        memcpy(mem.region_of, PyBytes_AS_STRING(regions), PyBytes_GET_SIZE(regions))
        mem.n_regions = <uint32_t>len(rkeys)
        for i in range(mem.n_regions):
            rkey = <bytes?>rkeys[i]
            size = PyBytes_GET_SIZE(rkey)
            mem.packed[i] = malloc(max(1, size))
            if mem.packed[i] == NULL:
                raise MemoryError
            memcpy(mem.packed[i], PyBytes_AS_STRING(rkey), size)
        for i in range(num_tensors):
            if mem.n_regions and mem.region_of[i] >= mem.n_regions:
                raise ValueError("a catalogue entry contradicts itself")
        if shared is not None:
            mem.shared_fd, mem.shared_inode, mem.shared_base, mem.shared_length = shared
            if not inside_shared(mem):
                raise ValueError("a catalogue entry contradicts itself")
        with nogil:
            core_lock(self.core)
            mem.link = link.link
            mem.next = link.link.remotes
            link.link.remotes = mem
            mem.refs += 1
            core_unlock(self.core)

    def __dealloc__(self):
        if self.mem == NULL or self.core.pid != getpid():
            return
        with nogil:
            core_lock(self.core)
            self.mem.retired = True
            if self.mem.link != NULL:
                self.mem.link.dirty = True
            remote_unref(self.mem)
            core_unlock(self.core)

    def retire(self):
        """Take no new pulls; running ones may end.  See `active`."""
        with nogil:
            core_lock(self.mem.core)
            self.mem.retired = True
            core_unlock(self.mem.core)

    @property
    def retired(self):
        """The owner has unregistered it, or is about to."""
        return bool(self.mem.retired)

    @property
    def quieted(self):
        """How often its owner has quiesced a part of it."""
        return self.mem.quieted

    @property
    def active(self):
        """Running pulls that read it."""
        return self.mem.active
