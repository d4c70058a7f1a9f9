// The arithmetic of a pass. native.cpp includes this file once for each instruction set, in a namespace.
//
// Inputs are rounded to 16 bits in blocks of 32: on these instruction sets that takes no longer than 8 bits, and loses
// nothing. The layout of weights is described in native.cpp.

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
// `sums` are those of both halves of the block, as they were rounded.
static inline float quantize_block(const float* x, int16_t* quantized, float* sums) {
    Floats largest = all(0), probe = all(0);
    for (int i = 0; i < BLOCK; i += 8) {
        const Floats values = load(x + i);
        largest = larger(largest, larger(values, -values));
        probe += values * 0;
    }
    float magnitude = 0;
    for (int i = 0; i < 8; i++) magnitude = largest[i] > magnitude ? largest[i] : magnitude;
    const float scale = magnitude / LARGEST_INPUT + sum(probe);
    const Floats inverse = all(magnitude > LEAST_INPUT ? LARGEST_INPUT / magnitude : 0);
    for (int half = 0; half < HALVES; half++) {
        Floats wholes = all(0);
        for (int i = half * BLOCK / HALVES; i < (half + 1) * BLOCK / HALVES; i += 8) {
            const Floats rounded = load(x + i) * inverse + ROUNDING;
            const Ints bits = (Ints)rounded - ROUNDING_BITS;
            const Shorts shorts = __builtin_convertvector(bits, Shorts);
            __builtin_memcpy(quantized + i, &shorts, sizeof shorts);
            wholes += rounded - ROUNDING;
        }
        sums[half] = scale * sum(wholes);
    }
    return scale;
}

// Quantizes a row in blocks. The last one is filled up with zeros.
static void quantize(const float* x, int count, int16_t* quantized, float* scales, float* sums) {
    const int whole = count / BLOCK;
    for (int block = 0; block < whole; block++)
        scales[block] = quantize_block(x + block * BLOCK, quantized + block * BLOCK, sums + block * HALVES);
    if (count % BLOCK) {
        float rest[BLOCK] = {};
        __builtin_memcpy(rest, x + whole * BLOCK, (count % BLOCK) * sizeof(float));
        scales[whole] = quantize_block(rest, quantized + whole * BLOCK, sums + whole * HALVES);
    }
}

// Eight scales or minimums of a panel.
static inline Floats load_scales(const float* from) { return load(from); }

static inline Floats load_scales(const Half* from) {
#if defined(MEMLM_AVX2)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Floats values;
    for (int i = 0; i < OUTPUTS; i++) values[i] = from_half(from[i]);
    return values;
#endif
}

#if defined(MEMLM_AVX2)

// Adds the products of 4 inputs and the weights of 4 outputs, in pairs.
static inline __m256i add_products(__m256i sums, __m256i weights, __m256i inputs) {
#if defined(MEMLM_VNNI)
    return _mm256_dpwssd_epi32(sums, weights, inputs);
#else
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(weights, inputs));
    asm("" : "+x"(sums));  // or GCC computes all products of a block before it adds them, and puts them on the stack
    return sums;
#endif
}

// The weights of 4 inputs for outputs 0 to 3 or 4 to 7 of a half block, in 16 bits.
template <int BITS> struct Numbers;

template <> struct Numbers<8> {
    const uint8_t* at;
    explicit Numbers(const uint8_t* half) : at(half) {}
    __m256i get(int group, int part) const {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + group * 2 + part));
    }
};

template <> struct Numbers<4> {
    __m256i parts[2];
    explicit Numbers(const uint8_t* half) {
        for (int part = 0; part < 2; part++)
            parts[part] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half) + part);
    }
    __m256i get(int group, int part) const {
        return _mm256_and_si256(_mm256_srli_epi16(parts[part], 4 * group), _mm256_set1_epi16(15));
    }
};

