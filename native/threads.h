// Who does the work: torch's own OpenMP team where it can be had, so that no two sets of threads compete for the cores
// (an idle OpenMP worker spins for a while before it sleeps); otherwise threads that live for one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include "interrupt.h"

namespace coterie {

// libgomp's entry point: run work(data) on a team of that many threads, the caller among them.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// The team of this process, or null. A forked child has none: the parent's workers did not come along.
Team current_team();
void adopt_team(Team team);

// What all calls to parallel_for so far took, in nanoseconds: of threads that were there to work, and of those among
// them that had nothing to do, as they came late or waited for others at the end.
struct Regions {
    std::atomic<int64_t> count{0}, held{0}, idle{0};
};
Regions& regions();

// The numbers that are worth a thread: half a million, or COTERIE_GRAIN in the environment, to test small calls on
// several threads.
double worth_a_thread();

inline int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The tasks of one call to parallel_for, and those who work on them.
template <class Task>
struct Tasks {
    int64_t count;
    Task& task;
    Interrupt* interrupt = current_interrupt;
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0}, busy{0};
    std::atomic<int64_t> worked{0};  // nanoseconds, of all
    std::exception_ptr failure{};
    std::mutex guard{};
    std::condition_variable idle{};

    static void run(void* data) {
        Tasks& work = *static_cast<Tasks*>(data);
        if (std::this_thread::get_id() == work.caller) {
            work.attempt([&] { work.share(); });
            if (work.interrupt) work.attempt([&] { work.wait(); });
            return;
        }
        WorkingFor call(work.interrupt);
        work.busy.fetch_add(1);
        work.attempt([&] { work.share(); });
        std::lock_guard<std::mutex> lock(work.guard);  // the caller may be about to sleep
        if (work.busy.fetch_sub(1) == 1) work.idle.notify_one();
    }

    void share() {
        int worker = workers.fetch_add(1);
        int64_t begin = nanoseconds();
        for (int64_t i; (i = next.fetch_add(1)) < count;) {
            breathe();
            task(i, worker);
        }
        worked.fetch_add(nanoseconds() - begin);
    }

    // A caller out of tasks must not wait where nobody can tell it to stop.
    void wait() {
        for (int spins = 0; spins < 1000; spins++) {
            if (!busy.load()) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(guard);
        while (!idle.wait_for(lock, Interrupt::kPatience / 8, [&] { return !busy.load(); })) {
            lock.unlock();
            breathe();
            lock.lock();
        }
    }

    template <class Part>
    void attempt(Part&& part) {
        try {
            part();
        } catch (const Stopped&) {
            next.store(count);  // the caller knows why
        } catch (...) {
            std::lock_guard<std::mutex> lock(guard);
            if (!failure) failure = std::current_exception();
            next.store(count);
        }
    }
};

// How many threads a piece of work is worth, by the numbers that it multiplies or moves: a team takes longer to come
// together than a little work takes one of them, and far longer where others want the cores.
inline int threads_for(double numbers, int threads) {
    return static_cast<int>(std::clamp(numbers / worth_a_thread(), 1.0, double(std::max(1, threads))));
}

// Run task(index, worker) for each index in [0, count) on at most `threads` threads. Tasks must not depend on who runs
// them; then neither does the result.
template <class Task>
void parallel_for(int64_t count, int threads, Task&& task) {
    threads = static_cast<int>(threads < count ? threads : count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) {
            breathe();
            task(i, 0);
        }
        return;
    }
    using Work = Tasks<std::remove_reference_t<Task>>;
    Work work{count, task};
    int64_t begin = nanoseconds();
    if (Team team = current_team()) {
        team(Work::run, &work, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> helpers;
        try {
            for (int helper = 1; helper < threads; helper++) helpers.emplace_back(Work::run, &work);
        } catch (const std::system_error&) {  // no more threads to be had: those that are there do the work
        }
        Work::run(&work);
        for (auto& helper : helpers) helper.join();
    }
    int64_t held = (nanoseconds() - begin) * threads;
    regions().count.fetch_add(1);
    regions().held.fetch_add(held);
    regions().idle.fetch_add(held - work.worked.load());
    if (work.failure) std::rethrow_exception(work.failure);
}

}  // namespace coterie
