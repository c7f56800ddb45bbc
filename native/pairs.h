// Which pairs of a group meet, and with what score: the plan's biases, masks and multiplicities.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "rows.h"

namespace coterie::COTERIE_ISA {

// Where the work of one group happens, or of several in a row that meet the same keys.
struct Group {
    int64_t batch, head, key_head;  // indices
    const Round* round = nullptr;  // null for a query alone with its self key
    int64_t first = 0, stop = 0;  // indices in the round
    const int32_t* rows;  // query rows of the group
    int64_t row_count, first_slot = 0;
    const int32_t* keys;
    int64_t key_count, first_key_slot = 0;
};

// Groups that are taken together begin and end between two multiples of this, whoever takes them, so that the result
// has the same bits. The queries and sums of so many, of a dozen queries each, fit into the cache of a core.
constexpr int64_t kTogether = 64;

// Group `first`, and those behind it that have the same range of keys: these are then gathered once.
inline Group group_at(const Call& call, const Round& round, int64_t bh, int64_t first) {
    int64_t end = std::min(round.groups(), (first / kTogether + 1) * kTogether);
    int64_t b = bh / call.heads, h = bh % call.heads, stop = first + 1;
    const int32_t* offsets = round.query_offsets.at(b, h);
    const int32_t *starts = round.key_start.at(b, h), *stops = round.key_stop.at(b, h);
    while (stop < end && starts[stop] == starts[first] && stops[stop] == stops[first]) stop++;
    return {
        .batch = b,
        .head = h,
        .key_head = h / (call.heads / call.key_heads),
        .round = &round,
        .first = first,
        .stop = stop,
        .rows = round.query_order.at(b, h) + offsets[first],
        .row_count = offsets[stop] - offsets[first],
        .first_slot = offsets[first],
        .keys = round.key_order.at(b, h) + starts[first],
        .key_count = stops[first] - starts[first],
        .first_key_slot = starts[first],
    };
}

// No fewer pairs than a call can meet.
inline double pairs_at_most(const Call& call) {
    return double(call.batch * call.heads) * double(call.q.rows) * double(call.k.rows) * double(call.rounds.size());
}

// A query that meets nobody else, with its self key. The group refers to both.
inline Group alone_with(const Call& call, int64_t bh, const int32_t& query, const int32_t& key) {
    int64_t b = bh / call.heads, h = bh % call.heads;
    return {
        .batch = b,
        .head = h,
        .key_head = h / (call.heads / call.key_heads),
        .rows = &query,
        .row_count = 1,
        .keys = &key,
        .key_count = 1,
    };
}

// The part of a group that is computed at once: some of its rows with some of its keys.
struct Block {
    const Group& group;
    int64_t first_row, rows, first_key, keys;

    int64_t query(int64_t i) const { return group.rows[first_row + i]; }
    int64_t key(int64_t j) const { return group.keys[first_key + j]; }
    const int32_t* key_list() const { return group.keys + first_key; }
};

// Where keys can sit. Queries can sit a little farther out, as an offset is added to their number.
constexpr int64_t kFirstPosition = std::numeric_limits<int32_t>::min(),
                  kLastPosition = std::numeric_limits<int32_t>::max();

inline int64_t query_position(const Call& call, int64_t b, int64_t h, int64_t row) {
    if (row < call.num_queries) return row + call.offset[b];
    const Segments& means = call.query_means;
    return means.positions ? means.positions[(b * call.heads + h) * means.count() + row - call.num_queries] : 0;
}

inline int64_t key_position(const Call& call, int64_t b, int64_t hk, int64_t key) {
    if (key < call.num_keys) return key;
    const Segments& means = call.key_means;
    return means.positions ? means.positions[(b * call.key_heads + hk) * means.count() + key - call.num_keys] : 0;
}

inline bool seen(const Call& call, bool windowed, int64_t low, int64_t high, int64_t ahead) {
    return !(call.causal && ahead < 0) && !(windowed && (ahead < low || ahead > high));
}

// How often a query meets each key over all rounds, for duplicates="once". Counters are kept at zero between rows.
class Multiplicity {
public:
    explicit Multiplicity(const Call& call) : call_(call), counts_(call.k.rows, 0) {
        for (auto& round : call.rounds) slots_.emplace_back(round.query_offsets.at(0, 0) ? call.q.rows : 0, -1);
    }

    // Must be called before the first group of a head.
    void enter(int64_t bh) {
        if (bh == bh_) return;
        bh_ = bh;
        int64_t b = bh / call_.heads, h = bh % call_.heads;
        for (size_t r = 0; r < call_.rounds.size(); r++) {
            auto& round = call_.rounds[r];
            std::fill(slots_[r].begin(), slots_[r].end(), -1);
            const int32_t* order = round.query_order.at(b, h);
            int64_t used = round.query_offsets.at(b, h)[round.groups()];
            for (int64_t s = 0; s < used; s++) slots_[r][order[s]] = static_cast<int32_t>(s);
        }
    }

