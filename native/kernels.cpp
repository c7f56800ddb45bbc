#include "kernels.h"

#include <algorithm>
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
void check_round(const Call& call, size_t r, int64_t b, int64_t h, std::vector<uint8_t>& met, Padding& padding) {
    const Round& round = call.rounds[r];
    std::string name = "rounds[" + std::to_string(r) + "]";
    int64_t groups = round.groups(), query_rows = call.num_queries + call.query_means.count();
    int64_t key_rows = call.num_keys + call.key_means.count();
    const int32_t* offsets = round.query_offsets.at(b, h);
    if (offsets[0] != 0) refuse(name, ".query_offsets: expected a first offset of 0, got ", offsets[0]);
    for (int64_t g = 0; g < groups; g++)
        if (offsets[g] > offsets[g + 1] || offsets[g + 1] > round.query_order.length)
            refuse(name, ".query_offsets: expected 0 ≤ start ≤ stop ≤ ", round.query_order.length, ", got start ",
                   offsets[g], ", stop ", offsets[g + 1]);
    met.assign(query_rows, 0);
    const int32_t* rows = round.query_order.at(b, h);
    for (int64_t s = 0; s < offsets[groups]; s++) {
        if (rows[s] < 0 || rows[s] >= query_rows)
            refuse(name, ".query_order: expected indices in [0, ", query_rows, "), got ", rows[s]);
        if (met[rows[s]]++) refuse(name, ".query_order: expected each query at most once in a round, got one 2 times");
    }
    for (int64_t s = 0; round.skip && s < offsets[groups]; s++) {
        const int32_t* skip = round.skip + ((b * call.heads + h) * round.query_order.length + s) * round.skips;
        if (!std::is_sorted(skip, skip + round.skips))
            refuse(name, ".skip: expected ascending key rows, got an unsorted list");
    }
    const int32_t *start = round.key_start.at(b, h), *stop = round.key_stop.at(b, h);
    const int32_t* keys = round.key_order.at(b, h);
    int64_t checked_from = 0, checked_to = 0;  // ranges often overlap; do not check what has been checked
    for (int64_t g = 0; g < groups; g++) {
        breathe();
        if (start[g] < 0 || start[g] > stop[g] || stop[g] > round.key_order.length)
            refuse(name, ".key_start, key_stop: expected 0 ≤ start ≤ stop ≤ ", round.key_order.length, ", got start ",
                   start[g], ", stop ", stop[g]);
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
                refuse(name, ".key_order: expected indices in [0, ", key_rows, "), got ", keys[s]);
        if (call.key_mask && any_hidden(keys + from, to - from, call.key_mask + b * call.num_keys, call.num_keys))
            padding.keys.store(true, std::memory_order_relaxed);
        // A group without keys may hold anybody.
        if (call.query_mask && start[g] < stop[g] &&
            any_hidden(rows + offsets[g], offsets[g + 1] - offsets[g], call.query_mask + b * call.num_queries,
                       call.num_queries))
            padding.queries.store(true, std::memory_order_relaxed);
    }
}

// Every segment must lie in `order`, and every row in [0, rows). A mean cannot leave out what a mask hides.
void check_segments(const char* name, const Segments& segments, int64_t rows, const char* mask = "",
                    const uint8_t* real = nullptr) {
    parallel_for(segments.count() ? segments.batch * segments.heads : 0, segments.threads, [&](int64_t bh, int) {
        int64_t b = bh / segments.heads, h = bh % segments.heads;
        const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h),
                      *order = segments.order.at(b, h);
        for (int64_t s = 0; s < segments.count(); s++) {
            breathe();
            if (start[s] < 0 || start[s] > stop[s] || stop[s] > segments.order.length)
                refuse(name, ".start, stop: expected 0 ≤ start ≤ stop ≤ ", segments.order.length, ", got start ",
                       start[s], ", stop ", stop[s]);
            for (int64_t i = start[s]; i < stop[s]; i++)
                if (order[i] < 0 || order[i] >= rows)
                    refuse(name, ".order: expected indices in [0, ", rows, "), got ", order[i]);
            if (real && any_hidden(order + start[s], stop[s] - start[s], real + b * rows, rows))
                refuse(
                    mask,
                    ": expected to be the mask that the plan's means were made with, got one that hides a row of a mean");
        }
    });
}

