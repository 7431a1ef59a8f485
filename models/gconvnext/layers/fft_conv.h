/* What the files of the CPU kernel share: a plan for one map, a task, and the table of functions of one instruction set. */
#ifndef GCONV_FFT_CONV_H
#define GCONV_FFT_CONV_H

#include <stddef.h>

#define MAX_PASSES 32

/* One pass of the transform: blocks of `radix * stride` elements are split into `radix` blocks of `stride`. */
typedef struct {
    int radix, stride;
    const float *twiddle; /* (stride, radix - 1) complex: exp(-2 pi i k q / (radix * stride)) */
} pass;

/* A circular convolution of length 2M as two of length M: its even bins are the transform of length M of the sequence, its odd bins that
 * of the sequence times `twist`. Both halves lie one behind the other in 2M elements, each in the order that its transform leaves. */
typedef struct plan {
    const struct instruction_set *use;
    int length;          /* L, elements of the sequence */
    int half;            /* M >= L, a product of 2, 3, 5 and 7 */
    int rows;            /* elements of it in memory: L less the gaps */
    int passes;
    pass pass[MAX_PASSES];
    float *twiddle;
    float *twist;        /* (M) complex: exp(-pi i t / M) */
    int *row;            /* (M) row in memory of element t; -1 for a gap or t >= L */
    int last;            /* radix of the last pass, which works on blocks of so many neighbours; 1 if it is also the first */
    int blocks, bins;    /* blocks below and `blocks * last` bins in them */
    int *block;          /* (blocks, 2) position of a block and of the one with the conjugate bins, the same for some; each pair once */
    int *pair;           /* (bins, 2) positions of a bin of the first block and of its conjugate */
    int *bin;            /* (bins) number of that bin, 0 .. M; negative where the conjugate has that number */
    int start[2][10];    /* blocks in the q-th part of a half, as the first pass divides it: start[half][q] .. start[half][q + 1] */
} plan;

typedef struct {
    const plan *plan;
    int batch, channels, blocks; /* blocks of `lanes` channels, the last one padded */
    int directions, splits, conjugate;
    const float *x, *g;          /* (batch, rows, channels) */
    const float *kernel;         /* (directions, channels, length) */
    const float *spectrum;       /* (blocks, bins, 2, lanes): bins of the kernel divided by 2M */
    const float *natural;        /* (channels, M + 1, parts) bins in order, real or complex */
    int parts;
    const float *bias;           /* (channels), or (batch, channels) */
    size_t bias_stride;          /* 0, or channels */
    const float *addend;         /* (batch, rows, channels) or NULL */
    float *out, *out_spectrum, *out_kernel, *out_power, *out_sum;
    float *partial;              /* (blocks, splits, bins + 1, 2, lanes) sums over a part of the batch */
    size_t size;                 /* bytes at x to hash */
    unsigned long long *hashes;
} task;

typedef void item_function(const task *, int item, float *scratch);

typedef struct instruction_set {
    int lanes;
    item_function *convolve, *differentiate, *collect, *analyse_kernel, *pack, *measure, *collect_power, *hash_part;
} instruction_set;

enum { HASHED_AT_ONCE = 1 << 16 }; /* bytes */

unsigned long long gconv_fold(const unsigned long long *words, size_t count); /* a hash of them */

extern const instruction_set gconv_baseline, gconv_avx2, gconv_avx512;

#endif
