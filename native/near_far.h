// The whole plan of near–far attention: what coterie/mechanisms/near_far makes of single steps, in one call, and with
// no tensor between the steps.
#pragma once

#include <memory>
#include <vector>

#include "halving.h"
#include "kmeans.h"
#include "layout.h"
#include "near_keys.h"
#include "orders.h"

namespace coterie::COTERIE_ISA {

// Numbers that are yet to be written. Their memory comes from malloc, which keeps some for the next call: fresh pages
// would cost more than what is done here.
template <class T>
class Scratch {
public:
    Scratch() = default;
    explicit Scratch(int64_t count) : count_(count), data_(new T[count]) {}
    T* data() const { return data_.get(); }
    T& operator[](int64_t i) const { return data_[i]; }
    int64_t size() const { return count_; }

private:
    int64_t count_ = 0;
    std::unique_ptr<T[]> data_;
};

// What the queries of a part reach: so many keys through clusters, and so many sinks.
struct Reach {
    int64_t keys, sunk;
};

// What both kinds of plan have in common: groups of queries, clusters of keys, and what those make of each other.
class NearFar {
protected:
    NearFar(const NearFarCall& call, const NearFarPlan& plan)
        : call_(call),
          plan_(plan),
          batch_(call.q.batch),
          heads_(call.q.heads),
          groups_(call.parts * call.room),
          exist_(batch_ * call.parts),
          together_(batch_ * call.parts),
          labels_(batch_ * heads_ * call.q.rows) {
        for (int64_t b = 0; b < batch_; b++) {
            queries_.emplace_back(call.query_mask + b * call.q.rows, call.q.rows);
            keys_.emplace_back(call.key_mask + b * call.k.rows, call.k.rows);
        }
    }

    // Similar clusters of a part side by side; `labels_` (batch, heads, rows) are numbers in a part until then, and
    // `part_of(b, h, row)` says in which.
    template <class PartOf>
    void put_side_by_side(const Scratch<double>& centroids, PartOf part_of) {
        int64_t room = call_.room;
        Scratch<float> rough(centroids.size());
        share_out(batch_ * heads_, double(rough.size()), [&](int64_t bh, int) {
            int64_t each = groups_ * call_.q.dim;
            for (int64_t i = bh * each; i < (bh + 1) * each; i++) rough[i] = static_cast<float>(centroids[i]);
        });
        std::vector<int32_t> rows(batch_ * groups_), start(exist_.size()), stop(exist_.size());
        std::vector<int64_t> alike(batch_);
        for (int64_t b = 0; b < batch_; b++) {
            for (int64_t g = 0; g < groups_; g++) rows[b * groups_ + g] = static_cast<int32_t>(g);
            for (int64_t p = 0, at = b * call_.parts; p < call_.parts; p++, at++) {
                start[at] = static_cast<int32_t>(p * room);
                stop[at] = static_cast<int32_t>(p * room + std::min(exist_[at], room));
            }
            alike[b] = together_[b * call_.parts];
        }
        HalveCall halving{
            .x = rows_of(rough.data(), groups_),
            .parts = parts_of(groups_, call_.parts, rows.data(), start.data(), stop.data()),
            .leaves = exist_.data(),
            .together = alike.data(),
            .threads = call_.threads,
        };
        std::vector<int32_t> order(batch_ * heads_ * groups_), place(batch_ * heads_ * groups_);
        halve(halving, order.data());
        share_out(batch_ * heads_, 4 * double(labels_.size()), [&](int64_t bh, int) {
            int32_t* mine = place.data() + bh * groups_;
            for (int64_t g = 0; g < groups_; g++) mine[order[bh * groups_ + g]] = static_cast<int32_t>(g);
            int64_t* label = labels_.data() + bh * call_.q.rows;
            for (int64_t i = 0; i < call_.q.rows; i++)
                label[i] = mine[label[i] + part_of(bh / heads_, bh % heads_, i) * room];
        });
    }

