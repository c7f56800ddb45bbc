#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "threads.h"

namespace coterie {

namespace {

std::atomic<Team> adopted{nullptr};
std::atomic<long> adopted_by{0};  // the process that adopted it

long process() {
#if defined(_WIN32)
    return 1;
#else
    return static_cast<long>(getpid());
#endif
}

#if defined(COTERIE_X86)
bool cpu_has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool cpu_has_avx512() {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Malformed(text.str());
}

// Whether a plan names padding; if not, nobody need look at the masks again.
struct Padding {
    std::atomic<bool> queries{false}, keys{false};
};

// Whether rows[0 … count) hold one that `real` hides; rows behind the last real one are means.
bool any_hidden(const int32_t* rows, int64_t count, const uint8_t* real, int64_t length) {
    uint8_t all = 1;
    for (int64_t s = 0; s < count; s++) all &= rows[s] >= length || real[rows[s]] != 0;
    return !all;
}

// One head's part of a round.
class RoundCheck {
public:
    RoundCheck(const Call& call, size_t r, int64_t b, int64_t h)
        : call_(call),
          round_(call.rounds[r]),
          b_(b),
          h_(h),
          name_("rounds[" + std::to_string(r) + "]"),
          offsets_(round_.query_offsets.at(b, h)),
          rows_(round_.query_order.at(b, h)) {}

    void check_queries() const {
        int64_t groups = round_.groups(), query_rows = call_.num_queries + call_.query_means.count();
        if (offsets_[0] != 0) refuse(name_, ".query_offsets: expected a first offset of 0, got ", offsets_[0]);
        for (int64_t g = 0; g < groups; g++)
            if (offsets_[g] > offsets_[g + 1] || offsets_[g + 1] > round_.query_order.length)
                refuse(name_, ".query_offsets: expected 0 ≤ start ≤ stop ≤ ", round_.query_order.length, ", got start ",
                       offsets_[g], ", stop ", offsets_[g + 1]);
        std::vector<uint8_t> met(query_rows, 0);
        for (int64_t s = 0; s < offsets_[groups]; s++) {
            if (rows_[s] < 0 || rows_[s] >= query_rows)
                refuse(name_, ".query_order: expected indices in [0, ", query_rows, "), got ", rows_[s]);
            if (met[rows_[s]]++)
                refuse(name_, ".query_order: expected each query at most once in a round, got one 2 times");
        }
        for (int64_t s = 0; round_.skip && s < offsets_[groups]; s++) {
            const int32_t* skip =
                round_.skip + ((b_ * call_.heads + h_) * round_.query_order.length + s) * round_.skips;
            if (!std::is_sorted(skip, skip + round_.skips))
                refuse(name_, ".skip: expected ascending key rows, got an unsorted list");
        }
    }

    // Notes, too, whether the groups hold padding. The queries must have been checked.
    void check_keys(Padding& padding) const {
        int64_t key_rows = call_.num_keys + call_.key_means.count();
        const int32_t *start = round_.key_start.at(b_, h_), *stop = round_.key_stop.at(b_, h_);
        const int32_t* keys = round_.key_order.at(b_, h_);
        int64_t checked_from = 0, checked_to = 0;  // ranges often overlap; do not check what has been checked
        for (int64_t g = 0; g < round_.groups(); g++) {
            breathe();
            if (start[g] < 0 || start[g] > stop[g] || stop[g] > round_.key_order.length)
                refuse(name_, ".key_start, key_stop: expected 0 ≤ start ≤ stop ≤ ", round_.key_order.length,
                       ", got start ", start[g], ", stop ", stop[g]);
            int64_t from = start[g], to = stop[g];
            if (from >= checked_from && from <= checked_to) {
                from = std::max<int64_t>(from, checked_to);
                checked_to = std::max(checked_to, to);
            } else {
                checked_from = from;
                checked_to = to;
            }
            for (int64_t s = from; s < to; s++)
                if (keys[s] < 0 || keys[s] >= key_rows)
                    refuse(name_, ".key_order: expected indices in [0, ", key_rows, "), got ", keys[s]);
            if (call_.key_mask &&
                any_hidden(keys + from, to - from, call_.key_mask + b_ * call_.num_keys, call_.num_keys))
                padding.keys.store(true, std::memory_order_relaxed);
            if (round_.counts) check_counts(g, stop[g] - start[g]);
            // A group without keys may hold anybody.
            if (call_.query_mask && start[g] < stop[g] && holds_padding(g))
                padding.queries.store(true, std::memory_order_relaxed);
        }
    }

private:
    void check_counts(int64_t g, int64_t keys) const {
        if (keys > round_.counts.width)
            refuse(name_, ".counts: expected room for ", keys, " keys, the longest range, got ", round_.counts.width);
        int32_t all = 0;
        for (int64_t w = 0; w < keys; w++) all |= round_.counts.at((b_ * call_.heads + h_) * round_.groups() + g, w);
        if (all < 0) refuse(name_, ".counts: expected no number below 0, got one");
    }

