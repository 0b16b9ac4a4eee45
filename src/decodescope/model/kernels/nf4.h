/* Products with NF4, whose levels are no whole numbers: activations stay floats. */
#pragma once
#include "blocks.h"

/* One row of blocks against M <= 8 rows of activations: y[m * N]. A block is summed by itself, then scaled. */
INLINE void row_normal(const int M, const uint8_t *row, const float *x, int64_t K, float *y, int64_t N) {
    lanes sum[8];
    for (int m = 0; m < M; m++) sum[m] = lanes_zero();
    for (int64_t at = 0; at < K; at += BLOCK_VALUES[NF4], row += BLOCK_BYTES[NF4]) {
        prefetch(row);
        const lanes scale = lanes_fill(half_float(load16(row)));
        const bytes first = bytes_load(row + 2), second = bytes_load(row + 18);
        const lanes levels[4] = {
            lanes_picked(first, NF4_LEVELS), lanes_picked(second, NF4_LEVELS),
            lanes_picked(first >> 4, NF4_LEVELS), lanes_picked(second >> 4, NF4_LEVELS),
        };
        for (int m = 0; m < M; m++) {
            lanes dot = lanes_zero();
            for (int i = 0; i < 4; i++) dot = lanes_mad(levels[i], lanes_float(x + m * K + at + i * LANES), dot);
            sum[m] = lanes_mad(dot, scale, sum[m]);
        }
    }
    for (int m = 0; m < M; m++) y[m * N] = lanes_sum(sum[m]);
}
