/* Rows of numbers -> blocks: Q8_0, Q4_0 and Q4_K as ggml lays them out, and NF4 (all read by blocks.h).
 *
 * Sixteen floats at a time in the compiler's own vector notation: every operation is rounded by itself and every sum
 * has one order, so that the bits are those of packing.py on any processor. The 4-bit whole-number formats try 16
 * spacings of their levels at once, a lane each; scale (and minimum) are the least squares fit to what each rounds to. */
#pragma once
#include "blocks.h"
#include "numbers.h"

typedef float floats __attribute__((vector_size(64)));
typedef int32_t wholes __attribute__((vector_size(64)));
typedef struct { floats low, high; } group; /* 32 values */

#define TINY 0x1p-100f /* a block with nothing larger is zero: float16 scales cannot hold less than 2^-25 */
#define HALF_LARGEST 65504.0f

INLINE group group_of(const float *at) {
    group out;
    memcpy(&out, at, sizeof out);
    return out;
}
INLINE floats choose(wholes mask, floats yes, floats no) {
    return (floats)((mask & (wholes)yes) | (~mask & (wholes)no));
}
INLINE floats each_least(floats a, floats b) { return choose(a < b, a, b); }
INLINE floats each_most(floats a, floats b) { return choose(a > b, a, b); }
INLINE floats magnitude(floats a) { return (floats)((wholes)a & 0x7fffffff); }

/* Of a vector: each value with the one half the length away, and so on. */
#define HALVE(JOIN)                            \
    float at[LANES];                           \
    memcpy(at, &a, sizeof at);                 \
    for (int half = LANES / 2; half; half /= 2) \
        for (int i = 0; i < half; i++) at[i] = JOIN; \
    return at[0];
INLINE float sum_of(floats a) { HALVE(at[i] + at[i + half]) }
INLINE float least_of(floats a) { HALVE(at[i] < at[i + half] ? at[i] : at[i + half]) }
INLINE float most_of(floats a) { HALVE(at[i] > at[i + half] ? at[i] : at[i + half]) }
INLINE float product_sum(group a, group b) { return sum_of(a.low * b.low + a.high * b.high); }

INLINE float inverse(float a) { return a > TINY || a < -TINY ? 1 / a : 0; }

/* To the nearest whole number within least..most, ties to even. */
INLINE floats levels_of(floats at, float least, float most) {
    at = each_least(each_most(at, (floats){0} + least), (floats){0} + most);
    return (at + 0x1.8p23f) - 0x1.8p23f;
}
INLINE group group_levels(group x, float offset, float spacing, float least, float most) {
    return (group){levels_of((x.low - offset) * spacing, least, most), levels_of((x.high - offset) * spacing, least, most)};
}

/* Sixteen whole numbers as bytes. */
INLINE bytes bytes_of(floats whole) {
    typedef int8_t signed_bytes __attribute__((vector_size(16)));
    return (bytes)__builtin_convertvector(__builtin_convertvector(whole, wholes), signed_bytes);
}
INLINE void store_bytes(uint8_t *at, bytes a) { memcpy(at, &a, sizeof a); }
INLINE void store16(uint8_t *at, uint16_t value) { memcpy(at, &value, 2); }

/* ---- Q8_0 ---- */

/* To nearest, ties away from zero, as the gguf package does. */
INLINE bytes eight_bits(floats x, float spacing) {
    floats at = x * spacing;
    wholes twice = __builtin_convertvector(magnitude(at) * 2, wholes), sign = (wholes)at >> 31;
    wholes nearest = (twice + 1) >> 1;
    return bytes_of(__builtin_convertvector((nearest ^ sign) - sign, floats));
}

INLINE void pack_bytes(const float *x, uint8_t *b) {
    group g = group_of(x);
    float scale = most_of(each_most(magnitude(g.low), magnitude(g.high))) / 127;
    store16(b, to_half(scale));
    store_bytes(b + 2, eight_bits(g.low, inverse(scale)));
    store_bytes(b + 18, eight_bits(g.high, inverse(scale)));
}

/* ---- Q4_0: scale * (-8 .. 7) ---- */

/* 16 spacings of the levels, a lane each: sums over a group of the levels, their squares, and values times levels. */
typedef struct { floats q, qq, xq; } trial;

INLINE trial try_spacings(const float *x, float offset, floats spacing, float least, float most) {
    trial sums = {{0}, {0}, {0}};
    for (int i = 0; i < 32; i++) {
        floats q = levels_of((x[i] - offset) * spacing, least, most);
        sums.q += q, sums.qq += q * q, sums.xq += q * x[i];
    }
    return sums;
}