    bool holds_padding(int64_t g) const {
        const uint8_t* real = call_.query_mask + b_ * call_.num_queries;
        return any_hidden(rows_ + offsets_[g], offsets_[g + 1] - offsets_[g], real, call_.num_queries);
    }

    const Call& call_;
    const Round& round_;
    int64_t b_, h_;
    std::string name_;
    const int32_t *offsets_, *rows_;
};

// Every segment must lie in `order`, and every row in [0, rows). A mean cannot leave out what a mask hides.
void check_segments(const char* name, const Segments& segments, int64_t rows, const char* mask = "",
                    const uint8_t* real = nullptr) {
    int64_t heads = segments.count() ? segments.batch * segments.heads : 0;
    int threads = threads_for(2 * double(heads) * double(segments.order.length), segments.threads);
    parallel_for(heads, threads, [&](int64_t bh, int) {
        int64_t b = bh / segments.heads, h = bh % segments.heads;
        const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h);
        const int32_t* order = segments.order.at(b, h);
        for (int64_t s = 0; s < segments.count(); s++) {
            breathe();
            if (start[s] < 0 || start[s] > stop[s] || stop[s] > segments.order.length)
                refuse(name, ".start, stop: expected 0 ≤ start ≤ stop ≤ ", segments.order.length, ", got start ",
                       start[s], ", stop ", stop[s]);
            for (int64_t i = start[s]; i < stop[s]; i++)
                if (order[i] < 0 || order[i] >= rows)
                    refuse(name, ".order: expected indices in [0, ", rows, "), got ", order[i]);
            if (real && any_hidden(order + start[s], stop[s] - start[s], real + b * rows, rows))
                refuse(mask, ": expected to be the mask that the plan's means were made with, ",
                       "got one that hides a row of a mean");
        }
    });
}

// The means of a call's queries, keys and values; they live as long as this does.
class VirtualRows {
public:
    explicit VirtualRows(Call& call) {
        form(call.q, call.query_means, q_);
        form(call.k, call.key_means, k_);
        form(call.v, call.key_means, v_);
    }

private:
    static void form(Rows& rows, const Segments& segments, std::unique_ptr<float[]>& means) {
        if (!segments.count()) return;
        means.reset(new float[segments.batch * segments.heads * segments.count() * rows.dim]);
        kernels().means(segments, rows, means.get());
        rows.means = means.get();
        rows.own = rows.rows;
        rows.rows += segments.count();
    }

    std::unique_ptr<float[]> q_, k_, v_;
};

}  // namespace

const float* logs() {
    static const std::vector<float> table = [] {
        std::vector<float> found(kLogs);
        for (int32_t n = 0; n < kLogs; n++) found[n] = static_cast<float>(std::log(static_cast<double>(n)));
        return found;
    }();
    return table.data();
}

Regions& regions() {
    static Regions all;
    return all;
}

double worth_a_thread() {
    static const double found = [] {
        const char* given = std::getenv("COTERIE_GRAIN");
        double number = given ? std::atof(given) : 0;
        return number > 0 ? number : double(1 << 19);
    }();
    return found;
}

Team current_team() { return adopted_by.load() == process() ? adopted.load() : nullptr; }

void adopt_team(Team team) {
    adopted_by.store(process());
    adopted.store(team);
}

void check_plan(Call& call) {
    Padding padding;
    int64_t slots = 0;
    for (auto& round : call.rounds) slots += round.query_order.length + round.key_order.length;
    int64_t heads = call.batch * call.heads;
    parallel_for(heads, threads_for(4 * double(heads * slots), call.threads), [&](int64_t bh, int) {
        for (size_t r = 0; r < call.rounds.size(); r++) {
            RoundCheck check(call, r, bh / call.heads, bh % call.heads);
            check.check_queries();
            check.check_keys(padding);
        }
    });
    if (call.self_keys)
        for (int64_t i = 0; i < call.batch * call.num_queries; i++) {
            int32_t key = call.self_keys[i];
            if (key < -1 || key >= call.num_keys)
                refuse("self_keys: expected indices in [0, ", call.num_keys, "), got ", key);
            if (key == -1) continue;
            if (call.key_mask && !call.key_mask[i / call.num_queries * call.num_keys + key]) padding.keys = true;
            if (call.query_mask && !call.query_mask[i]) padding.queries = true;
        }
    check_segments("query_means", call.query_means, call.num_queries, "query_mask", call.query_mask);
    check_segments("key_means", call.key_means, call.num_keys, "key_mask", call.key_mask);
    if (!padding.queries) call.query_mask = nullptr;
    if (!padding.keys) call.key_mask = nullptr;
}

void check_parts(const Parts& parts, const Rows& x) {
    for (int64_t b = 0; b < x.batch; b++) {
        const int32_t *start = parts.start + b * parts.count, *stop = parts.stop + b * parts.count;
        int64_t before = 0;
        for (int64_t p = 0; p < parts.count; before = stop[p++])
            if (start[p] < before || start[p] > stop[p] || stop[p] > parts.slots)
                refuse("parts: expected ", before, " ≤ start ≤ stop ≤ ", parts.slots, ", got start ", start[p],
                       ", stop ", stop[p]);
        for (int64_t i = 0; i < before; i++)
            if (int32_t row = parts.order[b * parts.slots + i]; row < 0 || row >= x.rows)
                refuse("parts.order: expected indices in [0, ", x.rows, "), got ", row);
    }
}

