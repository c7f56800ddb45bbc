// Who works: torch's own OpenMP team where it can be had, so that no two sets of threads compete for the cores.
// OpenMP's threads spin for milliseconds after each region, and its caller waits for all of them, also for those that a
// busy core has not let run. So a call is one region, in which the caller does everything that is not shared out, and
// posts what is; a helper looks for that a moment, then sleeps, and nobody waits for one that has not come.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "interrupt.h"

namespace coterie {

// libgomp's entry point: run work(data) on a team of that many threads, the caller among them.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// The team of this process, or null. A forked child has none: the parent's workers did not come along.
Team current_team();
void adopt_team(Team team);

inline int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// What a caller posts, one piece of work after the other.
class Crew {
public:
    // Of the thread that made the call, while its region lasts.
    static Crew*& mine() {
        static thread_local Crew* crew = nullptr;
        return crew;
    }

    // Whether a piece of work is posted: one inside of it is not shared out.
    bool busy() const { return busy_; }

    // For the caller: share work out to at most so many helpers, and come back when nobody is at it.
    template <class Work>
    void run(int helpers, Work& work) {
        busy_ = true;
        help_ = Work::help;
        work_ = &work;
        gate_.store(static_cast<uint32_t>(helpers) * kRoom);
        posted_.fetch_add(1);
        posted_.notify_all();
        work.attempt([&] { work.share(); });
        gate_.fetch_and(kRoom - 1);  // nobody comes any more
        work.attempt([&] { wait(breathe); });  // a caller out of tasks can still be told to stop
        wait([] {});
        busy_ = false;
    }

    // For helpers: do what is posted, until they are dismissed.
    void serve() {
        for (int seen = 0;;) {
            for (int64_t begin = nanoseconds(); posted_.load() == seen && nanoseconds() - begin < kAwake;)
                std::this_thread::yield();
            posted_.wait(seen);
            seen = posted_.load();
            if (dismissed_.load()) return;
            if (!join()) continue;
            help_(work_);
            std::lock_guard<std::mutex> lock(guard_);  // the caller may be about to sleep
            if (gate_.fetch_sub(1) == 1) idle_.notify_one();
        }
    }

    void dismiss() {
        dismissed_.store(true);
        posted_.fetch_add(1);
        posted_.notify_all();
    }

private:
    // For the helpers that have come, asking now and then whether to go on.
    template <class Ask>
    void wait(Ask&& ask) {
        for (int spins = 0; spins < 1000; spins++) {
            if (!gate_.load()) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(guard_);
        while (!idle_.wait_for(lock, Interrupt::kPatience / 8, [&] { return !gate_.load(); })) {
            lock.unlock();
            ask();
            lock.lock();
        }
    }

    static constexpr uint32_t kRoom = 1 << 16;  // of `gate_`: this for each who may still come, 1 for each who has
    static constexpr int64_t kAwake = 300'000;  // nanoseconds that a helper looks for work before it sleeps

    bool join() {
        uint32_t gate = gate_.load();
        while (gate >= kRoom)
            if (gate_.compare_exchange_weak(gate, gate - kRoom + 1)) return true;
        return false;
    }

    bool busy_ = false;  // of the caller alone
    void (*help_)(void*) = nullptr;  // written while nobody is inside
    void* work_ = nullptr;
    std::atomic<int> posted_{0};
    std::atomic<bool> dismissed_{false};
    std::atomic<uint32_t> gate_{0};
    std::mutex guard_{};
    std::condition_variable idle_{};
};

// Do body() as the caller of a crew of so many threads, which parallel_for shares its tasks out to.
template <class Body>
void in_one_region(int threads, Body&& body) {
    if (threads <= 1 || Crew::mine()) return body();
    struct Region {
        Body& body;
        std::thread::id caller = std::this_thread::get_id();
        Crew crew{};
        std::exception_ptr failure{};

        static void run(void* data) {
            Region& mine = *static_cast<Region*>(data);
            if (std::this_thread::get_id() != mine.caller) return mine.crew.serve();
            Crew::mine() = &mine.crew;
            try {
                mine.body();
            } catch (...) {
                mine.failure = std::current_exception();
            }
            Crew::mine() = nullptr;
            mine.crew.dismiss();
        }
    };
    Region region{body};
    if (Team team = current_team()) {
        team(Region::run, &region, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> helpers;
        try {
            for (int helper = 1; helper < threads; helper++) helpers.emplace_back(Region::run, &region);
        } catch (const std::system_error&) {  // no more threads to be had: those that are there do the work
        }
        Region::run(&region);
        for (auto& helper : helpers) helper.join();
    }
    if (region.failure) std::rethrow_exception(region.failure);
}

}  // namespace coterie