// A panel's products with ROWS rows of inputs.
template <typename Layout, int ROWS>
static inline void multiply(const uint8_t* panel, const Rows& x, int row, Floats* results) {
    const int16_t* inputs = x.values + row * x.stride();
    const float *scales = x.scales + row * x.num_blocks, *input_sums = x.sums + row * x.num_blocks * HALVES;
    Floats totals[ROWS];
    for (int i = 0; i < ROWS; i++) totals[i] = all(0);
    for (int block = 0; block < x.num_blocks; block++, panel += Layout::BYTES) {
        const auto* weight_scales = reinterpret_cast<const typename Layout::Scale*>(panel);
        const auto* minimums = weight_scales + Layout::SCALES * OUTPUTS;
        __m256i low[ROWS], high[ROWS];  // of outputs 0 to 3 and 4 to 7, two sums each
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++) {
            if (half == 0 || Layout::SCALES == HALVES)
                for (int i = 0; i < ROWS; i++) low[i] = high[i] = _mm256_setzero_si256();
            const Numbers<Layout::BITS> numbers(panel + Layout::HEADER + half * Layout::HALF_BYTES);
#pragma GCC unroll 4
            for (int group = 0; group < GROUPS; group++) {
                const __m256i first = numbers.get(group, 0), second = numbers.get(group, 1);
                for (int i = 0; i < ROWS; i++) {
                    int64_t four;
                    __builtin_memcpy(&four, inputs + i * x.stride() + block * BLOCK + (half * GROUPS + group) * GROUP,
                                     sizeof four);
                    const __m256i each = _mm256_set1_epi64x(four);
                    low[i] = add_products(low[i], first, each);
                    high[i] = add_products(high[i], second, each);
                }
            }
            if (half + 1 < HALVES && Layout::SCALES == 1) continue;
            const int number = Layout::SCALES == 1 ? 0 : half;
            const Floats weight_scale = load_scales(weight_scales + number * OUTPUTS);
            for (int i = 0; i < ROWS; i++) {
                // The sums of outputs 0, 1, 4, 5, 2, 3, 6, 7, then in order.
                const __m256i mixed = _mm256_hadd_epi32(low[i], high[i]);
                const Floats sums = (Floats)_mm256_cvtepi32_ps(_mm256_permute4x64_epi64(mixed, 0xD8));
                totals[i] += sums * (weight_scale * all(scales[i * x.num_blocks + block]));
            }
            if constexpr (Layout::HAS_MINIMUMS) {
                const Floats minimum = load_scales(minimums + number * OUTPUTS);
                for (int i = 0; i < ROWS; i++) {
                    const float* of_halves = input_sums + (i * x.num_blocks + block) * HALVES;
                    totals[i] += minimum * all(Layout::SCALES == 1 ? of_halves[0] + of_halves[1] : of_halves[half]);
                }
            }
        }
    }
    for (int i = 0; i < ROWS; i++) results[i] = totals[i];
}

#else

// The 16 weights of each of 8 outputs of a half block: by groups of 4 inputs, then outputs, then inputs.
template <int BITS> static inline void unpack(const uint8_t* half, int8_t* numbers) {
    for (int group = 0; group < GROUPS; group++)
        for (int i = 0; i < OUTPUTS * GROUP; i++) {
            const int at = group * OUTPUTS * GROUP + i;
            numbers[at] = BITS == 8 ? static_cast<int8_t>(half[at])
                                    : static_cast<int8_t>(half[2 * i + group / 2] >> (group % 2 * 4) & 15);
        }
}

template <typename Layout, int ROWS>
static inline void multiply(const uint8_t* panel, const Rows& x, int row, Floats* results) {
    for (int i = 0; i < ROWS; i++) results[i] = all(0);
    for (int block = 0; block < x.num_blocks; block++, panel += Layout::BYTES) {
        const auto* scales = reinterpret_cast<const typename Layout::Scale*>(panel);
        for (int half = 0; half < HALVES; half++) {
            const int number = Layout::SCALES == 1 ? 0 : half;
            const Floats scale = load_scales(scales + number * OUTPUTS);
            const Floats minimum =
                Layout::HAS_MINIMUMS ? load_scales(scales + (Layout::SCALES + number) * OUTPUTS) : all(0);
            int8_t numbers[GROUPS * OUTPUTS * GROUP];
            unpack<Layout::BITS>(panel + Layout::HEADER + half * Layout::HALF_BYTES, numbers);
            for (int i = 0; i < ROWS; i++) {
                const int64_t at = static_cast<int64_t>(row + i) * x.num_blocks + block;
                const int16_t* inputs = x.values + at * BLOCK + half * GROUPS * GROUP;
                int32_t sums[OUTPUTS] = {};
                for (int group = 0; group < GROUPS; group++)
                    for (int output = 0; output < OUTPUTS; output++)
                        for (int input = 0; input < GROUP; input++)
                            sums[output] += inputs[group * GROUP + input] *
                                            numbers[(group * OUTPUTS + output) * GROUP + input];
                Floats products;
                for (int output = 0; output < OUTPUTS; output++) products[output] = static_cast<float>(sums[output]);
                results[i] += products * (scale * all(x.scales[at])) + minimum * all(x.sums[at * HALVES + half]);
            }
        }
    }
}

