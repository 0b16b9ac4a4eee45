/* Products with weights that are numbers: every row of weights is read once and meets all rows of activations. */
#pragma once
#include <stdlib.h>
#include "numbers.h"
#include "team.h"

#if defined(__AVX512F__)
#define INPUTS_AT_ONCE 8 /* accumulators that stay in registers */
#define WEIGHTS_AT_ONCE 2
#else
#define INPUTS_AT_ONCE 4
#define WEIGHTS_AT_ONCE 1
#endif

/* One of the products of a call: y [M, rows of w] = x [M, K] times w, and the bias. */
typedef struct problem {
    work *run;
    int format; /* or kind */
    const uint8_t *w;
    const float *x;
    const void *fixed; /* the activations as digits */
    const uint8_t *bias; /* or NULL */
    int bias_kind;
    float *y;
    int64_t N, K, M;     /* columns of y, activations a row, rows of them */
    int64_t start, rows; /* where its rows begin in the work of the call, how many they are */
} problem;

/* Memory that a thread keeps for the next time, until it ends. */
enum room { WEIGHTS, CHUNKS, COLUMNS, ROOMS };
typedef struct {
    void *at;
    size_t bytes;
} kept;
static _Thread_local kept rooms[ROOMS];
static pthread_key_t leaving;
static pthread_once_t leaving_made = PTHREAD_ONCE_INIT;

static void leave_rooms(void *all) {
    for (kept *room = all; room < (kept *)all + ROOMS; room++) {
        free(room->at);
        *room = (kept){0};
    }
}

static void make_leaving(void) { pthread_key_create(&leaving, leave_rooms); }

/* Room for so many bytes, what was in it is lost; NULL where there is none. */
static void *room_for(enum room which, size_t bytes) {
    kept *room = rooms + which;
    if (bytes > room->bytes) {
        pthread_once(&leaving_made, make_leaving);
        pthread_setspecific(leaving, rooms);
        free(room->at);
        room->at = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        room->bytes = room->at ? bytes : 0;
    }
    return room->at;
}

/* Rows in a piece of work, which go `together`: enough bytes that handing it out costs nothing. */
static int64_t rows_at_once(int64_t row_bytes, int64_t together) {
    int64_t rows = (64 << 10) / row_bytes / together * together;
    return rows < together ? together : rows;
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
