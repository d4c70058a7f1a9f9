// The arithmetic of a decoding step. native.cpp includes this file once for each instruction set, in a namespace.
//
// A weight is stored in panels of 8 outputs. A panel is a row of blocks, one for each 32 inputs: 8 scales in float16,
// then 8 groups of 4 inputs, each with the 4 weights of output 0, those of output 1, and so on. Inputs are rounded
// to 16 bits in blocks of 32: on these instruction sets that takes no longer than 8 bits, and loses nothing.

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(16)));

// Adding 1.5 x 2^23 to a number below 2^22 leaves the nearest integer in its lowest bits, ties to even.
constexpr float ROUNDING = 12582912.0f;
constexpr int32_t ROUNDING_BITS = 0x4B400000;

static inline Floats load(const float* from) {
    Floats values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
}

static inline void store(float* to, Floats values) { __builtin_memcpy(to, &values, sizeof values); }

static inline Floats all(float value) { return Floats{value, value, value, value, value, value, value, value}; }

static inline float sum(Floats v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

static inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// Rounds 32 numbers to 16 bits: the largest becomes 32767 or -32767. A number that is not finite makes the scale NaN.
static inline float quantize_block(const float* x, int16_t* quantized) {
    Floats largest = all(0), probe = all(0);
    for (int i = 0; i < BLOCK; i += 8) {
        const Floats values = load(x + i);
        largest = larger(largest, larger(values, -values));
        probe += values * 0;
    }
    float magnitude = 0;
    for (int i = 0; i < 8; i++) magnitude = largest[i] > magnitude ? largest[i] : magnitude;
    const Floats inverse = all(magnitude > 0 ? LARGEST_INPUT / magnitude : 0);
    for (int i = 0; i < BLOCK; i += 8) {
        const Floats rounded = load(x + i) * inverse + ROUNDING;
        const Ints bits = (Ints)rounded - ROUNDING_BITS;
        const Shorts shorts = __builtin_convertvector(bits, Shorts);
        __builtin_memcpy(quantized + i, &shorts, sizeof shorts);
    }
    return magnitude / LARGEST_INPUT + sum(probe);
}

// Quantizes a row in blocks. The last one is filled up with zeros.
static void quantize(const float* x, int count, int16_t* quantized, float* scales) {
    const int whole = count / BLOCK;
    for (int block = 0; block < whole; block++)
        scales[block] = quantize_block(x + block * BLOCK, quantized + block * BLOCK);
    if (count % BLOCK) {
        float rest[BLOCK] = {};
        __builtin_memcpy(rest, x + whole * BLOCK, (count % BLOCK) * sizeof(float));
        scales[whole] = quantize_block(rest, quantized + whole * BLOCK);
    }
}

#if defined(MEMLM_AVX2)

// Adds the products of 4 inputs and the weights of 4 outputs, in pairs.
static inline __m256i add_products(__m256i sums, __m256i weights, __m256i inputs) {
#if defined(MEMLM_VNNI)
    return _mm256_dpwssd_epi32(sums, weights, inputs);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, inputs));
#endif
}

// A panel's products with ROWS rows of inputs.
template <int ROWS>
static inline void multiply(const uint8_t* panel, int num_blocks, const int16_t* inputs, int64_t input_stride,
                            const float* scales, int64_t scale_stride, Floats* results) {
    __m256 totals[ROWS];
    for (int row = 0; row < ROWS; row++) totals[row] = _mm256_setzero_ps();
    for (int block = 0; block < num_blocks; block++, panel += BLOCK_BYTES) {
        __m256i low[ROWS], high[ROWS];  // of outputs 0 to 3 and 4 to 7, two sums each
        for (int row = 0; row < ROWS; row++) low[row] = high[row] = _mm256_setzero_si256();
        for (int group = 0; group < BLOCK / GROUP; group++) {
            const __m128i* at = reinterpret_cast<const __m128i*>(panel + OUTPUTS * 2 + group * OUTPUTS * GROUP);
            const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
            const __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1));
            for (int row = 0; row < ROWS; row++) {
                int64_t four;
                __builtin_memcpy(&four, inputs + row * input_stride + block * BLOCK + group * GROUP, sizeof four);
                const __m256i x = _mm256_set1_epi64x(four);
                low[row] = add_products(low[row], first, x);
                high[row] = add_products(high[row], second, x);
            }
        }
        const __m256 weight_scales = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel)));
        for (int row = 0; row < ROWS; row++) {
            // The sums of outputs 0, 1, 4, 5, 2, 3, 6, 7, then in order.
            const __m256i mixed = _mm256_hadd_epi32(low[row], high[row]);
            const __m256i sums = _mm256_permute4x64_epi64(mixed, 0xD8);
            const __m256 scale = _mm256_mul_ps(weight_scales, _mm256_set1_ps(scales[row * scale_stride + block]));
            totals[row] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, totals[row]);
        }
    }
    for (int row = 0; row < ROWS; row++) results[row] = reinterpret_cast<Floats&>(totals[row]);
}

