/* y = x W^T for rows of float32 activations, W read as it is stored: float, bf16, fp16 or GGUF blocks.
 *
 * Compiled on first use by build.py, called through ctypes by compiled.py; sizes are checked by the caller. Four ways
 * through, by what the compiler may use: AMX for several rows of packed weights (amx.h), AVX-512 VNNI for few
 * (digits.h), sixteen lanes in AVX-512 or AVX2, or plain C (lanes.h). */
#include "attention.h"
#include "packed.h"

#if defined(DIGITS) && defined(__AMX_INT8__) && defined(__linux__)
#define AMX 1
#include "amx_rows.h"
#endif

const char *decodescope_instructions(void) {
#if defined(AMX)
    if (tiles_allowed()) return "AMX";
#endif
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

#if defined(AMX)
static int in_tiles(const problem *p) { return p->run == work_amx; }

/* All rows of activations as tiles, in a buffer that this thread keeps. Returns whether there was memory. */
static int prepare_amx(call *all, int threads) {
    const problem *first = all->parts;
    const int64_t together = ROWS_TOGETHER(first->M), blocks = (first->M + together - 1) / together;
    int wanting = 0;
    for (int i = 0; i < all->count; i++) wanting += in_tiles(all->parts + i);
    if (!wanting) return 1;
    column_group *buffer = room_for(COLUMNS, (size_t)(blocks * first->K / 32) * sizeof(column_group));
    if (!buffer) return 0;
    const laying job = {.x = first->x, .K = first->K, .M = first->M, .out = buffer};
    share(work_lay, &job, blocks, 1, threads);
    for (problem *p = all->parts; p < all->parts + all->count; p++)
        if (in_tiles(p)) p->fixed = buffer;
    return 1;
}

#else
#define WEIGHTS_TOGETHER(M) 1
static int in_tiles(const problem *p) { return (void)p, 0; }
static int prepare_amx(call *all, int threads) { return (void)all, (void)threads, 1; }
#endif

#if defined(DIGITS)
/* NF4's levels are no whole numbers: there the activations stay as they are. */
static int in_digits(const problem *p) { return p->run == work_packed && p->format != NF4; }

/* Rows of K activations -> rows of chunks for every format of a call, in a buffer that this thread keeps. Returns
 * whether there was memory. */
static int prepare(call *all) {
    const int64_t K = all->parts[0].K, M = all->parts[0].M, chunks = (K + CHUNK - 1) / CHUNK;
    int wanting = 0;
    for (int i = 0; i < all->count; i++) wanting += in_digits(all->parts + i);
    if (!wanting) return 1;
    chunk *buffer = room_for(CHUNKS, (size_t)(all->count * M * chunks) * sizeof(chunk));
    if (!buffer) return 0;
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

static problem part_of(const request *r, const matrix *m, const float *x, int64_t M, float *y) {
    work *run = !m->packed ? work_dense : M >= UNPACKED_FROM ? work_unpacked : work_packed;
#if defined(AMX)
    if (m->packed && m->format != NF4 && M >= AMX_FROM && tiles_allowed()) run = work_amx;
#endif
    return (problem){
        .run = run, .format = (int)m->format, .w = (const uint8_t *)(intptr_t)m->w, .x = x, .fixed = x,
        .bias = (const uint8_t *)(intptr_t)m->bias, .bias_kind = (int)m->bias_kind, .y = y,
        .N = r->N, .K = r->K, .M = M, .rows = m->rows,
    };
}

/* The same for M rows of activations, laid out together. */
static int few_products(const request *r, int count, const float *x, int64_t M, float *y, int threads) {
    call all = {.count = count};
    int64_t widest = 1, size = 0, together = WEIGHTS_AT_ONCE;
    for (int i = 0; i < count; i++) {
        const matrix *m = r->matrices + i;
        all.parts[i] = part_of(r, m, x, M, y);
        all.parts[i].start = size;
        y += m->rows;
        size += (m->rows + 15) & ~(int64_t)15; /* rows go together as they do alone */
        if (in_tiles(all.parts + i)) together = WEIGHTS_TOGETHER(M);
        const int64_t row_bytes = m->packed ? row_bytes_of((int)m->format, r->K) : r->K * KIND_BYTES[m->format];
        if (row_bytes > widest) widest = row_bytes;
    }
    if (!prepare(&all) || !prepare_amx(&all, threads)) return 1;
    share(work_call, &all, size, rows_at_once(widest, together), threads);
    return 0;
}

#define LAID_OUT 512 /* rows of activations at a time: this thread keeps the memory of their layout */

/* y [M, N] = x [M, K] times up to MOST_MATRICES matrices, side by side, plus their biases. Returns 0, or 1 when there
 * was no memory. */
int decodescope_products(const request *r, int count, const float *x, float *y, int threads) {
    for (int64_t m = 0; m < r->M; m += LAID_OUT) {
        const int64_t rows = r->M - m < LAID_OUT ? r->M - m : LAID_OUT;
        if (few_products(r, count, x + m * r->K, rows, y + m * r->N, threads)) return 1;
    }
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
