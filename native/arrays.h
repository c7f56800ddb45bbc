// What the kernels read and write: rows of floats of any width, and the tensors of a plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace coterie {

enum class Kind { f32, bf16, f16 };

// (batch, heads, rows, dim); strides in elements, the last one is 1. Rows from `own` on are virtual: the means of
// others, contiguous float32.
struct Rows {
    const void* data = nullptr;
    Kind kind = Kind::f32;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
    int64_t batch = 0, heads = 0, rows = 0, dim = 0;
    int64_t own = INT64_MAX;
    const float* means = nullptr;

    double numbers() const { return double(batch) * double(heads) * double(rows) * double(dim); }

    Kind kind_at(int64_t index) const { return index < own ? kind : Kind::f32; }

    // The rows of one head, by their index.
    struct Head {
        const char *first, *first_mean;
        int64_t step, mean_step, own;
        const char* operator()(int64_t index) const {
            return index < own ? first + index * step : first_mean + (index - own) * mean_step;
        }
    };
    Head at(int64_t batch, int64_t head) const {
        int64_t size = kind == Kind::f32 ? 4 : 2, mean_size = 4 * dim;
        return {
            .first = static_cast<const char*>(data) + size * (batch * batch_stride + head * head_stride),
            .first_mean =
                reinterpret_cast<const char*>(means) + (means ? (batch * heads + head) * (rows - own) * mean_size : 0),
            .step = size * row_stride,
            .mean_step = mean_size,
            .own = own,
        };
    }
    const char* row(int64_t batch, int64_t head, int64_t index) const { return at(batch, head)(index); }
};

// (batch, heads, length) int32 with a contiguous last axis; heads may share memory.
struct Index {
    const int32_t* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, length = 0;

    const int32_t* at(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }
    bool same(const Index& other) const {
        return data == other.data && batch_stride == other.batch_stride && head_stride == other.head_stride &&
               length == other.length;
    }
};

// (batch, heads, groups, width) int16 or int32, contiguous: how many keys a key of a group's range stands for.
struct Counts {
    const void* data = nullptr;
    bool wide = false;  // int32
    int64_t width = -1;

    explicit operator bool() const { return width >= 0; }
    const int16_t* narrow_row(int64_t group) const { return static_cast<const int16_t*>(data) + group * width; }
    const int32_t* wide_row(int64_t group) const { return static_cast<const int32_t*>(data) + group * width; }
    int32_t at(int64_t group, int64_t w) const { return wide ? wide_row(group)[w] : narrow_row(group)[w]; }
};

struct Round {
    Index query_order, query_offsets, key_order, key_start, key_stop;
    const float* bias = nullptr;  // (batch, heads, Mk), contiguous
    const int32_t* skip = nullptr;  // (batch, heads, Mq, skips), contiguous
    int64_t skips = 0;
    Counts counts{};
    bool windowed = false;
    int64_t low = 0, high = 0;  // set by `window`

    // No two positions are farther apart than kFar, so a wider window is the same; and sums with the bounds fit.
    static constexpr int64_t kFar = int64_t{1} << 40;
    void window(int64_t from, int64_t to) {
        windowed = true;
        low = std::clamp(from, -kFar, kFar);
        high = std::clamp(to, -kFar, kFar);
    }

    int64_t groups() const { return key_start.length; }
};

// A mask of pairs (batch, heads, Nq, Nk): float to add, or bytes of which 0 forbids.
struct PairMask {
    const void* data = nullptr;
    bool is_float = false;
    int64_t strides[4] = {0, 0, 0, 0};

    explicit operator bool() const { return data != nullptr; }
    int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
        return b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3];
    }
};

// Virtual rows: row s is the mean of the rows order[start[s] … stop[s]).
struct Segments {
    Index order, start, stop;
    const int32_t* positions = nullptr;  // (batch, heads, count), contiguous
    int64_t batch = 0, heads = 0;
    int threads = 1;

    int64_t count() const { return start.length; }
};

struct Call {
    int64_t batch = 0, heads = 0, key_heads = 0;
    int64_t num_queries = 0, num_keys = 0;  // real rows; q, k and v may have virtual ones behind
    int threads = 1;
    Rows q, k, v;
    std::vector<Round> rounds;
    const int32_t* offset = nullptr;  // (batch)
    const int32_t* self_keys = nullptr;  // (batch, Nq)
    const uint8_t* key_mask = nullptr;  // (batch, Nk), on top of the plan
    const uint8_t* query_mask = nullptr;  // (batch, Nq)
    Segments query_means, key_means;
    PairMask mask{};
    bool causal = false, once = false;
    float scale = 1;
    double dropout_p = 0;
    uint64_t seed = 0;
};

