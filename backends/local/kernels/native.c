/* The compiled kernels of the local engine: what a step does between its matrix products, in bfloat16.

   `native.py` compiles and calls this file; `torch_kernels.py` says the same in torch and is what runs without a
   compiler. Where transformers rounds to bfloat16, so does this; sums are float32. Every row's sums are taken in the
   same order whatever the number of rows or threads, so a sequence's numbers do not depend on its neighbours.

   Vectors are GCC's: 16 floats, which the compiler maps to what the machine has. OpenMP's threads are torch's own.
   Sizes are checked by the caller: head sizes and inner dimensions are multiples of 16. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define SPLIT 256      /* keys to a partial softmax: fixed, or the order of sums would depend on the batch */
#define GROUP_MAX 16   /* query heads to a key head */
#define HEAD_MAX 256   /* floats a head */
#define PARALLEL_ABOVE 16384 /* elements: below, waking a thread costs more than it brings */

typedef uint16_t bf16;
typedef float floats __attribute__((vector_size(64)));
typedef float half_floats __attribute__((vector_size(32)));
typedef float quarter_floats __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(16)));

static inline float widen(bf16 stored) {
    uint32_t bits = (uint32_t)stored << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float rounded(float value) { return widen(narrow(value)); }

static inline floats load_floats(const float *at) {
    floats value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline floats load_bf16(const bf16 *at) {
    halves stored;
    memcpy(&stored, at, sizeof stored);
    return (floats)(__builtin_convertvector(stored, words) << 16);
}

/* e4m3 has 4 bits of exponent with a bias of 7: in a float's place they are 120 too low. */
static inline floats load_fp8(const uint8_t *at) {
    bytes stored;
    memcpy(&stored, at, sizeof stored);
    words wide = __builtin_convertvector(stored, words);
    return (floats)(((wide & 0x80) << 24) | ((wide & 0x7f) << 20)) * 0x1p120f;
}

static inline float sum(floats value) {
    half_floats low, high;
    memcpy(&low, &value, sizeof low);
    memcpy(&high, (const char *)&value + sizeof low, sizeof high);
    low += high;
    quarter_floats first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (const char *)&low + sizeof first, sizeof second);
    first += second;
    return (first[0] + first[2]) + (first[1] + first[3]);
}

static inline floats choose(ints mask, floats yes, floats no) {
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

/* e to the x within two units in the last place: a power of two times a polynomial on half a step around zero. */
static inline floats exponential(floats x) {
    const floats zero = {0}, magic = zero + 12582912.0f;
    x = choose(x < -87.0f, zero - 87.0f, x);
    x = choose(x > 88.0f, zero + 88.0f, x);
    floats shifted = x * 1.44269504f + magic;
    floats whole = shifted - magic;
    floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats series = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    ints power = ((ints)shifted - (ints)magic + 127) << 23;
    return series * (floats)power;
}

/* ---- Root-mean-square norm, gate, rotation. ---- */

/* x += added first, if there is any. */
void pg_norm(bf16 *out, bf16 *x, const bf16 *added, const bf16 *weight, int64_t rows, int64_t width, float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ABOVE)
    for (int64_t m = 0; m < rows; m++) {
        bf16 *row = x + m * width;
        if (added)
            for (int64_t at = 0; at < width; at++) row[at] = narrow(widen(row[at]) + widen(added[m * width + at]));
        floats squares = {0};
        for (int64_t at = 0; at < width; at += LANES) {
            floats value = load_bf16(row + at);
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(sum(squares) / (float)width + epsilon);
        for (int64_t at = 0; at < width; at++)
            out[m * width + at] = narrow(rounded(widen(row[at]) * scale) * widen(weight[at]));
    }
}

/* silu(gate) * up; a row of `both` is all gates, then all ups. */
void pg_gate(bf16 *out, const bf16 *both, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ABOVE)
    for (int64_t m = 0; m < rows; m++) {
        const bf16 *gates = both + m * 2 * width, *ups = gates + width;
        for (int64_t at = 0; at < width; at += LANES) {
            floats gate = load_bf16(gates + at), up = load_bf16(ups + at);
            floats silu = gate / (1.0f + exponential(-gate));
            for (int lane = 0; lane < LANES; lane++)
                out[m * width + at + lane] = narrow(rounded(silu[lane]) * up[lane]);
        }
    }
}

static void rotate(bf16 *head, const bf16 *cosines, const bf16 *sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t at = 0; at < half; at++) {
        float first = widen(head[at]), second = widen(head[at + half]);
        head[at] = narrow(rounded(first * widen(cosines[at])) + rounded(second * widen(sines[at])));
        head[at + half] =
            narrow(rounded(second * widen(cosines[at + half])) + rounded(first * widen(sines[at + half])));
    }
}

