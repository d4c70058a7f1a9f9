// Prediction on the processor: products with weights in 4, 8 or 16 bits, and whole passes through plain attention layers.
//
// memlm/model/kernels/native.py calls this by ctypes, and memlm/model/kernels/quantized.py has the same arithmetic in torch.

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "threads.h"

namespace memlm {

constexpr int BLOCK = 32;
constexpr int OUTPUTS = 8;
constexpr int GROUP = 4;
constexpr float LARGEST_INPUT = 32767;
constexpr float LEAST_INPUT = 1e-30f;  // a block below it is zero: its inverse would be infinite
constexpr int HALVES = 2;                               // of a block
constexpr int GROUPS = BLOCK / HALVES / GROUP;          // of a half
constexpr int ROWS_AT_ONCE = 4;                         // as many as have their sums in registers
constexpr int TILE = 48;                                // rows of inputs that stay in the cache beside some panels
constexpr int QUERIES = 16;                             // that read keys and values together
constexpr int MOST_ROWS = 512;                          // that go through the layers together

using Half = uint16_t;
struct Brain { uint16_t bits; };  // bfloat16

// A weight is stored in panels of 8 outputs. A panel is a row of blocks, one for each 32 inputs: scales of the 8
// outputs, their minimums where there are some, and the numbers of both halves. A weight is scale x number + minimum.
// In 8 bits, a half is 4 groups of 4 inputs, each with the 4 numbers of output 0, those of output 1, and so on. In 4
// bits, the same numbers of the 4 groups share 16 bits, the first group in the lowest.
template <typename SCALE, int BITS_, int SCALES_, bool HAS_MINIMUMS_> struct LayoutOf {
    using Scale = SCALE;
    static constexpr int BITS = BITS_, SCALES = SCALES_;  // SCALES: of a block and output, one or one for each half
    static constexpr bool HAS_MINIMUMS = HAS_MINIMUMS_;
    static constexpr int HEADER = SCALES * OUTPUTS * static_cast<int>(sizeof(SCALE)) * (HAS_MINIMUMS ? 2 : 1);
    static constexpr int HALF_BYTES = OUTPUTS * BLOCK / HALVES * BITS / 8;
    static constexpr int BYTES = HEADER + HALVES * HALF_BYTES;
    static constexpr bool IS_PLAIN = false;
};

// Or a block is 32 inputs, each with the weights of 8 outputs. Its inputs are not rounded.
template <typename NUMBER> struct PlainLayout {
    using Number = NUMBER;
    static constexpr int BYTES = BLOCK * OUTPUTS * static_cast<int>(sizeof(NUMBER));
    static constexpr bool IS_PLAIN = true;
};

// As memlm/model/kernels/quantized.py numbers them.
template <typename Use> static inline auto with_layout(int number, Use&& use) {
    switch (number) {
        case 0: return use(LayoutOf<Half, 8, 1, false>());
        case 1: return use(LayoutOf<Half, 4, 1, true>());
        case 2: return use(LayoutOf<float, 4, 1, true>());
        case 3: return use(LayoutOf<float, 8, HALVES, true>());
        case 4: return use(PlainLayout<Half>());
        default: return use(PlainLayout<Brain>());
    }
}

enum Activation : int32_t { SWIGLU, GEGLU, GELU, GELU_TANH, RELU };

struct Matrix {
    const uint8_t* panels;
    const float* bias;  // or null
    int32_t out_features, in_features, layout;
};

struct Norm {
    const float* weight;
    const float* bias;  // or null
    float epsilon;
    int32_t centers;  // LayerNorm subtracts the mean, RMSNorm does not
};

struct Layer {
    Norm attention_norm, ff_norm, query_norm, key_norm;  // those of queries and keys may have no weight
    Matrix qkv, out, up, down;                           // up: the gate first, where there is one
    int32_t window;                                      // 0: all places
    int32_t rope;                                        // which of the step's ropes, or -1
};

struct Model {
    const Layer* layers;
    Norm norm;  // of the final hidden states
    int32_t num_layers, dim, num_heads, num_kv_heads, head_dim, ff_dim, rotary_dim, activation, is_gated, is_parallel;
    float query_scale;
};

// New tokens: each row has one, those of a sequence in order. Strides count numbers.
struct Step {
    float* hidden;   // rows x dim: embeddings, then final hidden states, or what precedes the last feed-forward
    float* keys;     // rows x dim, the inputs of the last feed-forward
    float* cache;    // the keys of the first layer, sequence and head
    int64_t layer_stride, value_stride, sequence_stride, head_stride;
    const int32_t* sequences;  // of each row: its sequence in the cache
    const int32_t* places;     // where its token is written
    const int32_t* firsts;     // the first place behind the sinks that it sees in layers without a window
    const int32_t* sinks;      // the first attention sink that it sees
    const float* ropes[2];     // rows x 2 x rotary_dim: cosines and sines of its position
    const float* sink_ropes[2];  // the same of its position for sinks
    int32_t num_rows, num_threads, num_sinks, finishes;  // finishes: through the last feed-forward and norm
};

// Rows of inputs, quantized in blocks, or plain.
struct Rows {
    const float* plain;
    const int16_t* values;
    const float* scales;
    const float* sums;  // of the numbers of each half block, times the scale
    int num_rows, num_blocks, features;
    int64_t stride() const { return static_cast<int64_t>(num_blocks) * BLOCK; }
};

// Queries of a head, and the places from `firsts` to before `ends` that each of them sees, after the attention sinks from
// `sinks` to before `sink_ends`, for which it is turned otherwise.
struct Queries {
    const float *heads, *sink_heads;
    float* mixed;
    int64_t stride, mixed_stride;  // from one query to the next
    int count;
    int firsts[QUERIES], ends[QUERIES], sinks[QUERIES], sink_ends[QUERIES];
    int num_sinks(int query) const { return sink_ends[query] - sinks[query]; }
};

// A number in float16.
static inline float from_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 5.9604645e-8f;  // 2^-24
    const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

namespace portable {
#include "kernels.h"
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MEMLM_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "kernels.h"
}
#pragma GCC pop_options
#define MEMLM_VNNI
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,prefer-vector-width=256")
namespace vnni {
#include "kernels.h"
}
#pragma GCC pop_options
#undef MEMLM_VNNI
#undef MEMLM_AVX2
#define MEMLM_HAS_X86_KERNELS
#endif

struct Kernels {
    const char* name;
    decltype(&portable::quantize) quantize;
    decltype(&portable::multiply_panels) multiply_panels;
    decltype(&portable::activate) activate;
    decltype(&portable::normalize) normalize;
    decltype(&portable::attend) attend;
    decltype(&portable::rotate) rotate;
};

#define MEMLM_KERNELS(set) \
    Kernels { #set, set::quantize, set::multiply_panels, set::activate, set::normalize, set::attend, set::rotate }

static const Kernels ALL_KERNELS[] = {
    MEMLM_KERNELS(portable),
#if defined(MEMLM_HAS_X86_KERNELS)
    MEMLM_KERNELS(avx2),
    MEMLM_KERNELS(vnni),
#endif
};

static bool runs_here(int number) {
#if defined(MEMLM_HAS_X86_KERNELS)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (number == 1) return avx2;
    if (number == 2) return avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vnni");
#endif
    return number == 0;
}

static constexpr int NUM_KERNELS = sizeof ALL_KERNELS / sizeof *ALL_KERNELS;

static int fastest() {
    for (int number = NUM_KERNELS - 1; number > 0; number--)
        if (runs_here(number)) return number;
    return 0;
}

static std::atomic<int> chosen{-1};

static const Kernels& kernels() {
    int number = chosen.load(std::memory_order_relaxed);
    if (number < 0) chosen.store(number = fastest(), std::memory_order_relaxed);
    return ALL_KERNELS[number];
}

static int panels_of(const Matrix& matrix) { return (matrix.out_features + OUTPUTS - 1) / OUTPUTS; }
static int blocks_of(int features) { return (features + BLOCK - 1) / BLOCK; }
static int bytes_of_block(const Matrix& matrix) {
    return with_layout(matrix.layout, [](auto layout) { return decltype(layout)::BYTES; });
}

// Calls body(row) for each row. Some rows cost less than waking a thread.
template <typename Body> static void for_rows(Threads::Claim& claim, int num_rows, Body&& body) {
    constexpr int FEW = 16;
    claim.loop((num_rows + FEW - 1) / FEW, [&](int chunk) {
        for (int row = chunk * FEW; row < num_rows && row < (chunk + 1) * FEW; row++) body(row);
    });
}

// The form of rows that a product takes, with memory of its own.
struct Inputs {
    std::vector<int16_t> values;
    std::vector<float> scales, sums;

    Rows of(Threads::Claim& claim, const Matrix& matrix, const float* x, int num_rows) {
        const int features = matrix.in_features, num_blocks = blocks_of(features);
        if (with_layout(matrix.layout, [](auto layout) { return decltype(layout)::IS_PLAIN; }))
            return {x, nullptr, nullptr, nullptr, num_rows, num_blocks, features};
        values.resize(static_cast<size_t>(num_rows) * num_blocks * BLOCK);
        scales.resize(static_cast<size_t>(num_rows) * num_blocks);
        sums.resize(static_cast<size_t>(num_rows) * num_blocks * HALVES);
        for_rows(claim, num_rows, [&](int row) {
            const int64_t at = static_cast<int64_t>(row) * num_blocks;
            kernels().quantize(x + static_cast<int64_t>(row) * features, features, values.data() + at * BLOCK,
                               scales.data() + at, sums.data() + at * HALVES);
        });
        return {nullptr, values.data(), scales.data(), sums.data(), num_rows, num_blocks, features};
    }
};

// Chunks small enough that threads end together, and large enough that handing them out costs nothing.
static void multiply(Threads::Claim& claim, const Matrix& matrix, const Rows& x, float* y, bool adds) {
    const int panels = panels_of(matrix);
    const int64_t bytes = static_cast<int64_t>(blocks_of(matrix.in_features)) * bytes_of_block(matrix);
    int size = static_cast<int>((48 << 10) / bytes);
    size = size > panels / 8 ? panels / 8 : size;
    size = size < 2 ? 2 : size / 2 * 2;  // plain panels are multiplied in pairs
    claim.loop((panels + size - 1) / size, [&](int chunk) {
        const int last = panels < (chunk + 1) * size ? panels : (chunk + 1) * size;
        kernels().multiply_panels(matrix, chunk * size, last, x, y, matrix.out_features, adds);
    });
}

// A number that is not negative, in float16, rounded to the nearest one, ties to even.
static Half to_half(float value) {
    if (value < 6.1035156e-5f) return static_cast<uint16_t>(__builtin_lrintf(value * 16777216.0f));  // subnormal
    if (!(value < 65520)) return value > 0 ? 0x7c00 : 0x7e00;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits += 0xfff + (bits >> 13 & 1);
    return static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

// The float16 number times -8. It is exact, or infinite.
static Half times_minus_8(Half half) {
    const float value = from_half(half) * -8;
    return static_cast<Half>(to_half(__builtin_fabsf(value)) | (half & 0x8000 ? 0 : 0x8000));
}

// Rounds a panel of a weight to 8 bits, each block to multiples of a 127th of its largest number.
static void quantize_panel(const float* weight, const Matrix& shape, int panel, uint8_t* blocks) {
    using Layout = LayoutOf<Half, 8, 1, false>;
    for (int begin = 0; begin < shape.in_features; begin += BLOCK, blocks += Layout::BYTES) {
        int8_t* numbers = reinterpret_cast<int8_t*>(blocks + Layout::HEADER);
        std::memset(blocks, 0, Layout::BYTES);
        const int size = shape.in_features - begin < BLOCK ? shape.in_features - begin : BLOCK;
        for (int i = 0; i < OUTPUTS && panel * OUTPUTS + i < shape.out_features; i++) {
            const float* row = weight + static_cast<int64_t>(panel * OUTPUTS + i) * shape.in_features + begin;
            float largest = 0;
            for (int j = 0; j < size; j++) largest = __builtin_fabsf(row[j]) > largest ? __builtin_fabsf(row[j]) : largest;
            const uint16_t half = to_half(largest / 127);
            std::memcpy(blocks + 2 * i, &half, sizeof half);
            const float scale = from_half(half), divisor = scale > 0 ? scale : 1;
            for (int j = 0; j < size; j++) {
                const float rounded = __builtin_rintf(row[j] / divisor);
                const float kept = rounded > 127 ? 127 : rounded < -127 ? -127 : rounded;
                numbers[(j / GROUP * OUTPUTS + i) * GROUP + j % GROUP] = static_cast<int8_t>(kept);
            }
        }
    }
}

// Writes a panel's block: for each output and input a number, in as many bits as the layout has.
template <typename Layout> static void pack_numbers(const uint8_t (*numbers)[BLOCK], uint8_t* block) {
    for (int half = 0; half < HALVES; half++) {
        uint8_t* to = block + Layout::HEADER + half * Layout::HALF_BYTES;
        for (int at = 0; at < OUTPUTS * GROUP; at++) {
            const uint8_t* from = numbers[at / GROUP] + half * GROUPS * GROUP + at % GROUP;
            if constexpr (Layout::BITS == 4) {
                to[2 * at] = static_cast<uint8_t>(from[0] | from[GROUP] << 4);
                to[2 * at + 1] = static_cast<uint8_t>(from[2 * GROUP] | from[3 * GROUP] << 4);
            } else {
                for (int group = 0; group < GROUPS; group++) to[group * OUTPUTS * GROUP + at] = from[group * GROUP];
            }
        }
    }
}

// Blocks of GGUF that lie in rows, as memlm/model/files/gguf_blocks.py reads them.
enum Kind : int32_t { Q8_0, Q4_0, Q4_1 };

static int bytes_of(int kind) { return kind == Q8_0 ? 34 : kind == Q4_0 ? 18 : 20; }

static void pack_panel(int kind, const uint8_t* rows, const Matrix& shape, int panel, uint8_t* blocks) {
    const int num_blocks = shape.in_features / BLOCK, bytes = bytes_of(kind);
    for (int block = 0; block < num_blocks; block++, blocks += bytes_of_block(shape)) {
        uint8_t numbers[OUTPUTS][BLOCK] = {};
        Half header[2][OUTPUTS] = {};
        for (int i = 0; i < OUTPUTS && panel * OUTPUTS + i < shape.out_features; i++) {
            const uint8_t* from = rows + (static_cast<int64_t>(panel * OUTPUTS + i) * num_blocks + block) * bytes;
            std::memcpy(&header[0][i], from, sizeof(Half));
            if (kind == Q8_0) {
                std::memcpy(numbers[i], from + sizeof(Half), BLOCK);
                continue;
            }
            if (kind == Q4_1) std::memcpy(&header[1][i], from + sizeof(Half), sizeof(Half));
            else header[1][i] = times_minus_8(header[0][i]);
            const uint8_t* nibbles = from + bytes - BLOCK / 2;
            for (int j = 0; j < BLOCK / 2; j++) {
                numbers[i][j] = nibbles[j] & 15;
                numbers[i][j + BLOCK / 2] = nibbles[j] >> 4;
            }
        }
        std::memcpy(blocks, header, kind == Q8_0 ? sizeof header[0] : sizeof header);
        if (kind == Q8_0) pack_numbers<LayoutOf<Half, 8, 1, false>>(numbers, blocks);
        else pack_numbers<LayoutOf<Half, 4, 1, true>>(numbers, blocks);
    }
}

// Rows of one sequence that read keys and values together.
struct Tile {
    int first, count;
};

struct Scratch {
    std::vector<float> normed, qkv, sink_queries, mixed, inner, activated;
    std::vector<Tile> tiles;
    Inputs inputs;
};

// Norms and turns queries and keys, and writes keys and values to the cache.
static void write(Threads::Claim& claim, const Model& model, const Layer& layer, float* cache, const Step& step,
                  Scratch& scratch) {
    const int H = model.num_heads, G = model.num_kv_heads, d = model.head_dim;
    for_rows(claim, step.num_rows, [&](int row) {
        float* heads = scratch.qkv.data() + static_cast<int64_t>(row) * (H + 2 * G) * d;
        const float* cosines =
            layer.rope < 0 ? nullptr : step.ropes[layer.rope] + static_cast<int64_t>(row) * 2 * model.rotary_dim;
        const float* sink_cosines =
            cosines && step.num_sinks ? step.sink_ropes[layer.rope] + static_cast<int64_t>(row) * 2 * model.rotary_dim : nullptr;
        for (int head = 0; head < H + G; head++) {
            float* at = heads + head * d;
            const Norm& norm = head < H ? layer.query_norm : layer.key_norm;
            if (norm.weight) kernels().normalize(norm, at, d, at);
            if (head < H && step.num_sinks) {
                float* near = scratch.sink_queries.data() + (static_cast<int64_t>(row) * H + head) * d;
                std::memcpy(near, at, d * sizeof(float));
                if (sink_cosines) kernels().rotate(near, sink_cosines, sink_cosines + model.rotary_dim, model.rotary_dim);
                for (int i = 0; i < d; i++) near[i] *= model.query_scale;
            }
            if (cosines) kernels().rotate(at, cosines, cosines + model.rotary_dim, model.rotary_dim);
            if (head < H) for (int i = 0; i < d; i++) at[i] *= model.query_scale;
        }
        float* key = cache + step.sequences[row] * step.sequence_stride + static_cast<int64_t>(step.places[row]) * d;
        for (int head = 0; head < G; head++, key += step.head_stride) {
            std::memcpy(key, heads + (H + head) * d, d * sizeof(float));
            std::memcpy(key + step.value_stride, heads + (H + G + head) * d, d * sizeof(float));
        }
    });
}

static void attend(Threads::Claim& claim, const Model& model, const Layer& layer, const float* cache, const Step& step,
                   Scratch& scratch) {
    const int H = model.num_heads, G = model.num_kv_heads, d = model.head_dim;
    claim.loop(static_cast<int>(scratch.tiles.size()) * H, [&](int chunk) {
        static thread_local std::vector<float> scores;
        const auto [begin, count] = scratch.tiles[chunk / H];
        const int head = chunk % H;
        Queries queries{scratch.qkv.data() + (static_cast<int64_t>(begin) * (H + 2 * G) + head) * d,
                        scratch.sink_queries.data() + (static_cast<int64_t>(begin) * H + head) * d,
                        scratch.mixed.data() + (static_cast<int64_t>(begin) * H + head) * d,
                        static_cast<int64_t>(H + 2 * G) * d, static_cast<int64_t>(H) * d, count, {}, {}, {}, {}};
        int most = 0;
        for (int i = 0; i < count; i++) {
            const int end = step.places[begin + i] + 1, since = end - layer.window, first = step.firsts[begin + i];
            queries.firsts[i] = layer.window && since > first ? since : first;
            queries.ends[i] = end > queries.firsts[i] ? end : queries.firsts[i];  // a sink sees none behind them
            queries.sink_ends[i] = end < step.num_sinks ? end : step.num_sinks;
            queries.sinks[i] = step.num_sinks ? step.sinks[begin + i] : 0;
            if (queries.sinks[i] > queries.sink_ends[i]) queries.sinks[i] = queries.sink_ends[i];
            const int seen = queries.ends[i] - queries.firsts[i] + queries.num_sinks(i);
            most = seen > most ? seen : most;
        }
        if (scores.size() < static_cast<size_t>(count) * most) scores.resize(2 * static_cast<size_t>(count) * most);
        const float* keys = cache + step.sequences[begin] * step.sequence_stride + (head / (H / G)) * step.head_stride;
        kernels().attend(queries, keys, keys + step.value_stride, d, scores.data(), most);
    });
}

// All keys and values of a layer are written before its attention begins, so rows of one sequence see those before them.
static void run_rows(Threads::Claim& claim, const Model& model, const Step& step) {
    static thread_local Scratch own;
    Scratch& scratch = own;  // loops capture the caller's, not that of each thread
    const int rows = step.num_rows, D = model.dim;
    const int inner = model.ff_dim * (model.is_gated ? 2 : 1), heads = model.num_heads * model.head_dim;
    scratch.normed.resize(static_cast<size_t>(rows) * D);
    scratch.qkv.resize(static_cast<size_t>(rows) * (heads + 2 * model.num_kv_heads * model.head_dim));
    if (step.num_sinks) scratch.sink_queries.resize(static_cast<size_t>(rows) * heads);
    scratch.mixed.resize(static_cast<size_t>(rows) * heads);
    scratch.inner.resize(static_cast<size_t>(rows) * inner);
    scratch.activated.resize(static_cast<size_t>(rows) * model.ff_dim);
    scratch.tiles.clear();
    for (int row = 0; row < rows; row++) {
        const bool goes_on = row && step.sequences[row] == step.sequences[row - 1];
        if (goes_on && scratch.tiles.back().count < QUERIES) scratch.tiles.back().count++;
        else scratch.tiles.push_back({row, 1});
    }
    const auto norm = [&](const Norm& with, float* to) {
        for_rows(claim, rows, [&](int row) {
            const int64_t at = static_cast<int64_t>(row) * D;
            kernels().normalize(with, step.hidden + at, D, to + at);
        });
    };
    const auto product = [&](const Matrix& matrix, const float* x, float* y, bool adds) {
        multiply(claim, matrix, scratch.inputs.of(claim, matrix, x, rows), y, adds);
    };
    for (int number = 0; number < model.num_layers; number++) {
        const Layer& layer = model.layers[number];
        const bool is_last = number == model.num_layers - 1;
        float *key = is_last ? step.keys : scratch.normed.data(), *cache = step.cache + number * step.layer_stride;
        norm(layer.attention_norm, scratch.normed.data());
        product(layer.qkv, scratch.normed.data(), scratch.qkv.data(), false);
        write(claim, model, layer, cache, step, scratch);
        attend(claim, model, layer, cache, step, scratch);
        if (model.is_parallel) norm(layer.ff_norm, key);
        product(layer.out, scratch.mixed.data(), step.hidden, true);
        if (!model.is_parallel) norm(layer.ff_norm, key);
        if (is_last && !step.finishes) return;
        product(layer.up, key, scratch.inner.data(), false);
        for_rows(claim, rows, [&](int row) {
            kernels().activate(model.activation, scratch.inner.data() + static_cast<int64_t>(row) * inner, model.ff_dim,
                               scratch.activated.data() + static_cast<int64_t>(row) * model.ff_dim);
        });
        product(layer.down, scratch.activated.data(), step.hidden, true);
    }
    norm(model.norm, step.hidden);
}

// Many rows go through all layers in parts, so that what they need besides the weights stays small.
static void run(const Model& model, const Step& step) {
    Threads::Claim claim(Threads::of_process(), step.num_threads);
    for (int64_t begin = 0; begin < step.num_rows; begin += MOST_ROWS) {
        Step part = step;
        part.num_rows = step.num_rows - begin < MOST_ROWS ? static_cast<int>(step.num_rows - begin) : MOST_ROWS;
        part.hidden += begin * model.dim;
        part.keys += begin * model.dim;
        part.sequences += begin;
        part.places += begin;
        part.firsts += begin;
        part.sinks += begin;
        for (const float*& rope : part.ropes) if (rope) rope += begin * 2 * model.rotary_dim;
        for (const float*& rope : part.sink_ropes) if (rope) rope += begin * 2 * model.rotary_dim;
        run_rows(claim, model, part);
    }
}

}  // namespace memlm

extern "C" {

// Raised with every change of these calls and structures, with VERSION in memlm/model/kernels/native.py.
int32_t memlm_version() { return 4; }

int32_t memlm_num_kernels() { return memlm::NUM_KERNELS; }

const char* memlm_kernels_name(int32_t number) { return memlm::ALL_KERNELS[number].name; }

int32_t memlm_runs_here(int32_t number) { return memlm::runs_here(number); }

// Uses the instruction set with this number; -1: the fastest.
void memlm_choose(int32_t number) { memlm::chosen.store(number < 0 ? memlm::fastest() : number); }

// Writes the panels of a weight with the shape of `matrix`, in 8 bits.
void memlm_quantize(const float* weight, const memlm::Matrix* matrix, uint8_t* panels, int32_t num_threads) {
    memlm::Threads::Claim claim(memlm::Threads::of_process(), num_threads);
    constexpr int CHUNK = 16;
    const int count = memlm::panels_of(*matrix);
    const int64_t size = static_cast<int64_t>(memlm::blocks_of(matrix->in_features)) * memlm::bytes_of_block(*matrix);
    claim.loop((count + CHUNK - 1) / CHUNK, [&](int chunk) {
        for (int panel = chunk * CHUNK; panel < count && panel < (chunk + 1) * CHUNK; panel++)
            memlm::quantize_panel(weight, *matrix, panel, panels + panel * size);
    });
}

// Writes the panels of a weight from the rows of a GGUF file.
void memlm_pack(int32_t kind, const uint8_t* rows, const memlm::Matrix* matrix, uint8_t* panels, int32_t num_threads) {
    memlm::Threads::Claim claim(memlm::Threads::of_process(), num_threads);
    constexpr int CHUNK = 16;
    const int count = memlm::panels_of(*matrix);
    const int64_t size = static_cast<int64_t>(memlm::blocks_of(matrix->in_features)) * memlm::bytes_of_block(*matrix);
    claim.loop((count + CHUNK - 1) / CHUNK, [&](int chunk) {
        for (int panel = chunk * CHUNK; panel < count && panel < (chunk + 1) * CHUNK; panel++)
            memlm::pack_panel(kind, rows, *matrix, panel, panels + panel * size);
    });
}

void memlm_multiply(const memlm::Matrix* matrix, const float* x, int32_t num_rows, float* y, int32_t num_threads) {
    memlm::Threads::Claim claim(memlm::Threads::of_process(), num_threads);
    static thread_local memlm::Inputs inputs;
    memlm::multiply(claim, *matrix, inputs.of(claim, *matrix, x, num_rows), y, false);
}

void memlm_step(const memlm::Model* model, const memlm::Step* step) { memlm::run(*model, *step); }
}