INLINE floats quarters_from(float first) {
    floats out;
    for (int i = 0; i < LANES; i++) out[i] = first + 0.25f * (float)i;
    return out;
}

/* The scale that lessens the sum of squared errors most: a least squares fit rounded to float16. */
INLINE float best_scale(const float *x, float inverse_outermost) {
    trial sums = try_spacings(x, 0, quarters_from(-10) * inverse_outermost, -8, 7);
    floats fitted = sums.xq / sums.qq;
    float scale = 0, best = 0;
    for (int i = 0; i < LANES; i++) fitted[i] = half_float(to_half(fitted[i]));
    floats gain = fitted * (2 * sums.xq - fitted * sums.qq);
    for (int i = 0; i < LANES; i++)
        if (gain[i] > best) best = gain[i], scale = fitted[i];
    return scale;
}

INLINE void pack_nibbles(const float *x, uint8_t *b) {
    float outermost = x[0];
    for (int i = 1; i < 32; i++)
        if (fabsf(x[i]) > fabsf(outermost)) outermost = x[i];
    float scale = best_scale(x, inverse(outermost));
    group q = group_levels(group_of(x), 0, inverse(scale), -8, 7);
    store16(b, to_half(scale));
    store_bytes(b + 2, bytes_of(q.low + 8) | bytes_of(q.high + 8) << 4);
}

/* ---- Q4_K: in each of eight groups scale * (0 .. 15) - minimum ---- */

typedef struct { float scale[8], minimum[8]; } fits;

/* Scale and minimum of a group from its extremes, and those with the least error: least squares lines through 16
 * spacings of the levels, whose minimum is not negative. */
INLINE void fit_group(const float *x, int number, fits *plain, fits *best) {
    group g = group_of(x);
    float low = least_of(each_least(g.low, g.high)), high = most_of(each_most(g.low, g.high)), x_sum = 0;
    low = low < 0 ? low : 0;
    plain->scale[number] = best->scale[number] = (high - low) / 15;
    plain->minimum[number] = best->minimum[number] = -low;
    float spacing = inverse(high - low), least = INFINITY;
    if (spacing == 0) return;
    for (int i = 0; i < 32; i++) x_sum += x[i];
    trial t = try_spacings(x, low, quarters_from(14) * spacing, 0, 15);
    floats spread = 32 * t.qq - t.q * t.q, down = t.q * t.xq - t.qq * x_sum;
    wholes lowered = (spread > 0) & (down > 0);
    floats scale = choose(lowered, (32 * t.xq - x_sum * t.q) / spread, t.xq / t.qq);
    floats minimum = choose(lowered, down / spread, (floats){0});
    floats error = scale * (scale * t.qq - 2 * t.xq - 2 * minimum * t.q) + minimum * (32 * minimum + 2 * x_sum);
    for (int i = 0; i < LANES; i++)
        if (error[i] < least)
            least = error[i], best->scale[number] = scale[i], best->minimum[number] = minimum[i];
}

/* Eight numbers in six bits each, in units of a float16 that is returned. */
INLINE uint16_t six_bits(const float *values, float *units) {
    float most = 0;
    for (int i = 0; i < 8; i++) most = values[i] > most ? values[i] : most;
    uint16_t unit = to_half(most / 63);
    float spacing = inverse(half_float(unit));
    for (int i = 0; i < 8; i++) {
        float at = values[i] * spacing;
        units[i] = ((at < 63 ? at : 63) + 0x1.8p23f) - 0x1.8p23f;
    }
    return unit;
}

/* Writes the block for these fits; returns the sum of its squared errors. */
INLINE float pack_fits(const float *x, const fits *line, uint8_t *b) {
    float scales[8], minima[8], error = 0;
    const uint16_t d = six_bits(line->scale, scales), least = six_bits(line->minimum, minima);
    memset(b, 0, (size_t)BLOCK_BYTES[Q4_K]);
    store16(b, d);
    store16(b + 2, least);
    for (int i = 0; i < 8; i++) {
        float scale = half_float(d) * scales[i], minimum = half_float(least) * minima[i];
        group g = group_of(x + 32 * i), q = group_levels(g, -minimum, inverse(scale), 0, 15), off;
        off.low = q.low * scale - minimum - g.low, off.high = q.high * scale - minimum - g.high;
        error += product_sum(off, off);
        for (int half = 0; half < 2; half++) {
            uint8_t *at = b + 16 + i / 2 * 32 + half * 16;
            store_bytes(at, bytes_load(at) | bytes_of(half ? q.high : q.low) << i % 2 * 4);
        }
        const uint8_t s = (uint8_t)scales[i], m = (uint8_t)minima[i];
        uint8_t *packed = b + 4 + i % 4;
        if (i < 4) packed[0] = s, packed[4] = m;
        else packed[8] = (s & 15) | m << 4, packed[0] |= s >> 4 << 6, packed[4] |= m >> 4 << 6;
    }
    return error;
}

