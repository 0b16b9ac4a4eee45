/* y = x W^T for a few rows of float32 activations, W read as it is stored: float, bf16, fp16 or GGUF blocks.
 *
 * Compiled on first use by build.py, called through ctypes by compiled.py; sizes are checked by the caller. Three ways
 * through, by what the compiler may use: AVX-512 VNNI (digits.h), sixteen lanes in AVX-512 or AVX2, or plain C
 * (lanes.h). */
#include <math.h>
#include <stdlib.h>
#include "attention.h"
#include "blocks.h"
#include "dense.h"
#include "nf4.h"
#include "unpack.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__BMI2__)
#define DIGITS 1
#include "digits.h"
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

/* ---- the matrices of a call ---- */

#define MOST_MATRICES 4

/* As the caller writes it. */
typedef struct {
    int64_t packed, format; /* blocks of this format, or numbers of this kind */
    int64_t w, rows;
    int64_t bias, bias_kind; /* address 0: none */
} matrix;

typedef struct {
    int64_t N, K, M; /* rows of all matrices, of activations in a row, rows of them */
    matrix matrices[];
} request;

typedef struct {
    problem parts[MOST_MATRICES];
    int count;
} call;

static void add_bias(const problem *p, int64_t from, int64_t to) {
    for (int64_t m = 0; p->bias && m < p->M; m++)
        for (int64_t n = from; n < to; n++) p->y[m * p->N + n] += load_one(p->bias_kind, p->bias, n);
}

/* Rows from..to of all matrices, one behind the other. */
static void work_call(const void *job, int64_t from, int64_t to) {
    const call *all = job;
    for (const problem *p = all->parts; p < all->parts + all->count; p++) {
        const int64_t first = from > p->start ? from - p->start : 0;
        const int64_t last = to - p->start < p->rows ? to - p->start : p->rows;
        if (first >= last) continue;
        p->run(p, first, last);
        add_bias(p, first, last);
    }
}

#if defined(DIGITS)
/* NF4's levels are no whole numbers: there the activations stay as they are. */
static int in_digits(const problem *p) { return p->run == work_packed && p->format != NF4; }

/* Rows of K activations -> rows of chunks for every format of a call, in a buffer that this thread keeps. Returns
 * whether there was memory. */
static int prepare(call *all) {
    static _Thread_local chunk *buffer;
    static _Thread_local size_t room;
    const int64_t K = all->parts[0].K, M = all->parts[0].M, chunks = (K + CHUNK - 1) / CHUNK;
    int wanting = 0;
    for (int i = 0; i < all->count; i++) wanting += in_digits(all->parts + i);
    const size_t need = (size_t)(wanting ? all->count * M * chunks : 0) * sizeof(chunk);
    if (need > room) {
        free(buffer);
        buffer = aligned_alloc(64, need);
        room = buffer ? need : 0;
        if (!buffer) return 0;
    }
    for (problem *p = all->parts; p < all->parts + all->count; p++) {
        if (!in_digits(p)) continue;
        for (const problem *q = all->parts; q < p; q++)
            if (in_digits(q) && q->format == p->format) p->fixed = q->fixed;
        if (p->fixed != p->x) continue;
        chunk *into = buffer + (p - all->parts) * M * chunks;
#define FIX(FORMAT) fix_row(FORMAT, p->x + m * K, K, into + m * chunks)
        for (int64_t m = 0; m < M; m++) WITH_FORMAT(FIX, p->format)
        p->fixed = into;
    }
    return 1;
}
#else
static int prepare(call *all) { return (void)all, 1; }
#endif

static problem part_of(const request *r, const matrix *m, const float *x, float *y) {
    work *run = !m->packed ? work_dense : r->M >= UNPACKED_FROM ? work_unpacked : work_packed;
    return (problem){
        .run = run, .format = (int)m->format, .w = (const uint8_t *)(intptr_t)m->w, .x = x, .fixed = x,
        .bias = (const uint8_t *)(intptr_t)m->bias, .bias_kind = (int)m->bias_kind, .y = y,
        .N = r->N, .K = r->K, .M = r->M, .rows = m->rows,
    };
}

/* y [M, N] = x [M, K] times up to MOST_MATRICES matrices, side by side, plus their biases. Returns 0, or 1 when there
 * was no memory. */
int decodescope_products(const request *r, int count, const float *x, float *y, int threads) {
    call all = {.count = count};
    int64_t widest = 1, size = 0;
    for (int i = 0; i < count; i++) {
        const matrix *m = r->matrices + i;
        all.parts[i] = part_of(r, m, x, y);
        all.parts[i].start = size;
        y += m->rows;
        size += (m->rows + 1) & ~(int64_t)1; /* rows go in the same pairs as alone */
        const int64_t row_bytes = m->packed ? row_bytes_of((int)m->format, r->K) : r->K * KIND_BYTES[m->format];
        if (row_bytes > widest) widest = row_bytes;
    }
    if (!prepare(&all)) return 1;
    share(work_call, &all, size, rows_at_once(widest), threads);
    return 0;
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
