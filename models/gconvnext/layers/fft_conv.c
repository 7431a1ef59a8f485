/* A global convolution on the CPU that stays in cache: channels last in and out, float32. (Ours.)
 *
 *     y[b, t, c] = sum_s k[c, t - s] x[b, s, c],   0 <= t, s < L
 *
 * A linear convolution of length L is a circular one of length 2M, M >= L: one of length M on the even bins and, the sequence being
 * multiplied by exp(-pi i t / M), one on the odd bins. So nothing is padded to twice its length, and the working set is halved. Two
 * images are the real and imaginary part of one complex sequence (the kernel is real and shared); of a single image two blocks of
 * channels are, and then a bin and its conjugate are untangled in the product.
 *
 * This file makes the plans, hands out the work and picks the instruction set; `fft_conv_lanes.h` is the arithmetic. There is no
 * threading library in here: the caller passes the function that starts a team of threads, that of the OpenMP runtime which PyTorch
 * itself uses. Functions return 0, or 1 if there is no memory.
 */
#define _GNU_SOURCE
#define LANES 8
#define TABLE gconv_baseline
#include "fft_conv_lanes.h"

#include <math.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

/* Beyond this M the buffer of 16 channels (256 M bytes) outgrows a third-level cache before that of 8 does: measured. */
enum { LONG = 1 << 17 };

