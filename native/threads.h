// Tasks that are shared out to the threads of a crew.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

#include "crew.h"

namespace coterie {

// What all calls to parallel_for so far took, in nanoseconds: of threads that were there to work, and of those among
// them that had nothing to do, as they came late or waited for others at the end.
struct Regions {
    std::atomic<int64_t> count{0}, held{0}, idle{0};
};
Regions& regions();

// The numbers that are worth a thread: half a million, or COTERIE_GRAIN in the environment, to test small calls on
// several threads.
double worth_a_thread();

// The tasks of one call to parallel_for, and those who work on them.
template <class Task>
struct Tasks {
    int64_t count;
    Task& task;
    Interrupt* interrupt = current_interrupt;
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0};
    std::atomic<int64_t> worked{0};  // nanoseconds, of all
    std::exception_ptr failure{};
    std::mutex guard{};

    static void help(void* data) {
        Tasks& work = *static_cast<Tasks*>(data);
        WorkingFor call(work.interrupt);
        work.attempt([&] { work.share(); });
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
    Crew* crew = Crew::mine();
    if (threads <= 1 || (crew && crew->busy())) {
        for (int64_t i = 0; i < count; i++) {
            breathe();
            task(i, 0);
        }
        return;
    }
    if (!crew) return in_one_region(threads, [&] { parallel_for(count, threads, task); });
    using Work = Tasks<std::remove_reference_t<Task>>;
    Work work{count, task};
    int64_t begin = nanoseconds();
    crew->run(threads - 1, work);
    int64_t held = (nanoseconds() - begin) * threads;
    regions().count.fetch_add(1);
    regions().held.fetch_add(held);
    regions().idle.fetch_add(held - work.worked.load());
    if (work.failure) std::rethrow_exception(work.failure);
}

}  // namespace coterie