static void pack_super(const float *x, uint8_t *b) {
    fits plain, best;
    uint8_t other[144];
    for (int i = 0; i < 8; i++) fit_group(x + 32 * i, i, &plain, &best);
    if (pack_fits(x, &plain, other) < pack_fits(x, &best, b)) memcpy(b, other, sizeof other);
}

/* ---- NF4 ---- */

/* The nearest level: how many of the midpoints between neighbours a value lies above. */
INLINE bytes nearest_levels(floats x, float spacing) {
    floats at = each_least(each_most(x * spacing, (floats){0} - 1), (floats){0} + 1);
    wholes above = {0};
    for (int i = 0; i < 15; i++) above -= at > (NF4_LEVELS[i] + NF4_LEVELS[i + 1]) / 2;
    return bytes_of(__builtin_convertvector(above, floats));
}

INLINE void pack_normal(const float *x, uint8_t *b) {
    group first = group_of(x), second = group_of(x + 32);
    floats most = each_most(magnitude(first.low), magnitude(first.high));
    float scale = most_of(each_most(most, each_most(magnitude(second.low), magnitude(second.high))));
    float spacing = inverse(scale);
    store16(b, to_half(scale));
    store_bytes(b + 2, nearest_levels(first.low, spacing) | nearest_levels(second.low, spacing) << 4);
    store_bytes(b + 18, nearest_levels(first.high, spacing) | nearest_levels(second.high, spacing) << 4);
}

/* ---- all rows ---- */

typedef struct {
    int format, kind;
    const uint8_t *w;
    uint8_t *out;
    int64_t K;
    _Atomic int *too_large;
} packing;

/* The values of one block as floats; returns whether one is not finite or too large for a float16. */
INLINE int load_block(const int format, int kind, const uint8_t *row, int64_t at, float *out) {
    wholes bad = {0};
    for (int i = 0; i < BLOCK_VALUES[format]; i += LANES) {
        lanes_store(out + i, load_lanes(kind, row, at + i));
        floats x;
        memcpy(&x, out + i, sizeof x);
        bad |= ~(magnitude(x) <= HALF_LARGEST);
    }
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= bad[i];
    return any;
}

INLINE void pack_row(const int format, const packing *p, const uint8_t *row, uint8_t *out) {
    for (int64_t at = 0; at < p->K; at += BLOCK_VALUES[format], out += BLOCK_BYTES[format]) {
        float x[256];
        if (load_block(format, p->kind, row, at, x)) {
            atomic_store(p->too_large, 1);
            return;
        }
        if (format == Q8_0) pack_bytes(x, out);
        else if (format == Q4_0) pack_nibbles(x, out);
        else if (format == Q4_K) pack_super(x, out);
        else pack_normal(x, out);
    }
}

static void work_pack(const void *job, int64_t from, int64_t to) {
    const packing *p = job;
    const int64_t in_bytes = p->K * KIND_BYTES[p->kind], out_bytes = row_bytes_of(p->format, p->K);
#define PACK(FORMAT) \
    for (int64_t n = from; n < to; n++) pack_row(FORMAT, p, p->w + n * in_bytes, p->out + n * out_bytes)
    switch (p->format) {
        case Q8_0: PACK(Q8_0); break;
        case Q4_0: PACK(Q4_0); break;
        case Q4_K: PACK(Q4_K); break;
        case NF4: PACK(NF4); break;
    }
}

/* N rows of K numbers -> rows of blocks; size = N, K. Returns 0, or 1 where a value is not finite or beyond 65504. */
int decodescope_pack(int format, int kind, const uint8_t *w, uint8_t *out, const int64_t size[2], int threads) {
    _Atomic int too_large = 0;
    const packing job = {.format = format, .kind = kind, .w = w, .out = out, .K = size[1], .too_large = &too_large};
    share(work_pack, &job, size[0], rows_at_once(row_bytes_of(format, size[1]), 1), threads);
    return too_large;
}
