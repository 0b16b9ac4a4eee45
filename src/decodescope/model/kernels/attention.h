/* softmax(q k^T / sqrt(d)) v for a few new positions, in float: keys and values are read once, as they are stored.
 *
 * A piece of work is some hundred positions of one key/value head. All query rows that look at them (heads of the
 * group times new positions) go over them tile by tile with a running softmax (https://arxiv.org/abs/1805.02867);
 * what the pieces found is joined at the end. Neither the pieces nor the result depend on the number of threads. */
#pragma once
#include <math.h> /* INFINITY */
#include <stdlib.h>
#include "numbers.h"
#include "team.h"

#define TILE 64                  /* positions whose weights lie side by side */
#define PIECE_BYTES (64 << 10)   /* of keys and values at least: handing it out costs nothing */
#define MOST_PIECES 64           /* about: what they found is to stay small */
#define BLOCK_ROWS (SUMS_AT_ONCE == 16 ? 8 : 4) /* query rows that go over a tile together at most */

/* Positions that follow one another, of one batch row (then all rows look at them) or of each. Steps are bytes from
 * row to row, head to head, position to position; scales lie position by position, NULL where there are none. */
typedef struct {
    const uint8_t *keys, *values;
    const float *key_scales, *value_scales;
    int64_t rows, length, key_steps[3], value_steps[3], key_scale_steps[2], value_scale_steps[2];
    int64_t chunk, first_position, first_piece, first_found; /* made by `plan` */
} stretch;

typedef struct {
    int kind, stretches;
    stretch *past;
    int64_t B, H, K, T, d; /* q [B, H, T, d] */
    const uint8_t *visible; /* bool [B or 1, 1, T, S], NULL: all; steps from row to row and from t to t */
    int64_t visible_steps[2];
    const float *q;
    float scale;            /* of the scores: log2(e) / sqrt(d), for powers of two instead of e */
    float *out;             /* [B, H, T, d] */
    float *queries, *found; /* made here, as is the rest */
    int64_t first_piece, pieces, found_rows;
} attention;

INLINE int64_t group_rows(const attention *a) { return a->H / a->K * a->T; } /* of one batch row */
INLINE int64_t items(const attention *a, const stretch *s) { return s->rows * a->K; }
INLINE int64_t chunks(const stretch *s) { return (s->length + s->chunk - 1) / s->chunk; }
INLINE int shared(const attention *a, const stretch *s) { return s->rows == 1 && a->B > 1; }
INLINE int64_t item_rows(const attention *a, const stretch *s) {
    return group_rows(a) * (shared(a, s) ? a->B : 1);
}

/* What a row has found: d sums of weighted values, the largest score, the sum of the weights. Blocks of rows are
 * written whole. */
