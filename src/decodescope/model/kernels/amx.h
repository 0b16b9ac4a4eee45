/* Packed products with AMX: sixteen rows of weights meet sixteen rows of activations at a time.
 *
 * The activations of a call are laid out as tiles once, a digit each (fixed_point.h); weights are unpacked to signed
 * bytes in this thread's cache. A tile product sums one group exactly in int32, and only then comes one multiplication
 * with scale * step. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>
#include "fixed_point.h"
#include "quants.h"
#include "team.h"

#define SIDE 16 /* rows of a tile */

/* So many rows of activations go together that their digits, a column each, fill one tile, two or three. */
#define ROWS_TOGETHER(M) (M <= 5 ? 5 : M <= 8 ? 8 : SIDE)
#define TILES_OF(rows) ((3 * rows + SIDE - 1) / SIDE)

/* A group of 32 activations of as many rows as a tile product wants them: four values of every column side by side.
 * First come the highest digits of all rows, then the middle ones, then the lowest. */
typedef struct {
    int8_t tile[3][8][SIDE][4];
    float step[SIDE], sum[SIDE]; /* of each column: worth of 1, sum of the activations (there are no middle ones) */
} __attribute__((aligned(64))) column_group;

/* Rows of weights as whole numbers, SIDE by SIDE: quants row by row, scales and offsets group by group. */
typedef struct {
    char *memory;
    int64_t stride, scales, bytes; /* of SIDE rows: bytes from row to row, scales, bytes in all */
} tile_weights;

/* What SIDE rows of K weights take. Between rows is a gap: a power of two would send all to one place in the cache. */
INLINE tile_weights tile_sizes(int64_t K) {
    const int64_t chunks = (K + CHUNK - 1) / CHUNK, stride = chunks * CHUNK + 64, scales = chunks * 8 * SIDE;
    return (tile_weights){NULL, stride, scales, SIDE * stride + 2 * scales * (int64_t)sizeof(float)};
}

/* The SIDE rows among which row n is. */
INLINE tile_weights square_at(tile_weights w, int64_t n) {
    w.memory += n / SIDE * w.bytes;
    return w;
}
INLINE int8_t *quants_of(tile_weights w) { return (int8_t *)w.memory; }
INLINE float *scales_of(tile_weights w) { return (float *)(w.memory + SIDE * w.stride); }
INLINE float *offsets_of(tile_weights w) { return scales_of(w) + w.scales; }

/* Whether the system lets this process use tiles (https://docs.kernel.org/arch/x86/xstate.html). */
static int tiles_allowed(void) {
    static _Atomic int known; /* 0: not asked yet; 1: no; 2: yes */
    if (!atomic_load(&known)) atomic_store(&known, 1 + !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18));
    return atomic_load(&known) == 2;
}

/* ---- activations ---- */

/* Sixteen digits into a column, from row `four` of its tile on. */
INLINE void put_column(__m512i values, int column, int four, column_group *out) {
    int32_t fours[4];
    _mm_storeu_si128((__m128i *)fours, _mm512_cvtepi32_epi8(values));
    for (int i = 0; i < 4; i++) memcpy(out->tile[column / SIDE][four + i][column % SIDE], fours + i, 4);
}

/* One group of row `m` of `rows`. */
INLINE void lay_group(const float *x, int m, int rows, column_group *out) {
    const fixed_group fixed = fix_group(x);
    for (int half = 0; half < 2; half++) {
        const digits d = split_digits(half ? fixed.second : fixed.first);
        put_column(d.high, m, 4 * half, out);
        put_column(d.middle, m + rows, 4 * half, out);
        put_column(d.low, m + 2 * rows, 4 * half, out);
    }
    for (int column = m; column < SIDE; column += rows) out->step[column] = fixed.step;
    out->sum[m] = fixed.sum;
}

typedef struct {
    const float *x;
    int64_t K, M;
    column_group *out;
} laying;

/* Blocks of rows from..to; rows that are missing in the last one are zero. */
static void work_lay(const void *job, int64_t from, int64_t to) {
    const laying *p = job;
    const int64_t groups = p->K / 32, together = ROWS_TOGETHER(p->M);
    for (int64_t block = from; block < to; block++) {
        column_group *out = p->out + block * groups;
        const int64_t first = block * together, rows = p->M - first < together ? p->M - first : together;
        if (rows < SIDE) memset(out, 0, (size_t)groups * sizeof *out);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t g = 0; g < groups; g++)
                lay_group(p->x + (first + m) * p->K + 32 * g, (int)m, (int)together, out + g);
    }
}

/* ---- weights ---- */

#define GROUP(format) (format == Q6_K ? 16 : 32) /* values with one scale */
#define HAS_OFFSETS(format) (format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K)

INLINE void store_halves(int8_t *at, __m512i two, int apart) {
    _mm256_storeu_si256((__m256i *)at, _mm512_castsi512_si256(two));
    _mm256_storeu_si256((__m256i *)(at + 32 * apart), _mm512_extracti64x4_epi64(two, 1));
}

