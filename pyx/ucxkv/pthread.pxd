"""The few POSIX thread and clock calls the native core needs."""

from libc.stdint cimport uint64_t


cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec* ts)
    int CLOCK_MONOTONIC


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_create(pthread_t* thread, const void* attr, void* (*start)(void*) noexcept nogil,
                       void* arg)
    int pthread_join(pthread_t thread, void** result)
    int pthread_mutex_init(pthread_mutex_t* mutex, const void* attr)
    int pthread_mutex_destroy(pthread_mutex_t* mutex)
    int pthread_mutex_lock(pthread_mutex_t* mutex)
    int pthread_mutex_unlock(pthread_mutex_t* mutex)
    int pthread_condattr_init(pthread_condattr_t* attr)
    int pthread_condattr_setclock(pthread_condattr_t* attr, int clock)
    int pthread_condattr_destroy(pthread_condattr_t* attr)
    int pthread_cond_init(pthread_cond_t* cond, const pthread_condattr_t* attr)
    int pthread_cond_destroy(pthread_cond_t* cond)
    int pthread_cond_broadcast(pthread_cond_t* cond)
    int pthread_cond_timedwait(pthread_cond_t* cond, pthread_mutex_t* mutex, const timespec* ts)


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <uint64_t>ts.tv_sec * 1000000000u + <uint64_t>ts.tv_nsec


cdef inline uint64_t deadline_of(object seconds) except? 0:
    """The time in so many seconds, None for never; a century is what fits the clock."""
    if seconds is None:
        return <uint64_t>-1
    return now_ns() + <uint64_t>(<double>min(max(0.0, seconds), 3e9) * 1e9)


cdef inline timespec to_timespec(uint64_t ns) noexcept nogil:
    cdef timespec ts
    ts.tv_sec = <long>(ns // 1000000000u)
    ts.tv_nsec = <long>(ns % 1000000000u)
    return ts
