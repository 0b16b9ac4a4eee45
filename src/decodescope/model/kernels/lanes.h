/* Sixteen floats side by side: one AVX-512 register, two AVX2 registers, or an array the compiler makes the best of. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

/* Sixteen bytes, in the compiler's own vector notation: every processor has some of these. */
typedef uint8_t bytes __attribute__((vector_size(16)));

INLINE bytes bytes_pair(uint64_t low, uint64_t high) {
    typedef uint64_t pair __attribute__((vector_size(16)));
    return (bytes)(pair){low, high};
}

INLINE bytes bytes_load(const uint8_t *at) {
    bytes out;
    memcpy(&out, at, 16);
    return out;
}

/* The processor's own look-ahead stops at the end of each page: far ahead into L2, shortly before use into L1. */
#define FAR_AHEAD 4096 /* bytes */
#define SOON 512
INLINE void prefetch(const uint8_t *at) {
    __builtin_prefetch((const char *)at + FAR_AHEAD, 0, 2);
    __builtin_prefetch((const char *)at + SOON, 0, 3);
}

INLINE float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t load16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

INLINE float bf16_float(uint16_t bf16) { return bits_float((uint32_t)bf16 << 16); }

/* Exact for subnormals too: the exponent is moved by a multiplication. */
INLINE float half_float(uint16_t half) {
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x0f800000) return bits_float(sign | 0x70000000 | rest); /* infinities and NaN */
    return bits_float(sign | 0x3f800000) * (bits_float(rest) * 0x1p112f);
#endif
}

/* To nearest, ties to even; what is too large becomes infinite, NaN stays NaN. */
INLINE uint16_t to_half(float value) {
#if defined(__F16C__)
    return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0);