    // What stands for each group: the mean of its queries among those of `mask`, scale included.
    Scratch<float> judges(const uint8_t* mask) const {
        int64_t each = groups_ * call_.q.dim;
        Scratch<double> means(batch_ * heads_ * each);
        MeansCall averaging{.x = call_.q, .clusters = groups_, .mask = mask, .threads = call_.threads};
        cluster_means(averaging, labels_.data(), means.data());
        Scratch<float> found(means.size());
        share_out(batch_ * heads_, double(found.size()), [&](int64_t bh, int) {
            for (int64_t i = bh * each; i < (bh + 1) * each; i++) found[i] = rounded(means[i] * call_.scale);
        });
        return found;
    }

    // k-means of keys in blocks, of which the plan's lists hold those of one level after the other.
    void cluster_keys(const Count& count, int64_t blocks, const int32_t* edges, const int32_t* order, int64_t level,
                      int64_t first, int64_t block_size) {
        int64_t key_heads = call_.k.heads, keys = call_.k.rows, clusters = blocks * count.room;
        std::vector<int32_t> start(batch_ * blocks), stop(batch_ * blocks);
        std::vector<int64_t> counts(batch_ * blocks);
        for (int64_t b = 0; b < batch_; b++)
            for (int64_t p = 0, at = b * blocks; p < blocks; p++, at++) {
                start[at] = edges[b * (blocks + 1) + p];
                stop[at] = edges[b * (blocks + 1) + p + 1];
                counts[at] = count.of(stop[at] - start[at]);
            }
        Scratch<int64_t> labels(batch_ * key_heads * keys);
        Scratch<double> centroids(batch_ * key_heads * clusters * call_.k.dim);
        KmeansCall clustering{
            .x = call_.k,
            .parts = parts_of(keys, blocks, order, start.data(), stop.data()),
            .clusters = count.room,
            .iterations = call_.key_iterations,
            .sample = call_.sample,
            .counts = counts.data(),
            .given = nullptr,
            .unit = false,
            .per_head = false,
            .draws = call_.draws,
            .threads = call_.threads,
        };
        kmeans(clustering, labels.data(), centroids.data());
        int64_t slots = plan_.listed, all = plan_.clusters;
        share_out(batch_ * key_heads, 8 * double(labels.size()), [&](int64_t bh, int) {
            int64_t b = bh / key_heads;
            const Real& real = keys_[b];
            std::vector<int32_t> next(clusters + 2, 0), number(keys);
            for (int64_t i = 0; i < keys; i++) {
                bool counts_here = real.at(i) && real.before[i] >= edges[b * (blocks + 1)];
                int64_t block = std::min<int64_t>(real.before[i] / block_size, blocks - 1);
                number[i] = static_cast<int32_t>(
                    counts_here ? std::clamp<int64_t>(labels[bh * keys + i], 0, count.room - 1) + block * count.room
                                : clusters);
                next[number[i] + 1]++;
            }
            for (int64_t c = 0; c <= clusters; c++) next[c + 1] += next[c];
            auto behind = static_cast<int32_t>(level * keys);
            int32_t* from = plan_.cluster_start + bh * all + first;
            int32_t* to = plan_.cluster_stop + bh * all + first;
            for (int64_t c = 0; c < clusters; c++) {
                from[c] = next[c] + behind;
                to[c] = next[c + 1] + behind;
            }
            int32_t* listed = plan_.cluster_order + bh * slots + behind;
            for (int64_t i = 0; i < keys; i++) listed[next[number[i]]++] = static_cast<int32_t>(i);
        });
    }

