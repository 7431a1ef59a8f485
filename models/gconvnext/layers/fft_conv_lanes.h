/* The arithmetic, compiled once for each instruction set: the including file defines LANES and TABLE.
 *
 * A vector holds LANES channels of one sequence element, a complex element holds two images (or two blocks of channels) as its real and
 * imaginary part. The transforms work in place and leave their result in digit-reversed order, where the product with the kernel's
 * spectrum does not mind; so nothing is ever reordered, and a block of channels stays in cache from load to store.
 */
#include "fft_conv.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef struct {
    vec re, im;
} element;

/* Run a statement for j = 0 .. r - 1, r a constant of at most 8: spelled out, so that arrays stay in registers. */
#define ONE(r, i, ...)     \
    if ((r) > (i)) {       \
        enum { j = (i) };  \
        __VA_ARGS__        \
    }
#define EACH(r, ...)                                                                                      \
    do {                                                                                                  \
        ONE(r, 0, __VA_ARGS__) ONE(r, 1, __VA_ARGS__) ONE(r, 2, __VA_ARGS__) ONE(r, 3, __VA_ARGS__)       \
        ONE(r, 4, __VA_ARGS__) ONE(r, 5, __VA_ARGS__) ONE(r, 6, __VA_ARGS__) ONE(r, 7, __VA_ARGS__)       \
    } while (0)

