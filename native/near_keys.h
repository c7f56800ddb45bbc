// The best keys of small groups of queries: several groups search together, in the clusters whose means or outliers one
// of them likes best, and each picks its own keys there. Products are those of bytes.
#pragma once

#include <memory>

#include "near_choice.h"
#include "near_ranking.h"

namespace coterie::COTERIE_ISA {

// Groups first … last of a chunk, which search together.
struct Party {
    int64_t chunk, first, last;
};

// The search parties of a sample.
inline std::vector<Party> parties_of(const NearCall& call, int64_t b) {
    std::vector<Party> found;
    for (int64_t chunk = 0; chunk < call.chunks; chunk++) {
        int64_t used = call.used[b * call.chunks + chunk], together = call.together[b * call.chunks + chunk];
        for (int64_t first = 0; first < used; first += together)
            found.push_back({chunk, first, std::min(used, first + together)});
    }
    return found;
}

// Search parties of any head, one at a time.
class NearWorker {
public:
    NearWorker(const NearCall& call, const float* queries, const Picks& picks)
        : call_(call), queries_(queries), picks_(picks), rough_(padded(call.k.dim)) {}

    // `h`: of the queries. `keys`: of the key head that it has.
    void meet(int64_t b, int64_t h, const Party& party, const KeyBytes& keys) {
        int64_t chunk = (b * call_.heads + h) * call_.groups + party.chunk * call_.share();
        bool moved = view_.look(call_, b, h / (call_.heads / call_.k.heads), party.chunk);
        if (view_.total > call_.reach && call_.near) {
            read(chunk + party.first, party.last - party.first);
            list(keys, ranking_.rank(view_, keys, left_, call_.reach));
            pick(chunk + party.first, keys);
            return;
        }
        if (moved) list(keys, view_.clusters);
        for (int64_t first = party.first; first < party.last; first += kAtATime) {
            read(chunk + first, std::min(kAtATime, party.last - first));
            pick(chunk + first, keys);
        }
    }

private:
    static constexpr int64_t kAtATime = 16;  // groups, if all keys are searched

    // What stands for some groups.
    void read(int64_t first, int64_t groups) {
        left_.clear(call_.k.dim);
        for (int64_t g = 0; g < groups; g++) {
            const float* query = queries_ + (first + g) * call_.k.dim;
            for (int64_t d = 0; d < call_.k.dim; d++) rough_[d] = rounded(query[d]);
            left_.add(rough_.data(), call_.k.dim);
        }
    }

    // The best of the listed keys for each of these groups.
    void pick(int64_t first, const KeyBytes& keys) {
        int64_t stride = spans_.scores(), wanted = std::min(held_, call_.near);
        if (wanted) {
            scores_.resize(left_.padded_rows() * stride);
            spans_.multiply(left_, keys.keys, scores_.data());
        }
        for (int64_t g = 0; g < left_.rows; g++)
            write(wanted ? chooser_.choose(scores_.data() + g * stride, stride, keys_.data(), held_, wanted)
                         : std::span<const int32_t>(),
                  first + g);
    }

    // The keys of clusters that are searched, where their scores will be.
    void list(const KeyBytes& keys, const std::vector<View::Cluster>& clusters) {
        spans_.clear();
        for (const auto& each : clusters) spans_.add(each.start, each.stop);
        keys_.resize(spans_.scores());
        slots_.resize(spans_.scores());
        held_ = 0;
        size_t span = 0;
        for (const auto& each : clusters) {
            while (each.start >= spans_.all[span].stop) span++;
            int64_t at = spans_.at(span, each.start), size = each.stop - each.start;
            std::copy_n(keys.order + each.start, size, keys_.begin() + at);
            std::fill_n(slots_.begin() + at, size, static_cast<int32_t>(each.slot));
            held_ += size;
        }
    }