// Fresh memory that is about to be written all over: large pages spare the faults, and later the look-ups.
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
        rows.heads = segments.heads;
        rows.own = rows.rows;
        rows.rows += segments.count();
    }

    std::unique_ptr<float[]> q_, k_, v_;
};

}  // namespace

Team current_team() { return adopted_by.load() == process() ? adopted.load() : nullptr; }

void adopt_team(Team team) {
    adopted_by.store(process());
    adopted.store(team);
}

void check_plan(Call& call) {
    Padding padding;
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        std::vector<uint8_t> met;
        for (size_t r = 0; r < call.rounds.size(); r++)
            check_round(call, r, bh / call.heads, bh % call.heads, met, padding);
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

void check_parts(const KmeansCall& call) {
    for (int64_t b = 0; b < call.batch; b++) {
        const int32_t *start = call.start + b * call.parts, *stop = call.stop + b * call.parts;
        int64_t before = 0;
        for (int64_t p = 0; p < call.parts; before = stop[p++])
            if (start[p] < before || start[p] > stop[p] || stop[p] > call.slots)
                refuse("parts: expected ", before, " ≤ start ≤ stop ≤ ", call.slots, ", got start ", start[p],
                       ", stop ", stop[p]);
        for (int64_t i = 0; i < before; i++)
            if (int32_t row = call.order[b * call.slots + i]; row < 0 || row >= call.x.rows)
                refuse("parts.order: expected indices in [0, ", call.x.rows, "), got ", row);
    }
}

void check_near(const NearCall& call) {
    check_segments("clusters", call.clusters, call.k.rows);
    for (int64_t bh = 0; bh < call.batch * call.key_heads && call.clusters.count(); bh++) {
        const int32_t* start = call.clusters.start.at(bh / call.key_heads, bh % call.key_heads);
        const int32_t* stop = call.clusters.stop.at(bh / call.key_heads, bh % call.key_heads);
        for (int64_t s = 0; s < call.clusters.count(); s++)
            if (stop[s] - start[s] > call.k.rows)
                refuse("clusters: expected at most ", call.k.rows, " keys, got ", stop[s] - start[s]);
    }
    if (call.chunks ? call.groups % call.chunks : call.groups)
        refuse("visible: expected a chunk for equally many of the ", call.groups, " groups, got ", call.chunks);
    for (int64_t i = 0; i < call.batch * call.chunks; i++) {
        if (call.seen[i] < 0 || call.seen[i] > call.visible_width)
            refuse("seen: expected at most ", call.visible_width, ", got ", call.seen[i]);
        for (int64_t v = call.visible_width - call.seen[i]; v < call.visible_width; v++)
            if (int32_t id = call.visible[i * call.visible_width + v]; id < 0 || id >= call.clusters.count())
                refuse("visible: expected indices in [0, ", call.clusters.count(), "), got ", id);
    }
}

void run_forward(Call& call, const Forward& result) {
    check_plan(call);
    VirtualRows rows(call);
    prefer_large_pages(result.out, call.batch * call.heads * call.q.rows * call.v.dim * int64_t(sizeof(float)));
    kernels().forward(call, result);
}

void run_backward(Call& call, Backward& result) {
    check_plan(call);
    VirtualRows rows(call);
    auto make_room = [&](Gradient& gradient, const Segments& segments, int64_t heads) {
        int64_t size = gradient.own_rows * gradient.dim;
        prefer_large_pages(gradient.own, call.batch * heads * size * int64_t(sizeof(float)));
        parallel_for(call.batch * heads, call.threads,
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
