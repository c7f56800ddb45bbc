// Who does the work: torch's own OpenMP team where it can be had, so that no two sets of threads compete for the cores
// (an idle OpenMP worker spins for a while before it sleeps); otherwise threads that live for one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace coterie {

// libgomp's entry point: run work(data) on a team of that many threads, the caller among them.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// The team of this process, or null. A forked child has none: the parent's workers did not come along.
Team current_team();
void adopt_team(Team team);

// Run task(index, worker) for each index in [0, count) on at most `threads` threads. Tasks must not depend on who runs
// them; then neither does the result.
template <class Task>
void parallel_for(int64_t count, int threads, Task&& task) {
    threads = static_cast<int>(threads < count ? threads : count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) task(i, 0);
        return;
    }
    struct Work {
        int64_t count;
        Task& task;
        std::atomic<int64_t> next{0};
        std::atomic<int> workers{0};
        std::exception_ptr failure;
        std::mutex guard;

        static void run(void* data) {
            Work& work = *static_cast<Work*>(data);
            int worker = work.workers.fetch_add(1);
            try {
                for (int64_t i; (i = work.next.fetch_add(1)) < work.count;) work.task(i, worker);
            } catch (...) {
                std::lock_guard<std::mutex> lock(work.guard);
                if (!work.failure) work.failure = std::current_exception();
                work.next.store(work.count);
            }
        }
    } work{count, task, {}, {}, {}, {}};
    if (Team team = current_team()) {
        team(Work::run, &work, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> helpers;
        for (int helper = 1; helper < threads; helper++) helpers.emplace_back(Work::run, &work);
        Work::run(&work);
        for (auto& helper : helpers) helper.join();
    }
    if (work.failure) std::rethrow_exception(work.failure);
}

}  // namespace coterie
