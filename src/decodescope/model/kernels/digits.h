/* Packed products with AVX-512 VNNI: byte times byte, exact in the weights and float32-like in the activations.
 *
 * vpdpbusd multiplies the unsigned quants, as they lie in the block, with one digit of the activations each
 * (fixed_point.h); the digits' sums are joined in an int32 without rounding, and only then comes one multiplication
 * with scale * step. What is rounded on the way stays below what summing in float32 costs anyway. */
#pragma once
#include "fixed_point.h"
#include "quants.h"

INLINE __m512i digit_of(const chunk *x, int unit, int digit) {
    return _mm512_load_si512((const void *)x->digit[unit][digit]);
}

INLINE __m512i whole_numbers(const int32_t *at) { return _mm512_load_si512((const void *)at); }

/* high * 65536 + middle * 256 + low */
INLINE __m512i join_digits(__m512i high, __m512i middle, __m512i low) {
    __m512i above = _mm512_add_epi32(_mm512_slli_epi32(high, 8), middle);
    return _mm512_add_epi32(_mm512_slli_epi32(above, 8), low);
}

/* Sum over the four values of each lane, exact, plus `zero`. The digits are summed apart: one long chain of
 * dependent instructions would fill the processor's window. */
INLINE __m512i dot(__m512i quants, const chunk *x, int unit, __m512i zero) {
    __m512i none = _mm512_setzero_si512();
    __m512i high = _mm512_dpbusd_epi32(none, quants, digit_of(x, unit, 0));
    __m512i middle = _mm512_dpbusd_epi32(none, quants, digit_of(x, unit, 1));
    return join_digits(high, middle, _mm512_dpbusd_epi32(zero, quants, digit_of(x, unit, 2)));
}

/* The same over two registers whose lanes have one scale. */
INLINE __m512i dot_pair(nibbles q, const chunk *x, __m512i zero) {
    __m512i sum[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), zero};
    for (int digit = 0; digit < 3; digit++) {
        sum[digit] = _mm512_dpbusd_epi32(sum[digit], q.low, digit_of(x, 0, digit));
        sum[digit] = _mm512_dpbusd_epi32(sum[digit], q.high, digit_of(x, 1, digit));
    }
    return join_digits(sum[0], sum[1], sum[2]);
}

/* Lane i of the result is lane INDEX[i] of `scales`. */
INLINE __m512 spread(__m512 scales, __m512i index) { return _mm512_permutexvar_ps(index, scales); }
INLINE __m512i quarters(void) { return _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0); }
INLINE __m512i halves(int low, int high) {
    return _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
}

/* The accumulators of M rows of activations. */
typedef struct {
    __m512 dots[8], high[8]; /* high: of Q8_0's highest digit, worth 65536 */
    __m256 minima[8];        /* Q4_1, Q5_1, Q4_K, Q5_K: minimum * sum of the group */
} sums;

/* Four blocks of 32 with nibbles (Q4_0, Q4_1, Q5_0, Q5_1) against the chunk x[m * stride] of each row. */
INLINE void add_nibble_blocks(
    const int format, const int M, const uint8_t *b, const chunk *x, int64_t stride, sums *out) {
    const int has_minimum = format == Q4_1 || format == Q5_1;
    const int64_t bytes = BLOCK_BYTES[format];
    const nibbles q = quants_of_four(format, b);
    __m128 d = four_halves(b, bytes), least = has_minimum ? four_halves(b + 2, bytes) : _mm_setzero_ps();
    for (int m = 0; m < M; m++) {
        const chunk *at = x + m * stride;
        __m512 scale = _mm512_castps128_ps512(_mm_mul_ps(d, _mm_load_ps(at->step)));
        __m512i sum = dot_pair(q, at, has_minimum ? _mm512_setzero_si512() : whole_numbers(at->zero[0]));
        out->dots[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), spread(scale, quarters()), out->dots[m]);
        if (!has_minimum) continue;
        __m128 minima = _mm_fmadd_ps(least, _mm_load_ps(at->sum), _mm256_castps256_ps128(out->minima[m]));
        out->minima[m] = _mm256_castps128_ps256(minima);
    }
}

/* Four blocks of Q8_0: signed bytes, made unsigned; their highest digit would overflow beside the others. */
INLINE void add_byte_blocks(const int M, const uint8_t *b, const chunk *x, int64_t stride, sums *out) {
    const int64_t bytes = BLOCK_BYTES[Q8_0];
    __m128 d = four_halves(b, bytes);
    for (int unit = 0; unit < 2; unit++, b += 2 * bytes) {
        __m512i q = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(b + 2)));
        q = _mm512_inserti64x4(q, _mm256_loadu_si256((const __m256i *)(b + bytes + 2)), 1);
        q = _mm512_xor_si512(q, _mm512_set1_epi8((char)0x80));
        for (int m = 0; m < M; m++) {
            const chunk *at = x + m * stride;
            __m512i high = _mm512_dpbusd_epi32(whole_numbers(at->zero_high[unit]), q, digit_of(at, unit, 0));
            __m512i middle = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, digit_of(at, unit, 1));
            __m512i low = _mm512_dpbusd_epi32(whole_numbers(at->zero[unit]), q, digit_of(at, unit, 2));
            low = _mm512_add_epi32(_mm512_slli_epi32(middle, 8), low);
            __m512 scale = _mm512_castps128_ps512(_mm_mul_ps(d, _mm_load_ps(at->step)));
            scale = spread(scale, halves(2 * unit, 2 * unit + 1));
            out->high[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), scale, out->high[m]);
            out->dots[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), scale, out->dots[m]);
        }
    }
}

