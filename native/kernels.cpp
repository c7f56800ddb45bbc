#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
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

void check_round(const Call& call, size_t r, const Round& round, std::vector<uint8_t>& met) {
    std::string name = "rounds[" + std::to_string(r) + "]";
    int64_t groups = round.groups();
    for (int64_t b = 0; b < call.batch; b++)
        for (int64_t h = 0; h < call.heads; h++) {
            const int32_t* offsets = round.query_offsets.at(b, h);
            if (offsets[0] != 0) refuse(name, ".query_offsets: expected a first offset of 0, got ", offsets[0]);
            for (int64_t g = 0; g < groups; g++)
                if (offsets[g] > offsets[g + 1] || offsets[g + 1] > round.query_order.length)
                    refuse(name, ".query_offsets: expected 0 ≤ start ≤ stop ≤ ", round.query_order.length, ", got start ",
                           offsets[g], ", stop ", offsets[g + 1]);
            met.assign(call.q.rows, 0);
            const int32_t* rows = round.query_order.at(b, h);
            for (int64_t s = 0; s < offsets[groups]; s++) {
                if (rows[s] < 0 || rows[s] >= call.q.rows)
                    refuse(name, ".query_order: expected indices in [0, ", call.q.rows, "), got ", rows[s]);
                if (met[rows[s]]++) refuse(name, ".query_order: expected each query at most once in a round, got one 2 times");
            }
            const int32_t *start = round.key_start.at(b, h), *stop = round.key_stop.at(b, h);
            const int32_t* keys = round.key_order.at(b, h);
            int64_t checked_from = 0, checked_to = 0;  // ranges often overlap; do not check what has been checked
            for (int64_t g = 0; g < groups; g++) {
                if (start[g] < 0 || start[g] > stop[g] || stop[g] > round.key_order.length)
                    refuse(name, ".key_start, key_stop: expected 0 ≤ start ≤ stop ≤ ", round.key_order.length,
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
                    if (keys[s] < 0 || keys[s] >= call.k.rows)
                        refuse(name, ".key_order: expected indices in [0, ", call.k.rows, "), got ", keys[s]);
            }
        }
}

}  // namespace

Team current_team() { return adopted_by.load() == process() ? adopted.load() : nullptr; }

void adopt_team(Team team) {
    adopted_by.store(process());
    adopted.store(team);
}

void check_plan(const Call& call) {
    std::vector<uint8_t> met;
    for (size_t r = 0; r < call.rounds.size(); r++) check_round(call, r, call.rounds[r], met);
    if (call.self_keys)
        for (int64_t i = 0; i < call.batch * call.num_queries; i++)
            if (call.self_keys[i] < -1 || call.self_keys[i] >= call.num_keys)
                refuse("self_keys: expected indices in [0, ", call.num_keys, "), got ", call.self_keys[i]);
}

void check_segments(const Segments& segments, int64_t rows) {
    for (int64_t b = 0; b < segments.batch; b++)
        for (int64_t h = 0; h < segments.heads; h++) {
            const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h), *order = segments.order.at(b, h);
            for (int64_t s = 0; s < segments.start.length; s++) {
                if (start[s] < 0 || start[s] > stop[s] || stop[s] > segments.order.length)
                    refuse("means.start, stop: expected 0 ≤ start ≤ stop ≤ ", segments.order.length, ", got start ", start[s],
                           ", stop ", stop[s]);
                for (int64_t i = start[s]; i < stop[s]; i++)
                    if (order[i] < 0 || order[i] >= rows)
                        refuse("means.order: expected indices in [0, ", rows, "), got ", order[i]);
            }
        }
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
