/* The arithmetic for AVX2 (x86 since 2013). */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define LANES 8
#define TABLE gconv_avx2
#include "fft_conv_lanes.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
