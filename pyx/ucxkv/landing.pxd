"""Writing to memory that nobody is going to read soon."""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t


cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <string.h>

    #define UCXKV_PAST_CACHES 1024

    #if defined(__SSE2__)
    #include <emmintrin.h>

    /* Past the caches: lines that are overwritten whole need not be fetched from memory before. */
    static inline void ucxkv_land(void *to, const void *from, size_t length) {
        char *target = (char *)to;
        const char *source = (const char *)from;
        size_t head = -(uintptr_t)target & 63;
        if (length < UCXKV_PAST_CACHES) {
            memcpy(target, source, length);
            return;
        }
        memcpy(target, source, head);
        target += head, source += head, length -= head;
        for (; length >= 64; target += 64, source += 64, length -= 64) {
            const __m128i *words = (const __m128i *)source;
            __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1);
            __m128i c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
            _mm_stream_si128((__m128i *)target, a);
            _mm_stream_si128((__m128i *)target + 1, b);
            _mm_stream_si128((__m128i *)target + 2, c);
            _mm_stream_si128((__m128i *)target + 3, d);
        }
        memcpy(target, source, length);
    }
    static inline void ucxkv_landed(void) { _mm_sfence(); }
    #else
    static inline void ucxkv_land(void *to, const void *from, size_t length) {
        memcpy(to, from, length);
    }
    static inline void ucxkv_landed(void) {}
    #endif
    """
    enum:
        PAST_CACHES "UCXKV_PAST_CACHES"     # bytes at one place, from which on it pays
    void land "ucxkv_land"(void* to, const void* source, size_t length)
    # Before anybody is told: such writes become visible in no particular order.
    void landed "ucxkv_landed"()


cdef enum:
    # So much at once would not stay in a processor's caches anyway.
    BEYOND_CACHES = 4194304


cdef inline bint lands_past_caches(uint64_t total, uint64_t block_len) noexcept nogil:
    """Whether what is written in pieces of `block_len` should go past the caches."""
    return total >= BEYOND_CACHES and block_len >= PAST_CACHES
