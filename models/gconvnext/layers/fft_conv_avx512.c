/* The arithmetic for AVX-512. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
#endif
#define LANES 16
#define TABLE gconv_avx512
#include "fft_conv_lanes.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
