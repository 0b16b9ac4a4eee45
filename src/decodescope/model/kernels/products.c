/* y = x W^T for a few rows of float32 activations, W read as it is stored: float, bf16, fp16 or GGUF blocks.
 *
 * Compiled on first use by build.py, called through ctypes by compiled.py; sizes are checked by the caller. Three ways
 * through, by what the compiler may use: AVX-512 VNNI (digits.h), sixteen lanes in AVX-512 or AVX2, or plain C
 * (lanes.h). */
#include <math.h>
#include <stdlib.h>
#include "attention.h"
#include "blocks.h"
#include "nf4.h"
#include "numbers.h"
#include "team.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__BMI2__)
#define DIGITS 1
#include "digits.h"
#endif

#if defined(__AVX512F__)
#define INPUTS_AT_ONCE 8 /* accumulators that stay in registers */
#define WEIGHTS_AT_ONCE 2
#else
#define INPUTS_AT_ONCE 4
#define WEIGHTS_AT_ONCE 1
#endif

const char *decodescope_instructions(void) {
#if defined(DIGITS)
    return "AVX-512 VNNI";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return "AVX2";
#else
    return "C";
#endif
}

/* Everything about one product: y [M, N] = x [M, K] times w [N, K]. */
typedef struct {
    int format; /* or kind */
    const uint8_t *w;
    const float *x;
    const void *fixed; /* the activations as digits */
    float *y;
    int64_t N, K, M;
} problem;

/* Rows in a piece of work: enough bytes that handing it out costs nothing, even so that rows go in pairs. */
static int64_t rows_at_once(int64_t row_bytes) {
    int64_t rows = (64 << 10) / row_bytes & ~(int64_t)1;
    return rows < 2 ? 2 : rows;
}

/* CALL(M) with a constant number of rows of activations; `M` rows are left to do. */
#define WITH_FEW_ROWS(CALL, M)                  \
    if (M >= 4) { CALL(4); }                    \
    else if (M == 3) { CALL(3); }               \
    else if (M == 2) { CALL(2); }               \
    else { CALL(1); }
#if INPUTS_AT_ONCE == 8
#define WITH_ROWS(CALL, M)                      \
    if (M >= 8) { CALL(8); }                    \
    else WITH_FEW_ROWS(CALL, M)
#else
#define WITH_ROWS WITH_FEW_ROWS
#endif

/* ---- weights that are numbers ---- */

/* R rows of weights against M rows of activations. A single pair takes four accumulators in turn. */
INLINE void dense_rows(
    const int kind, const int R, const int M, const uint8_t *w, const float *x, int64_t K, float *y, int64_t N) {
    const int turns = R * M == 1 ? 4 : R * M == 2 ? 2 : 1;
    const int64_t row_bytes = K * KIND_BYTES[kind];
    lanes sum[WEIGHTS_AT_ONCE * INPUTS_AT_ONCE];
    for (int i = 0; i < R * M * turns; i++) sum[i] = lanes_zero();
    int64_t at = 0;
    for (; at + turns * LANES <= K; at += turns * LANES)
        for (int turn = 0; turn < turns; turn++) {
            lanes weights[WEIGHTS_AT_ONCE];
            for (int r = 0; r < R; r++) {
                const int64_t here = at + turn * LANES;
                weights[r] = load_lanes(kind, w + r * row_bytes, here);
                if (kind == FLOAT32 || turn % 2 == 0) prefetch(w + r * row_bytes + here * KIND_BYTES[kind]);
            }
            for (int m = 0; m < M; m++) {
                lanes values = lanes_float(x + m * K + at + turn * LANES);
                for (int r = 0; r < R; r++) {
                    lanes *into = sum + (turn * M + m) * R + r;
                    *into = lanes_mad(weights[r], values, *into);
                }
            }
        }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) {
            float total = 0;
            for (int turn = 0; turn < turns; turn++) total += lanes_sum(sum[(turn * M + m) * R + r]);
            for (int64_t k = at; k < K; k++) total += load_one(kind, w + r * row_bytes, k) * x[m * K + k];
            y[m * N + r] = total;
        }
}

INLINE void dense_range(const int kind, const problem *p, int64_t from, int64_t to) {
    const int64_t N = p->N, K = p->K, M = p->M, row_bytes = K * KIND_BYTES[kind];
    int64_t n = from, m;
#define DENSE(R, ROWS) \
    dense_rows(kind, R, ROWS, p->w + n * row_bytes, p->x + m * K, K, p->y + m * N + n, N), m += ROWS
#define PAIR(ROWS) DENSE(WEIGHTS_AT_ONCE, ROWS)
    for (; n + WEIGHTS_AT_ONCE <= to; n += WEIGHTS_AT_ONCE)
        for (m = 0; m < M;) WITH_ROWS(PAIR, M - m)
#define SINGLE(ROWS) DENSE(1, ROWS)
    for (; n < to; n++)
        for (m = 0; m < M;) WITH_ROWS(SINGLE, M - m)
}

static void work_dense(const void *job, int64_t from, int64_t to) {
    const problem *p = job;
    if (p->format == BFLOAT16) dense_range(BFLOAT16, p, from, to);
    else if (p->format == FLOAT16) dense_range(FLOAT16, p, from, to);
    else dense_range(FLOAT32, p, from, to);
}

/* y [M, N] = x [M, K] times w [N, K] of float32, bf16 or fp16; size = N, K, M. */
void decodescope_dense(int kind, const uint8_t *w, const float *x, float *y, const int64_t size[3], int threads) {
    const problem job = {.format = kind, .w = w, .x = x, .y = y, .N = size[0], .K = size[1], .M = size[2]};
    share(work_dense, &job, job.N, rows_at_once(job.K * KIND_BYTES[kind]), threads);
}