    // Subtract log m from the scores of `row` with keys[0 … count).
    void divide(int64_t row, const int32_t* keys, int64_t count, float* scores) {
        walk(row, +1);
        for (int64_t j = 0; j < count; j++)
            if (counts_[keys[j]] > 1) scores[j] -= std::log(static_cast<float>(counts_[keys[j]]));
        walk(row, -1);
    }

private:
    void walk(int64_t row, int32_t step) {
        int64_t b = bh_ / call_.heads, h = bh_ % call_.heads, hk = h / (call_.heads / call_.key_heads);
        int64_t position = query_position(call_, b, h, row);
        for (size_t r = 0; r < call_.rounds.size(); r++) {
            auto& round = call_.rounds[r];
            int32_t slot = slots_[r][row];
            if (slot < 0) continue;
            const int32_t* offsets = round.query_offsets.at(b, h);
            int64_t g = std::upper_bound(offsets, offsets + round.groups() + 1, slot) - offsets - 1;
            const int32_t* order = round.key_order.at(b, h);
            int64_t start = round.key_start.at(b, h)[g], stop = round.key_stop.at(b, h)[g];
            const float* bias = round.bias ? round.bias + bh_ * round.key_order.length : nullptr;
            const int32_t* skip =
                round.skip ? round.skip + ((bh_ * round.query_order.length) + slot) * round.skips : nullptr;
            for (int64_t s = start; s < stop; s++) {
                int32_t key = order[s];
                if (bias && bias[s] == kNone) continue;
                if (round.counts && !round.counts.at(bh_ * round.groups() + g, s - start)) continue;
                if (skip && std::binary_search(skip, skip + round.skips, key)) continue;
                bool placed = call_.causal || round.windowed;
                if (placed &&
                    !seen(call_, round.windowed, round.low, round.high, position - key_position(call_, b, hk, key)))
                    continue;
                counts_[key] += step;
            }
        }
    }

    const Call& call_;
    int64_t bh_ = -1;
    std::vector<int32_t> counts_;
    std::vector<std::vector<int32_t>> slots_;
};

inline void add_bias(const Block& block, const float* bias, float* row) {
    for (int64_t j = 0; j < block.keys; j++) row[j] = bias[j] == kNone ? kNone : row[j] + bias[j];
}

template <class T>
inline void log_each(const T* counts, int64_t size, float* to) {
    const float* table = logs();
    T most = 0;
    for (int64_t j = 0; j < size; j++) most = std::max(most, counts[j]);
    if (most < kLogs)
        for (int64_t j = 0; j < size; j++) to[j] = table[counts[j]];
    else
        for (int64_t j = 0; j < size; j++) to[j] = static_cast<float>(std::log(static_cast<double>(counts[j])));
}

// The counts that belong to the rows of a block, as biases: worked out once for the rows of each group.
class CountBiases {
public:
    CountBiases(const Call& call, const Block& block) : block_(block), round_(*block.group.round) {
        const Group& group = block.group;
        offsets_ = round_.query_offsets.at(group.batch, group.head);
        before_ = (group.batch * call.heads + group.head) * round_.groups();
        group_ = group.first - 1;
    }

