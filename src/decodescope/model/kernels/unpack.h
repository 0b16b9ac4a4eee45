/* Rows of blocks -> float32 or bf16, as many as the caller wants at once. */
#pragma once
#include "blocks.h"
#include "dense.h"

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
    share(work_unpack, &job, size[0], rows_at_once(row_bytes_of(format, size[1]), 1), threads);
}
