// Work that is done by anybody and written down in its order, so that sums come out the same whoever made their parts.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "interrupt.h"

namespace coterie {

// Whose turn it is in one line of tasks. Tasks must be begun in the order of the line: then whoever is waited for is at
// work.
class Turns {
public:
    // Wait until all tasks before this one have passed.
    void wait_for(int64_t task) const {
        for (int looks = 0; next_.load(std::memory_order_acquire) != task; looks++) {
            if (given_up_.load(std::memory_order_relaxed)) throw Stopped();
            breathe();
            if (looks > kPatience) std::this_thread::yield();
        }
    }

    void pass(int64_t task) { next_.store(task + 1, std::memory_order_release); }

    // A task has failed: nobody need wait for it.
    void give_up() { given_up_.store(true, std::memory_order_relaxed); }

private:
    static constexpr int kPatience = 64;  // looks before the core is left to others
    std::atomic<int64_t> next_{0};
    std::atomic<bool> given_up_{false};
};

// One task's.
struct Turn {
    Turns& turns;
    int64_t task;

    void wait() const { turns.wait_for(task); }
    void pass() const { turns.pass(task); }
};

}  // namespace coterie