/* One head's row as kv/fp8.py stores it. */
static void quantise(uint8_t *values, uint8_t *scale, const bf16 *row, int64_t size) {
    float largest = 0;
    for (int64_t at = 0; at < size; at++) largest = fmaxf(largest, fabsf(widen(row[at])));
    uint32_t bits;
    memcpy(&bits, &largest, 4);
    int exponent = (int)(bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000);
    if (largest == 0) exponent = -9;
    exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    *scale = (uint8_t)(exponent + 127);
    float shrink = ldexpf(1.0f, -exponent);
    for (int64_t at = 0; at < size; at++) {
        float value = widen(row[at]) * shrink;
        memcpy(&bits, &value, 4);
        uint8_t sign = (uint8_t)((bits >> 24) & 0x80);
        float magnitude = fabsf(value);
        bits &= 0x7fffffff;
        if (magnitude < 0x1p-6f)
            values[at] = sign | (uint8_t)rintf(magnitude * 512.0f);
        else
            values[at] = sign | (uint8_t)(((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3));
    }
}

/* Rotates a row's query and key heads where they are, then puts its keys and values into the slot of its token. */
void pg_rotate_store(bf16 *qkv, const bf16 *cosines, const bf16 *sines, const int64_t *positions, const int64_t *slots,
                     uint8_t *values, uint8_t *scales, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size) {
    int64_t stored = 2 * kv_heads, width = (heads + stored) * size;
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ABOVE)
    for (int64_t m = 0; m < rows; m++) {
        bf16 *row = qkv + m * width, *pair = row + heads * size;
        for (int64_t head = 0; head < heads + kv_heads; head++)
            rotate(row + head * size, cosines + positions[m] * size, sines + positions[m] * size, size);
        if (scales)
            for (int64_t head = 0; head < stored; head++)
                quantise(values + (slots[m] * stored + head) * size, scales + slots[m] * stored + head,
                         pair + head * size, size);
        else
            memcpy(values + slots[m] * stored * size * 2, pair, (size_t)(stored * size * 2));
    }
}

/* ---- Attention of decoding rows over their pages. ---- */

typedef struct {
    const uint8_t *values, *scales; /* of this layer; no scales: bfloat16 */
    const int32_t *table;           /* [rows, width]: the pages of each row */
    int64_t width, page_size, kv_heads;
} cache;

static inline int64_t slot_of(const cache *pool, int64_t row, int64_t key) {
    return (int64_t)pool->table[row * pool->width + key / pool->page_size] * pool->page_size + key % pool->page_size;
}

static inline floats load_cached(const cache *pool, int64_t at) {
    return pool->scales ? load_fp8(pool->values + at) : load_bf16((const bf16 *)pool->values + at);
}