#endif

static inline Floats load_weights(const Half* from) { return load_scales(from); }

static inline Floats load_weights(const Brain* from) {
#if defined(MEMLM_AVX2)
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return (Floats)_mm256_slli_epi32(words, 16);
#else
    Floats values;
    for (int i = 0; i < OUTPUTS; i++) {
        const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
        float value;
        __builtin_memcpy(&value, &bits, sizeof value);
        values[i] = value;
    }
    return values;
#endif
}

// Products of PANELS panels of plain weights with ROWS rows. Each sum adds the inputs in order, whatever is beside it.
template <typename Layout, int PANELS, int ROWS>
static inline void multiply_plain(const uint8_t* panel, const Rows& x, int row, Floats (*results)[ROWS_AT_ONCE]) {
    const auto* weights = reinterpret_cast<const typename Layout::Number*>(panel);
    const int64_t next_panel = static_cast<int64_t>(x.num_blocks) * BLOCK * OUTPUTS;
    const float* inputs = x.plain + static_cast<int64_t>(row) * x.features;
    Floats totals[PANELS][ROWS];
    for (int p = 0; p < PANELS; p++)
        for (int i = 0; i < ROWS; i++) totals[p][i] = all(0);
    for (int input = 0; input < x.features; input++, weights += OUTPUTS) {
        Floats each[PANELS];
        for (int p = 0; p < PANELS; p++) each[p] = load_weights(weights + p * next_panel);
        for (int i = 0; i < ROWS; i++) {
            const Floats value = all(inputs[static_cast<int64_t>(i) * x.features + input]);
            for (int p = 0; p < PANELS; p++) totals[p][i] += each[p] * value;
        }
    }
    for (int p = 0; p < PANELS; p++)
        for (int i = 0; i < ROWS; i++) results[p][i] = totals[p][i];
}

template <typename Layout, int PANELS>
static inline void multiply_some(const uint8_t* panel, const Rows& x, int row, int rows, Floats (*results)[ROWS_AT_ONCE]) {
    switch (rows) {
        case 1: return multiply_plain<Layout, PANELS, 1>(panel, x, row, results);
        case 2: return multiply_plain<Layout, PANELS, 2>(panel, x, row, results);
        case 3: return multiply_plain<Layout, PANELS, 3>(panel, x, row, results);
        default: return multiply_plain<Layout, PANELS, 4>(panel, x, row, results);
    }
}

// Writes or adds a panel's products with a row.
static inline void put(const Matrix& matrix, int panel, Floats products, float* row, bool adds) {
    const int begin = panel * OUTPUTS;
    const int size = matrix.out_features - begin < OUTPUTS ? matrix.out_features - begin : OUTPUTS;
    if (size == OUTPUTS) {
        if (matrix.bias) products += load(matrix.bias + begin);
        if (adds) products += load(row + begin);
        store(row + begin, products);
        return;
    }
    for (int output = 0; output < size; output++) {
        const float bias = matrix.bias ? matrix.bias[begin + output] : 0;
        row[begin + output] = products[output] + bias + (adds ? row[begin + output] : 0);
    }
}

template <typename Layout>
static void multiply_plain_in(const Matrix& matrix, int first, int last, const Rows& x, float* y, int64_t stride,
                              bool adds) {
    for (int tile = 0; tile < x.num_rows; tile += TILE) {
        const int end = x.num_rows < tile + TILE ? x.num_rows : tile + TILE;
        for (int panel = first; panel < last; panel += 2) {
            const uint8_t* weights = matrix.panels + static_cast<int64_t>(panel) * x.num_blocks * Layout::BYTES;
            const int panels = last - panel >= 2 ? 2 : 1;
            for (int row = tile; row < end; row += ROWS_AT_ONCE) {
                Floats results[2][ROWS_AT_ONCE];
                const int rows = end - row < ROWS_AT_ONCE ? end - row : ROWS_AT_ONCE;
                if (panels == 2) multiply_some<Layout, 2>(weights, x, row, rows, results);
                else multiply_some<Layout, 1>(weights, x, row, rows, results);
                for (int p = 0; p < panels; p++)
                    for (int i = 0; i < rows; i++) put(matrix, panel + p, results[p][i], y + (row + i) * stride, adds);
            }
        }
    }
}