    // The clusters that each part sees, `seen` (batch, parts) of `visible` (batch, parts, width); what groups pick, and
    // where the rows are that they meet.
    template <class ReachOf>
    void meet(const Scratch<float>& judges, const std::vector<int32_t>& visible, const std::vector<int32_t>& seen,
              int64_t width, ReachOf reach_of) {
        auto index = [&](const int32_t* data, int64_t length) {
            return Index{data, call_.k.heads * length, length, length};
        };
        NearCall picking{
            .k = call_.k,
            .heads = heads_,
            .groups = groups_,
            .chunks = call_.parts,
            .width = width,
            .near = call_.near,
            .reach = call_.reach,
            .room = plan_.width,
            .clusters = {.order = index(plan_.cluster_order, plan_.listed),
                         .start = index(plan_.cluster_start, plan_.clusters),
                         .stop = index(plan_.cluster_stop, plan_.clusters),
                         .batch = batch_,
                         .heads = call_.k.heads,
                         .threads = call_.threads},
            .visible = visible.data(),
            .seen = seen.data(),
            .used = exist_.data(),
            .together = together_.data(),
            .threads = call_.threads,
        };
        near_keys(picking, judges.data(), plan_.picks);
        int64_t lists = batch_ * heads_ * groups_;
        for (int64_t bh = 0; bh < batch_ * heads_; bh++)
            for (int64_t g = 0; g < groups_; g++) {
                int64_t b = bh / heads_, part = g / call_.room, at = bh * groups_ + g;
                auto [held, sunk] = reach_of(b, part);
                plan_.bounds[at] = static_cast<int32_t>(part * plan_.width);
                plan_.bounds[lists + at] =
                    static_cast<int32_t>(part * plan_.width + seen[b * call_.parts + part] + sunk);
                plan_.bounds[2 * lists + at] = static_cast<int32_t>(g * call_.near);
                plan_.bounds[3 * lists + at] = static_cast<int32_t>(g * call_.near + std::min(held, call_.near));
            }
    }

    // Members of each group in order of position; rows that are in none come last, in that order, too.
    template <class In, class Row>
    void list_groups(In in, Row row) {
        int64_t rows = call_.q.rows;
        share_out(batch_ * heads_, 4 * double(labels_.size()), [&](int64_t bh, int) {
            int64_t b = bh / heads_;
            std::vector<int32_t> next(groups_ + 2, 0);
            auto group = [&](int64_t place, int64_t i) { return in(b, place) ? labels_[bh * rows + i] : groups_; };
            for (int64_t i = 0; i < rows; i++) next[group(i, row(bh, i)) + 1]++;
            for (int64_t g = 0; g <= groups_; g++) next[g + 1] += next[g];
            std::copy_n(next.data(), groups_ + 1, plan_.offsets + bh * (groups_ + 1));
            for (int64_t i = 0; i < rows; i++) {
                int64_t here = row(bh, i);
                plan_.order[bh * rows + next[group(i, here)]++] = static_cast<int32_t>(here);
            }
        });
    }

    template <class Task>
    void share_out(int64_t count, double numbers, Task&& task) const {
        parallel_for(count, threads_for(numbers, call_.threads), task);
    }

    Rows rows_of(const float* data, int64_t rows) const {
        int64_t dim = call_.q.dim;
        return {.data = data,
                .batch_stride = heads_ * rows * dim,
                .head_stride = rows * dim,
                .row_stride = dim,
                .batch = batch_,
                .heads = heads_,
                .rows = rows,
                .dim = dim};
    }

    static Parts parts_of(int64_t slots, int64_t count, const int32_t* order, const int32_t* start,
                          const int32_t* stop) {
        return {.slots = slots, .count = count, .order = order, .start = start, .stop = stop};
    }

    const NearFarCall& call_;
    const NearFarPlan& plan_;
    const int64_t batch_, heads_, groups_;
    std::vector<Real> queries_, keys_;
    std::vector<int64_t> exist_, together_;  // (batch, parts)
    Scratch<int64_t> labels_;  // (batch, heads, rows): the group of each query
};

// Where everybody sees everybody: halving cuts the queries into parts, k-means those into groups.
class Everyone : NearFar {
public:
    Everyone(const NearFarCall& call, const NearFarPlan& plan) : NearFar(call, plan) {}

