// A loop over chunks of work, shared by threads that spin briefly and then sleep.
//
// Chunks are handed out one by one. A thread that the system does not run takes none, so beside a busy process the
// caller waits for no more than the chunk that another thread has begun.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <thread>
#include <unistd.h>

namespace memlm {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Threads {
  public:
    // The threads of this process. A fork has none of its parent's, so it gets its own.
    static Threads& of_process() {
        static std::mutex lock;
        static Threads* threads = nullptr;
        static pid_t owner = 0;
        std::lock_guard<std::mutex> guard(lock);
        if (owner != getpid()) {
            threads = new Threads;  // never deleted: its threads may sleep in it until the process ends
            owner = getpid();
        }
        return *threads;
    }

    // Uses up to `number` threads, the caller included, until the claim ends. While another caller has them: one.
    class Claim {
      public:
        Claim(Threads& threads, int number) : threads_(threads), held_(number > 1 && threads.busy_.try_lock()) {
            if (held_) threads_.enlist(number);
        }
        ~Claim() {
            if (held_) threads_.busy_.unlock();
        }
        Claim(const Claim&) = delete;
        Claim& operator=(const Claim&) = delete;

        // Calls body(0) ... body(count - 1), in any order, and returns when all have ended. count is below 2^24.
        template <typename Body> void loop(int count, Body&& body) {
            if (held_ && count > 1) {
                threads_.run(count, [](void* given, int chunk) { (*static_cast<Body*>(given))(chunk); }, &body);
            } else {
                for (int chunk = 0; chunk < count; chunk++) body(chunk);
            }
        }

      private:
        Threads& threads_;
        bool held_;
    };

  private:
    static constexpr int SPINS = 4000;  // some 50 microseconds
    static constexpr uint64_t FIELD = (1u << 24) - 1;

    using Call = void (*)(void*, int);

    void enlist(int number) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
        for (; enlisted_ < number - 1; enlisted_++) std::thread(&Threads::work, this, enlisted_ + 1).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        active_.store(number, std::memory_order_relaxed);
    }

    void run(int count, Call call, void* body) {
        call_ = call;
        body_ = body;
        done_.store(0, std::memory_order_relaxed);
        epoch_ = (epoch_ + 1) & 0xffff;
        ticket_.store(epoch_ << 48 | static_cast<uint64_t>(count) << 24);
        ticket_.notify_all();
        while (take()) {}
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS) pause_briefly();
            else sched_yield();
        }
    }

    // Computes the next chunk. A ticket holds the loop's number, its count of chunks and the next chunk in one word, so
    // a thread that comes late reads the current loop's or finds nothing left.
    bool take() {
        if (!has_work(ticket_.load(std::memory_order_acquire))) return false;
        const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
        if (!has_work(ticket)) return false;
        call_(body_, static_cast<int>(ticket & FIELD));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    static bool has_work(uint64_t ticket) { return (ticket & FIELD) < (ticket >> 24 & FIELD); }

    void work(int number) {
        for (int spins = 0;;) {
            const uint64_t ticket = ticket_.load(std::memory_order_acquire);
            if (has_work(ticket) && number < active_.load(std::memory_order_relaxed)) {
                while (take()) {}
                spins = 0;
            } else if (spins++ < SPINS) {
                pause_briefly();
            } else {
                ticket_.wait(ticket);
                spins = 0;
            }
        }
    }

    std::mutex busy_;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int> done_{0};
    std::atomic<int> active_{1};
    Call call_ = nullptr;
    void* body_ = nullptr;
    uint64_t epoch_ = 0;
    int enlisted_ = 0;
};

}  // namespace memlm
