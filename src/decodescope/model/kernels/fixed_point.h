/* Activations as 24-bit fixed point for the byte products of digits.h.
 *
 * Every group of 32 activations gets one step, its largest value / LARGEST; each value is a whole number of steps in
 * three signed digits of base 256. Rounding: at most 2^-24 of the group's largest value. */
#pragma once
#include <math.h>
#include "blocks.h"

#define CHUNK 128 /* activations worked on together */
#define LARGEST 8323072.0f /* 127 * 65536: rounding cannot push a digit past 127 */
#define SMALLEST 1e-30f /* below this largest value a group loses digits instead of overflowing its step */

/* How the values of a chunk lie in the two registers of quants: as they come, or low nibbles in the first and high
 * nibbles in the second (of runs of 16 or 32 bytes). */
enum order { AS_THEY_COME, NIBBLES_OF_16, NIBBLES_OF_32 };
static const enum order ORDER[FORMATS] = {
    NIBBLES_OF_16, NIBBLES_OF_16, NIBBLES_OF_16, NIBBLES_OF_16,
    AS_THEY_COME, NIBBLES_OF_32, NIBBLES_OF_32, AS_THEY_COME,
};
static const int32_t ZERO_POINT[FORMATS] = {8, 0, 16, 0, 128, 0, 0, 32}; /* the unsigned quant that means zero */

typedef struct {
    int8_t digit[2][3][64];      /* of both registers, highest digit first */
    int32_t zero[2][LANES];      /* -zero point * sum of the lane's four values; Q8_0: of their two low digits */
    int32_t zero_high[2][LANES]; /* Q8_0: of the highest digit */
    float step[4], sum[4];       /* per group of 32: worth of 1, sum of the activations */
} __attribute__((aligned(64))) chunk;

/* Where 16 values from `at` on go: register and byte. */
INLINE int place(enum order order, int at, int *byte) {
    int run = order == AS_THEY_COME ? 64 : order == NIBBLES_OF_16 ? 16 : 32;
    *byte = at / (2 * run) * run + at % run;
    return at / run % 2;
}

/* The sums of four neighbours, one in each of four lanes. */
INLINE __m128i sums_of_four(__m512i values) {
    __m512i pairs = _mm512_add_epi32(values, _mm512_shuffle_epi32(values, 0xb1));
    __m512i fours = _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, 0x4e));
    return _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, fours));
}

INLINE void subtract_at(int32_t *at, __m128i values, int32_t factor) {
    __m128i product = _mm_mullo_epi32(values, _mm_set1_epi32(factor));
    _mm_storeu_si128((__m128i *)at, _mm_sub_epi32(_mm_loadu_si128((__m128i *)at), product));
}

typedef struct { __m512i high, middle, low; } digits;

/* Sixteen whole numbers in three signed digits each. */
INLINE digits split_digits(__m512i fixed) {
    __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(fixed, 24), 24);
    __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(fixed, low), 8);
    __m512i middle = _mm512_srai_epi32(_mm512_slli_epi32(above, 24), 24);
    return (digits){_mm512_srai_epi32(_mm512_sub_epi32(above, middle), 8), middle, low};
}

/* 32 activations in fixed point: the worth of 1, and their sum. */
typedef struct {
    __m512i first, second;
    float step, sum;
} fixed_group;

/* A value that is not finite makes the step NaN, and so every sum. */
INLINE fixed_group fix_group(const float *x) {
    __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
    __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i a = _mm512_and_si512(_mm512_castps_si512(first), magnitude);
    __m512i b = _mm512_and_si512(_mm512_castps_si512(second), magnitude);
    float largest = bits_float((uint32_t)_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
    if (!isfinite(largest)) return (fixed_group){_mm512_setzero_si512(), _mm512_setzero_si512(), NAN, 0};
    if (largest < SMALLEST) largest = SMALLEST;
    __m512 scale = _mm512_set1_ps(LARGEST / largest);
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(first, scale));
    __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(second, scale));
    const float step = largest / LARGEST;
    return (fixed_group){low, high, step, step * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(low, high))};
}

/* Sixteen values in fixed point into the digits and zero corrections of a chunk. */
INLINE void put_digits(const int format, __m512i fixed, int at, chunk *out) {
    int byte, unit = place(ORDER[format], at, &byte);
    const digits d = split_digits(fixed);
    _mm_storeu_si128((__m128i *)(out->digit[unit][0] + byte), _mm512_cvtepi32_epi8(d.high));
    _mm_storeu_si128((__m128i *)(out->digit[unit][1] + byte), _mm512_cvtepi32_epi8(d.middle));
    _mm_storeu_si128((__m128i *)(out->digit[unit][2] + byte), _mm512_cvtepi32_epi8(d.low));
    if (format == Q8_0) {
        subtract_at(out->zero_high[unit] + byte / 4, sums_of_four(d.high), ZERO_POINT[format]);
        fixed = _mm512_add_epi32(_mm512_slli_epi32(d.middle, 8), d.low);
    }
    if (ORDER[format] == NIBBLES_OF_16) unit = 0; /* both registers end in the same lanes */
    if (ZERO_POINT[format]) subtract_at(out->zero[unit] + byte / 4, sums_of_four(fixed), ZERO_POINT[format]);
}

/* One row of K activations (a multiple of 32) into K/128 chunks; what is missing in the last one is zero. */
static void fix_row(const int format, const float *x, int64_t K, chunk *out) {
    memset(out, 0, (size_t)((K + CHUNK - 1) / CHUNK) * sizeof *out);
    for (int64_t at = 0; at < K; at += 32) {
        const int group = (int)(at % CHUNK / 32);
        const fixed_group fixed = fix_group(x + at);
        chunk *into = out + at / CHUNK;
        put_digits(format, fixed.first, group * 32, into);
        put_digits(format, fixed.second, group * 32 + 16, into);
        into->step[group] = fixed.step;
        into->sum[group] = fixed.sum;
    }
}