// y = x W' + b for some panels, or y += x W' + b. Rows are taken in tiles that stay in the cache beside the panels.
template <typename Layout>
static void multiply_in(const Matrix& matrix, int first, int last, const Rows& x, float* y, int64_t stride,
                        bool adds) {
    for (int tile = 0; tile < x.num_rows; tile += TILE) {
        const int end = x.num_rows < tile + TILE ? x.num_rows : tile + TILE;
        for (int panel = first; panel < last; panel++) {
            const uint8_t* weights = matrix.panels + static_cast<int64_t>(panel) * x.num_blocks * Layout::BYTES;
            for (int row = tile; row < end;) {
                Floats results[ROWS_AT_ONCE];
                const int rows = end - row >= 4 ? 4 : end - row;
                if (rows == 4) multiply<Layout, 4>(weights, x, row, results);
                else if (rows == 3) multiply<Layout, 3>(weights, x, row, results);
                else if (rows == 2) multiply<Layout, 2>(weights, x, row, results);
                else multiply<Layout, 1>(weights, x, row, results);
                for (int i = 0; i < rows; i++) put(matrix, panel, results[i], y + (row + i) * stride, adds);
                row += rows;
            }
        }
    }
}

static void multiply_panels(const Matrix& matrix, int first, int last, const Rows& x, float* y, int64_t stride,
                            bool adds) {
    with_layout(matrix.layout, [&](auto layout) {
        using Layout = decltype(layout);
        if constexpr (Layout::IS_PLAIN) multiply_plain_in<Layout>(matrix, first, last, x, y, stride, adds);
        else multiply_in<Layout>(matrix, first, last, x, y, stride, adds);
    });
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

// The sums of 8 vectors, each added in the order of sum().
static inline Floats sums(const Floats* v) {
#if defined(MEMLM_AVX2)
    const auto halves = [](Floats x, Floats y) {
        return (Floats)_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x20) +
               (Floats)_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x31);
    };
    const auto quarters = [](Floats x, Floats y) {
        return (Floats)_mm256_shuffle_ps((__m256)x, (__m256)y, 0x44) +
               (Floats)_mm256_shuffle_ps((__m256)x, (__m256)y, 0xEE);
    };
    const Floats even = quarters(halves(v[0], v[4]), halves(v[1], v[5]));  // of 0, 1, 4 and 5, two numbers each
    const Floats odd = quarters(halves(v[2], v[6]), halves(v[3], v[7]));
    return (Floats)_mm256_shuffle_ps((__m256)even, (__m256)odd, 0x88) +
           (Floats)_mm256_shuffle_ps((__m256)even, (__m256)odd, 0xDD);
#else
    return Floats{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3]), sum(v[4]), sum(v[5]), sum(v[6]), sum(v[7])};
#endif
}

// The products of a query and `count` keys. Each has the bits of dot(), whatever keys are beside it.
static inline void score(const float* query, const float* keys, int count, int size, float* scores) {
    int place = 0;
    for (; place + 8 <= count; place += 8, keys += 8 * size) {
        Floats totals[8];
        for (int i = 0; i < 8; i++) totals[i] = all(0);
        for (int at = 0; at < size; at += 8) {
            const Floats numbers = load(query + at);
            for (int i = 0; i < 8; i++) totals[i] += numbers * load(keys + i * size + at);
        }
        store(scores + place, sums(totals));
    }
    for (; place < count; place++, keys += size) scores[place] = dot(query, keys, size);
}