INLINE int64_t found_floats(const attention *a) { return a->d + LANES; }
INLINE int64_t found_rows(const attention *a, const stretch *s) {
    return (item_rows(a, s) + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
}

/* 2^x for x <= 0, within 2e-7 of it; below the normal numbers 0. NaN stays. Sixteen at a time, and one. */
INLINE void exp2_below(float *x) {
    typedef float floats16 __attribute__((vector_size(64)));
    typedef int32_t wholes16 __attribute__((vector_size(64)));
    floats16 at;
    memcpy(&at, x, sizeof at);
    const floats16 magic = (floats16){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to whole numbers */
    const wholes16 tiny = at < -126.0f;
    at = (floats16)(~tiny & (wholes16)at);
    const floats16 shifted = at + magic, rest = at - (shifted - magic);
    floats16 sum = 1.535336188319500e-4f * rest + 1.339887440266574e-3f;
    sum = sum * rest + 9.618437357674640e-3f;
    sum = sum * rest + 5.550332471162809e-2f;
    sum = sum * rest + 2.402264791363012e-1f;
    sum = sum * rest + 6.931472028550421e-1f;
    sum = sum * rest + 1.0f;
    const floats16 power = (floats16)(((wholes16)shifted + 127) << 23);
    at = (floats16)(~tiny & (wholes16)(sum * power));
    memcpy(x, &at, sizeof at);
}
INLINE float exp2_one(float x) {
    float each[LANES] = {x};
    exp2_below(each);
    return each[0];
}
/* What weights lie under: no infinity minus infinity where nothing was seen. */
INLINE float level_of(float peak) { return peak == -INFINITY ? 0.0f : peak; }

/* Keys and values are met in turns: while the one is worked on, the other is fetched. */
INLINE void fetch(const uint8_t *line) { __builtin_prefetch(line, 0, 2); }

/* Scores of R rows of queries against `count` positions. The positions behind the last one are its copies. `next` is
 * fetched meanwhile, as much as there are keys. */
INLINE void score(
    const int kind, const int R, const float *q, int64_t d, const uint8_t *keys, int64_t step, int64_t count,
    const uint8_t *next, float (*scores)[TILE]) {
    const int P = SUMS_AT_ONCE / R; /* positions at once */
    for (int64_t i = 0; i < count; i += P) {
        const uint8_t *key[SUMS_AT_ONCE];
        lanes sum[SUMS_AT_ONCE];
        for (int p = 0; p < P; p++) key[p] = keys + (i + p < count ? i + p : count - 1) * step;
        const uint8_t *line = next + i * step;
        for (int n = 0; n < SUMS_AT_ONCE; n++) sum[n] = lanes_zero();
        for (int64_t x = 0; x < d; x += LANES) {
            lanes values[SUMS_AT_ONCE];
            for (int p = 0; p < P; p++) {
                values[p] = load_lanes(kind, key[p], x);
                if (x * KIND_BYTES[kind] % 64 == 0) fetch(line + p * step + x * KIND_BYTES[kind]);
            }
            for (int r = 0; r < R; r++) {
                const lanes query = lanes_float(q + r * d + x);
                for (int p = 0; p < P; p++) sum[r * P + p] = lanes_mad(query, values[p], sum[r * P + p]);
            }
        }
        float sums[SUMS_AT_ONCE];
        lanes_sums(sum, sums);
        for (int r = 0; r < R; r++) memcpy(scores[r] + i, sums + r * P, (size_t)P * sizeof(float));
    }
}

/* Scales R rows of `found`, W registers of each, and adds the values of `count` positions, each times its weight. */
INLINE void add_values(
    const int kind, const int R, const int W, float (*weights)[TILE], const float *scales, const uint8_t *values,
    int64_t step, int64_t count, const uint8_t *next, float *found, int64_t found_step) {
    lanes sum[SUMS_AT_ONCE];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++)
            sum[r * W + w] = lanes_times(lanes_float(found + r * found_step + w * LANES), scales[r]);
    for (int64_t i = 0; i < count; i++) {
        lanes value[SUMS_AT_ONCE];
        for (int w = 0; w < W; w++) {
            value[w] = load_lanes(kind, values + i * step, w * LANES);
            if (w * LANES * KIND_BYTES[kind] % 64 == 0) fetch(next + i * step + w * LANES * KIND_BYTES[kind]);
        }
        for (int r = 0; r < R; r++) {
            const lanes weight = lanes_fill(weights[r][i]);
            for (int w = 0; w < W; w++) sum[r * W + w] = lanes_mad(weight, value[w], sum[r * W + w]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) lanes_store(found + r * found_step + w * LANES, sum[r * W + w]);
}

INLINE void times(float *row, const float *scales, int64_t count) {
    for (int64_t i = 0; i < count; i++) row[i] *= scales[i];
}

INLINE float larger_of(float a, float b) { return a > b ? a : b; }

/* Scores -> weights 2^(score - largest so far); largest and sum in `peak_and_sum` move on. Returns what the sums of
 * before are worth now. A row that has seen nothing has weights and sums of zero. */
INLINE float soften(float *row, float *peak_and_sum) {
    lanes best = lanes_float(row), sum = lanes_zero();
    for (int i = LANES; i < TILE; i += LANES) best = lanes_max(lanes_float(row + i), best);
    const float peak = larger_of(lanes_largest(best), peak_and_sum[0]), level = level_of(peak);
    const float before = exp2_one(peak_and_sum[0] - level);
    for (int i = 0; i < TILE; i += LANES) {
        lanes_store(row + i, lanes_plus(lanes_float(row + i), -level));
        exp2_below(row + i);
        sum = lanes_mad(lanes_fill(1.0f), lanes_float(row + i), sum);
    }
    peak_and_sum[0] = peak;
    peak_and_sum[1] = peak_and_sum[1] * before + lanes_sum(sum);
    return before;
}

/* Which positions from `at` on a row may look at; NULL: all. */
INLINE const uint8_t *seen_by(const attention *a, const stretch *s, int64_t item, int64_t row, int64_t at) {
    if (!a->visible) return NULL;
    const int64_t b = shared(a, s) ? row / group_rows(a) : item / a->K;
    return a->visible + b * a->visible_steps[0] + row % a->T * a->visible_steps[1] + s->first_position + at;
}

/* `count` positions of one head of one batch row, from position `at` of the stretch on. */
typedef struct {
    int64_t item, at, count;
    const uint8_t *keys, *values;
    const float *key_scales, *value_scales;
} tile;

static tile tile_at(const attention *a, const stretch *s, int64_t item, int64_t at, int64_t end) {
    const int64_t b = item / a->K, head = item % a->K;
#define AT(from, steps) (s->from + b * s->steps[0] + head * s->steps[1] + at * s->steps[2])
#define SCALES_AT(from, steps) (s->from ? s->from + b * s->steps[0] + head * s->steps[1] + at : NULL)
    return (tile){
        .item = item, .at = at, .count = at + TILE < end ? TILE : end - at,
        .keys = AT(keys, key_steps), .key_scales = SCALES_AT(key_scales, key_scale_steps),
        .values = AT(values, value_steps), .value_scales = SCALES_AT(value_scales, value_scale_steps)};
}

/* Scores of a tile, TILE with those behind its end -> weights of its values. Returns what the sums of before are
 * worth now. */
static float weigh(const tile *t, const uint8_t *seen, float *row, float *peak_and_sum) {
    if (t->key_scales) times(row, t->key_scales, t->count);
    for (int64_t i = 0; i < t->count && seen; i++) row[i] = seen[i] ? row[i] : -INFINITY;
    for (int64_t i = t->count; i < TILE; i++) row[i] = -INFINITY;
    const float before = soften(row, peak_and_sum);
    if (t->value_scales) times(row, t->value_scales, t->count);
    return before;
}

/* Rows `row` .. row + valid of an item over a tile; R with those that only fill the block. */
INLINE void tile_rows(
    const int kind, const int R, const attention *a, const stretch *s, const tile *t, int64_t row, int valid,
    const float *q, float *found) {
    float weights[BLOCK_ROWS][TILE], before[BLOCK_ROWS] = {0};
    const uint8_t *seen[BLOCK_ROWS] = {NULL};
    int any = !a->visible;
    for (int r = 0; r < valid && a->visible; r++) {
        seen[r] = seen_by(a, s, t->item, row + r, t->at);
        any = any || memchr(seen[r], 1, (size_t)t->count);
    }
    if (!any) return;
    const int64_t d = a->d, found_step = found_floats(a);
    score(kind, R, q, d, t->keys, s->key_steps[2], t->count, t->values, weights);
    for (int r = 0; r < valid; r++)
        before[r] = weigh(t, seen[r], weights[r], found + r * found_step + d);
    for (int r = valid; r < R; r++) memset(weights[r], 0, sizeof weights[r]);
    const int W = R > 4 ? 2 : SUMS_AT_ONCE / R < 4 ? SUMS_AT_ONCE / R : 4; /* registers at once */
    for (int64_t x = 0; x < d;) {
        const uint8_t *values = t->values + x * KIND_BYTES[kind];
        const uint8_t *next = t->keys + TILE * s->key_steps[2] + x * KIND_BYTES[kind];
#define VALUES(W)                                                                                       \
    add_values(kind, R, W, weights, before, values, s->value_steps[2], t->count, next, found + x, found_step), \
        x += W * LANES
        if (x + W * LANES <= d) VALUES(W);
        else VALUES(1);
    }
}

INLINE void piece(const int kind, const attention *a, const stretch *s, int64_t number) {
    const int64_t item = number / chunks(s), start = number % chunks(s) * s->chunk, ahead = s->length - start;
    const int64_t end = start + (s->chunk < ahead ? s->chunk : ahead);
    const int64_t rows = item_rows(a, s), group = group_rows(a), found_step = found_floats(a);
    const int64_t first = item % a->K * a->B * group + item / a->K * group; /* queries lie by head, then batch row */
    float *found = a->found + (s->first_found + number * found_rows(a, s)) * found_step;
    for (int64_t r = 0; r < rows; r++) {
        memset(found + r * found_step, 0, (size_t)found_step * sizeof(float));
        found[r * found_step + a->d] = -INFINITY;
    }
    for (int64_t at = start; at < end; at += TILE) {
        const tile t = tile_at(a, s, item, at, end);
        for (int64_t r = 0; r < rows;) {
            const int left = rows - r < BLOCK_ROWS ? (int)(rows - r) : BLOCK_ROWS;
            const float *q = a->queries + (first + r) * a->d;
#define ROWS(R) tile_rows(kind, R, a, s, &t, r, left < R ? left : R, q, found + r * found_step), r += R
            if (left == BLOCK_ROWS - 1) ROWS(BLOCK_ROWS - 1); /* seven: Qwen2.5 has groups of that */
            else if (left > BLOCK_ROWS / 2) ROWS(BLOCK_ROWS);
            else if (left > 2) ROWS(4);
            else if (left == 2) ROWS(2);
            else ROWS(1);
        }
    }
}

static void work_attention(const void *jobs, int64_t from, int64_t to) {
    for (int64_t number = from; number < to; number++) {
        const attention *a = jobs;
        while (number >= a->first_piece + a->pieces) a++;
        const stretch *s = a->past;
        while (number >= a->first_piece + s->first_piece + items(a, s) * chunks(s)) s++;
        const int64_t here = number - a->first_piece - s->first_piece;
        if (a->kind == BFLOAT16) piece(BFLOAT16, a, s, here);
        else if (a->kind == FLOAT16) piece(FLOAT16, a, s, here);
        else if (a->kind == FLOAT8) piece(FLOAT8, a, s, here);
        else if (a->kind == INT8) piece(INT8, a, s, here);
        else piece(FLOAT32, a, s, here);
    }
}

/* What row `row` of key/value head `head` (over all batch rows) found in a piece of a stretch. */
INLINE const float *found_in(const attention *a, const stretch *s, int64_t head, int64_t row, int64_t chunk) {
    const int64_t group = group_rows(a), item = shared(a, s) ? head : row / group * a->K + head;
    const int64_t before = (item * chunks(s) + chunk) * found_rows(a, s) + (shared(a, s) ? row : row % group);
    return a->found + (s->first_found + before) * found_floats(a);
}

/* Adds what some pieces found, at most LANES, to `out`; returns the sum of their weights under a common level. */
INLINE float add_parts(const float *const *parts, int count, int64_t d, float level, float *out) {
    float weights[LANES], total = 0;
    for (int i = 0; i < LANES; i++) weights[i] = i < count ? parts[i][d] - level : -INFINITY;
    exp2_below(weights);
    for (int i = 0; i < count; i++) total += weights[i] * parts[i][d + 1];
    for (int64_t x = 0; x < d; x += LANES) {
        lanes sum = lanes_float(out + x);
        for (int i = 0; i < count; i++) sum = lanes_mad(lanes_fill(weights[i]), lanes_float(parts[i] + x), sum);
        lanes_store(out + x, sum);
    }
    return total;
}

/* The softmax over all pieces, from the softmax within each. A row that saw nothing gets zeros, as from torch. */
static void join(const attention *a, int64_t head, int64_t row) {
    const int64_t d = a->d, group = group_rows(a);
    const stretch *end = a->past + a->stretches;
    float *out = a->out + ((row / group * a->K + head) * group + row % group) * d, peak = -INFINITY, total = 0;
    for (const stretch *s = a->past; s < end; s++)
        for (int64_t c = 0; c < chunks(s); c++) peak = larger_of(found_in(a, s, head, row, c)[d], peak);
    memset(out, 0, (size_t)d * sizeof(float));
    for (const stretch *s = a->past; s < end; s++)
        for (int64_t c = 0; c < chunks(s); c += LANES) {
            const float *parts[LANES];
            const int count = chunks(s) - c < LANES ? (int)(chunks(s) - c) : LANES;
            for (int i = 0; i < count; i++) parts[i] = found_in(a, s, head, row, c + i);
            total += add_parts(parts, count, d, level_of(peak), out);
        }
    for (int64_t x = 0; x < d && total != 0; x++) out[x] /= total;
}

/* Cuts every stretch into chunks: the number of pieces, and of the rows of what they find. */
static void plan(attention *a) {
    int64_t position = 0, pieces = 0, rows = 0;
    for (stretch *s = a->past; s < a->past + a->stretches; s++) {
        const int64_t least = PIECE_BYTES / (2 * KIND_BYTES[a->kind] * a->d);
        const int64_t even = s->length * items(a, s) / MOST_PIECES;
        s->chunk = ((least > even ? least : even) + TILE - 1) / TILE * TILE;
        s->first_position = position, s->first_piece = pieces, s->first_found = rows;
        position += s->length;
        pieces += items(a, s) * chunks(s);
        rows += items(a, s) * chunks(s) * found_rows(a, s);
    }
    a->pieces = pieces, a->found_rows = rows;
}

/* q [B, H, T, d] with the scores' scale, key/value head by key/value head. */
static void order_queries(const attention *a) {
    const int64_t count = group_rows(a) * a->d;
    for (int64_t head = 0; head < a->K; head++)
        for (int64_t b = 0; b < a->B; b++) {
            float *to = a->queries + (head * a->B + b) * count;
            const float *from = a->q + (b * a->K + head) * count;
            for (int64_t i = 0; i < count; i++) to[i] = from[i] * a->scale;
        }
    memset(a->queries + a->K * a->B * count, 0, (size_t)(BLOCK_ROWS * a->d) * sizeof(float)); /* of the last block */
}

/* Room of `floats` that this thread keeps; NULL: no memory. */
static float *attention_room(int64_t floats) {
    static _Thread_local float *room;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(room);
        room = malloc((size_t)floats * sizeof(float));
        size = room ? floats : 0;
    }
    return room;
}

INLINE int64_t query_floats(const attention *a) { return (a->B * a->H * a->T + BLOCK_ROWS) * a->d; }

/* Fills `out` of some attentions, whose pieces are shared out together. All sizes are at least 1, d is a multiple of
 * LANES. Returns 0, or 1 when there was no memory. */
int decodescope_attention(attention *jobs, int count, int threads) {
    int64_t pieces = 0, floats = 0;
    for (attention *a = jobs; a < jobs + count; a++) {
        plan(a);
        a->first_piece = pieces;
        pieces += a->pieces;
        floats += query_floats(a) + a->found_rows * found_floats(a);
    }
    float *room = attention_room(floats);
    if (!room) return 1;
    for (attention *a = jobs; a < jobs + count; a++) {
        a->queries = room;
        a->found = room + query_floats(a);
        room = a->found + a->found_rows * found_floats(a);
        order_queries(a);
    }
    share(work_attention, jobs, pieces, 1, threads);
    for (attention *a = jobs; a < jobs + count; a++)
        for (int64_t head = 0; head < a->K; head++)
            for (int64_t row = 0; row < a->B * group_rows(a); row++) join(a, head, row);
    return 0;
}
