// Threads that live for one call: nothing spins between calls, nothing is left over for a fork to lose.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace coterie {

// Run task(index, worker) for each index in [0, count) on at most `threads` threads. Tasks must not depend on who runs
// them; then neither does the result.
template <class Task>
void parallel_for(int64_t count, int threads, Task&& task) {
    threads = static_cast<int>(threads < count ? threads : count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) task(i, 0);
        return;
    }
    std::atomic<int64_t> next{0};
    std::exception_ptr failure;
    std::mutex guard;
    auto work = [&](int worker) {
        try {
            for (int64_t i; (i = next.fetch_add(1)) < count;) task(i, worker);
        } catch (...) {
            std::lock_guard<std::mutex> lock(guard);
            if (!failure) failure = std::current_exception();
            next.store(count);
        }
    };
    std::vector<std::thread> team;
    for (int worker = 1; worker < threads; worker++) team.emplace_back(work, worker);
    work(0);
    for (auto& member : team) member.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace coterie
