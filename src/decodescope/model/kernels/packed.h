/* Packed weights without tiles: unpacked block by block, row by row into the cache, or met as whole numbers. */
#pragma once
#include <math.h>
#include "dense.h"
#include "nf4.h"
#include "unpack.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__BMI2__)
#define DIGITS 1
#include "digits.h"
#endif

#define UNPACKED_FROM 8 /* rows of activations: from here on unpacking a row of weights is the smaller part */

/* One row of blocks, unpacked block by block, against M rows of activations. */
INLINE void row_floats(
    const int format, const int M, const uint8_t *row, const float *x, int64_t K, float *y, int64_t N) {
    const int64_t values = BLOCK_VALUES[format];
    lanes sum[INPUTS_AT_ONCE];
    for (int m = 0; m < M; m++) sum[m] = lanes_zero();
    for (int64_t at = 0; at < K; at += values, row += BLOCK_BYTES[format]) {
        float block[256];
        for (int64_t line = 0; line < BLOCK_BYTES[format]; line += 64) prefetch(row + line);
        unpack_block(format, row, block);
        for (int i = 0; i < values; i += LANES)
            for (int m = 0; m < M; m++)
                sum[m] = lanes_mad(lanes_float(block + i), lanes_float(x + m * K + at + i), sum[m]);
    }
    for (int m = 0; m < M; m++) y[m * N] = lanes_sum(sum[m]);
}

/* The same against all rows of activations. */
INLINE void float_rows(const int format, const problem *p, const uint8_t *row, float *y) {
    const int64_t N = p->N, K = p->K, M = p->M;
#define FLOAT_ROWS(ROWS) row_floats(format, ROWS, row, p->x + m * K, K, y + m * N, N), m += ROWS
    for (int64_t m = 0; m < M;) WITH_ROWS(FLOAT_ROWS, M - m)
}

static void one_row_floats(int format, const uint8_t *row, const float *x, int64_t K, float *y) {
#define ONE(FORMAT) row_floats(FORMAT, 1, row, x, K, y, 0)
    WITH_FORMAT(ONE, format)
}

/* A sum that is not finite is done over value by value: infinities and NaN must stand as in the unpacked product. */
INLINE void redo_nonfinite(const int format, const problem *p, const uint8_t *row, float *y) {
    for (int64_t m = 0; m < p->M; m++)
        if (!isfinite(y[m * p->N])) one_row_floats(format, row, p->x + m * p->K, p->K, y + m * p->N);
}

/* A row of NF4 against all rows of activations. */
INLINE void normal_rows(const problem *p, const uint8_t *row, float *y) {
    const int64_t N = p->N, K = p->K, M = p->M;
#define NORMAL_ROWS(ROWS) row_normal(ROWS, row, p->x + m * K, K, y + m * N, N), m += ROWS
    for (int64_t m = 0; m < M;) WITH_ROWS(NORMAL_ROWS, M - m)
    redo_nonfinite(NF4, p, row, y);
}

#if defined(DIGITS)

INLINE void packed_row(const int format, const problem *p, const uint8_t *row, float *y) {
    const int64_t N = p->N, K = p->K, M = p->M, chunks = (K + CHUNK - 1) / CHUNK;
    const chunk *fixed = p->fixed;
    if (format == NF4) {
        normal_rows(p, row, y);
        return;
    }
#define DIGIT_ROWS(ROWS) row_digits(format, ROWS, row, fixed + m * chunks, K, y + m * N, N), m += ROWS
    for (int64_t m = 0; m < M;) WITH_FEW_ROWS(DIGIT_ROWS, M - m)
    redo_nonfinite(format, p, row, y);
}

#else

INLINE void packed_row(const int format, const problem *p, const uint8_t *row, float *y) {
    if (format == NF4) normal_rows(p, row, y);
    else float_rows(format, p, row, y);
}

#endif

/* The way that needs no memory. */
static void work_floats(const void *job, int64_t from, int64_t to) {
    const problem *p = job;
    const int64_t row_bytes = row_bytes_of(p->format, p->K);
#define FLOATS(FORMAT) \
    for (int64_t n = from; n < to; n++) float_rows(FORMAT, p, p->w + n * row_bytes, p->y + n)
    WITH_FORMAT(FLOATS, p->format)
}

static void work_packed(const void *job, int64_t from, int64_t to) {
    const problem *p = job;
    const int64_t row_bytes = row_bytes_of(p->format, p->K);
#define RANGE(FORMAT) \
    for (int64_t n = from; n < to; n++) packed_row(FORMAT, p, p->w + n * row_bytes, p->y + n)
    WITH_FORMAT(RANGE, p->format)
}

/* Rows of weights are unpacked into a buffer that this thread keeps, in its cache, and meet all activations there. */
static void work_unpacked(const void *job, int64_t from, int64_t to) {
    const problem *p = job;
    const int64_t K = p->K, row_bytes = row_bytes_of(p->format, K);
    float *rows = room_for(WEIGHTS, (size_t)(WEIGHTS_AT_ONCE * K) * sizeof(float));
    if (!rows) {
        work_floats(job, from, to);
        return;
    }
    for (int64_t n = from; n < to; n += WEIGHTS_AT_ONCE) {
        const int64_t count = to - n < WEIGHTS_AT_ONCE ? to - n : WEIGHTS_AT_ONCE;
        for (int64_t r = 0; r < count; r++) {
#define INTO_CACHE(FORMAT) unpack_row(FORMAT, p->w + (n + r) * row_bytes, K, rows + r * K, 0)
            WITH_FORMAT(INTO_CACHE, p->format)
        }
        problem dense = *p;
        dense.w = (const uint8_t *)rows;
        dense.y = p->y + n;
        dense_range(FLOAT32, &dense, 0, count);
    }
}
