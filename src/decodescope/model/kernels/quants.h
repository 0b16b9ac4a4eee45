/* The whole numbers of blocks, many at once: nibbles, fifth and sixth bits put together in registers of 64 bytes. */
#pragma once
#include "blocks.h"

typedef struct { __m512i low, high; } nibbles;

/* The 32-bit words at the same place of two blocks. */
INLINE uint64_t two_words(const uint8_t *at, int64_t stride) {
    uint32_t words[2];
    memcpy(words, at, 4);
    memcpy(words + 1, at + stride, 4);
    return words[0] | (uint64_t)words[1] << 32;
}

/* The float16 at the same place of four blocks. */
INLINE __m128 four_halves(const uint8_t *at, int64_t stride) {
    const uint64_t first = load16(at) | (uint64_t)load16(at + stride) << 16;
    const uint64_t second = load16(at + 2 * stride) | (uint64_t)load16(at + 3 * stride) << 16;
    return _mm_cvtph_ps(_mm_cvtsi64_si128((long long)(first | second << 32)));
}

INLINE __m512i four_runs(const uint8_t *at, int64_t stride) {
    __m512i out = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
    out = _mm512_inserti32x4(out, _mm_loadu_si128((const __m128i *)(at + stride)), 1);
    out = _mm512_inserti32x4(out, _mm_loadu_si128((const __m128i *)(at + 2 * stride)), 2);
    return _mm512_inserti32x4(out, _mm_loadu_si128((const __m128i *)(at + 3 * stride)), 3);
}

INLINE nibbles split_nibbles(__m512i bytes) {
    __m512i mask = _mm512_set1_epi8(15);
    return (nibbles){_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
}

/* Of four blocks of Q4_0, Q4_1, Q5_0 or Q5_1: the first 16 of each, and the others. */
INLINE nibbles quants_of_four(const int format, const uint8_t *b) {
    const int64_t bytes = BLOCK_BYTES[format];
    nibbles q = split_nibbles(four_runs(b + bytes - 16, bytes));
    if (format == Q4_0 || format == Q4_1) return q;
    const uint8_t *high = b + bytes - 20;
    __m512i bit = _mm512_set1_epi8(16);
    const uint64_t first = two_words(high, bytes), second = two_words(high + 2 * bytes, bytes);
    const uint64_t lower = 0x0000ffff0000ffff, upper = ~lower; /* bits of the low nibbles, of the high ones */
    const uint64_t of_low = _pext_u64(first, lower) | _pext_u64(second, lower) << 32;
    const uint64_t of_high = _pext_u64(first, upper) | _pext_u64(second, upper) << 32;
    q.low = _mm512_mask_add_epi8(q.low, of_low, q.low, bit);
    q.high = _mm512_mask_add_epi8(q.high, of_high, q.high, bit);
    return q;
}

/* Words turned left, those of the first half by `low` bits and those of the second by `high`: a bit that stays in its
 * byte is shifted. */
INLINE __m512i turned(__m512i words, int low, int high) {
    return _mm512_rolv_epi64(words, _mm512_inserti64x4(_mm512_set1_epi64(low), _mm256_set1_epi64x(high), 1));
}

/* Bit `low` of every byte in the first half and bit `high` in the second, moved to bit 4. */
INLINE __m512i fifth_bits(__m512i bytes, int low, int high) {
    return _mm512_and_si512(turned(bytes, 4 - low, 4 - high), _mm512_set1_epi8(16));
}

/* Of one half of a super-block of Q4_K or Q5_K: its groups 0 and 2, and its groups 1 and 3. */
INLINE nibbles quants_of_groups(const int format, const uint8_t *b, int half) {
    nibbles q = split_nibbles(_mm512_loadu_si512(b + BLOCK_BYTES[format] - 128 + 64 * half));
    if (format == Q4_K) return q;
    __m512i bits = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(b + 16)));
    q.low = _mm512_or_si512(q.low, fifth_bits(bits, 4 * half, 4 * half + 2));
    q.high = _mm512_or_si512(q.high, fifth_bits(bits, 4 * half + 1, 4 * half + 3));
    return q;
}

/* Of one half of a super-block of Q6_K: its first 64, and the others. */
INLINE nibbles quants_of_six_bits(const uint8_t *b, int half) {
    nibbles q = split_nibbles(_mm512_loadu_si512(b + 64 * half));
    __m512i two_bits = _mm512_set1_epi8(0x30);
    __m512i bits = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(b + 128 + 32 * half)));
    q.low = _mm512_or_si512(q.low, _mm512_and_si512(turned(bits, 4, 2), two_bits));
    q.high = _mm512_or_si512(q.high, _mm512_and_si512(turned(bits, 0, -2), two_bits));
    return q;
}

INLINE __m256 byte_floats(uint64_t bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
}