    void run() {
        make_groups();
        auto inside = [&](int64_t b, int64_t place) { return place < queries_[b].count(); };
        auto row = [&](int64_t bh, int64_t place) { return int64_t{halved_[bh * call_.q.rows + place]}; };
        list_groups(inside, row);
        Scratch<float> judging = judges(call_.query_mask);
        meet_clusters(judging);
    }

private:
    void make_groups() {
        int64_t rows = call_.q.rows, parts = call_.parts, room = call_.room;
        std::vector<int32_t> order(batch_ * rows), whole_start(batch_, 0), whole_stop(batch_), start(batch_ * parts),
            stop(batch_ * parts);
        std::vector<int64_t> pieces(batch_), alone(batch_, 1);
        for (int64_t b = 0; b < batch_; b++) {
            int64_t count = queries_[b].count(), groups = call_.groups.of(count);
            queries_[b].list(order.data() + b * rows);
            whole_stop[b] = static_cast<int32_t>(count);
            pieces[b] = std::min((groups + call_.in_part - 1) / call_.in_part, parts);
            for (int64_t p = 0, at = b * parts; p < parts; p++, at++) {
                start[at] = static_cast<int32_t>(balanced(p, count, pieces[b]));
                stop[at] = static_cast<int32_t>(balanced(p + 1, count, pieces[b]));
                exist_[at] = stop[at] > start[at] ? std::min((groups + pieces[b] - 1) / pieces[b], room) : 0;
                together_[at] = keys_[b].count() > call_.looked_at ? call_.party : room;
            }
        }
        HalveCall halving{
            .x = call_.q,
            .parts = parts_of(rows, 1, order.data(), whole_start.data(), whole_stop.data()),
            .leaves = pieces.data(),
            .together = alone.data(),
            .threads = call_.threads,
        };
        halved_ = Scratch<int32_t>(batch_ * heads_ * rows);
        halve(halving, halved_.data());
        std::vector<int32_t> part(batch_ * heads_ * rows, 0);  // of each query
        Scratch<double> centroids(batch_ * heads_ * groups_ * call_.q.dim);
        // Heads have lists of their own, so each is a call; where there are many, all threads take one at a time.
        bool many = batch_ * heads_ >= 2 * call_.threads;
        double numbers = call_.q.numbers() * double(room * (call_.iterations + 1));
        parallel_for(batch_ * heads_, many ? threads_for(numbers, call_.threads) : 1, [&](int64_t bh, int) {
            int64_t b = bh / heads_;
            Rows mine = call_.q;
            mine.data = call_.q.row(b, bh % heads_, 0);
            mine.batch = mine.heads = 1;
            KmeansCall clustering{
                .x = mine,
                .parts = parts_of(rows, parts, halved_.data() + bh * rows, start.data() + b * parts,
                                  stop.data() + b * parts),
                .clusters = room,
                .iterations = call_.iterations,
                .sample = 0,
                .counts = exist_.data() + b * parts,
                .given = nullptr,
                .unit = false,
                .per_head = false,
                .draws = call_.draws,
                .threads = many ? 1 : call_.threads,
            };
            kmeans(clustering, labels_.data() + bh * rows, centroids.data() + bh * groups_ * call_.q.dim);
            for (int64_t p = 0; p < parts; p++)
                for (int64_t i = start[b * parts + p]; i < stop[b * parts + p]; i++)
                    part[bh * rows + halved_[bh * rows + i]] = static_cast<int32_t>(p);
        });
        put_side_by_side(centroids,
                         [&](int64_t b, int64_t h, int64_t i) { return int64_t{part[(b * heads_ + h) * rows + i]}; });
    }

    void meet_clusters(const Scratch<float>& judging) {
        const Count& count = call_.levels[0].clusters;
        std::vector<int32_t> order(batch_ * call_.k.rows), edges(2 * batch_, 0);
        std::vector<int32_t> visible(batch_ * call_.parts * count.room), seen(batch_ * call_.parts);
        for (int64_t b = 0; b < batch_; b++) {
            keys_[b].list(order.data() + b * call_.k.rows);
            edges[2 * b + 1] = static_cast<int32_t>(keys_[b].count());
            std::fill_n(seen.begin() + b * call_.parts, call_.parts, static_cast<int32_t>(count.of(keys_[b].count())));
        }
        cluster_keys(count, 1, edges.data(), order.data(), 0, 0, std::max<int64_t>(1, call_.k.rows));
        for (size_t i = 0; i < visible.size(); i++) {
            visible[i] = static_cast<int32_t>(i % count.room);
            plan_.rows[i] = static_cast<int32_t>(visible[i] + call_.k.rows);
        }
        meet(judging, visible, seen, count.room, [&](int64_t b, int64_t) { return Reach{keys_[b].count(), 0}; });
    }