INLINE void store_apart(float *at, __m256 values, int count) {
    float each[8];
    _mm256_storeu_ps(each, values);
    for (int i = 0; i < count; i++) at[i * SIDE] = each[i];
}

/* Two blocks' nibbles in order; of Q5_0 and Q5_1 with their fifth bits, which lie in order at `fifth`. */
INLINE void take_nibbles(const int format, nibbles q, __m512i order, const uint8_t *fifth, int8_t *quants) {
    __m512i values = _mm512_permutex2var_epi64(q.low, order, q.high);
    const __m512i sixteen = _mm512_set1_epi8(16);
    if (format == Q4_0) values = _mm512_sub_epi8(values, _mm512_set1_epi8(8));
    if (format == Q5_1) values = _mm512_mask_add_epi8(values, two_words(fifth, BLOCK_BYTES[format]), values, sixteen);
    if (format == Q5_0) /* 16 more, and 16 less for the zero point */
        values = _mm512_mask_sub_epi8(values, ~two_words(fifth, BLOCK_BYTES[format]), values, sixteen);
    _mm512_storeu_si512(quants, values);
}

/* Four blocks of 32. */
INLINE void take_blocks(const int format, const uint8_t *b, int8_t *quants, float *scale, float *offset) {
    const int64_t bytes = BLOCK_BYTES[format];
    store_apart(scale, _mm256_castps128_ps256(four_halves(b, bytes)), 4);
    if (format == Q8_0) {
        for (int i = 0; i < 4; i++) memcpy(quants + 32 * i, b + i * bytes + 2, 32);
        return;
    }
    if (HAS_OFFSETS(format)) store_apart(offset, _mm256_castps128_ps256(four_halves(b + 2, bytes)), 4);
    const nibbles q = split_nibbles(four_runs(b + bytes - 16, bytes));
    const uint8_t *fifth = b + bytes - 20;
    take_nibbles(format, q, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), fifth, quants);
    take_nibbles(format, q, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), fifth + 2 * bytes, quants + 64);
}

/* A super-block of Q4_K or Q5_K. */
INLINE void take_groups(const int format, const uint8_t *b, int8_t *quants, float *scale, float *offset) {
    uint64_t scales, minima;
    six_bit_scales(b + 4, &scales, &minima);
    store_apart(scale, _mm256_mul_ps(byte_floats(scales), _mm256_set1_ps(half_float(load16(b)))), 8);
    store_apart(offset, _mm256_mul_ps(byte_floats(minima), _mm256_set1_ps(-half_float(load16(b + 2)))), 8);
    for (int half = 0; half < 2; half++, quants += 128) {
        const nibbles q = quants_of_groups(format, b, half);
        store_halves(quants, q.low, 2);
        store_halves(quants + 32, q.high, 2);
    }
}

/* A super-block of Q6_K. */
INLINE void take_six_bits(const uint8_t *b, int8_t *quants, float *scale) {
    const float d = half_float(load16(b + 208));
    for (int i = 0; i < 16; i++) scale[i * SIDE] = (float)(int8_t)b[192 + i] * d;
    for (int half = 0; half < 2; half++, quants += 128) {
        const nibbles q = quants_of_six_bits(b, half);
        _mm512_storeu_si512(quants, _mm512_sub_epi8(q.low, _mm512_set1_epi8(32)));
        _mm512_storeu_si512(quants + 64, _mm512_sub_epi8(q.high, _mm512_set1_epi8(32)));
    }
}

/* The blocks of one or two chunks. */
INLINE void take_chunks(const int format, const uint8_t *b, int8_t *quants, float *scale, float *offset) {
    if (format == Q6_K) take_six_bits(b, quants, scale);
    else if (format == Q4_K || format == Q5_K) take_groups(format, b, quants, scale, offset);
    else take_blocks(format, b, quants, scale, offset);
}

/* Row `n` of SIDE from its blocks. What does not fill a chunk is filled up with zeros. */
INLINE void take_row(const int format, const uint8_t *row, int64_t K, int n, tile_weights w) {
    const int64_t values = BLOCK_VALUES[format], step = values < CHUNK ? CHUNK : values;
    const int64_t bytes = step / values * BLOCK_BYTES[format], scales = step / GROUP(format) * SIDE;
    int8_t *quants = quants_of(w) + n * w.stride;
    float *scale = scales_of(w) + n, *offset = offsets_of(w) + n;
    for (; K >= step; K -= step, row += bytes, quants += step, scale += scales, offset += scales) {
        for (int64_t line = 0; line < bytes; line += 64) prefetch(row + line);
        take_chunks(format, row, quants, scale, offset);
    }
    if (values > CHUNK || K == 0) return;
    uint8_t rest[4 * 34] = {0};
    memcpy(rest, row, (size_t)(K / values * BLOCK_BYTES[format]));
    take_chunks(format, rest, quants, scale, offset);
}