static inline float cached_scale(const cache *pool, int64_t at) {
    if (!pool->scales) return 1.0f;
    uint32_t bits = (uint32_t)pool->scales[at] << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

/* The keys first … last - 1 of one key head for its `group` queries: weighted values, largest score, sum of weights. */
static inline __attribute__((always_inline)) void attend_split(float *partial, const float *queries, const cache *pool,
                                                               int64_t row, int64_t head, int64_t group, int64_t size,
                                                               int64_t first, int64_t last) {
    int64_t stored = 2 * pool->kv_heads, count = last - first, pieces = size / LANES;
    float scores[GROUP_MAX][SPLIT] __attribute__((aligned(64)));
    for (int64_t key = 0; key < count; key++) {
        int64_t at = slot_of(pool, row, first + key) * stored + head;
        floats keys[HEAD_MAX / LANES];
        for (int64_t i = 0; i < pieces; i++) keys[i] = load_cached(pool, at * size + i * LANES);
        float scale = cached_scale(pool, at);
        for (int64_t g = 0; g < group; g++) {
            floats products = {0};
            for (int64_t i = 0; i < pieces; i++) products += keys[i] * load_floats(queries + g * size + i * LANES);
            scores[g][key] = sum(products) * scale;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float largest = scores[g][0], total = 0;
        for (int64_t key = 1; key < count; key++) largest = fmaxf(largest, scores[g][key]);
        for (int64_t key = count; key % LANES; key++) scores[g][key] = -INFINITY;
        for (int64_t key = 0; key < count; key += LANES) {
            floats weights = exponential(load_floats(&scores[g][key]) - largest);
            memcpy(&scores[g][key], &weights, sizeof weights);
        }
        for (int64_t key = 0; key < count; key++) total += scores[g][key];
        partial[g * (size + 2) + size] = largest;
        partial[g * (size + 2) + size + 1] = total;
    }
    floats sums[GROUP_MAX][HEAD_MAX / LANES];
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < pieces; i++) sums[g][i] = (floats){0};
    for (int64_t key = 0; key < count; key++) {
        int64_t at = slot_of(pool, row, first + key) * stored + pool->kv_heads + head;
        float scale = cached_scale(pool, at);
        for (int64_t i = 0; i < pieces; i++) {
            floats value = load_cached(pool, at * size + i * LANES) * scale;
            for (int64_t g = 0; g < group; g++) sums[g][i] += value * scores[g][key];
        }
    }
    for (int64_t g = 0; g < group; g++) memcpy(partial + g * (size + 2), sums[g], (size_t)size * sizeof(float));
}

/* One query head: the partial softmaxes of its splits, put together. */
static void combine(bf16 *out, const float *partial, int64_t splits, int64_t stride, int64_t size) {
    float largest = partial[size], total = 0, sums[HEAD_MAX] = {0};
    for (int64_t split = 1; split < splits; split++) largest = fmaxf(largest, partial[split * stride + size]);
    for (int64_t split = 0; split < splits; split++) {
        const float *one = partial + split * stride;
        float share = expf(one[size] - largest);
        total += share * one[size + 1];
        for (int64_t at = 0; at < size; at++) sums[at] += share * one[at];
    }
    for (int64_t at = 0; at < size; at++) out[at] = narrow(sums[at] / total);
}

/* `qkv` as pg_rotate_store left it; `scratch` holds rows * kv_heads * splits * group * (size + 2) floats, where splits
   is what the longest row needs. */
void pg_attend(bf16 *out, const bf16 *qkv, const uint8_t *values, const uint8_t *scales, const int32_t *table,
               const int32_t *lengths, float *scratch, int64_t rows, int64_t width, int64_t splits, int64_t page_size,
               int64_t heads, int64_t kv_heads, int64_t size) {
    cache pool = {values, scales, table, width, page_size, kv_heads};
    int64_t group = heads / kv_heads, one = group * (size + 2), row_width = (heads + 2 * kv_heads) * size;
    float root = 1.0f / sqrtf((float)size);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < rows * kv_heads * splits; item++) {
            int64_t split = item % splits, head = item / splits % kv_heads, row = item / splits / kv_heads;
            int64_t first = split * SPLIT, last = first + SPLIT < lengths[row] ? first + SPLIT : lengths[row];
            if (first >= last) continue;
            float queries[GROUP_MAX * HEAD_MAX];
            const bf16 *from = qkv + row * row_width + head * group * size;
            for (int64_t at = 0; at < group * size; at++) queries[at] = widen(from[at]) * root;
            /* With its sizes known the compiler keeps the sums in registers. */
            if (size == 64 && group == 3)
                attend_split(scratch + item * one, queries, &pool, row, head, 3, 64, first, last);
            else
                attend_split(scratch + item * one, queries, &pool, row, head, group, size, first, last);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < rows * heads; item++) {
            int64_t row = item / heads, query = item % heads, head = query / group;
            const float *partial = scratch + (row * kv_heads + head) * splits * one + query % group * (size + 2);
            combine(out + item * size, partial, (lengths[row] + SPLIT - 1) / SPLIT, one, size);
        }
    }
}