    Scratch<int32_t> halved_;  // (batch, heads, rows): similar queries side by side
};

// Where the future is hidden: keys are cut into chunks, queries by the chunk of the last key that they see.
class Causal : NearFar {
public:
    Causal(const NearFarCall& call, const NearFarPlan& plan)
        : NearFar(call, plan), chunk_(batch_ * call.q.rows), placed_(batch_ * call.q.rows), older_(exist_.size()) {}

    void run() {
        for (int64_t b = 0; b < batch_; b++) cut(b);
        make_groups();
        auto placed = [&](int64_t b, int64_t i) { return placed_[b * call_.q.rows + i] != 0; };
        list_groups(placed, [](int64_t, int64_t i) { return i; });
        Scratch<float> judging = judges(placed_.data());
        int64_t first = 0;
        for (size_t level = 0; level < call_.levels.size(); level++) first = make_means(level, first);
        meet_clusters(judging);
    }

private:
    // The chunks of a sample, and who is in them.
    void cut(int64_t b) {
        const Real &keys = keys_[b], &queries = queries_[b];
        int64_t rows = call_.q.rows, parts = call_.parts, first = -1;
        std::vector<int32_t> sizes(parts, 0);
        for (int64_t i = 0; i < rows; i++) {
            int64_t last = std::clamp<int64_t>(i + int64_t{call_.offset[b]} + 1, 0, call_.k.rows);
            int64_t rank = int64_t{keys.before[last]} - 1;
            uint8_t here = placed_[b * rows + i] = queries.at(i) && rank >= 0;
            if (!here) continue;
            if (first < 0) first = rank / call_.chunk;  // ranks ascend
            int64_t chunk = std::min(rank / call_.chunk - first, parts - 1);
            chunk_[b * rows + i] = static_cast<int32_t>(chunk);
            sizes[chunk]++;
        }
        Real(placed_.data() + b * rows, rows).list(plan_.chunk_order + b * rows);
        keys.list(plan_.chunk_keys + b * call_.k.rows);
        int32_t* offsets = plan_.chunk_offsets + b * (parts + 1);
        offsets[0] = 0;
        for (int64_t c = 0, at = b * parts; c < parts; c++, at++) {
            offsets[c + 1] = offsets[c] + sizes[c];
            int64_t place = std::max<int64_t>(first, 0) + c;
            int64_t stop = std::min((place + 1) * call_.chunk, keys.count());
            plan_.chunk_stop[at] = static_cast<int32_t>(stop);
            plan_.chunk_start[at] = static_cast<int32_t>(std::min(std::max<int64_t>(place - 1, 0) * call_.chunk, stop));
            older_[at] = sizes[c] ? std::max<int64_t>(place - 1, 0) : 0;
            exist_[at] = std::min(call_.groups.of(sizes[c]), call_.room);
            together_[at] = keys.count() > call_.looked_at ? call_.party : call_.room;
        }
    }

    void make_groups() {
        int64_t rows = call_.q.rows, parts = call_.parts;
        std::vector<int32_t> start(exist_.size()), stop(exist_.size());
        for (int64_t b = 0; b < batch_; b++)
            for (int64_t c = 0; c < parts; c++) {
                start[b * parts + c] = plan_.chunk_offsets[b * (parts + 1) + c];
                stop[b * parts + c] = plan_.chunk_offsets[b * (parts + 1) + c + 1];
            }
        Scratch<double> centroids(batch_ * heads_ * groups_ * call_.q.dim);
        KmeansCall clustering{
            .x = call_.q,
            .parts = parts_of(rows, parts, plan_.chunk_order, start.data(), stop.data()),
            .clusters = call_.room,
            .iterations = call_.iterations,
            .sample = 0,
            .counts = exist_.data(),
            .given = nullptr,
            .unit = false,
            .per_head = false,
            .draws = call_.draws,
            .threads = call_.threads,
        };
        kmeans(clustering, labels_.data(), centroids.data());
        put_side_by_side(centroids, [&](int64_t b, int64_t, int64_t i) { return int64_t{chunk_[b * rows + i]}; });
    }