    // Rows must be asked for in their order.
    const float* of_row(int64_t i) {
        int64_t slot = block_.group.first_slot + block_.first_row + i, group = std::max(group_, block_.group.first);
        while (slot >= offsets_[group + 1]) group++;
        if (group == group_) return bias_;
        group_ = group;
        if (round_.counts.wide)
            log_each(round_.counts.wide_row(before_ + group) + block_.first_key, block_.keys, bias_);
        else
            log_each(round_.counts.narrow_row(before_ + group) + block_.first_key, block_.keys, bias_);
        return bias_;
    }

private:
    const Block& block_;
    const Round& round_;
    const int32_t* offsets_;
    int64_t before_, group_;  // groups of the heads before this one; the group that bias_ is for
    float bias_[kKeyBlock];
};

// A virtual row has no row of its own in the mask; the caller has seen to that.
inline void apply_pair_mask(const Call& call, const Block& block, int64_t query, float* row) {
    const int32_t* key = block.key_list();
    const PairMask& mask = call.mask;
    int64_t step = mask.strides[3];
    int64_t at = mask.offset(block.group.batch, block.group.head, mask.strides[2] ? query : 0, 0);
    if (mask.is_float) {
        auto* values = static_cast<const float*>(mask.data) + at;
        for (int64_t j = 0; j < block.keys; j++) {
            float add = values[step ? key[j] * step : 0];
            row[j] = add == kNone ? kNone : row[j] + add;
        }
    } else {
        auto* allowed = static_cast<const uint8_t*>(mask.data) + at;
        for (int64_t j = 0; j < block.keys; j++)
            if (!allowed[step ? key[j] * step : 0]) row[j] = kNone;
    }
}

inline void hide_padding(const Call& call, const Block& block, int64_t query, float* row) {
    const int32_t* key = block.key_list();
    int64_t b = block.group.batch;
    if (call.key_mask)
        for (int64_t j = 0; j < block.keys; j++)
            if (key[j] < call.num_keys && !call.key_mask[b * call.num_keys + key[j]]) row[j] = kNone;
    if (call.query_mask && query < call.num_queries && !call.query_mask[b * call.num_queries + query])
        std::fill(row, row + block.keys, kNone);
}

// Hide the keys behind a causal query, and those outside of its window; `positions` are the keys'.
inline void hide_unseen(const Call& call, const Block& block, int64_t query, const int32_t* positions, float* row) {
    const Round* round = block.group.round;
    bool windowed = round && round->windowed;
    int64_t position = query_position(call, block.group.batch, block.group.head, query);
    int64_t low = windowed ? position - round->high : kFirstPosition;
    int64_t high = windowed ? position - round->low : kLastPosition;
    if (call.causal) high = std::min(high, position);
    if (low > kLastPosition || high < kFirstPosition) {
        std::fill(row, row + block.keys, kNone);
        return;
    }
    auto first = static_cast<int32_t>(std::max(low, kFirstPosition));
    auto last = static_cast<int32_t>(std::min(high, kLastPosition));
    for (int64_t j = 0; j < block.keys; j++) row[j] = positions[j] >= first && positions[j] <= last ? row[j] : kNone;
}

// Hide the keys that a row's ascending list of `skips` names; `ascending`: the block's keys are in order, too.
inline void hide_skipped(const Block& block, const int32_t* skip, int64_t skips, bool ascending, float* row) {
    const int32_t *key = block.key_list(), *end = key + block.keys;
    if (ascending) {
        const int32_t* last = std::upper_bound(skip, skip + skips, end[-1]);
        for (const int32_t* s = std::lower_bound(skip, last, key[0]); s < last; s++)
            for (auto found = std::lower_bound(key, end, *s); found < end && *found == *s; found++)
                row[found - key] = kNone;
    } else {
        for (int64_t j = 0; j < block.keys; j++)
            if (std::binary_search(skip, skip + skips, key[j])) row[j] = kNone;
    }
}

// Turn raw scores of a block into the plan's: biases, masks, multiplicities, and −inf where a pair does not meet.
inline void settle_scores(const Call& call, const Block& block, float* scores, Multiplicity* multiplicity) {
    const Group& group = block.group;
    const Round* round = group.round;
    const int32_t* key = block.key_list();
    const float* bias = round ? round->bias : nullptr;
    const int32_t* skip = round ? round->skip : nullptr;
    bool counted = round && round->counts;
    int64_t bh = group.batch * call.heads + group.head, width = padded(block.keys);
    bool placed = call.causal || (round && round->windowed), padding = call.key_mask || call.query_mask;
    if (width == block.keys && !placed && !call.mask && !padding && !multiplicity && !bias && !skip && !counted) return;
    int32_t some[kKeyBlock], last = INT32_MIN;
    const int32_t* positions = key;  // of keys that are real
    for (int64_t j = 0; placed && j < block.keys; j++) last = std::max(last, key[j]);
    if (placed && last >= call.num_keys) {
        last = INT32_MIN;
        for (int64_t j = 0; j < block.keys; j++) {
            some[j] = static_cast<int32_t>(key_position(call, group.batch, group.key_head, key[j]));
            last = std::max(last, some[j]);
        }
        positions = some;
    }
    bool windowed = round && round->windowed;
    if (bias) bias += bh * round->key_order.length + group.first_key_slot + block.first_key;
    if (skip) skip += (bh * round->query_order.length + group.first_slot + block.first_row) * round->skips;
    bool ascending = skip && std::is_sorted(key, key + block.keys);
    std::optional<CountBiases> counts;
    if (counted) counts.emplace(call, block);
    for (int64_t i = 0; i < block.rows; i++) {
        float* row = scores + i * kKeyBlock;
        int64_t query = block.query(i);
        for (int64_t j = block.keys; j < width; j++) row[j] = kNone;
        if (bias) add_bias(block, bias, row);
        if (counts) add_bias(block, counts->of_row(i), row);
        if (call.mask) apply_pair_mask(call, block, query, row);
        if (padding) hide_padding(call, block, query, row);
        if (multiplicity) multiplicity->divide(query, key, block.keys, row);
        if (placed && (windowed || query_position(call, group.batch, group.head, query) < last))
            hide_unseen(call, block, query, positions, row);
        if (skip) hide_skipped(block, skip + i * round->skips, round->skips, ascending, row);
    }
}

}  // namespace coterie::COTERIE_ISA