static const instruction_set *choose(const plan *p) {
#if defined(__x86_64__)
    const char *limit = getenv("GCONVNEXT_CPU"); /* for tests: "baseline" or "avx2" */
    __builtin_cpu_init();
    if (!limit && p->half <= LONG && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return &gconv_avx512;
    if (!(limit && !strcmp(limit, "baseline")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &gconv_avx2;
#endif
    (void)p;
    return &gconv_baseline;
}

/* Channels that share a vector; a spectrum's layout depends on it. */
EXPORT int gconv_lanes(const plan *p) { return p->use->lanes; }

EXPORT void gconv_free_plan(plan *p) {
    if (!p) return;
    free(p->twiddle);
    free(p->twist);
    free(p->row);
    free(p->block);
    free(p->pair);
    free(p->bin);
    free(p);
}

static void factorise(plan *p) {
    const int odd[] = {7, 5, 3};
    int rest = p->half, twos = 0;
    for (; rest % 2 == 0; rest /= 2) twos++;
    int stride = p->half;
#define ADD(r) (stride /= (r), p->pass[p->passes++] = (pass){(r), stride, NULL})
    for (; twos >= 3 && twos != 4; twos -= 3) ADD(8);
    for (; twos >= 2; twos -= 2) ADD(4);
    if (twos) ADD(2);
    for (int i = 0; i < 3; i++)
        for (; rest % odd[i] == 0; rest /= odd[i]) ADD(odd[i]);
    if (!p->passes) ADD(1);
#undef ADD
    p->last = p->passes > 1 ? p->pass[p->passes - 1].radix : 1;
}

static void fill_twiddles(plan *p) {
    const double pi = 3.14159265358979323846;
    float *w = p->twiddle;
    for (int i = 0; i < p->passes; i++) {
        pass *step = p->pass + i;
        step->twiddle = w;
        for (int k = 0; k < step->stride; k++) {
            for (int q = 1; q < step->radix; q++) {
                double angle = -2 * pi * ((double)k * q) / ((double)step->radix * step->stride);
                *w++ = (float)cos(angle), *w++ = (float)sin(angle);
            }
        }
    }
    for (int t = 0; t < p->half; t++) {
        p->twist[2 * t] = (float)cos(-pi * t / p->half), p->twist[2 * t + 1] = (float)sin(-pi * t / p->half);
    }
}

/* Blocks with conjugate bins. Position q0 M/r0 + q1 M/(r0 r1) + .. holds frequency q0 + r0 q1 + .. of its half; so block b, of frequencies
 * f, f + M/r, .., has a mate with -f, .. in reverse order, and only f = 0 is its own with bin 0 in front. */
static void pair_bins(plan *p, int *position) {
    int r = p->last, count = p->half / r, stride = p->pass[0].stride, blocks = 0;
    for (int odd = 0; odd < 2; odd++) {
        for (int pass = 0; pass < 2; pass++) { /* once to know where each frequency is, once to pair */
            for (int b = 0; b < count; b++) {
                int rest = b * r, weight = 1, f = 0;
                for (int i = 0; weight < count; weight *= p->pass[i++].radix) {
                    f += rest / p->pass[i].stride * weight;
                    rest %= p->pass[i].stride;
                }
                if (pass == 0) {
                    position[f] = b;
                    continue;
                }
                if (b * r % stride == 0) p->start[odd][b * r / stride] = blocks;
                int other = position[odd ? count - 1 - f : (count - f) % count];
                if (b > other) continue;
                p->block[2 * blocks] = b * r, p->block[2 * blocks + 1] = other * r;
                for (int q = 0; q < r; q++) {
                    int s = blocks * r + q, bin = 2 * (f + q * count) + odd;
                    p->pair[2 * s] = b * r + q;
                    p->pair[2 * s + 1] = other * r + (odd || f ? r - 1 - q : (r - q) % r);
                    p->bin[s] = bin <= p->half ? bin : bin - 2 * p->half;
                }
                blocks++;
            }
        }
        p->start[odd][p->pass[0].radix] = blocks;
    }
}

/* A plan for sequences of `height` rows of `width` elements with `gap` zeros behind each; NULL if there is no memory.
 * `half` is M: at least height * (width + gap), without prime factors above 7. */
EXPORT plan *gconv_make_plan(int height, int width, int gap, int half) {
    plan *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->length = height * (width + gap), p->half = half, p->rows = height * width;
    p->use = choose(p);
    factorise(p);
    int count = p->half / p->last; /* of a half's blocks */
    p->blocks = count / 2 + 1 + (count + 1) / 2, p->bins = p->blocks * p->last;
    size_t twiddles = 0;
    for (int i = 0; i < p->passes; i++) twiddles += 2 * (size_t)p->pass[i].stride * (p->pass[i].radix - 1);
    p->twiddle = malloc(sizeof(float) * (twiddles + 1));
    p->twist = malloc(sizeof(float) * 2 * half);
    p->row = malloc(sizeof(int) * half);
    p->block = malloc(sizeof(int) * 2 * p->blocks);
    p->pair = malloc(sizeof(int) * 2 * p->bins);
    p->bin = malloc(sizeof(int) * p->bins);
    int *order = malloc(sizeof(int) * count);
    if (!p->twiddle || !p->twist || !p->row || !p->block || !p->pair || !p->bin || !order) {
        free(order);
        gconv_free_plan(p);
        return NULL;
    }
    fill_twiddles(p);
    pair_bins(p, order);
    for (int t = 0; t < half; t++) {
        int y = t / (width + gap), x = t % (width + gap);
        p->row[t] = t < p->length && x < width ? y * width + x : -1;
    }
    free(order);
    return p;
}

/* Bins that a spectrum holds, some of them twice. */
EXPORT int gconv_bins(const plan *p) { return p->bins; }

/* Starts a team: calls `function(data)` on each of `threads` threads and waits for all. Null: there is only this one. */
typedef void team(void (*function)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    const task *task;
    item_function *function;
    int items, next, threads;
    char *scratch;
    size_t scratch_size;
} queue;

static void work(void *data) {
    queue *q = data;
    int thread = __atomic_fetch_add(&q->threads, 1, __ATOMIC_RELAXED);
    float *scratch = (float *)(q->scratch + thread * q->scratch_size);
    for (int item; (item = __atomic_fetch_add(&q->next, 1, __ATOMIC_RELAXED)) < q->items;) q->function(q->task, item, scratch);
}

static void *allocate(size_t size) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, size ? size : 64) ? NULL : memory;
}

/* Run items 0 .. items - 1, with `elements` complex elements of scratch memory for each thread. */
static int run(const task *t, item_function *function, int items, size_t elements, int lanes, int threads, team *start) {
    if (threads > items) threads = items;
    if (threads < 1 || !start) threads = 1;
    size_t size = (elements * 2 * lanes * sizeof(float) + 4096 + 63) / 64 * 64;
    queue q = {t, function, items, 0, 0, allocate(size * threads), size};
    if (!q.scratch) return 1;
    if (threads == 1) work(&q);
    else start(work, &q, threads, 0);
    free(q.scratch);
    return 0;
}

static task make_task(const plan *p, int batch, int channels, int lanes) {
    task t = {0};
    t.plan = p, t.batch = batch, t.channels = channels, t.blocks = (channels + lanes - 1) / lanes, t.splits = 1;
    return t;
}

/* Parts of the batch a block of channels is divided into, so that there is work for all threads. */
static int split(int blocks, int pairs, int threads) {
    int splits = (2 * threads + blocks - 1) / blocks;
    return splits < pairs ? splits : pairs;
}

/* A 64-bit hash in which every bit of the words reaches every bit of the result: four chains of multiplications to 128 bits. */
unsigned long long gconv_fold(const unsigned long long *words, size_t count) {
    unsigned long long chain[4] = {0x9e3779b97f4a7c15ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull, count};
    for (size_t at = 0; at < count; at += 8) {
        unsigned long long word[8] = {0};
        memcpy(word, words + at, sizeof *words * (count - at < 8 ? count - at : 8));
        for (int i = 0; i < 4; i++) {
            unsigned __int128 mixed = (unsigned __int128)(word[2 * i] ^ 0xd6e8feb86659fd93ull) * (word[2 * i + 1] ^ chain[i]);
            chain[i] = (unsigned long long)(mixed >> 64) ^ (unsigned long long)mixed ^ (chain[i] << 23 | chain[i] >> 41);
        }
    }
    for (int i = 1; i < 4; i++) {
        unsigned __int128 mixed = (unsigned __int128)(chain[0] ^ 0xa0761d6478bd642full) * (chain[i] ^ 0xe7037ed1a0b428dbull);
        chain[0] = (unsigned long long)(mixed >> 64) ^ (unsigned long long)mixed;
    }
    return chain[0];
}

/* A hash of `size` bytes, to notice that they were changed. */
EXPORT int gconv_hash(const void *bytes, size_t size, unsigned long long *result, int threads, team *start) {
    task t = {0};
    int parts = (int)((size + HASHED_AT_ONCE - 1) / HASHED_AT_ONCE);
    t.x = bytes, t.size = size, t.hashes = allocate(sizeof(unsigned long long) * parts);
    int failed = !t.hashes || run(&t, choose(&(plan){.half = 1})->hash_part, parts, 0, 1, threads, start);
    if (!failed) *result = gconv_fold(t.hashes, parts);
    free(t.hashes);
    return failed;
}

/* Spectrum `(blocks, bins, 2, lanes)` of a kernel `(directions, channels, L)`. */
EXPORT int gconv_spectrum(const plan *p, const float *kernel, int directions, int channels, float *spectrum, int threads, team *start) {
    const instruction_set *use = p->use;
    task t = make_task(p, 0, channels, use->lanes);
    t.kernel = kernel, t.directions = directions, t.out_spectrum = spectrum;
    return run(&t, use->analyse_kernel, (t.blocks + 1) / 2, 2 * (size_t)p->half, use->lanes, threads, start);
}

/* The same from bins in natural order, `(channels, M + 1)` real (parts = 1) or complex (parts = 2). */
EXPORT int gconv_pack(const plan *p, const float *bins, int parts, int channels, float *spectrum, int threads, team *start) {
    const instruction_set *use = p->use;
    task t = make_task(p, 0, channels, use->lanes);
    t.natural = bins, t.parts = parts, t.out_spectrum = spectrum;
    return run(&t, use->pack, t.blocks, 0, use->lanes, threads, start);
}

/* y = x * kernel + bias + addend, each `(batch, rows, channels)`; bias `(channels)`, or `(batch, channels)` with per_image. */
EXPORT int gconv_convolve(const plan *p, const float *x, const float *spectrum, const float *bias, int per_image, const float *addend,
                          float *y, int batch, int channels, int threads, team *start) {
    const instruction_set *use = p->use;
    task t = make_task(p, batch, channels, use->lanes);
    t.x = x, t.spectrum = spectrum, t.bias = bias, t.bias_stride = per_image ? channels : 0, t.addend = addend, t.out = y;
    int items = t.blocks * (batch / 2) + (batch % 2 ? (t.blocks + 1) / 2 : 0);
    return run(&t, use->convolve, items, 2 * (size_t)p->half, use->lanes, threads, start);
}

/* Gradients of y = x * kernel + bias. Each of dx, dkernel, dbias may be null; x only if dkernel and dbias are. */
EXPORT int gconv_differentiate(const plan *p, const float *g, const float *x, const float *spectrum, int directions, float *dx,
                               float *dkernel, float *dbias, int batch, int channels, int threads, team *start) {
    const instruction_set *use = p->use;
    task t = make_task(p, batch, channels, use->lanes);
    t.g = g, t.x = x, t.spectrum = spectrum, t.out = dx, t.directions = directions, t.out_kernel = dkernel, t.out_sum = dbias;
    int half = p->half, pairs = (batch + 1) / 2, sums = dkernel || dbias;
    t.splits = split(t.blocks, pairs, threads);
    if (sums && !(t.partial = allocate(sizeof(float) * 2 * use->lanes * ((size_t)p->bins + 1) * t.blocks * t.splits))) return 1;
    int failed = run(&t, use->differentiate, t.blocks * t.splits, 4 * (size_t)half, use->lanes, threads, start);
    if (!failed && sums) failed = run(&t, use->collect, (t.blocks + 1) / 2, 2 * (size_t)half, use->lanes, threads, start);
    free(t.partial);
    return failed;
}

/* Energy of each bin summed over the batch, `(channels, M + 1)`, and each image's sum, `(batch, channels)`. */
EXPORT int gconv_power(const plan *p, const float *x, float *power, float *sum, int batch, int channels, int threads, team *start) {
    const instruction_set *use = p->use;
    task t = make_task(p, batch, channels, use->lanes);
    t.x = x, t.out_power = power, t.out_sum = sum;
    t.splits = split(t.blocks, (batch + 1) / 2, threads);
    if (!(t.partial = allocate(sizeof(float) * use->lanes * (size_t)p->bins * t.blocks * t.splits))) return 1;
    int failed = run(&t, use->measure, t.blocks * t.splits, 2 * (size_t)p->half, use->lanes, threads, start);
    if (!failed) failed = run(&t, use->collect_power, t.blocks, 0, use->lanes, threads, start);
    free(t.partial);
    return failed;
}