INLINE element plus(element a, element b) { return (element){a.re + b.re, a.im + b.im}; }
INLINE element minus(element a, element b) { return (element){a.re - b.re, a.im - b.im}; }
INLINE element times(element a, float re, float im) { return (element){a.re * re - a.im * im, a.re * im + a.im * re}; }
INLINE element conjugate(element a) { return (element){a.re, -a.im}; }
INLINE element product(element a, element b) { return (element){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
/* Times -i, or +i in an inverse transform. */
INLINE element turn(element a, int inverse) { return inverse ? (element){-a.im, a.re} : (element){a.im, -a.re}; }

INLINE void dft4(element *a, element *b, element *c, element *d, int inverse) {
    element s = plus(*a, *c), t = minus(*a, *c), u = plus(*b, *d), v = turn(minus(*b, *d), inverse);
    *a = plus(s, u), *b = plus(t, v), *c = minus(s, u), *d = minus(t, v);
}

/* The transform of r elements, in natural order. */
INLINE void dft(element *a, int r, int inverse) {
    if (r == 2) {
        element s = plus(a[0], a[1]);
        a[1] = minus(a[0], a[1]), a[0] = s;
    } else if (r == 3) {
        const float sine = 0.86602540378443865f;
        element s = plus(a[1], a[2]), d = turn(minus(a[1], a[2]), inverse);
        element m = {a[0].re - 0.5f * s.re, a[0].im - 0.5f * s.im};
        a[0] = plus(a[0], s);
        a[1] = (element){m.re + sine * d.re, m.im + sine * d.im};
        a[2] = (element){m.re - sine * d.re, m.im - sine * d.im};
    } else if (r == 4) {
        dft4(a, a + 1, a + 2, a + 3, inverse);
    } else if (r == 5) {
        const float c1 = 0.30901699437494742f, c2 = -0.80901699437494742f, s1 = 0.95105651629515357f, s2 = 0.58778525229247313f;
        element p = plus(a[1], a[4]), q = plus(a[2], a[3]);
        element d = turn(minus(a[1], a[4]), inverse), e = turn(minus(a[2], a[3]), inverse);
        element m = {a[0].re + c1 * p.re + c2 * q.re, a[0].im + c1 * p.im + c2 * q.im};
        element n = {a[0].re + c2 * p.re + c1 * q.re, a[0].im + c2 * p.im + c1 * q.im};
        element f = {s1 * d.re + s2 * e.re, s1 * d.im + s2 * e.im}, g = {s2 * d.re - s1 * e.re, s2 * d.im - s1 * e.im};
        a[0] = plus(a[0], plus(p, q));
        a[1] = plus(m, f), a[4] = minus(m, f), a[2] = plus(n, g), a[3] = minus(n, g);
    } else if (r == 7) {
        const float c1 = 0.62348980185873353f, c2 = -0.22252093395631440f, c3 = -0.90096886790241913f;
        const float s1 = 0.78183148246802981f, s2 = 0.97492791218182361f, s3 = 0.43388373911755812f;
        element p = plus(a[1], a[6]), q = plus(a[2], a[5]), s = plus(a[3], a[4]);
        element d = turn(minus(a[1], a[6]), inverse), e = turn(minus(a[2], a[5]), inverse), f = turn(minus(a[3], a[4]), inverse);
        element l = {a[0].re + c1 * p.re + c2 * q.re + c3 * s.re, a[0].im + c1 * p.im + c2 * q.im + c3 * s.im};
        element m = {a[0].re + c2 * p.re + c3 * q.re + c1 * s.re, a[0].im + c2 * p.im + c3 * q.im + c1 * s.im};
        element n = {a[0].re + c3 * p.re + c1 * q.re + c2 * s.re, a[0].im + c3 * p.im + c1 * q.im + c2 * s.im};
        element t = {s1 * d.re + s2 * e.re + s3 * f.re, s1 * d.im + s2 * e.im + s3 * f.im};
        element u = {s2 * d.re - s3 * e.re - s1 * f.re, s2 * d.im - s3 * e.im - s1 * f.im};
        element v = {s3 * d.re - s1 * e.re + s2 * f.re, s3 * d.im - s1 * e.im + s2 * f.im};
        a[0] = plus(plus(a[0], p), plus(q, s));
        a[1] = plus(l, t), a[6] = minus(l, t), a[2] = plus(m, u), a[5] = minus(m, u), a[3] = plus(n, v), a[4] = minus(n, v);
    } else if (r == 8) {
        const float h = 0.70710678118654752f;
        dft4(a, a + 2, a + 4, a + 6, inverse); /* even elements: bins 0, 1, 2, 3 in a[0], a[2], a[4], a[6] */
        dft4(a + 1, a + 3, a + 5, a + 7, inverse);
        element b = a[3], c = a[7], e = turn(a[5], inverse);
        element bt = turn(b, inverse), ct = turn(c, inverse);
        b = (element){h * (b.re + bt.re), h * (b.im + bt.im)};
        c = (element){h * (ct.re - c.re), h * (ct.im - c.im)};
        element a0 = a[0], a1 = a[2], a2 = a[4], a3 = a[6], o = a[1];
        a[0] = plus(a0, o), a[4] = minus(a0, o), a[1] = plus(a1, b), a[5] = minus(a1, b);
        a[2] = plus(a2, e), a[6] = minus(a2, e), a[3] = plus(a3, c), a[7] = minus(a3, c);
    }
}

INLINE void forward_blocks(element *x, int blocks, int stride, const float *twiddle, int r) {
    for (; blocks > 0; blocks--, x += (size_t)r * stride) {
        const float *w = twiddle;
        for (int k = 0; k < stride; k++, w += 2 * (r - 1)) {
            element a[8];
            EACH(r, a[j] = x[k + j * stride];);
            dft(a, r, 0);
            x[k] = a[0];
            if (stride > 1) {
                EACH(r, if (j > 0) x[k + j * stride] = times(a[j], w[2 * j - 2], w[2 * j - 1]););
            } else {
                EACH(r, x[k + j * stride] = a[j];);
            }
        }
    }
}

INLINE void inverse_blocks(element *x, int blocks, int stride, const float *twiddle, int r) {
    for (; blocks > 0; blocks--, x += (size_t)r * stride) {
        const float *w = twiddle;
        for (int k = 0; k < stride; k++, w += 2 * (r - 1)) {
            element a[8];
            a[0] = x[k];
            if (stride > 1) {
                EACH(r, if (j > 0) a[j] = times(x[k + j * stride], w[2 * j - 2], -w[2 * j - 1]););
            } else {
                EACH(r, a[j] = x[k + j * stride];);
            }
            dft(a, r, 1);
            EACH(r, x[k + j * stride] = a[j];);
        }
    }
}

/* Call f(..., radix) with the radix as a constant. */
#define WITH_RADIX(radix, f, ...)            \
    switch (radix) {                         \
    case 1: f(__VA_ARGS__, 1); break;        \
    case 2: f(__VA_ARGS__, 2); break;        \
    case 3: f(__VA_ARGS__, 3); break;        \
    case 4: f(__VA_ARGS__, 4); break;        \
    case 5: f(__VA_ARGS__, 5); break;        \
    case 7: f(__VA_ARGS__, 7); break;        \
    case 8: f(__VA_ARGS__, 8); break;        \
    }

static void forward_pass(element *x, int blocks, const pass *p) {
    WITH_RADIX(p->radix, forward_blocks, x, blocks, p->stride, p->twiddle)
}

static void inverse_pass(element *x, int blocks, const pass *p) {
    WITH_RADIX(p->radix, inverse_blocks, x, blocks, p->stride, p->twiddle)
}

enum { IN_CACHE = 16384 / sizeof(element) }; /* elements of half a first-level cache */

/* The passes first .. end - 1 over one block: part by part until a part fits the first-level cache, then pass by pass. */
static void forward(const plan *p, int first, int end, element *x) {
    if (first >= end) return;
    const pass *step = p->pass + first;
    if (step->radix * step->stride > IN_CACHE) {
        forward_pass(x, 1, step);
        for (int q = 0; q < step->radix; q++) forward(p, first + 1, end, x + (size_t)q * step->stride);
        return;
    }
    for (int blocks = 1; first < end; blocks *= step->radix, first++) {
        step = p->pass + first;
        forward_pass(x, blocks, step);
    }
}

static void inverse(const plan *p, int first, int end, element *x) {
    if (first >= end) return;
    const pass *step = p->pass + first;
    int size = step->radix * step->stride;
    if (size > IN_CACHE) {
        for (int q = 0; q < step->radix; q++) inverse(p, first + 1, end, x + (size_t)q * step->stride);
        inverse_pass(x, 1, step);
        return;
    }
    while (--end >= first) {
        step = p->pass + end;
        inverse_pass(x, size / (step->radix * step->stride), step);
    }
}

/* A block of channels of one image in memory; no pointer: zeros. */
typedef struct {
    const float *data;
    int width; /* channels of it, at most LANES */
} source;

INLINE vec load(const float *data, int width) {
    vec v;
    if (width == LANES) {
        memcpy(&v, data, sizeof v);
    } else {
        v = (vec){0};
        float lanes[LANES] = {0};
        int i = 0;
        for (; i + 4 <= width; i += 4) memcpy(lanes + i, data + i, 16);
        for (; i < width; i++) lanes[i] = data[i];
        memcpy(&v, lanes, sizeof v);
    }
    return v;
}

INLINE void store(float *data, vec v, int width) {
    if (width == LANES) {
        memcpy(data, &v, sizeof v);
    } else {
        float lanes[LANES];
        memcpy(lanes, &v, sizeof v);
        int i = 0;
        for (; i + 4 <= width; i += 4) memcpy(data + i, lanes + i, 16);
        for (; i < width; i++) data[i] = lanes[i];
    }
}

INLINE element load_pair(source re, source im, size_t offset) {
    return (element){load(re.data + offset, re.width), im.data ? load(im.data + offset, im.width) : (vec){0}};
}

/* Rows are a stride of all channels apart, which the hardware does not foresee well: ask for the row so many further on. */
enum { AHEAD = 8 };

/* Load a pair and run the first pass of both halves. */
INLINE void load_blocks(const plan *p, source re, source im, size_t step, element *x, int r) {
    int stride = p->pass[0].stride, half = p->half;
    const float *w = p->pass[0].twiddle;
    for (int k = 0; k < stride; k++, w += 2 * (r - 1)) {
        element raw[8], a[8];
        EACH(r, {
            int row = p->row[k + j * stride];
            if (row >= 0) __builtin_prefetch(re.data + (row + AHEAD) * step);
            if (row >= 0 && im.data) __builtin_prefetch(im.data + (row + AHEAD) * step);
            raw[j] = row < 0 ? (element){(vec){0}, (vec){0}} : load_pair(re, im, row * step);
        });
        EACH(r, a[j] = raw[j];);
        dft(a, r, 0);
        x[k] = a[0];
        EACH(r, if (j > 0) x[k + j * stride] = times(a[j], w[2 * j - 2], w[2 * j - 1]););
        EACH(r, {
            const float *twist = p->twist + 2 * (size_t)(k + j * stride);
            a[j] = times(raw[j], twist[0], twist[1]);
        });
        dft(a, r, 0);
        x[half + k] = a[0];
        EACH(r, if (j > 0) x[half + k + j * stride] = times(a[j], w[2 * j - 2], w[2 * j - 1]););
    }
}

static void load_pass(const plan *p, source re, source im, size_t step, element *x) {
    WITH_RADIX(p->pass[0].radix, load_blocks, p, re, im, step, x)
}

/* Where a pair goes: y + bias + addend, row by row. */
typedef struct {
    float *data;
    const float *addend;
    vec bias;
    int width;
} target;

INLINE void store_row(target to, vec v, size_t offset, size_t ahead) {
    __builtin_prefetch(to.data + offset + ahead, 1);
    v += to.bias;
    if (to.addend) v += load(to.addend + offset, to.width);
    store(to.data + offset, v, to.width);
}

INLINE element store_blocks(const plan *p, const element *x, target re, target im, size_t step, int r) {
    int stride = p->pass[0].stride, half = p->half;
    const float *w = p->pass[0].twiddle;
    element first = {(vec){0}, (vec){0}};
    for (int k = 0; k < stride; k++, w += 2 * (r - 1)) {
        element a[8], b[8];
        b[0] = x[half + k];
        EACH(r, if (j > 0) b[j] = times(x[half + k + j * stride], w[2 * j - 2], -w[2 * j - 1]););
        dft(b, r, 1);
        EACH(r, {
            const float *twist = p->twist + 2 * (size_t)(k + j * stride);
            b[j] = times(b[j], twist[0], -twist[1]);
        });
        a[0] = x[k];
        EACH(r, if (j > 0) a[j] = times(x[k + j * stride], w[2 * j - 2], -w[2 * j - 1]););
        dft(a, r, 1);
        EACH(r, {
            int row = p->row[k + j * stride];
            element y = plus(a[j], b[j]);
            if (j == 0 && k == 0) first = y;
            if (row >= 0) {
                store_row(re, y.re, row * step, AHEAD * step);
                if (im.data) store_row(im, y.im, row * step, AHEAD * step);
            }
        });
    }
    return first;
}

static int is_finite(element a) {
    vec zero = a.re * 0 + a.im * 0;
    for (int i = 0; i < LANES; i++)
        if (zero[i] != 0) return 0;
    return 1;
}

/* The last pass of both halves; whether all is finite: one bad input spoils every element of its pair, so one is looked at. */
static int store_pass(const plan *p, const element *x, target re, target im, size_t step) {
    element first = {(vec){0}, (vec){0}};
#define STORE(...) first = store_blocks(__VA_ARGS__)
    WITH_RADIX(p->pass[0].radix, STORE, p, x, re, im, step)
#undef STORE
    return is_finite(first);
}

/* Part q of a half and the part with its conjugate bins. */
INLINE int mate(const plan *p, int half, int q) {
    int r = p->pass[0].radix;
    return half ? r - 1 - q : (r - q) % r;
}

/* Transform what the first pass left, or transform it back to there; passes up to `end`. */
static void forward_parts(const plan *p, int half, int q, int end, element *x) {
    size_t stride = p->pass[0].stride;
    x += (size_t)half * p->half;
    forward(p, 1, end, x + q * stride);
    if (mate(p, half, q) != q) forward(p, 1, end, x + mate(p, half, q) * stride);
}

static void inverse_parts(const plan *p, int half, int q, int end, element *x) {
    size_t stride = p->pass[0].stride;
    x += (size_t)half * p->half;
    inverse(p, 1, end, x + q * stride);
    if (mate(p, half, q) != q) inverse(p, 1, end, x + mate(p, half, q) * stride);
}

/* The parts of both halves with those that hold their conjugate bins; `s` runs over their bins. */
#define FOR_PARTS(p, half, q) \
    for (int half = 0; half < 2; half++) \
        for (int q = 0; q < (p)->pass[0].radix; q++) \
            if (q <= mate(p, half, q))
#define FOR_BINS(p, half, q, s) for (int s = (p)->start[half][q] * (p)->last; s < (p)->start[half][(q) + 1] * (p)->last; s++)

INLINE element *at(const plan *p, element *x, int half, int s, int which) {
    return x + (size_t)half * p->half + p->pair[2 * s + which];
}

/* One block of two images times the spectrum k of their channels, between the last pass (if `transformed`, done already) and its inverse. */
INLINE void multiply_block(element *x, const element *k, float sign, int reversed, int transformed, int r) {
    element a[8];
    EACH(r, a[j] = x[j];);
    if (!transformed) dft(a, r, 0);
    EACH(r, {
        element c = k[reversed ? r - 1 - j : j];
        c.im *= sign;
        a[j] = product(a[j], c);
    });
    dft(a, r, 1);
    EACH(r, x[j] = a[j];);
}

INLINE void multiply_blocks(const plan *p, int half, int q, element *x, const element *k, float sign, int transformed, int r) {
    x += (size_t)half * p->half;
    for (int b = p->start[half][q]; b < p->start[half][q + 1]; b++) {
        int first = p->block[2 * b], second = p->block[2 * b + 1];
        multiply_block(x + first, k + (size_t)b * r, sign, 0, transformed, r);
        if (second != first) multiply_block(x + second, k + (size_t)b * r, -sign, 1, transformed, r);
    }
}

/* Two images, whose last pass is still to be done, times the spectrum k of their channels, and that pass undone. */
static void multiply_images(const plan *p, int half, int q, element *x, const element *k, float sign) {
    WITH_RADIX(p->last, multiply_blocks, p, half, q, x, k, sign, 0)
}

/* The same where the last pass is done. */
static void multiply_bins(const plan *p, int half, int q, element *x, const element *k, float sign) {
    WITH_RADIX(p->last, multiply_blocks, p, half, q, x, k, sign, 1)
}

/* Two blocks of channels of one image, each times its own spectrum: U1 = (z + conj y) / 2, U2 = (z - conj y) / 2i. */
static void multiply_channels(const plan *p, int half, int q, element *x, const element *k1, const element *k2, float sign) {
    FOR_BINS(p, half, q, s) {
        element *z = at(p, x, half, s, 0), *y = at(p, x, half, s, 1);
        if (z > y) continue; /* of a block that is its own mate: done */
        element sum = {0.5f * (k1[s].re + k2[s].re), 0.5f * sign * (k1[s].im + k2[s].im)};
        element difference = {0.5f * (k1[s].re - k2[s].re), 0.5f * sign * (k1[s].im - k2[s].im)};
        element a = *z, b = *y;
        *z = plus(product(a, sum), product(conjugate(b), difference));
        if (y != z) *y = plus(product(b, conjugate(sum)), product(conjugate(a), conjugate(difference)));
    }
}

INLINE int block_width(const task *t, int block) {
    int rest = t->channels - block * LANES;
    return rest < LANES ? rest : LANES;
}

INLINE size_t offset_of(const task *t, int image, int block) {
    return (size_t)image * t->plan->rows * t->channels + (size_t)block * LANES;
}

INLINE source source_of(const task *t, const float *data, int image, int block) {
    return image < t->batch ? (source){data + offset_of(t, image, block), block_width(t, block)} : (source){NULL, 0};
}

INLINE target target_of(const task *t, int image, int block) {
    if (image >= t->batch) return (target){NULL, NULL, (vec){0}, 0};
    size_t offset = offset_of(t, image, block);
    int width = block_width(t, block);
    vec bias = {0};
    if (t->bias) bias = load(t->bias + image * t->bias_stride + (size_t)block * LANES, width);
    return (target){t->out + offset, t->addend ? t->addend + offset : NULL, bias, width};
}

INLINE const element *spectrum_of(const task *t, int block) {
    return (const element *)t->spectrum + (size_t)block * t->plan->bins;
}

/* Convolve block a of image i and block b of image k, where i = k or a = b; image k may lie outside the batch. */
static void convolve_pair(const task *t, int i, int a, int k, int b, element *x) {
    const plan *p = t->plan;
    float sign = t->conjugate ? -1 : 1;
    load_pass(p, source_of(t, t->x, i, a), source_of(t, t->x, k, b), t->channels, x);
    FOR_PARTS(p, half, q) {
        int end = a == b ? p->passes - 1 : p->passes;
        forward_parts(p, half, q, end, x);
        if (a == b) multiply_images(p, half, q, x, spectrum_of(t, a), sign);
        else multiply_channels(p, half, q, x, spectrum_of(t, a), spectrum_of(t, b), sign);
        inverse_parts(p, half, q, end, x);
    }
    int finite = store_pass(p, x, target_of(t, i, a), target_of(t, k, b), t->channels);
    if (!finite && k < t->batch) { /* not to infect one another: each once more, alone */
        convolve_pair(t, i, a, t->batch, a, x);
        convolve_pair(t, k, b, t->batch, b, x);
    }
}

/* Items: pairs of images for each block; then, of a last image without a partner, pairs of blocks. */
static void convolve(const task *t, int item, float *scratch) {
    int pairs = t->batch / 2;
    if (item < t->blocks * pairs) {
        int block = item / pairs, i = item % pairs * 2;
        convolve_pair(t, i, block, i + 1, block, (element *)scratch);
    } else {
        int block = (item - t->blocks * pairs) * 2, last = t->batch - 1;
        if (block + 1 < t->blocks) convolve_pair(t, last, block, last, block + 1, (element *)scratch);
        else convolve_pair(t, last, block, t->batch, block, (element *)scratch);
    }
}

/* The input's gradient, one pair of images. With `sum`, adds conj(U) G of both images to it, and behind its end the sum of g. */
static int differentiate_pair(const task *t, int i, int k, int block, element *x, element *g, element *sum) {
    const plan *p = t->plan;
    const element *kernel = spectrum_of(t, block);
    if (sum) load_pass(p, source_of(t, t->x, i, block), source_of(t, t->x, k, block), t->channels, x);
    load_pass(p, source_of(t, t->g, i, block), source_of(t, t->g, k, block), t->channels, g);
    FOR_PARTS(p, half, q) {
        forward_parts(p, half, q, p->passes, g);
        if (sum) {
            forward_parts(p, half, q, p->passes, x);
            FOR_BINS(p, half, q, s) {
                element u = *at(p, x, half, s, 0), v = *at(p, x, half, s, 1), a = *at(p, g, half, s, 0), b = *at(p, g, half, s, 1);
                sum[s] = plus(sum[s], plus(product(conjugate(u), a), product(v, conjugate(b)))); /* twice the sum */
            }
        }
        if (half == 0 && q == 0 && sum) sum[p->bins].re += g[0].re + g[0].im;
        if (!t->out) continue;
        multiply_bins(p, half, q, g, kernel, -1);
        inverse_parts(p, half, q, p->passes - 1, g);
    }
    return !t->out || store_pass(p, g, target_of(t, i, block), target_of(t, k, block), t->channels);
}

/* Items: the parts of the batch for each block of channels. */
static void differentiate(const task *t, int item, float *scratch) {
    const plan *p = t->plan;
    int block = item / t->splits, split = item % t->splits, pairs = (t->batch + 1) / 2;
    int first = (int)((long long)pairs * split / t->splits), last = (int)((long long)pairs * (split + 1) / t->splits);
    element *x = (element *)scratch, *g = x + 2 * (size_t)p->half;
    element *sum = t->partial ? (element *)t->partial + (size_t)item * (p->bins + 1) : NULL;
    if (sum) memset(sum, 0, sizeof(element) * (p->bins + 1));
    for (int i = 2 * first; i < 2 * last; i += 2) {
        if (!differentiate_pair(t, i, i + 1, block, x, g, sum) && i + 1 < t->batch) {
            differentiate_pair(t, i, t->batch, block, x, g, NULL);
            differentiate_pair(t, i + 1, t->batch, block, x, g, NULL);
        }
    }
}

INLINE float *tap(const task *t, float *kernel, int direction, int channel) {
    return kernel + ((size_t)direction * t->channels + channel) * t->plan->length;
}

/* A block's sum over the batch from those of its parts. */
static element *sum_of(const task *t, int block) {
    int size = t->plan->bins + 1;
    element *sum = (element *)t->partial + (size_t)block * t->splits * size;
    for (int split = 1; split < t->splits; split++)
        for (int s = 0; s < size; s++) sum[s] = plus(sum[s], sum[(size_t)split * size + s]);
    if (t->out_sum) store(t->out_sum + (size_t)block * LANES, sum[size - 1].re, block_width(t, block));
    return sum;
}

/* The kernel's gradient in one or two blocks of channels from a on, as real and imaginary part. */
static void collect_blocks(const task *t, int a, int blocks, element *const *sums, element *x) {
    const plan *p = t->plan;
    int half = p->half, length = p->length;
    const float scale = 0.25f / half; /* 1 / 2M, and half of twice the sum */
    FOR_PARTS(p, odd, q) {
        FOR_BINS(p, odd, q, s) {
            element c = sums[0][s], d = {(vec){0}, (vec){0}};
            if (blocks == 2) d = sums[1][s];
            *at(p, x, odd, s, 0) = times((element){c.re - d.im, c.im + d.re}, scale, 0);
            *at(p, x, odd, s, 1) = times((element){c.re + d.im, d.re - c.im}, scale, 0);
        }
        inverse_parts(p, odd, q, p->passes, x);
    }
    inverse_pass(x, 1, p->pass);
    inverse_pass(x + half, 1, p->pass);
    for (int j = 0; j < half; j++) { /* taps j and j - M */
        element y = x[j], z = times(x[half + j], p->twist[2 * j], -p->twist[2 * j + 1]);
        x[j] = plus(y, z), x[half + j] = minus(y, z);
    }
    if (blocks == 2 && !is_finite(x[0])) {
        collect_blocks(t, a, 1, sums, x);
        collect_blocks(t, a + 1, 1, sums + 1, x);
        return;
    }
    for (int which = 0; which < blocks; which++) {
        for (int lane = 0; lane < block_width(t, a + which); lane++) {
            int channel = (a + which) * LANES + lane;
            const float *column = (const float *)x + which * LANES + lane;
            float *to = tap(t, t->out_kernel, 0, channel);
            for (int j = 0; j < length; j++) to[j] = column[(size_t)j * 2 * LANES];
            if (t->directions == 1) continue;
            to = tap(t, t->out_kernel, 1, channel);
            for (int m = 0; m < length - 1; m++) to[m] = column[(size_t)(2 * half - 1 - m) * 2 * LANES];
            to[length - 1] = 0;
        }
    }
}

/* Items: pairs of blocks. */
static void collect(const task *t, int item, float *scratch) {
    int a = 2 * item, blocks = a + 1 < t->blocks ? 2 : 1;
    element *sums[2] = {sum_of(t, a), blocks == 2 ? sum_of(t, a + 1) : NULL};
    if (t->out_kernel) collect_blocks(t, a, blocks, sums, (element *)scratch);
}

/* The spectrum of a kernel in one or two blocks of channels from a on, as real and imaginary part. */
static void analyse_blocks(const task *t, int a, int blocks, element *x) {
    const plan *p = t->plan;
    int half = p->half, length = p->length;
    memset(x, 0, sizeof(element) * 2 * half);
    for (int which = 0; which < blocks; which++) {
        for (int lane = 0; lane < block_width(t, a + which); lane++) {
            int channel = (a + which) * LANES + lane;
            float *column = (float *)x + which * LANES + lane;
            const float *from = tap(t, (float *)t->kernel, 0, channel);
            for (int j = 0; j < length; j++) column[(size_t)j * 2 * LANES] = from[j];
            if (t->directions == 1) continue;
            from = tap(t, (float *)t->kernel, 1, channel);
            for (int m = 0; m < length - 1; m++) column[(size_t)(2 * half - 1 - m) * 2 * LANES] = from[m];
        }
    }
    for (int j = 0; j < half; j++) {
        element y = x[j], z = x[half + j];
        x[j] = plus(y, z), x[half + j] = times(minus(y, z), p->twist[2 * j], p->twist[2 * j + 1]);
    }
    forward_pass(x, 1, p->pass);
    forward_pass(x + half, 1, p->pass);
    const float scale = 0.25f / half; /* 1 / 2M, and half of the sums below */
    element *first = (element *)t->out_spectrum + (size_t)a * p->bins, *second = first + p->bins;
    FOR_PARTS(p, odd, q) {
        forward_parts(p, odd, q, p->passes, x);
        FOR_BINS(p, odd, q, s) {
            element u = *at(p, x, odd, s, 0), v = conjugate(*at(p, x, odd, s, 1));
            first[s] = times(plus(u, v), scale, 0);
            if (blocks == 2) second[s] = times(turn(minus(u, v), 0), scale, 0);
        }
    }
    if (blocks == 2 && !(is_finite(first[0]) && is_finite(second[0]))) {
        analyse_blocks(t, a, 1, x);
        analyse_blocks(t, a + 1, 1, x);
    }
}

/* Items: pairs of blocks. */
static void analyse_kernel(const task *t, int item, float *scratch) {
    analyse_blocks(t, 2 * item, 2 * item + 1 < t->blocks ? 2 : 1, (element *)scratch);
}

/* Bins in natural order to those of a spectrum; items: blocks. */
static void pack(const task *t, int item, float *scratch) {
    const plan *p = t->plan;
    element *to = (element *)t->out_spectrum + (size_t)item * p->bins;
    (void)scratch;
    memset(to, 0, sizeof(element) * p->bins);
    for (int lane = 0; lane < block_width(t, item); lane++) {
        const float *from = t->natural + ((size_t)item * LANES + lane) * (p->half + 1) * t->parts;
        float *column = (float *)to + lane, scale = 0.5f / p->half;
        for (int s = 0; s < p->bins; s++) {
            int bin = p->bin[s], number = bin < 0 ? -bin : bin;
            column[(size_t)s * 2 * LANES] = scale * from[(size_t)number * t->parts];
            if (t->parts == 2) column[(size_t)s * 2 * LANES + LANES] = (bin < 0 ? -scale : scale) * from[(size_t)number * 2 + 1];
        }
    }
}

/* The energy of each bin over a part of the batch, and each image's sum; items as in `differentiate`. */
static void measure(const task *t, int item, float *scratch) {
    const plan *p = t->plan;
    int block = item / t->splits, split = item % t->splits, pairs = (t->batch + 1) / 2, width = block_width(t, block);
    int first = (int)((long long)pairs * split / t->splits), last = (int)((long long)pairs * (split + 1) / t->splits);
    element *x = (element *)scratch;
    vec *power = (vec *)t->partial + (size_t)item * p->bins;
    memset(power, 0, sizeof(vec) * p->bins);
    for (int i = 2 * first; i < 2 * last; i += 2) {
        load_pass(p, source_of(t, t->x, i, block), source_of(t, t->x, i + 1, block), t->channels, x);
        FOR_PARTS(p, half, q) {
            forward_parts(p, half, q, p->passes, x);
            FOR_BINS(p, half, q, s) {
                element u = *at(p, x, half, s, 0), v = *at(p, x, half, s, 1);
                power[s] += 0.5f * (u.re * u.re + u.im * u.im + v.re * v.re + v.im * v.im);
            }
        }
        float *sum = t->out_sum + (size_t)i * t->channels + (size_t)block * LANES;
        store(sum, x[0].re, width);
        if (i + 1 < t->batch) store(sum + t->channels, x[0].im, width);
    }
}

/* The energies in natural order; items: blocks. */
static void collect_power(const task *t, int item, float *scratch) {
    const plan *p = t->plan;
    vec *power = (vec *)t->partial + (size_t)item * t->splits * p->bins;
    (void)scratch;
    for (int split = 1; split < t->splits; split++)
        for (int s = 0; s < p->bins; s++) power[s] += power[(size_t)split * p->bins + s];
    for (int lane = 0; lane < block_width(t, item); lane++) {
        float *to = t->out_power + ((size_t)item * LANES + lane) * (p->half + 1);
        for (int s = 0; s < p->bins; s++) to[p->bin[s] < 0 ? -p->bin[s] : p->bin[s]] = ((const float *)(power + s))[lane];
    }
}

typedef unsigned long long words __attribute__((vector_size(64)));

/* A hash of a part of memory: each of eight lanes keeps a sum of products, in which a word's place counts, and a rotated sum, which no
 * single change leaves as it was. Items: parts of HASHED_AT_ONCE bytes. */
static void hash_part(const task *t, int item, float *scratch) {
    size_t start = (size_t)item * HASHED_AT_ONCE, size = t->size - start;
    const char *bytes = (const char *)t->x + start;
    words key = {0x9e3779b97f4a7c15ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull, 0xd6e8feb86659fd93ull,
                 0xa0761d6478bd642full, 0xe7037ed1a0b428dbull, 0x8ebc6af09c88c6e3ull, 0x589965cc75374cc3ull};
    (void)scratch;
    if (size > HASHED_AT_ONCE) size = HASHED_AT_ONCE;
    words sums[2] = {{0}, {size}};
    for (size_t at = 0; at < size; at += sizeof(words)) {
        words word = {0};
        if (size - at >= sizeof word) memcpy(&word, bytes + at, sizeof word);
        else memcpy(&word, bytes + at, size - at);
        words mixed = word + key;
        sums[0] += (mixed & 0xffffffffull) * (mixed >> 32);
        sums[1] = (sums[1] << 13 | sums[1] >> 51) + word;
        key += 0x9e3779b97f4a7c15ull;
    }
    t->hashes[item] = gconv_fold((const unsigned long long *)sums, 16);
}

const instruction_set TABLE = {LANES,  convolve, differentiate, collect,   analyse_kernel,
                               pack,   measure,  collect_power, hash_part};