    void write(std::span<const int32_t> chosen, int64_t group) {
        int32_t* keys = picks_.keys + group * call_.near;
        for (size_t i = 0; i < chosen.size(); i++) keys[i] = keys_[chosen[i]];
        std::fill(keys + chosen.size(), keys + call_.near, 0);
        if (picks_.wide)
            count(chosen, picks_.wide + group * call_.room);
        else
            count(chosen, picks_.narrow + group * call_.room);
    }

    template <class T>
    void count(std::span<const int32_t> chosen, T* left) const {
        for (int64_t slot = 0; slot < view_.seen; slot++) left[slot] = static_cast<T>(view_.sizes[slot]);
        std::fill(left + view_.seen, left + call_.room, T{1});
        for (int32_t j : chosen) left[slots_[j]]--;
    }

    const NearCall& call_;
    const float* queries_;  // (batch, heads, groups, dim)
    Picks picks_;
    std::vector<float> rough_, scores_;
    LeftBytes left_;
    View view_;
    Ranking ranking_;
    Spans spans_;
    std::vector<int32_t> keys_, slots_;  // of each score: its key, and where its cluster is in view
    int64_t held_ = 0;  // keys that are searched
    Chooser chooser_;
};

// Write 0 for the groups of a head that do not exist.
inline void clear_unused(const NearCall& call, const Picks& picks, int64_t b, int64_t h) {
    for (int64_t chunk = 0; chunk < call.chunks; chunk++) {
        int64_t used = call.used[b * call.chunks + chunk], none = call.share() - used;
        int64_t first = (b * call.heads + h) * call.groups + chunk * call.share() + used;
        std::fill_n(picks.keys + first * call.near, none * call.near, 0);
        if (picks.wide)
            std::fill_n(picks.wide + first * call.room, none * call.room, 0);
        else
            std::fill_n(picks.narrow + first * call.room, none * call.room, int16_t{0});
    }
}

// The near keys of each group, and how many keys it leaves of each cluster that it sees.
inline void near_keys(const NearCall& call, const float* queries, const Picks& picks) {
    if (!call.groups) return;
    int64_t lists = call.k.batch * call.heads, share = call.heads / std::max<int64_t>(1, call.k.heads);
    parallel_for(lists, threads_for(double(lists * call.groups * (call.near + call.room)), call.threads),
                 [&](int64_t bh, int) { clear_unused(call, picks, bh / call.heads, bh % call.heads); });
    double met = double(lists * call.groups) * (double(call.room) + double(call.reach));
    int readers = threads_for(2 * call.k.numbers(), call.threads);
    int threads = threads_for(met * double(call.k.dim), call.threads);
    std::vector<std::unique_ptr<NearWorker>> workers(threads);
    std::vector<std::unique_ptr<KeyBytes>> keys;
    for (int64_t b = 0; b < call.k.batch; b++) {
        std::vector<Party> parties = parties_of(call, b);
        auto count = static_cast<int64_t>(parties.size());
        int64_t together = KeyBytes::heads_at_a_time(call);
        for (int64_t first = 0; first < call.k.heads; first += together) {
            int64_t heads = std::min(together, call.k.heads - first);
            for (int64_t h = 0; h < heads; h++) {
                if (h == static_cast<int64_t>(keys.size())) keys.push_back(std::make_unique<KeyBytes>(call));
                keys[h]->turn_to(b, first + h);
            }
            constexpr int64_t kPieces = KeyBytes::kPieces;
            parallel_for(heads * kPieces, readers,
                         [&](int64_t task, int) { keys[task / kPieces]->read(task % kPieces); });
            parallel_for(heads * kPieces, readers,
                         [&](int64_t task, int) { keys[task / kPieces]->put(task % kPieces); });
            for (auto& each : keys) each->forget_rows();
            parallel_for(heads * share * count, threads, [&](int64_t task, int who) {
                if (!workers[who]) workers[who] = std::make_unique<NearWorker>(call, queries, picks);
                int64_t h = task / (share * count), party = task / share % count;
                workers[who]->meet(b, (first + h) * share + task % share, parties[party], *keys[h]);
            });
        }
    }
}

}  // namespace coterie::COTERIE_ISA