INLINE __m256 eight_floats(const float *low, const float *high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(low)), _mm_load_ps(high), 1);
}

/* A super-block of Q4_K or Q5_K. */
INLINE void add_groups(
    const int format, const int M, const uint8_t *b, const chunk *x, int64_t stride, sums *out) {
    uint64_t scales, minima;
    six_bit_scales(b + 4, &scales, &minima);
    __m256 scale = _mm256_mul_ps(byte_floats(scales), _mm256_set1_ps(half_float(load16(b))));
    __m256 least = _mm256_mul_ps(byte_floats(minima), _mm256_set1_ps(half_float(load16(b + 2))));
    const nibbles q[2] = {quants_of_groups(format, b, 0), quants_of_groups(format, b, 1)};
    __m512i none = _mm512_setzero_si512();
    for (int m = 0; m < M; m++) {
        const chunk *at = x + m * stride;
        __m512 steps = _mm512_castps256_ps512(_mm256_mul_ps(scale, eight_floats(at[0].step, at[1].step)));
        out->minima[m] = _mm256_fmadd_ps(least, eight_floats(at[0].sum, at[1].sum), out->minima[m]);
        for (int half = 0; half < 2; half++) {
            __m512 low = _mm512_cvtepi32_ps(dot(q[half].low, at + half, 0, none));
            __m512 high = _mm512_cvtepi32_ps(dot(q[half].high, at + half, 1, none));
            out->dots[m] = _mm512_fmadd_ps(low, spread(steps, halves(4 * half, 4 * half + 2)), out->dots[m]);
            out->dots[m] = _mm512_fmadd_ps(high, spread(steps, halves(4 * half + 1, 4 * half + 3)), out->dots[m]);
        }
    }
}

/* A super-block of Q6_K: 16 groups of 16, two high bits of four values in a byte. */
INLINE void add_six_bits(const int M, const uint8_t *b, const chunk *x, int64_t stride, sums *out) {
    const nibbles q[2] = {quants_of_six_bits(b, 0), quants_of_six_bits(b, 1)};
    __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(b + 192)));
    __m512 scale = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(half_float(load16(b + 208))));
    __m512i in_pairs = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    for (int m = 0; m < M; m++) {
        const chunk *at = x + m * stride;
        __m512 steps = spread(_mm512_castps256_ps512(eight_floats(at[0].step, at[1].step)), in_pairs);
        steps = _mm512_mul_ps(steps, scale);
        for (int i = 0; i < 4; i++) {
            __m512i zero = whole_numbers(at[i / 2].zero[i % 2]);
            __m512 sum = _mm512_cvtepi32_ps(dot(i % 2 ? q[i / 2].high : q[i / 2].low, at + i / 2, i % 2, zero));
            __m512i index = _mm512_add_epi32(quarters(), _mm512_set1_epi32(4 * i));
            out->dots[m] = _mm512_fmadd_ps(sum, spread(steps, index), out->dots[m]);
        }
    }
}

/* The blocks of one or two chunks. */
INLINE void add_blocks(
    const int format, const int M, const uint8_t *b, const chunk *x, int64_t stride, sums *out) {
    if (format == Q8_0) add_byte_blocks(M, b, x, stride, out);
    else if (format == Q6_K) add_six_bits(M, b, x, stride, out);
    else if (format == Q4_K || format == Q5_K) add_groups(format, M, b, x, stride, out);
    else add_nibble_blocks(format, M, b, x, stride, out);
}

/* One row of weights against M rows of activations, `stride` chunks apart: y[m * N]. */
INLINE void row_digits(
    const int format, const int M, const uint8_t *row, const chunk *x, int64_t K, float *y, int64_t N) {
    const int64_t values = BLOCK_VALUES[format], chunks = (K + CHUNK - 1) / CHUNK;
    const int64_t step = values < CHUNK ? CHUNK : values, bytes = step / values * BLOCK_BYTES[format];
    sums out;
    for (int m = 0; m < M; m++) {
        out.dots[m] = out.high[m] = _mm512_setzero_ps();
        out.minima[m] = _mm256_setzero_ps();
    }
    int64_t at = 0;
    for (; at + step <= K; at += step, row += bytes) {
        for (int64_t line = 0; line < bytes; line += 64) prefetch(row + line);
        add_blocks(format, M, row, x + at / CHUNK, chunks, &out);
    }
    if (values < CHUNK && at < K) { /* fewer than four blocks are left: the missing ones are zero */
        uint8_t rest[4 * 34] = {0};
        memcpy(rest, row, (size_t)((K - at) / values * BLOCK_BYTES[format]));
        add_blocks(format, M, rest, x + at / CHUNK, chunks, &out);
    }
    for (int m = 0; m < M; m++) {
        float sum = _mm512_reduce_add_ps(_mm512_fmadd_ps(out.high[m], _mm512_set1_ps(65536), out.dots[m]));
        if (format == Q4_1 || format == Q5_1) sum += lanes_sum(_mm512_zextps256_ps512(out.minima[m]));
        if (format == Q4_K || format == Q5_K) sum -= lanes_sum(_mm512_zextps256_ps512(out.minima[m]));
        y[m * N] = sum;
    }
}