struct Forward {
    float* out;  // (batch, heads, query rows, value dim), contiguous
    float* lse;  // (batch, heads, query rows)
    uint8_t* alone;  // (batch, heads, Nq): who fell back on itself; null unless there are self keys
};

// Sums over (batch, heads, rows, dim), contiguous; those of virtual rows apart.
struct Gradient {
    float* own = nullptr;
    int64_t own_rows = 0, dim = 0;
    std::vector<float> means{};
    int64_t mean_rows = 0;

    float* row(int64_t bh, int64_t index) {
        return index < own_rows ? own + (bh * own_rows + index) * dim
                                : means.data() + (bh * mean_rows + index - own_rows) * dim;
    }
};

struct Backward {
    Forward forward;  // what the forward pass gave
    Rows grad_out;
    const float* grad_lse;
    Gradient q, k, v;
    float* grad_mask = nullptr;  // contiguous over the mask's own shape, zeroed; null unless asked for
    int64_t grad_mask_strides[4] = {0, 0, 0, 0};
};

// One step of decoding; `decode.h` has what is done. Everything but q, k and v is contiguous.
struct DecodeCall {
    Rows q, k, v;
    const int32_t* real = nullptr;  // (batch, Nk): rows of k that are real, in order
    const int32_t* rank = nullptr;  // (batch, Nq): the last of these that a query sees; −1 sees none
    const uint8_t* codes = nullptr;  // (batch, key heads, places, padded dim / 2): residuals of keys, in panels
    const uint16_t* tops = nullptr;  // (batch, key heads, places): bfloat16, the largest number of a residual
    const uint8_t* narrow = nullptr;  // (batch, key heads, places): where in its chunk a key is, cluster by cluster
    const int32_t* wide = nullptr;  // the same, for long chunks
    const int32_t* offsets = nullptr;  // (batch, key heads, clusters + 1)
    const int16_t *mean_keys = nullptr, *mean_values = nullptr;  // (batch, key heads, clusters, padded dim)
    const float *key_steps = nullptr, *value_steps = nullptr;  // (batch, key heads, clusters): of these means
    const int32_t* labels =
        nullptr;  // (batch, key heads, blocks, 4 · per): in which cluster of a block those inside are
    const int32_t* block_sizes = nullptr;  // (batch, key heads, blocks · per): the keys of a cluster
    const int16_t *block_keys = nullptr,
                  *block_values = nullptr;  // (batch, key heads, blocks · per, padded dim): means
    const float *block_key_steps = nullptr, *block_value_steps = nullptr;  // (batch, key heads, blocks · per)
    int64_t places = 0, clusters = 0, blocks = 0;  // that there is room for
    int64_t chunk = 1, per = 1, sinks = 0, near = 0, reach = 1, wider = 1, shown = 1, least = 0;
    float scale = 1;
    int threads = 1;
    float* out = nullptr;  // (batch, heads, Nq, value dim)
    int32_t* picks = nullptr;  // (batch, heads, Nq, near): the near keys, if asked for; −1 behind the last
};

// One step of decoding over all keys; `decode_all.h` has what is done. Everything but q, k and v is contiguous.
struct AllKeysCall {
    Rows q, k, v;
    const uint8_t* real = nullptr;  // (batch, Nk): which keys are; null for all
    const int32_t* seen = nullptr;  // (batch, Nq): of how many of the first keys a query sees those that are real
    float scale = 1;
    int threads = 1;
    float* out = nullptr;  // (batch, heads, Nq, value dim)
};

// Chunks of a cache that are to be finished; `finish.h` has what is done. Everything but k and v is contiguous.
struct FinishCall {
    Rows k, v;  // of some samples, chunk by chunk
    const int64_t* labels = nullptr;  // (those samples, key heads, keys): the cluster of each
    const int64_t* samples = nullptr;  // which samples
    int64_t clusters = 0, first_cluster = 0,
            all_clusters = 0;  // of these chunks, before them, and that there is room for
    int64_t first_place = 0, places = 0;
    int64_t first_rank = 0, chunk = 1;  // how many real keys come before these, and the keys of a chunk
    int threads = 1;
    // As in DecodeCall:
    uint8_t* codes = nullptr;
    uint16_t* tops = nullptr;
    uint8_t* narrow = nullptr;
    int32_t *wide = nullptr, *offsets = nullptr;
    int16_t *mean_keys = nullptr, *mean_values = nullptr;
    float *key_steps = nullptr, *value_steps = nullptr;
};

// The logs of 0 … kLogs − 1, taken in float64.
constexpr int32_t kLogs = 1024;
const float* logs();

struct Malformed : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// Throws Malformed unless every index of the plan is in range, no query is twice in a round and no mean holds padding.
// Drops the masks if the plan names no padding: then they change nothing, and scores need not be looked at.
void check_plan(Call& call);

}  // namespace coterie