#else

template <int ROWS>
static inline void multiply(const uint8_t* panel, int num_blocks, const int16_t* inputs, int64_t input_stride,
                            const float* scales, int64_t scale_stride, Floats* results) {
    for (int row = 0; row < ROWS; row++) results[row] = all(0);
    for (int block = 0; block < num_blocks; block++, panel += BLOCK_BYTES) {
        Floats weight_scales;
        for (int output = 0; output < OUTPUTS; output++) {
            uint16_t half;
            __builtin_memcpy(&half, panel + output * 2, sizeof half);
            weight_scales[output] = from_half(half);
        }
        const int8_t* weights = reinterpret_cast<const int8_t*>(panel + OUTPUTS * 2);
        for (int row = 0; row < ROWS; row++) {
            const int16_t* x = inputs + row * input_stride + block * BLOCK;
            int32_t sums[OUTPUTS] = {};
            for (int group = 0; group < BLOCK / GROUP; group++)
                for (int output = 0; output < OUTPUTS; output++)
                    for (int i = 0; i < GROUP; i++)
                        sums[output] += x[group * GROUP + i] * weights[(group * OUTPUTS + output) * GROUP + i];
            Floats products;
            for (int output = 0; output < OUTPUTS; output++) products[output] = static_cast<float>(sums[output]);
            results[row] += products * weight_scales * all(scales[row * scale_stride + block]);
        }
    }
}

#endif

// y = x W' + b for some panels, or y += x W' + b.
static void multiply_panels(const Matrix& matrix, int first, int last, const Quantized& x, float* y, int64_t stride,
                            bool adds) {
    const int num_blocks = (matrix.in_features + BLOCK - 1) / BLOCK;
    for (int panel = first; panel < last; panel++) {
        const uint8_t* weights = matrix.panels + static_cast<int64_t>(panel) * num_blocks * BLOCK_BYTES;
        const int begin = panel * OUTPUTS;
        const int size = matrix.out_features - begin < OUTPUTS ? matrix.out_features - begin : OUTPUTS;
        for (int row = 0; row < x.num_rows;) {
            Floats results[4];
            const int left = x.num_rows - row, rows = left >= 4 ? 4 : left;
            const int16_t* inputs = x.values + row * x.stride();
            const float* scales = x.scales + row * x.num_blocks;
            if (rows == 4) multiply<4>(weights, num_blocks, inputs, x.stride(), scales, x.num_blocks, results);
            else if (rows == 3) multiply<3>(weights, num_blocks, inputs, x.stride(), scales, x.num_blocks, results);
            else if (rows == 2) multiply<2>(weights, num_blocks, inputs, x.stride(), scales, x.num_blocks, results);
            else multiply<1>(weights, num_blocks, inputs, x.stride(), scales, x.num_blocks, results);
            for (int i = 0; i < rows; i++) {
                float* to = y + (row + i) * stride + begin;
                for (int output = 0; output < size; output++) {
                    const float bias = matrix.bias ? matrix.bias[begin + output] : 0;
                    to[output] = results[i][output] + bias + (adds ? to[output] : 0);
                }
            }
            row += rows;
        }
    }
}