    // The means of a level's blocks, which stand at the last key of their block; returns where the next level's begin.
    int64_t make_means(size_t number, int64_t first) {
        const NearFarLevel& level = call_.levels[number];
        int64_t blocks = level.blocks, room = level.clusters.room, key_heads = call_.k.heads;
        std::vector<int32_t> edges(batch_ * (blocks + 1));
        for (int64_t b = 0; b < batch_; b++) {
            int64_t count = keys_[b].count(), sinks = std::min(count, call_.sinks);
            int32_t* edge = edges.data() + b * (blocks + 1);
            for (int64_t p = 0; p <= blocks; p++)
                edge[p] = static_cast<int32_t>(std::max(std::min(p * level.size * call_.chunk, count), sinks));
            for (int64_t h = 0; h < key_heads; h++)
                for (int64_t c = 0; c < blocks * room; c++) {
                    int64_t last = std::max(edge[c / room + 1] - 1, 0);
                    plan_.cluster_position[(b * key_heads + h) * plan_.clusters + first + c] =
                        call_.k.rows ? plan_.chunk_keys[b * call_.k.rows + last] : 0;
                }
        }
        cluster_keys(level.clusters, blocks, edges.data(), plan_.chunk_keys, static_cast<int64_t>(number), first,
                     level.size * call_.chunk);
        return first + blocks * room;
    }

    // Where a level takes over from the one before: a multiple of its size.
    static int64_t edge(int64_t size, int64_t older) {
        return std::max<int64_t>(older - kBlocks * (size - 1), 0) / size * size;
    }

    void meet_clusters(const Scratch<float>& judging) {
        int64_t width = plan_.width - call_.sunk, parts = call_.parts;
        std::vector<int32_t> visible(batch_ * parts * width, 0), seen(batch_ * parts, 0);
        for (int64_t at = 0; at < batch_ * parts; at++) {
            int32_t *shown = visible.data() + at * width, *all = plan_.rows + at * plan_.width;
            int64_t count = 0, first = 0, stop = older_[at];
            for (size_t number = 0; number < call_.levels.size(); number++) {
                const NearFarLevel& level = call_.levels[number];
                bool last = number + 1 == call_.levels.size();
                int64_t begin = last ? 0 : edge(call_.levels[number + 1].size, older_[at]);
                int64_t most = std::min(level.blocks, kBlocks + 1), room = level.clusters.room;
                for (int64_t block = std::max<int64_t>(stop / level.size - most, 0); block < stop / level.size; block++)
                    for (int64_t c = 0; block * level.size >= begin && c < room && count < width; c++)
                        shown[count++] = static_cast<int32_t>(first + block * room + c);
                first += level.blocks * room;
                stop = begin;
            }
            seen[at] = static_cast<int32_t>(count);
            // The clusters that it sees, and right behind them the sinks.
            const int32_t* sinks = plan_.chunk_keys + at / parts * call_.k.rows;
            for (int64_t slot = 0; slot < plan_.width; slot++)
                all[slot] = slot < count || !call_.sunk
                                ? static_cast<int32_t>((slot < width ? shown[slot] : 0) + call_.k.rows)
                                : sinks[std::min(slot - count, call_.sunk - 1)];
        }
        meet(judging, visible, seen, width, [&](int64_t b, int64_t part) {
            int64_t keys = older_[b * parts + part] * call_.chunk, sunk = std::min(keys, call_.sunk);
            return Reach{keys - sunk, sunk};
        });
    }

    static constexpr int64_t kBlocks = 32;  // of one size, before blocks of twice the size follow

    std::vector<int32_t> chunk_;  // (batch, rows): of each query
    std::vector<uint8_t> placed_;  // (batch, rows): who sees a key
    std::vector<int64_t> older_;  // (batch, parts): the chunks before the previous one
};

inline void near_far(const NearFarCall& call, const NearFarPlan& plan) {
    if (call.chunk)
        Causal(call, plan).run();
    else
        Everyone(call, plan).run();
}

}  // namespace coterie::COTERIE_ISA
