// CLOCK_MONOTONIC from the processor's time stamp counter: the system's own call costs twice as much as a record may.
//
// The counter is read where the kernel itself keeps time by it, and is laid against the system's clock again every 50 ms
// that somebody asks for the time. Between two such looks it runs at the rate that the last second had, so it follows what
// NTP does, and is off by what that changes in 50 ms: nanoseconds, 25 µs where a clock is slewed as fast as it can be. Looks
// that fit nothing (a machine that slept or moved) begin it anew. Elsewhere, and until two looks lie far enough apart, it is
// the system's call.
#pragma once

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace keepstep::ring {

inline std::uint64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<std::uint64_t>(t.tv_nsec);
}

#if defined(__x86_64__)

// One for each process and library; a forked child has its own copy.
class Clock {
 public:
  std::uint64_t now() noexcept {
    const std::uint64_t ticks = __rdtsc();
    const std::uint32_t version = version_.load(acquire);
    // Acquire on each: whoever sees a new value of one also sees that the version has moved.
    const std::uint64_t since = ticks - ticks_.load(acquire), rate = rate_.load(acquire);
    const std::uint64_t from_ns = ns_.load(acquire), period = period_.load(acquire);
    if (since < period && (version & 1) == 0 && version == version_.load(relaxed)) return from_ns + (since * rate >> kShift);
    return look();
  }

 private:
  static constexpr auto relaxed = std::memory_order_relaxed, acquire = std::memory_order_acquire,
                        release = std::memory_order_release;
  static constexpr int kShift = 32;                           // of the rate, in ns a tick
  static constexpr std::uint64_t kPeriodNs = 50'000'000;      // from one look to the next
  static constexpr std::uint64_t kLeastNs = 20'000'000;       // between two looks that give a rate
  static constexpr std::uint64_t kBaselineNs = 1'000'000'000;  // over which a rate is taken, once and up to twice
  static constexpr std::uint64_t kFitsNs = 100'000;           // between the time by the rate and the system's

  struct Look {
    std::uint64_t ticks, ns;
  };
  enum class Usable : std::uint8_t { unknown, yes, no };

  // The system's time; and, by one thread at a time, what the fast path needs.
  std::uint64_t look() noexcept {
    if (busy_.exchange(true, acquire)) return clock_ns(CLOCK_MONOTONIC);
    std::uint64_t now = clock_ns(CLOCK_MONOTONIC);
    if (usable_ == Usable::unknown) usable_ = kernel_uses_it() ? Usable::yes : Usable::no;
    const bool waits = first_.ns != 0 && rate_.load(relaxed) == 0 && now - first_.ns < kLeastNs;
    if (usable_ == Usable::yes && !waits) {
      const Look found = read_both();
      now = found.ns;
      if (first_.ns == 0 || !fits(found)) {
        first_ = second_ = found;
        store(found, 0, 0);
      } else {
        const unsigned __int128 passed = found.ns - first_.ns;
        const auto rate = static_cast<std::uint64_t>((passed << kShift) / (found.ticks - first_.ticks));
        store(found, rate, rate == 0 ? 0 : (kPeriodNs << kShift) / rate);
        if (found.ns - second_.ns >= kBaselineNs) {
          first_ = second_;
          second_ = found;
        }
      }
    }
    busy_.store(false, release);
    return now;
  }

  static bool kernel_uses_it() noexcept {
    char text[5] = {};
    const int fd = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const bool is_tsc = read(fd, text, 4) == 4 && std::strcmp(text, "tsc\n") == 0;
    close(fd);
    return is_tsc;
  }

  // Whether the counter has run on since the last look, at the rate that it had.
  bool fits(const Look& found) const noexcept {
    const std::uint64_t rate = rate_.load(relaxed);
    const Look last = rate == 0 ? first_ : Look{ticks_.load(relaxed), ns_.load(relaxed)};
    if (found.ticks <= last.ticks || found.ns < last.ns) return false;
    if (rate == 0) return true;
    const std::uint64_t passed = found.ns - last.ns;
    const auto by_rate = static_cast<std::uint64_t>(static_cast<unsigned __int128>(found.ticks - last.ticks) * rate >> kShift);
    return (by_rate > passed ? by_rate - passed : passed - by_rate) <= kFitsNs + passed / 1000;
  }

  // The counter in the middle of the fastest of a few calls: one that was interrupted says little.
  static Look read_both() noexcept {
    Look best{0, 0};
    std::uint64_t least = ~0ULL;
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t before = __rdtsc(), ns = clock_ns(CLOCK_MONOTONIC), took = __rdtsc() - before;
      if (took < least) {
        least = took;
        best = {before + took / 2, ns};
      }
    }
    return best;
  }

  void store(const Look& look, std::uint64_t rate, std::uint64_t period) noexcept {
    version_.fetch_add(1, std::memory_order_acq_rel);
    ticks_.store(look.ticks, release);
    ns_.store(look.ns, release);
    rate_.store(rate, release);
    period_.store(period, release);
    version_.fetch_add(1, release);
  }

  // Read by everybody, written seldom.
  alignas(64) std::atomic<std::uint32_t> version_{0};  // odd while the others are written
  std::atomic<std::uint64_t> ticks_{0}, ns_{0}, rate_{0}, period_{0};
  // Of whoever has `busy_`.
  alignas(64) std::atomic<bool> busy_{false};
  Usable usable_ = Usable::unknown;
  Look first_{0, 0}, second_{0, 0};
};

inline Clock process_clock;

inline std::uint64_t monotonic_ns() noexcept { return process_clock.now(); }

#else

inline std::uint64_t monotonic_ns() noexcept { return clock_ns(CLOCK_MONOTONIC); }

#endif

}  // namespace keepstep::ring