void check_near(const NearCall& call, bool wide) {
    int64_t most = wide ? call.k.rows : std::min<int64_t>(call.k.rows, INT16_MAX);
    check_segments("clusters", call.clusters, call.k.rows);
    for (int64_t bh = 0; bh < call.k.batch * call.k.heads && call.clusters.count(); bh++) {
        const int32_t* start = call.clusters.start.at(bh / call.k.heads, bh % call.k.heads);
        const int32_t* stop = call.clusters.stop.at(bh / call.k.heads, bh % call.k.heads);
        for (int64_t s = 0; s < call.clusters.count(); s++) {
            if (stop[s] - start[s] > most)
                refuse("clusters: expected at most ", most, " keys, got ", stop[s] - start[s]);
            if (s && start[s] < stop[s - 1])
                refuse("clusters: expected one behind the other, got start ", start[s], " after stop ", stop[s - 1]);
        }
    }
    if (call.chunks ? call.groups % call.chunks : call.groups)
        refuse("visible: expected a chunk for equally many of the ", call.groups, " groups, got ", call.chunks);
    for (int64_t i = 0; i < call.k.batch * call.chunks; i++) {
        if (call.seen[i] < 0 || call.seen[i] > std::min(call.width, call.room))
            refuse("seen: expected at most ", std::min(call.width, call.room), ", got ", call.seen[i]);
        if (call.used[i] < 0 || call.used[i] > call.share())
            refuse("used: expected at most ", call.share(), ", got ", call.used[i]);
        const int32_t* ids = call.visible + i * call.width;
        for (int64_t v = 0; v < call.seen[i]; v++) {
            if (ids[v] < 0 || ids[v] >= call.clusters.count())
                refuse("visible: expected indices in [0, ", call.clusters.count(), "), got ", ids[v]);
            if (v && ids[v] <= ids[v - 1])
                refuse("visible: expected ascending indices, got ", ids[v], " after ", ids[v - 1]);
        }
    }
}

void prefer_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kLarge = 1 << 21;
    uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kLarge - 1) / kLarge * kLarge;
    uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / kLarge * kLarge;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice; may be declined
#else
    (void)memory, (void)bytes;
#endif
}

static int threads_of(const Call& call) {
    double slots = 0;  // at least as many pairs are met
    for (auto& round : call.rounds) slots += double(round.query_order.length + round.key_order.length);
    return threads_for(double(call.batch * call.heads) * slots * double(call.q.dim + call.v.dim), call.threads);
}

void run_forward(Call& call, const Forward& result) {
    in_one_region(threads_of(call), [&] {
        check_plan(call);
        VirtualRows rows(call);
        prefer_large_pages(result.out, call.batch * call.heads * call.q.rows * call.v.dim * int64_t(sizeof(float)));
        kernels().forward(call, result);
    });
}

static void backward_in_region(Call& call, Backward& result) {
    check_plan(call);
    VirtualRows rows(call);
    auto make_room = [&](Gradient& gradient, const Segments& segments, int64_t heads) {
        int64_t size = gradient.own_rows * gradient.dim, all = call.batch * heads * size;
        prefer_large_pages(gradient.own, all * int64_t(sizeof(float)));
        parallel_for(call.batch * heads, threads_for(double(all), call.threads),
                     [&](int64_t bh, int) { std::fill_n(gradient.own + bh * size, size, 0.0f); });
        gradient.mean_rows = segments.count();
        gradient.means.assign(segments.batch * segments.heads * segments.count() * gradient.dim, 0.0f);
    };
    make_room(result.q, call.query_means, call.heads);
    make_room(result.k, call.key_means, call.key_heads);
    make_room(result.v, call.key_means, call.key_heads);
    kernels().backward(call, result);
    if (call.query_means.count()) kernels().means_backward(call.query_means, result.q);
    if (!call.key_means.count()) return;
    kernels().means_backward(call.key_means, result.k);
    kernels().means_backward(call.key_means, result.v);
}

void run_backward(Call& call, Backward& result) {
    in_one_region(threads_of(call), [&] { backward_in_region(call, result); });
}

const Kernels& kernels() {
    static const Kernels& chosen = [&]() -> const Kernels& {
        const char* wanted = std::getenv("COTERIE_ISA");
        auto named = [&](const Kernels& each) { return wanted && !std::strcmp(wanted, each.name); };
        if (named(portable_kernels())) return portable_kernels();
#if defined(COTERIE_X86)
        if (named(avx2_kernels()) && cpu_has_avx2()) return avx2_kernels();
        if (cpu_has_avx512()) return avx512_kernels();
        if (cpu_has_avx2()) return avx2_kernels();
#endif
        return portable_kernels();
    }();
    return chosen;
}

}  // namespace coterie