// Replaces scores by their exponentials, relative to the largest, and returns 1 / their sum.
static inline float exponentiate(float* scores, int count) {
    Floats largest_of = all(-__builtin_inff()), totals = all(0);
    const int whole = count / 8 * 8;
    for (int i = 0; i < whole; i += 8) largest_of = larger(load(scores + i), largest_of);
    float largest = -__builtin_inff();
    for (int i = 0; i < 8; i++) largest = largest_of[i] > largest ? largest_of[i] : largest;
    for (int i = whole; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    for (int i = 0; i < count; i++) scores[i] = exponential(scores[i] - largest);
    for (int i = 0; i < whole; i += 8) totals += load(scores + i);
    float total = sum(totals);
    for (int i = whole; i < count; i++) total += scores[i];
    return 1 / total;
}

// Adds weighted values to VECTORS vectors of the mixture, the places in order.
template <int VECTORS>
static inline void mix(const float* weights, const float* values, int count, int size, float* mixed) {
    Floats totals[VECTORS];
    for (int i = 0; i < VECTORS; i++) totals[i] = load(mixed + 8 * i);
    for (int place = 0; place < count; place++, values += size) {
        const Floats weight = all(weights[place]);
        for (int i = 0; i < VECTORS; i++) totals[i] += weight * load(values + 8 * i);
    }
    for (int i = 0; i < VECTORS; i++) store(mixed + 8 * i, totals[i]);
}

// Adds weighted values to a head of `size` numbers, the places in order.
static inline void mix_all(const float* weights, const float* values, int count, int size, float* mixed) {
    int at = 0;
    for (; at + 64 <= size; at += 64) mix<8>(weights, values + at, count, size, mixed + at);
    for (; at + 32 <= size; at += 32) mix<4>(weights, values + at, count, size, mixed + at);
    for (; at < size; at += 8) mix<1>(weights, values + at, count, size, mixed + at);
}

// softmax(q k) v of some queries of a sequence, one for each row. The queries share a block of keys, and then of values,
// while it is in the cache. Each adds in an order of its own, so that its result does not depend on those beside it.
// Heads are 8n numbers wide. `scores` has room for queries x stride numbers.
static void attend(const Queries& queries, const float* keys, const float* values, int size, float* scores,
                   int64_t stride) {
    constexpr int PLACES = 32;  // of a block
    int least = queries.firsts[0], most = 0;
    for (int i = 0; i < queries.count; i++) {
        least = queries.firsts[i] < least ? queries.firsts[i] : least;
        most = queries.ends[i] > most ? queries.ends[i] : most;
        for (int at = 0; at < size; at += 8) store(queries.mixed + i * queries.mixed_stride + at, all(0));
    }
    // Calls body(query, first place, number of places, score of the first place) for each block.
    const auto for_blocks = [&](auto&& body) {
        for (int block = least; block < most; block += PLACES)
            for (int i = 0; i < queries.count; i++) {
                const int first = block > queries.firsts[i] ? block : queries.firsts[i];
                const int end = block + PLACES < queries.ends[i] ? block + PLACES : queries.ends[i];
                float* at = scores + i * stride + queries.num_sinks(i) + first - queries.firsts[i];
                if (first < end) body(i, first, end - first, at);
            }
    };
    for (int i = 0; i < queries.count; i++)
        if (const int count = queries.num_sinks(i))
            score(queries.sink_heads + i * queries.mixed_stride, keys + static_cast<int64_t>(queries.sinks[i]) * size,
                  count, size, scores + i * stride);
    for_blocks([&](int i, int first, int count, float* at) {
        score(queries.heads + i * queries.stride, keys + static_cast<int64_t>(first) * size, count, size, at);
    });
    float factors[QUERIES];
    for (int i = 0; i < queries.count; i++) {
        const int num_sinks = queries.num_sinks(i);
        factors[i] = exponentiate(scores + i * stride, num_sinks + queries.ends[i] - queries.firsts[i]);
        mix_all(scores + i * stride, values + static_cast<int64_t>(queries.sinks[i]) * size, num_sinks, size,
                queries.mixed + i * queries.mixed_stride);
    }
    for_blocks([&](int i, int first, int count, const float* weights) {
        mix_all(weights, values + static_cast<int64_t>(first) * size, count, size,
                queries.mixed + i * queries.mixed_stride);
    });
    for (int i = 0; i < queries.count; i++) {
        float* to = queries.mixed + i * queries.mixed_stride;
        for (int at = 0; at < size; at += 8) store(to + at, load(to + at) * factors[i]);
    }
}

// Turns the first `size` numbers of a head by the cosines and sines of its position (memlm/model/positions.py).
static void rotate(float* head, const float* cosines, const float* sines, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] + second * sines[i];
        head[half + i] = second * cosines[half + i] + first * sines[half + i];
    }
}
