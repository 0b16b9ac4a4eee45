/* Packed weights with AMX: rows of weights are unpacked as tiles and meet all rows of activations. */
#pragma once
#include "amx.h"
#include "packed.h"

#define AMX_FROM 4 /* rows of activations: from here on tiles are faster than digits row by row */
/* With many rows of activations more weights are unpacked at once: each block of activations is fetched less often. */
#define WEIGHTS_TOGETHER(M) (M > SIDE ? 4 * SIDE : SIDE)

/* Rows of weights, SIDE by SIDE, against all rows of activations, `together` at a time; `count` of them are there. */
INLINE void amx_rows(
    const int group, const int offsets, const int together, const problem *p, tile_weights w, int64_t count,
    float *y) {
    float out[SIDE][SIDE] __attribute__((aligned(64)));
    const column_group *x = p->fixed;
    for (int64_t first = 0; first < p->M; first += together, x += p->K / 32)
        for (int64_t at = 0; at < count; at += SIDE) {
            multiply_tiles(group, offsets, together, square_at(w, at), x, p->K, out);
            for (int m = 0; m < together && first + m < p->M; m++)
                for (int n = 0; n < SIDE && at + n < count; n++) {
                    float sum = 0;
                    for (int i = 0; i < SIDE / together; i++) sum += out[n][m + i * together];
                    y[(first + m) * p->N + at + n] = sum;
                }
        }
}

/* The same with constants. */
static void amx_rows_of(int format, const problem *p, tile_weights w, int64_t count, float *y) {
#define TOGETHER(group, offsets)                                          \
    if (p->M <= 5) amx_rows(group, offsets, 5, p, w, count, y);           \
    else if (p->M <= 8) amx_rows(group, offsets, 8, p, w, count, y);      \
    else amx_rows(group, offsets, SIDE, p, w, count, y)
    if (GROUP(format) == 16) {
        TOGETHER(16, 0);
    } else if (HAS_OFFSETS(format)) {
        TOGETHER(32, 1);
    } else {
        TOGETHER(32, 0);
    }
}

static void work_amx(const void *job, int64_t from, int64_t to) {
    const problem *p = job;
    const int64_t K = p->K, row_bytes = row_bytes_of(p->format, K), at_once = WEIGHTS_TOGETHER(p->M);
    tile_weights w = tile_sizes(K);
    w.memory = room_for(WEIGHTS, (size_t)(at_once / SIDE * w.bytes));
    if (!w.memory) {
        work_floats(job, from, to);
        return;
    }
    shape_tiles(GROUP(p->format));
    for (int64_t n = from; n < to; n += at_once) {
        const int64_t count = to - n < at_once ? to - n : at_once;
        const uint8_t *row = p->w + n * row_bytes;
#define TAKE_ROWS(FORMAT) \
    for (int64_t i = 0; i < count; i++) take_row(FORMAT, row + i * row_bytes, K, (int)(i % SIDE), square_at(w, i))
        WITH_FORMAT(TAKE_ROWS, p->format)
        amx_rows_of(p->format, p, w, count, p->y + n);
        for (int64_t i = 0; i < count; i++) redo_nonfinite(p->format, p, row + i * row_bytes, p->y + n + i);
    }
    _tile_release();
}