#else
    uint32_t bits, sign;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (bits >= 0x47800000) return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (bits < 0x38800000) { /* subnormal: the addition rounds to its last digit */
        float moved = bits_float(bits) + 0.5f;
        memcpy(&bits, &moved, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
#endif
}

#if defined(__AVX512F__)

typedef __m512 lanes;
INLINE lanes lanes_zero(void) { return _mm512_setzero_ps(); }
INLINE lanes lanes_float(const float *at) { return _mm512_loadu_ps(at); }
INLINE lanes lanes_bf16(const uint16_t *at) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE lanes lanes_half(const uint16_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE lanes lanes_int8(bytes a) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)a)); }
INLINE lanes lanes_picked(bytes which, const float *from) { /* one of 16 by the lowest four bits */
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32((__m128i)which), _mm512_loadu_ps(from));
}
INLINE lanes lanes_times(lanes a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
INLINE lanes lanes_plus(lanes a, float b) { return _mm512_add_ps(a, _mm512_set1_ps(b)); }
INLINE void lanes_store(float *at, lanes a) { _mm512_storeu_ps(at, a); }
INLINE lanes lanes_mad(lanes a, lanes b, lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE lanes lanes_max(lanes a, lanes b) { return _mm512_max_ps(a, b); }
INLINE lanes lanes_fill(float a) { return _mm512_set1_ps(a); }
INLINE float lanes_largest(lanes a) { return _mm512_reduce_max_ps(a); }
INLINE float lanes_sum(lanes a) { return _mm512_reduce_add_ps(a); }

/* out[i] = the sum of a[i]: neighbours are folded into each other, four times. */
#define SUMS_AT_ONCE 16
INLINE void lanes_sums(const lanes *a, float *out) {
    lanes two[8], four[4], eight[2];
    for (int i = 0; i < 8; i++)
        two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(two[2 * i]), high = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
#define FOLD_QUARTERS(a, b) _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))
    for (int i = 0; i < 2; i++) eight[i] = FOLD_QUARTERS(four[2 * i], four[2 * i + 1]);
    _mm512_storeu_ps(out, FOLD_QUARTERS(eight[0], eight[1]));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

typedef struct { __m256 low, high; } lanes;
INLINE lanes lanes_zero(void) { return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE lanes lanes_float(const float *at) { return (lanes){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
INLINE __m256 eight_bf16(const uint16_t *at) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE lanes lanes_bf16(const uint16_t *at) { return (lanes){eight_bf16(at), eight_bf16(at + 8)}; }
INLINE __m256 eight_half(const uint16_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE lanes lanes_half(const uint16_t *at) { return (lanes){eight_half(at), eight_half(at + 8)}; }
INLINE __m256 eight_int8(__m128i a) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)); }
INLINE lanes lanes_int8(bytes a) {
    return (lanes){eight_int8((__m128i)a), eight_int8(_mm_srli_si128((__m128i)a, 8))};
}
INLINE __m256 eight_picked(__m128i which, const float *from) {
    __m256i index = _mm256_cvtepu8_epi32(which); /* its bit 3, moved to the sign, chooses the half */
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(from + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
INLINE lanes lanes_picked(bytes which, const float *from) {
    return (lanes){eight_picked((__m128i)which, from), eight_picked(_mm_srli_si128((__m128i)which, 8), from)};
}
INLINE lanes lanes_times(lanes a, float b) {
    __m256 factor = _mm256_set1_ps(b);
    return (lanes){_mm256_mul_ps(a.low, factor), _mm256_mul_ps(a.high, factor)};
}
INLINE lanes lanes_plus(lanes a, float b) {
    __m256 offset = _mm256_set1_ps(b);
    return (lanes){_mm256_add_ps(a.low, offset), _mm256_add_ps(a.high, offset)};
}
INLINE void lanes_store(float *at, lanes a) {
    _mm256_storeu_ps(at, a.low);
    _mm256_storeu_ps(at + 8, a.high);
}
INLINE lanes lanes_mad(lanes a, lanes b, lanes sum) {
    return (lanes){_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
INLINE lanes lanes_max(lanes a, lanes b) { return (lanes){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE lanes lanes_fill(float a) { return (lanes){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
INLINE float lanes_largest(lanes a) {
    __m256 eight = _mm256_max_ps(a.low, a.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE float lanes_sum(lanes a) {
    __m256 eight = _mm256_add_ps(a.low, a.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* out[i] = the sum of a[i]. */
#define SUMS_AT_ONCE 4
INLINE void lanes_sums(const lanes *a, float *out) {
    __m256 eight[4];
    for (int i = 0; i < 4; i++) eight[i] = _mm256_add_ps(a[i].low, a[i].high);
    __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(eight[0], eight[1]), _mm256_hadd_ps(eight[2], eight[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}

#else

typedef struct { float at[LANES]; } lanes;
#define EACH_LANE(VALUE)                                      \
    do {                                                      \
        lanes out;                                            \
        for (int i = 0; i < LANES; i++) out.at[i] = (VALUE);  \
        return out;                                           \
    } while (0)
INLINE lanes lanes_zero(void) { EACH_LANE(0.0f); }
INLINE lanes lanes_float(const float *at) { EACH_LANE(at[i]); }
INLINE lanes lanes_bf16(const uint16_t *at) { EACH_LANE(bf16_float(at[i])); }
INLINE lanes lanes_half(const uint16_t *at) { EACH_LANE(half_float(at[i])); }
INLINE lanes lanes_int8(bytes a) { EACH_LANE((float)(int8_t)a[i]); }
INLINE lanes lanes_picked(bytes which, const float *from) { EACH_LANE(from[which[i] & 15]); }
INLINE lanes lanes_times(lanes a, float b) { EACH_LANE(a.at[i] * b); }
INLINE lanes lanes_plus(lanes a, float b) { EACH_LANE(a.at[i] + b); }
INLINE void lanes_store(float *at, lanes a) { memcpy(at, a.at, sizeof a.at); }
INLINE lanes lanes_mad(lanes a, lanes b, lanes sum) { EACH_LANE(a.at[i] * b.at[i] + sum.at[i]); }
INLINE lanes lanes_max(lanes a, lanes b) { EACH_LANE(a.at[i] > b.at[i] ? a.at[i] : b.at[i]); }
INLINE lanes lanes_fill(float a) { EACH_LANE(a); }
INLINE float lanes_largest(lanes a) {
    for (int i = 1; i < LANES; i++) a.at[0] = a.at[i] > a.at[0] ? a.at[i] : a.at[0];
    return a.at[0];
}
INLINE float lanes_sum(lanes a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a.at[i] += a.at[i + half];
    return a.at[0];
}

#define SUMS_AT_ONCE 4
INLINE void lanes_sums(const lanes *a, float *out) {
    for (int i = 0; i < SUMS_AT_ONCE; i++) out[i] = lanes_sum(a[i]);
}

#endif