/* ---- packed weights ---- */

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

/* Rows of K activations -> rows of chunks, in a buffer that this thread keeps. NULL: no memory. NF4's levels are no
 * whole numbers, and many rows are better met by floats: there the activations stay as they are. */
static const void *prepare(int format, const float *x, int64_t K, int64_t M) {
    if (format == NF4 || M >= UNPACKED_FROM) return x;
    static _Thread_local chunk *buffer;
    static _Thread_local size_t room;
    const int64_t chunks = (K + CHUNK - 1) / CHUNK;
    const size_t need = (size_t)(M * chunks) * sizeof(chunk);
    if (need > room) {
        free(buffer);
        buffer = aligned_alloc(64, need);
        room = buffer ? need : 0;
    }
    for (int64_t m = 0; buffer && m < M; m++) {
#define FIX(FORMAT) fix_row(FORMAT, x + m * K, K, buffer + m * chunks)
        WITH_FORMAT(FIX, format)
    }
    return buffer;
}

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

static const void *prepare(int format, const float *x, int64_t K, int64_t M) {
    return (void)format, (void)K, (void)M, x;
}

INLINE void packed_row(const int format, const problem *p, const uint8_t *row, float *y) {
    if (format == NF4) normal_rows(p, row, y);
    else float_rows(format, p, row, y);
}

#endif

static int64_t row_bytes_of(int format, int64_t K) { return K / BLOCK_VALUES[format] * BLOCK_BYTES[format]; }

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

/* To nearest, ties to even; NaN stays NaN (quiet, positive or negative as torch writes it: 0x7fc0). */
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

typedef struct {
    int format, as_bf16;
    const uint8_t *w;
    char *out;
    int64_t K;
} unpacking;

INLINE void unpack_row(const int format, const uint8_t *row, int64_t K, void *out, const int as_bf16) {
    const int64_t values = BLOCK_VALUES[format];
    for (int64_t at = 0; at < K; at += values, row += BLOCK_BYTES[format]) {
        for (int64_t line = 0; line < BLOCK_BYTES[format]; line += 64) prefetch(row + line);
        if (!as_bf16) {
            unpack_block(format, row, (float *)out + at);
            continue;
        }
        float block[256];
        unpack_block(format, row, block);
        for (int i = 0; i < values; i++) ((uint16_t *)out)[at + i] = to_bf16(block[i]);
    }
}

/* Rows of weights are unpacked into a buffer that this thread keeps, in its cache, and meet all activations there. */
static void work_unpacked(const void *job, int64_t from, int64_t to) {
    static _Thread_local float *rows;
    static _Thread_local size_t room;
    const problem *p = job;
    const int64_t K = p->K, row_bytes = row_bytes_of(p->format, K);
    const size_t need = (size_t)(WEIGHTS_AT_ONCE * K) * sizeof(float);
    if (need > room) {
        free(rows);
        rows = malloc(need);
        room = rows ? need : 0;
    }
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

/* y [M, N] = x [M, K] times w, N rows of blocks; size = N, K, M. Returns 0, or 1 when there was no memory. */
int decodescope_packed(int format, const uint8_t *w, const float *x, float *y, const int64_t size[3], int threads) {
    problem job = {.format = format, .w = w, .x = x, .y = y, .N = size[0], .K = size[1], .M = size[2]};
    job.fixed = prepare(format, x, job.K, job.M);
    if (!job.fixed) return 1;
    work *run = job.M >= UNPACKED_FROM ? work_unpacked : work_packed;
    share(run, &job, job.N, rows_at_once(row_bytes_of(format, job.K)), threads);
    return 0;
}

static void work_unpack(const void *job, int64_t from, int64_t to) {
    const unpacking *p = job;
    const int64_t row_bytes = row_bytes_of(p->format, p->K), out_bytes = p->K * (p->as_bf16 ? 2 : 4);
#define UNPACK(FORMAT)                                                                              \
    for (int64_t n = from; n < to; n++) {                                                           \
        if (p->as_bf16) unpack_row(FORMAT, p->w + n * row_bytes, p->K, p->out + n * out_bytes, 1);  \
        else unpack_row(FORMAT, p->w + n * row_bytes, p->K, p->out + n * out_bytes, 0);             \
    }
    WITH_FORMAT(UNPACK, p->format)
}

/* N rows of blocks into float32 or bf16 [N, K]; size = N, K. */
void decodescope_unpack(int format, const uint8_t *w, void *out, const int64_t size[2], int as_bf16, int threads) {
    const unpacking job = {.format = format, .as_bf16 = as_bf16, .w = w, .out = out, .K = size[1]};
    share(work_unpack, &job, size[0], rows_at_once(row_bytes_of(format, size[1])), threads);
}

#include "quantize.h"

/* ---- what memory can give ---- */

static void work_read(const void *job, int64_t from, int64_t to) {
    const problem *p = job;
    uint64_t sum = 0;
    for (int64_t i = from; i < to; i++) sum ^= ((const uint64_t *)p->w)[i];
    atomic_fetch_xor((_Atomic uint64_t *)p->fixed, sum);
}

/* Reads `words` 64-bit words as the products read weights, and does next to nothing with them. */
uint64_t decodescope_read(const uint8_t *w, int64_t words, int threads) {
    _Atomic uint64_t sum = 0;
    const problem job = {.w = w, .fixed = &sum};
    share(work_read, &job, words, (64 << 10) / 8, threads);
    return sum;
}
