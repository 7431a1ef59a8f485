/* The CPU kernel under the sanitizers, against direct sums in double precision: `make sanitize`.
 *
 * Buffers are allocated to the exact size, so that one element too far is an error, and the work is done by a team of four threads.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct plan plan;
typedef void team(void (*function)(void *), void *data, unsigned threads, unsigned flags);
plan *gconv_make_plan(int height, int width, int gap, int half);
void gconv_free_plan(plan *p);
int gconv_bins(const plan *p);
int gconv_lanes(const plan *p);
int gconv_spectrum(const plan *, const float *kernel, int directions, int channels, float *spectrum, int threads, team *);
int gconv_pack(const plan *, const float *bins, int parts, int channels, float *spectrum, int threads, team *);
int gconv_convolve(const plan *, const float *x, const float *spectrum, const float *bias, int per_image, const float *addend, float *y,
                   int batch, int channels, int threads, team *);
int gconv_differentiate(const plan *, const float *g, const float *x, const float *spectrum, int directions, float *dx, float *dkernel,
                        float *dbias, int batch, int channels, int threads, team *);
int gconv_power(const plan *, const float *x, float *power, float *sum, int batch, int channels, int threads, team *);
int gconv_hash(const void *bytes, size_t size, unsigned long long *result, int threads, team *);

enum { THREADS = 4 };
typedef struct {
    void (*function)(void *);
    void *data;
} call;

static void *enter(void *argument) {
    call *c = argument;
    c->function(c->data);
    return NULL;
}

static void start(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
    pthread_t thread[THREADS];
    call c = {function, data};
    (void)flags;
    for (unsigned i = 0; i < threads; i++) pthread_create(thread + i, NULL, enter, &c);
    for (unsigned i = 0; i < threads; i++) pthread_join(thread[i], NULL);
}

static float *floats(size_t count, int random) {
    float *values = malloc(sizeof(float) * count);
    for (size_t i = 0; i < count; i++) values[i] = random ? (float)rand() / RAND_MAX - 0.5f : 0;
    return values;
}

static double worst;

static void compare(const char *what, const float *actual, const double *expected, size_t count) {
    double error = 0, norm = 1e-30;
    for (size_t i = 0; i < count; i++) error += pow(actual[i] - expected[i], 2), norm += pow(expected[i], 2);
    error = sqrt(error / norm);
    if (error > worst) worst = error;
    if (!(error < 1e-5)) printf("%s: relative error %g\n", what, error), exit(1);
}

/* Smallest M >= length without prime factors above 7. */
static int good_half(int length) {
    for (int half = length;; half++) {
        int rest = half;
        for (int i = 0; i < 4; i++)
            while (rest % (int[]){2, 3, 5, 7}[i] == 0) rest /= (int[]){2, 3, 5, 7}[i];
        if (rest == 1) return half;
    }
}

/* y = x * kernel, and with g the gradients dx and dk, as sums over all pairs of elements. */
static void direct(const float *x, const float *k, const float *g, double *y, double *dx, double *dk, int B, int C, int D, int H, int W,
                   int gap) {
    int L = H * (W + gap), rows = H * W;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < rows; t++)
            for (int s = 0; s < rows; s++)
                for (int c = 0; c < C; c++) {
                    int offset = t / W * (W + gap) + t % W - s / W * (W + gap) - s % W;
                    if (offset < 0 && D == 1) continue;
                    size_t tap = offset >= 0 ? (size_t)c * L + offset : ((size_t)C + c) * L - offset - 1;
                    size_t to = ((size_t)b * rows + t) * C + c, from = ((size_t)b * rows + s) * C + c;
                    y[to] += (double)k[tap] * x[from];
                    dx[from] += (double)k[tap] * g[to];
                    dk[tap] += (double)g[to] * x[from];
                }
}

static void check(int B, int C, int D, int H, int W, int gap) {
    int L = H * (W + gap), rows = H * W, half = good_half(L);
    size_t size = (size_t)B * rows * C, taps = (size_t)D * C * L;
    plan *p = gconv_make_plan(H, W, gap, half);
    size_t packed = (size_t)(C + gconv_lanes(p) - 1) / gconv_lanes(p) * gconv_bins(p) * 2 * gconv_lanes(p);
    float *x = floats(size, 1), *g = floats(size, 1), *k = floats(taps, 1), *spectrum = floats(packed, 0), *zero = floats((size_t)B * C, 0);
    float *y = floats(size, 0), *dx = floats(size, 0), *dk = floats(taps, 0), *db = floats(C, 0);
    float *power = floats((size_t)C * (half + 1), 0), *sum = floats((size_t)B * C, 0);
    double *expected = calloc(2 * size + taps, sizeof(double));
    direct(x, k, g, expected, expected + size, expected + 2 * size, B, C, D, H, W, gap);
    int failed = gconv_spectrum(p, k, D, C, spectrum, THREADS, start);
    failed |= gconv_convolve(p, x, spectrum, zero, B % 2, g, y, B, C, THREADS, start);
    for (size_t i = 0; i < size; i++) y[i] -= g[i];
    failed |= gconv_differentiate(p, g, x, spectrum, D, dx, dk, db, B, C, THREADS, start);
    failed |= gconv_power(p, x, power, sum, B, C, THREADS, start);
    failed |= gconv_pack(p, power, 1, C, spectrum, THREADS, start);
    unsigned long long hash[2];
    failed |= gconv_hash(x, sizeof(float) * size, hash, 1, NULL) | gconv_hash(x, sizeof(float) * size, hash + 1, THREADS, start);
    if (failed || hash[0] != hash[1]) printf("failed\n"), exit(1);
    compare("y", y, expected, size);
    compare("dx", dx, expected + size, size);
    compare("dkernel", dk, expected + 2 * size, taps);
    gconv_free_plan(p);
    float *all[] = {x, g, k, spectrum, zero, y, dx, dk, db, power, sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(expected);
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 200;
    for (int i = 0; i < rounds; i++)
        check(1 + rand() % 5, 1 + rand() % 35, 1 + rand() % 2, 1 + rand() % 9, 1 + rand() % 9, rand() % 2 * (rand() % 4));
    check(2, 3, 2, 28, 28, 0);
    check(1, 17, 2, 25, 31, 3);
    printf("%d random cases, worst relative error %.1e\n", rounds, worst);
    return 0;
}
