/* Rows of plain numbers -> float: what dense weights and the KV cache are held in. */
#pragma once
#include "lanes.h"

enum kind { FLOAT32, BFLOAT16, FLOAT16, FLOAT8, INT8 };
static const int64_t KIND_BYTES[] = {4, 2, 2, 1, 1};

/* float8_e4m3fn (https://arxiv.org/abs/2209.05433) has three of the ten fraction bits of a float16 and an exponent
 * that is 8 smaller; it has no infinity, and all ones are NaN. */
INLINE lanes lanes_float8(bytes a) {
    typedef uint16_t halves __attribute__((vector_size(32)));
    halves wide = __builtin_convertvector(a, halves);
    halves half = (wide & 0x80) << 8 | (wide & 0x7f) << 7;
    half |= (halves)((wide & 0x7f) == 0x7f) & 0x7e00;
    return lanes_times(lanes_half((const uint16_t *)&half), 256.0f);
}

/* LANES numbers of a row, from number `at` on. */
INLINE lanes load_lanes(const int kind, const uint8_t *row, int64_t at) {
    if (kind == BFLOAT16) return lanes_bf16((const uint16_t *)row + at);
    if (kind == FLOAT16) return lanes_half((const uint16_t *)row + at);
    if (kind == FLOAT8) return lanes_float8(bytes_load(row + at));
    if (kind == INT8) return lanes_int8(bytes_load(row + at));
    return lanes_float((const float *)row + at);
}

/* One number of a row of floats of 16 or 32 bits. */
INLINE float load_one(const int kind, const uint8_t *row, int64_t at) {
    if (kind == BFLOAT16) return bf16_float(((const uint16_t *)row)[at]);
    if (kind == FLOAT16) return half_float(((const uint16_t *)row)[at]);
    return ((const float *)row)[at];
}