/* ---- products ---- */

/* Tiles 0 to 2 and 3 to 5: sums; 6: weights; 7: activations. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_shapes;

static void shape_tiles(int group) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = SIDE;
    shapes.bytes[6] = (uint16_t)group;
    shapes.rows[7] = (uint8_t)(group / 4);
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

typedef int32_t tile_sums[3][SIDE][SIDE] __attribute__((aligned(64))); /* tile, row of weights, column */

#define ONE_TILE(INTO, which)                 \
    _tile_loadd(7, x->tile[which][four], 64); \
    _tile_zero(INTO);                         \
    _tile_dpbssd(INTO, 6, 7)
#define ALL_TILES(FIRST, SECOND, THIRD)              \
    ONE_TILE(FIRST, 0);                              \
    if (tiles > 1) { ONE_TILE(SECOND, 1); }          \
    if (tiles > 2) { ONE_TILE(THIRD, 2); }           \
    _tile_stored(FIRST, out[0], 64);                 \
    if (tiles > 1) _tile_stored(SECOND, out[1], 64); \
    if (tiles > 2) _tile_stored(THIRD, out[2], 64)

/* One group of SIDE rows of weights times one of all columns, from row `four` of their tiles on. Neighbouring groups
 * take other tiles: one is multiplied while the sums of the other are stored. */
INLINE void multiply_group(
    const int odd, const int tiles, const int8_t *quants, int64_t stride, const column_group *x, int four,
    tile_sums out) {
    _tile_loadd(6, quants, stride);
    if (odd) {
        ALL_TILES(3, 4, 5);
    } else {
        ALL_TILES(0, 1, 2);
    }
}

/* What the digits of each column are worth to each other. */
INLINE __m512 worth(const int rows) {
    const __mmask16 middle = (__mmask16)(((1u << rows) - 1) << rows), low = (__mmask16)(middle << rows);
    __m512 out = _mm512_mask_mov_ps(_mm512_set1_ps(65536), middle, _mm512_set1_ps(256));
    return rows < 8 ? _mm512_mask_mov_ps(out, low, _mm512_set1_ps(1)) : out;
}

INLINE void add_group(
    const int offsets, const int rows, tile_sums sum, const float *scale, const float *offset, const column_group *x,
    __m512 *out) {
    const int tiles = TILES_OF(rows);
    const __m512 above = worth(rows), total = _mm512_load_ps(x->sum);
    const __m512 step = tiles == 1 ? _mm512_mul_ps(_mm512_load_ps(x->step), above) : _mm512_load_ps(x->step);
#pragma GCC unroll 16
    for (int n = 0; n < SIDE; n++) {
        __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(sum[0][n]));
        if (tiles > 1) {
            __m512i low = _mm512_load_si512(sum[tiles - 1][n]);
            if (tiles > 2) low = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sum[1][n]), 8), low);
            value = _mm512_fmadd_ps(value, above, _mm512_cvtepi32_ps(low));
        }
        out[n] = _mm512_fmadd_ps(value, _mm512_mul_ps(step, _mm512_set1_ps(scale[n])), out[n]);
        if (offsets) out[n] = _mm512_fmadd_ps(total, _mm512_set1_ps(offset[n]), out[n]);
    }
}

/* SIDE rows of weights times `rows` rows of activations: out[row of weights][column]. */
INLINE void multiply_tiles(
    const int group, const int offsets, const int rows, const tile_weights w, const column_group *x, int64_t K,
    float (*out)[SIDE]) {
    const int64_t groups = K / group;
    tile_sums sums[2];
    __m512 total[SIDE];
#pragma GCC unroll 16
    for (int n = 0; n < SIDE; n++) total[n] = _mm512_setzero_ps();
    __asm__ volatile("" ::: "memory"); /* the compiler does not know that tiles read memory */
#define COLUMNS(g) (x + (g) * group / 32)
#define MULTIPLY(odd, g)                                                                             \
    multiply_group(                                                                                  \
        odd, TILES_OF(rows), quants_of(w) + (g) * group, w.stride, COLUMNS(g), (int)((g) * group % 32 / 4), sums[odd])
#define ADD(odd, g) \
    add_group(offsets, rows, sums[odd], scales_of(w) + (g) * SIDE, offsets_of(w) + (g) * SIDE, COLUMNS(g), total)
    MULTIPLY(0, 0);
    for (int64_t g = 0; g < groups; g += 2) {
        if (g + 1 < groups) MULTIPLY(1, g + 1);
        ADD(0, g);
        if (g + 2 < groups) MULTIPLY(0, g + 2);
        if (g + 1 < groups) ADD(1, g + 1);
    }
#pragma GCC unroll 16
    for (int n = 0; n < SIDE; n++) _mm512_store_ps(out[n], total[n]);
}
