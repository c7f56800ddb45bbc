// How a long call is stopped half-way. The thread that made the call asks its caller now and then whether to go on;
// helpers look at a flag. Who is asked, and what the answer means, is the caller's business: no kernel knows of it.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace coterie {

// What helpers throw when the call that they work for has been stopped; the calling thread throws the reason.
struct Stopped {};

class Interrupt {
public:
    using Ask = void (*)();  // throws if the call should stop

    // The time between two questions: each may have to wait for the GIL, and half a second is what a user grants.
    static constexpr std::chrono::milliseconds kPatience{50};

    explicit Interrupt(Ask ask) : ask_(ask) {}
    Interrupt(const Interrupt&) = delete;

    void check() {
        if (std::this_thread::get_id() != caller_) {
            if (stopped_.load(std::memory_order_relaxed)) throw Stopped();
            return;
        }
        if (++looks_ % 8) return;  // even the clock costs something
        auto now = std::chrono::steady_clock::now();
        if (now - asked_ < kPatience) return;
        asked_ = now;
        try {
            ask_();
        } catch (...) {
            stopped_.store(true, std::memory_order_relaxed);
            throw;
        }
    }

private:
    const Ask ask_;
    const std::thread::id caller_ = std::this_thread::get_id();
    std::atomic<bool> stopped_{false};
    unsigned looks_ = 0;
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

// What this thread works for; null if nobody can stop it.
inline thread_local Interrupt* current_interrupt = nullptr;

// As long as this lives, the thread works for that call.
class WorkingFor {
public:
    explicit WorkingFor(Interrupt* interrupt) : before_(current_interrupt) { current_interrupt = interrupt; }
    ~WorkingFor() { current_interrupt = before_; }
    WorkingFor(const WorkingFor&) = delete;

private:
    Interrupt* const before_;
};

// To be called between pieces of work of at most a few milliseconds, and never while a thread_local is in use: whoever
// is asked may run a signal handler, which may make a call of its own.
inline void breathe() {
    if (current_interrupt) current_interrupt->check();
}

}  // namespace coterie
