"""Holds: an owner's promise to leave a part of a cache alone for a while.

A hold has a word in the table of generation words, like a cache.  Its token, the word's place and
its 64 random bits, travels to the puller by the application's own channel, and the puller checks
that word where it would check the cache's.  A hold ends by its puller's notice, by its owner's
`release`, when its time has come, or with its cache; its word is changed before anybody learns of
that, so that whoever still reads the memory can tell.

All functions want the engine's lock to be held.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport getpid

from ucxkv.errors import LlmError

from ucxkv.core cimport (
    HOLD_ACTIVE,
    HOLD_EXPIRED,
    HOLD_NOTICED,
    HOLD_RELEASED,
    HOLD_UNREGISTERED,
    MAX_WORDS,
    OWN_WORDS,
    SIGNAL_NS,
    CacheMem,
    Core,
    Hold,
    HoldState,
    Link,
    cache_shown,
    core_idle,
    core_lock,
    core_timer,
    core_unlock,
    core_wait,
    random64,
    store_barrier,
)
from ucxkv.pthread cimport deadline_of, now_ns, timespec, to_timespec


cdef void hold_unref(Hold* hold) noexcept nogil:
    hold.refs -= 1
    if hold.refs == 0:
        free(hold)


cdef inline void put(Core* core, uint32_t place, Hold* hold) noexcept nogil:
    core.expiring[place] = hold
    hold.place = place


cdef void settle(Core* core, uint32_t place, Hold* hold) noexcept nogil:
    """Put `hold` into the heap, at `place` or above or below it, where it belongs."""
    cdef uint32_t below
    while place > 0 and core.expiring[(place - 1) // 2].expires > hold.expires:
        put(core, place, core.expiring[(place - 1) // 2])
        place = (place - 1) // 2
    while True:
        below = 2 * place + 1
        if (below + 1 < core.n_holds
                and core.expiring[below + 1].expires < core.expiring[below].expires):
            below += 1
        if below >= core.n_holds or core.expiring[below].expires >= hold.expires:
            break
        put(core, place, core.expiring[below])
        place = below
    put(core, place, hold)


cdef void enlist(Core* core, Hold* hold) noexcept nogil:
    core.n_holds += 1
    settle(core, core.n_holds - 1, hold)


cdef void delist(Core* core, Hold* hold) noexcept nogil:
    core.n_holds -= 1
    if hold.place < core.n_holds:
        settle(core, hold.place, core.expiring[core.n_holds])


cdef void hold_end(Core* core, Hold* hold, HoldState state) noexcept nogil:
    if hold.state != HOLD_ACTIVE:
        return
    core.words[hold.slot] = random64()
    store_barrier()
    hold.state = state
    hold.mem.holds -= 1
    core.holds[hold.slot] = NULL
    core.free_words[core.n_free_words] = hold.slot
    core.n_free_words += 1
    delist(core, hold)
    core_idle(core)
    hold_unref(hold)


cdef Hold* find(Core* core, uint32_t slot, uint64_t word) noexcept nogil:
    if slot >= MAX_WORDS or core.holds[slot] == NULL or core.holds[slot].word != word:
        return NULL
    return core.holds[slot]


cdef bint hold_covers(Core* core, uint32_t slot, uint64_t word, const CacheMem* mem) noexcept nogil:
    """Whether that is the token of an active hold of that cache."""
    cdef Hold* hold = find(core, slot, word)
    return hold != NULL and hold.mem == mem


cdef void hold_noticed(const Link* link, uint32_t slot, uint64_t word) noexcept nogil:
    """A peer has told that it needs the memory no more; it must be one that may read it."""
    cdef Core* core = link.core
    cdef Hold* hold = find(core, slot, word)
    if hold != NULL and cache_shown(hold.mem, link):
        hold_end(core, hold, HOLD_NOTICED)


cdef void holds_expire(Core* core, uint64_t now) noexcept nogil:
    """End what is over, and have the others looked at in time."""
    while core.n_holds > 0 and core.expiring[0].expires <= now:
        hold_end(core, core.expiring[0], HOLD_EXPIRED)
    if core.n_holds > 0:
        core_timer(core, core.expiring[0].expires, False)


cdef void holds_unregister(Core* core, const CacheMem* mem) noexcept nogil:
    """End all holds of a cache."""
    cdef uint32_t slot
    for slot in range(OWN_WORDS, MAX_WORDS if mem.holds > 0 else OWN_WORDS):
        if core.holds[slot] != NULL and core.holds[slot].mem == mem:
            hold_end(core, core.holds[slot], HOLD_UNREGISTERED)


cdef void holds_forget(Core* core) noexcept nogil:
    """End all of them: the engine is closing."""
    while core.n_holds > 0:
        hold_end(core, core.expiring[0], HOLD_UNREGISTERED)


cdef NativeHold hold_create(object engine, Core* core, CacheMem* mem, uint64_t expires):
    """An active hold; raises MemoryError where there are too many, KeyError for a lost cache."""
    cdef NativeHold result = NativeHold.__new__(NativeHold)
    cdef Hold* hold = <Hold*>calloc(1, sizeof(Hold))
    cdef bint gone, full
    if hold == NULL:
        raise MemoryError
    hold.refs = 1
    hold.mem = mem
    hold.expires = expires
    with nogil:
        core_lock(core)
        gone = core.stop or mem.retiring or mem.retired
        full = core.n_free_words == 0
        if not gone and not full:
            core.n_free_words -= 1
            hold.slot = core.free_words[core.n_free_words]
            hold.word = random64()
            hold.refs = 2
            core.words[hold.slot] = hold.word
            core.holds[hold.slot] = hold
            mem.holds += 1
            enlist(core, hold)
            core_timer(core, expires, True)
        core_unlock(core)
    result.core = core
    result.hold = hold
    result._engine = engine
    if gone:
        raise KeyError(mem.cache_id)
    if full:
        raise MemoryError(
            f"an engine has at most {MAX_WORDS - OWN_WORDS} caches and holds at a time")
    return result


@cython.no_gc
cdef class NativeHold:
    """One hold; made by ``LocalCache.hold``.  It goes on whether or not this object is kept."""

    def __init__(self):
        raise TypeError("holds are made by LocalCache.hold")

    def __dealloc__(self):
        if self.hold == NULL or self.core.pid != getpid():
            return
        with nogil:
            core_lock(self.core)
            hold_unref(self.hold)
            core_unlock(self.core)

    @property
    def slot(self):
        """Index of its word."""
        return self.hold.slot

    @property
    def word(self):
        """Its 64 random bits."""
        return self.hold.word

    @property
    def state(self):
        """0: active; how it has ended otherwise: 1 noticed, 2 released, 3 expired, 4 unregistered.

        Whatever the service thread does meanwhile, it is not active any more when its time is over.
        """
        if self.core.pid != getpid():
            raise LlmError("this hold belongs to the parent process")
        with nogil:
            core_lock(self.core)
            holds_expire(self.core, now_ns())
            core_unlock(self.core)
        return self.hold.state

    def release(self):
        """End it now; does nothing if it has ended."""
        if self.core.pid != getpid():
            raise LlmError("this hold belongs to the parent process")
        with nogil:
            core_lock(self.core)
            hold_end(self.core, self.hold, HOLD_RELEASED)
            core_unlock(self.core)

    def wait(self, seconds=None):
        """Wait for its end, at most so long; True if it has ended.  Signal handlers run meanwhile.
        """
        cdef uint64_t end = deadline_of(seconds)
        cdef uint64_t until, now = 0
        cdef timespec ts
        while self.state == HOLD_ACTIVE and now < end:
            PyErr_CheckSignals()
            with nogil:
                until = min(end, now_ns() + SIGNAL_NS)
                # Its own time is the service thread's business, which may be late.
                until = min(until, self.hold.expires)
                ts = to_timespec(until)
                core_lock(self.core)
                if self.hold.state == HOLD_ACTIVE:
                    core_wait(self.core, &ts)
                core_unlock(self.core)
                now = now_ns()
        return self.state != HOLD_ACTIVE