// e^x to some 2e-7, relative. x below -87 gives 1.6e-38.
static inline float exponential(float x) {
    x = x > 88 ? 88 : x < -87 ? -87 : x;
    const float shifted = x * 1.44269504f + ROUNDING, whole = shifted - ROUNDING;
    const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1;
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - ROUNDING_BITS + 127) << 23;
    float scale;
    __builtin_memcpy(&scale, &bits, sizeof scale);
    return power * scale;
}

static inline float gelu_tanh(float x) {
    const float inner = 1.59576912f * (x + 0.044715f * x * x * x);  // twice the argument of tanh
    return x / (1 + exponential(-inner));
}

static void activate(int kind, const float* x, int size, float* y) {
    if (kind == SWIGLU) {
        for (int i = 0; i < size; i++) y[i] = x[i] / (1 + exponential(-x[i])) * x[size + i];
    } else if (kind == GEGLU) {
        for (int i = 0; i < size; i++) y[i] = gelu_tanh(x[i]) * x[size + i];
    } else if (kind == GELU_TANH) {
        for (int i = 0; i < size; i++) y[i] = gelu_tanh(x[i]);
    } else if (kind == GELU) {
        for (int i = 0; i < size; i++) y[i] = 0.5f * x[i] * (1 + __builtin_erff(x[i] * 0.70710678f));
    } else {
        for (int i = 0; i < size; i++) y[i] = x[i] > 0 ? x[i] : 0;
    }
}

static inline float dot(const float* x, const float* y, int size) {
    Floats totals = all(0);
    int i = 0;
    for (; i + 8 <= size; i += 8) totals += load(x + i) * load(y + i);
    float total = sum(totals);
    for (; i < size; i++) total += x[i] * y[i];
    return total;
}

static void normalize(const Norm& norm, const float* x, int size, float* y) {
    float mean = 0;
    if (norm.centers) {
        double total = 0;
        for (int i = 0; i < size; i++) total += x[i];
        mean = static_cast<float>(total / size);
    }
    for (int i = 0; i < size; i++) y[i] = x[i] - mean;
    const float factor = 1 / __builtin_sqrtf(dot(y, y, size) / size + norm.epsilon);
    for (int i = 0; i < size; i++) y[i] = y[i] * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
}

// softmax(q k) v over `count` places. `scores` has room for them. Places and heads are 8n numbers wide.
static void attend(const float* query, const float* keys, const float* values, int count, int size, float* scores,
                   float* mixed) {
    float largest = -__builtin_inff(), total = 0;
    for (int place = 0; place < count; place++) {
        scores[place] = dot(query, keys + static_cast<int64_t>(place) * size, size);
        largest = scores[place] > largest ? scores[place] : largest;
    }
    for (int place = 0; place < count; place++) scores[place] = exponential(scores[place] - largest);
    for (int place = 0; place < count; place++) total += scores[place];
    const Floats factor = all(1 / total);
    for (int begin = 0; begin < size; begin += 32) {
        const int vectors = size - begin < 32 ? (size - begin) / 8 : 4;
        Floats sums[4] = {all(0), all(0), all(0), all(0)};
        const float* at = values + begin;
        if (vectors == 4) {
            for (int place = 0; place < count; place++, at += size) {
                const Floats weight = all(scores[place]);
                for (int i = 0; i < 4; i++) sums[i] += weight * load(at + 8 * i);
            }
        } else {
            for (int place = 0; place < count; place++, at += size)
                for (int i = 0; i < vectors; i++) sums[i] += all(scores[place]) * load(at + 8 * i);
        }
        for (int i = 0; i < vectors; i++) store(mixed + begin + 8 * i, sums[i] * factor);
    }
}

// Turns the first `size` numbers of a head by the cosines and sines of its position (memlm/model/positions.py).
static void rotate(float* head, const float* cosines, const float* sines, int size, float* scratch) {
    for (int i = 0; i < size; i++) scratch[i] = head[i];
    const int half = size / 2;
    for (int i = 0; i < half; i++) {
        head[i] = scratch[i] * cosines[i] + scratch[half + i] * sines[i];
        head[half + i] = scratch[half + i] * cosines[half + i] + scratch[i] * sines[half + i];
    }
}
