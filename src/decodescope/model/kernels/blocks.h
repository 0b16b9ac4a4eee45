/* Blocks -> float, value by value as ggml defines them (ggml-common.h of https://github.com/ggml-org/ggml), and NF4.
 * Compiled without contraction, so that the bits are those of gguf_blocks.py. */
#pragma once
#include "lanes.h"

enum format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, NF4, FORMATS };

static const int64_t BLOCK_VALUES[FORMATS] = {32, 32, 32, 32, 32, 256, 256, 256, 64};
static const int64_t BLOCK_BYTES[FORMATS] = {18, 20, 22, 24, 34, 144, 176, 210, 34};

/* Quantiles of the normal distribution, zero among them: QLoRA (https://arxiv.org/abs/2305.14314), appendix E. */
static const float NF4_LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

/* quant * scale, and quant * scale + offset: rounded twice, as the definition does. */
INLINE void put(float *out, bytes quants, float scale) { lanes_store(out, lanes_times(lanes_int8(quants), scale)); }
INLINE void put_above(float *out, bytes quants, float scale, float offset) {
    lanes_store(out, lanes_plus(lanes_times(lanes_int8(quants), scale), offset));
}

/* The lowest 16 bits of `word`, each at bit 4 of its byte. */
INLINE bytes fifth_bit(uint32_t word) {
    const bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    bytes copies = bytes_pair((word & 255) * 0x0101010101010101u, (word >> 8 & 255) * 0x0101010101010101u);
    return (bytes)((copies & bit) == bit) & 16;
}

/* A block of 32 (Q4_0, Q4_1, Q5_0, Q5_1): scale, perhaps minimum, perhaps fifth bits, then nibbles. */
INLINE void unpack_nibbles(const int format, const uint8_t *b, float *out) {
    bytes nibbles = bytes_load(b + BLOCK_BYTES[format] - 16), low = nibbles & 15, high = nibbles >> 4;
    float d = half_float(load16(b));
    if (format == Q5_0 || format == Q5_1) {
        const uint8_t *fifth = b + BLOCK_BYTES[format] - 20;
        low |= fifth_bit(load16(fifth));
        high |= fifth_bit(load16(fifth + 2));
    }
    if (format == Q4_1 || format == Q5_1) {
        float least = half_float(load16(b + 2));
        put_above(out, low, d, least);
        put_above(out + 16, high, d, least);
    } else {
        const uint8_t zero = format == Q5_0 ? 16 : 8;
        put(out, low - zero, d);
        put(out + 16, high - zero, d);
    }
}

INLINE void unpack_bytes(const uint8_t *b, float *out) {
    float d = half_float(load16(b));
    put(out, bytes_load(b + 2), d);
    put(out + 16, bytes_load(b + 18), d);
}

/* Eight 6-bit scales and eight 6-bit minima from 12 bytes, a byte each (lowest byte first). */
INLINE void six_bit_scales(const uint8_t *packed, uint64_t *scales, uint64_t *minima) {
    uint32_t part[3];
    memcpy(part, packed, 12);
    uint32_t above = (part[2] & 0x0f0f0f0f) | ((part[0] >> 2) & 0x30303030);
    *scales = (part[0] & 0x3f3f3f3f) | (uint64_t)above << 32;
    above = ((part[2] >> 4) & 0x0f0f0f0f) | ((part[1] >> 2) & 0x30303030);
    *minima = (part[1] & 0x3f3f3f3f) | (uint64_t)above << 32;
}

/* Q4_K and Q5_K: eight groups of 32, each with its scale and minimum. */
INLINE void unpack_groups(const int format, const uint8_t *b, float *out) {
    float d = half_float(load16(b)), least = half_float(load16(b + 2));
    uint64_t scales, minima;
    six_bit_scales(b + 4, &scales, &minima);
#pragma GCC unroll 8
    for (int group = 0; group < 8; group++) {
        float scale = d * (float)(scales >> 8 * group & 63), minimum = least * (float)(minima >> 8 * group & 63);
        for (int half = 0; half < 2; half++) {
            bytes quants = bytes_load(b + BLOCK_BYTES[format] - 128 + group / 2 * 32 + half * 16);
            quants = (quants >> group % 2 * 4) & 15;
            if (format == Q5_K) quants |= (bytes_load(b + 16 + half * 16) >> group & 1) << 4;
            put_above(out + group * 32 + half * 16, quants, scale, -minimum);
        }
    }
}

/* Q6_K: sixteen groups of 16, two high bits of four values in a byte. */
INLINE void unpack_six_bits(const uint8_t *b, float *out) {
    float d = half_float(load16(b + 208));
#pragma GCC unroll 16
    for (int group = 0; group < 16; group++) {
        int half = group / 8;
        bytes low = bytes_load(b + half * 64 + group % 4 * 16) >> group / 4 % 2 * 4;
        bytes high = bytes_load(b + 128 + half * 32 + group % 2 * 16) >> group / 2 % 4 * 2;
        put(out + group * 16, ((low & 15) | (high & 3) << 4) - 32, (float)(int8_t)b[192 + group] * d);
    }
}

/* NF4: the largest magnitude of 64 values as float16, then the numbers of their levels, low nibbles first. */
INLINE void unpack_normal(const uint8_t *b, float *out) {
    float largest = half_float(load16(b));
    for (int at = 0; at < 32; at += LANES) {
        bytes levels = bytes_load(b + 2 + at);
        lanes_store(out + at, lanes_times(lanes_picked(levels, NF4_LEVELS), largest));
        lanes_store(out + at + 32, lanes_times(lanes_picked(levels >> 4, NF4_LEVELS), largest));
    }
}

INLINE void unpack_block(const int format, const uint8_t *block, float *out) {
    if (format == Q8_0) unpack_bytes(block, out);
    else if (format == NF4) unpack_normal(block, out);
    else if (format == Q6_K) unpack_six_bits(block, out);
    else if (format == Q4_K || format == Q5_K) unpack_groups(format, block, out);
    else unpack_nibbles(format, block, out);
}

static int64_t row_bytes_of(int format, int64_t K) { return K / BLOCK_VALUES[format] * BLOCK_BYTES[format]; }

/* CALL(format) with a constant for each format, so that the compiler makes a loop of its own for every one. */
#define WITH_FORMAT(CALL, format)    \
    switch (format) {                \
        case Q4_0: CALL(Q4_0); break; \
        case Q4_1: CALL(Q4_1); break; \
        case Q5_0: CALL(Q5_0); break; \
        case Q5_1: CALL(Q5_1); break; \
        case Q8_0: CALL(Q8_0); break; \
        case Q4_K: CALL(Q4_K); break; \
        case Q5_K: CALL(Q5_K); break; \
        case Q6_K: CALL(Q6_K); break; \
        case NF4: CALL(NF4); break;   \
    }
