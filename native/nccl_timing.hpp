// When the GPU began and ended what was called, how long the compute stream was blocked by it, and how long an iteration
// took there: CUDA events on the streams, read by a thread of ours. See docs/design/nccl-shim.md.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "nccl_events.hpp"

namespace keepstep::nccl {
namespace {

constexpr std::uint16_t kTimed = 64;                       // core/events.py: Flag
constexpr std::uint64_t kMostOrderedNs = 600'000'000'000;  // whatever is ordered
constexpr unsigned kLookUs = 2000, kIdleLookUs = 20'000, kLongestLookUs = 50'000;
constexpr std::uint64_t kMarkedNs = 10'000'000'000;  // without a boundary for so long, nothing is measured any more

// What is measured of the iterations, so that it costs a thousandth of them at most. An event with timing takes 2 µs of its
// stream (docs/design/on-a-gpu.md).
constexpr std::uint64_t kEventNs = 2000, kShare = 1000;
constexpr std::uint64_t kEveryNs = 50'000'000;  // and not more often than that, for the sake of who reads the ring
constexpr std::uint64_t kFirst = 32;            // of a process: all, for a rank may be slow from the start
constexpr std::uint64_t kInARow = 8;            // as several optimizer steps may make one iteration
constexpr std::uint64_t kMostRare = 128;

// As core/events.py numbers them.
enum class Device : unsigned char { iteration = 1, wait, blind };

// From one boundary to the next, on the compute stream.
struct Iteration {
  Span *from = nullptr, *to = nullptr;
  std::uint64_t number = 0;      // of optimizer steps, at its end
  std::uint64_t blocked_ns = 0;  // as far as it is known
  std::uint64_t lost = 0;        // Behind::lost() at its start
  unsigned events = 0, others = 0;  // put onto the compute stream for it, and onto other streams
  unsigned replays = 0;          // of graphs, whose communication is not seen
  int pending = 0;               // spans that are not read yet
  bool spoilt = false;           // something of it was not measured
  bool calls = false;            // calls on other streams are timed, too
};

std::atomic<const std::atomic<std::uint64_t>*> g_orders{nullptr};  // the rank's page

// The order as it stands; 0, mostly: there is none.
std::uint64_t ordered_until() noexcept {
  constexpr int kUntil = 5;  // ring/orders.py: Word
  const auto* words = g_orders.load(std::memory_order_acquire);
  return words == nullptr ? 0 : words[kUntil].load(std::memory_order_relaxed);
}

bool is_ordered() noexcept {
  const std::uint64_t until = ordered_until();
  return until != 0 && until - ring::monotonic_ns() < kMostOrderedNs;
}

const bool g_device_off = [] {
  const char* told = std::getenv("KEEPSTEP_DEVICE_TIMES");
  return told != nullptr && std::strcmp(told, "0") == 0;
}();
constexpr std::uintptr_t kNoStream = ~std::uintptr_t{0};
std::atomic<std::uintptr_t> g_main{kNoStream};  // the compute stream: that of the newest boundary
// What callers look at, in one word: there was a boundary; an iteration is being measured; its calls on other streams, too.
constexpr unsigned kTracked = 1, kMeasures = 2, kCalls = 4;
std::atomic<unsigned> g_state{0};
bool has(unsigned state) noexcept { return (g_state.load(std::memory_order_relaxed) & state) != 0; }
bool is_main(Stream stream) noexcept { return g_main.load(std::memory_order_relaxed) == reinterpret_cast<std::uintptr_t>(stream); }

Behind& behind() {
  static auto* made = new Behind;
  return *made;
}

class Timing;
Timing& timing();

class Timing {
 public:
  // Opens what the agent orders by. Without it, nothing is ever ordered.
  __attribute__((noinline)) void open(const char* path) noexcept {
    constexpr std::uint64_t kMagic = 0x4B534F5244455231;  // ring/orders.py
    if (path == nullptr || path_ == path) return;
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void* memory = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) return;
    const auto* words = static_cast<const std::atomic<std::uint64_t>*>(memory);
    if (words[0].load(std::memory_order_relaxed) != kMagic) return;
    path_ = path;
    g_orders.store(words, std::memory_order_release);
  }

  // Whether calls on this stream are to be timed now.
  static bool wants(Stream stream) noexcept {
    const unsigned state = g_state.load(std::memory_order_relaxed);
    return state > kTracked ? (state & kCalls) != 0 || is_main(stream) || ordered_until() != 0 : ordered_until() != 0;
  }

  // For calls on this stream; null where they are not to be timed, or cannot be: see `free_span`.
  __attribute__((noinline)) Span* take(Stream stream) noexcept {
    if (!has(kMeasures) && !is_ordered()) return nullptr;
    Span* span = free_span(stream);
    const std::lock_guard<std::mutex> guard(lock_);
    if (current_ == nullptr) return span;
    if (is_main(stream))
      join(span);
    else if (span != nullptr)
      current_->others += 2;
    return span;
  }

  void begin(Span* span, Stream stream) noexcept {
    if (cuda().record(span->from, stream) == 0) return;
    fail("an event could not be recorded");
    const std::lock_guard<std::mutex> guard(lock_);
    if (span->base != nullptr) --span->base->users;
    span->base = nullptr;
  }

  // After the calls. What did not come onto the stream as it should has its end now.
  void end(Span* span, Stream stream, Result result) noexcept {
    const bool bad = result != kSuccess && result != kInProgress;
    const bool there = result == kSuccess && span->base != nullptr && cuda().record(span->to, stream) == 0;
    if (!there)
      for (ring::Operation& operation : span->operations) operation.finish(bad);
    const std::lock_guard<std::mutex> guard(lock_);
    if (there) {
      under_way_.push_back(span);
      return;
    }
    if (span->iteration != nullptr) leave(span->iteration, true);
    events_.give_back(span);
  }

  // The compute stream is about to wait for communication of this group; null: nobody measures that now.
  __attribute__((noinline)) Span* take_wait(Stream stream, std::int16_t group) noexcept {
    Span* span = free_span(stream);
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (current_ == nullptr) {
        if (span != nullptr) events_.give_back(span);
        return nullptr;
      }
      join(span);
    }
    if (span == nullptr) return nullptr;
    span->host_ns = ring::monotonic_ns();
    span->group = group;
    begin(span, stream);
    return span;
  }

  void replayed() noexcept {
    const std::lock_guard<std::mutex> guard(lock_);
    if (current_ != nullptr) ++current_->replays;
  }

  // The optimizer has stepped for the `number`-th time; what it does on the GPU is on this stream, before the boundary.
  __attribute__((noinline)) void mark(std::uint64_t number, Stream stream) noexcept {
    if (off_.load(std::memory_order_relaxed)) return;
    const bool same = is_main(stream);
    g_main.store(reinterpret_cast<std::uintptr_t>(stream), std::memory_order_relaxed);
    marked_ns_.store(ring::monotonic_ns(), std::memory_order_relaxed);
    bool next = false;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (number <= newest_) first_ = number;  // another incarnation begins in this process
      newest_ = number;
      next = is_measured(number, rare_.load(std::memory_order_relaxed));
    }
    g_state.fetch_or(kTracked, std::memory_order_relaxed);
    if (!next && !has(kMeasures)) return;
    Span* span = free_span(stream);
    if (span != nullptr) {
      span->host_ns = ring::monotonic_ns();
      begin(span, stream);
      if (span->base == nullptr) {
        const std::lock_guard<std::mutex> guard(lock_);
        events_.give_back(std::exchange(span, nullptr));
      }
    }
    const std::lock_guard<std::mutex> guard(lock_);
    Iteration* over = std::exchange(current_, nullptr);
    if (over != nullptr) {
      over->to = span;
      over->number = number;
      over->spoilt = over->spoilt || span == nullptr || !same || behind().lost() != over->lost;
      if (span != nullptr) ++span->users;
      over_.push_back(over);
    }
    if (next && span != nullptr && !spare_.empty()) {
      current_ = spare_.back();
      spare_.pop_back();
      *current_ = {};
      current_->from = span;
      current_->events = 1;
      current_->lost = behind().lost();
      current_->calls = is_measured(number, calls_rare_.load(std::memory_order_relaxed));
      ++span->users;
    }
    if (span != nullptr && span->users == 0) events_.give_back(span);
    const unsigned measured = current_ == nullptr ? 0 : current_->calls ? kMeasures | kCalls : kMeasures;
    g_state.store(kTracked | measured, std::memory_order_relaxed);
  }

 private:
  static const Driver& cuda() noexcept { return *Driver::get(); }  // once something is to be timed

  bool is_measured(std::uint64_t number, std::uint64_t rare) const noexcept {
    return number - first_ < kFirst || number / kInARow % rare == 0 || is_ordered();
  }

  // Two events for this stream. Null where it is captured into a graph (an event would go into the graph), or is the default
  // one and another's capture forbids that, or too much is under way; and wherever CUDA has failed once.
  Span* free_span(Stream stream) noexcept {
    const Driver* driver = off_.load(std::memory_order_relaxed) ? nullptr : Driver::get();
    Handle handle = nullptr;
    int captured = 0;
    if (driver == nullptr || driver->context(&handle) != 0 || handle == nullptr || driver->is_captured(stream, &captured) != 0 ||
        captured != 0)
      return nullptr;
    const std::lock_guard<std::mutex> guard(lock_);
    return runs_ || start() ? events_.take(handle) : nullptr;
  }

  // Makes a span of the compute stream part of the iteration, of which nothing may be missing.
  void join(Span* span) noexcept {
    if (span == nullptr) {
      current_->spoilt = true;
      return;
    }
    span->iteration = current_;
    current_->pending += 1;
    current_->events += 2;
  }

  static void leave(Iteration* one, bool unread) noexcept {
    one->pending -= 1;
    one->spoilt = one->spoilt || unread;
  }

  // CUDA's first error is the last that we see: from then on we call nothing of it.
  void fail(const char* what) noexcept {
    if (off_.exchange(true)) return;
    g_state.store(0, std::memory_order_relaxed);
    say(std::string("the GPU's times are not taken any more: ") + what);
  }

  // At the process's end: CUDA is taken down after this. A driver that hangs is not waited for.
  void stop() noexcept {
    stopped_ = true;
    for (int i = 0; i < 100; ++i) {
      {
        const std::lock_guard<std::mutex> guard(lock_);
        if (!runs_) return;
      }
      usleep(kLookUs);
    }
  }

  // The thread that reads; it takes no signals, which are for the threads of the training.
  bool start() noexcept {
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto body = [](void* self) -> void* {
      static_cast<Timing*>(self)->run();
      return nullptr;
    };
    static const int registered = std::atexit([] { timing().stop(); });
    runs_ = registered == 0 && !stopped_ && pthread_create(&thread, &attributes, body, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    return runs_;
  }

  void run() noexcept {
    int mode = Driver::kRelaxed;
    cuda().capture_mode(&mode);  // what we do is no part of a capture that another thread is at, and does not end it
    pthread_setname_np(pthread_self(), "keepstep-gpu");
    while (true) {
      if (!off_ && !(events_.make() && events_.renew())) fail("events could not be made");
      std::vector<Span*> mine;
      {
        const std::lock_guard<std::mutex> guard(lock_);
        if (is_over()) {
          runs_ = false;
          return;
        }
        under_way_.reserve(events_.made());
        mine.swap(under_way_);
      }
      const auto over = std::partition(mine.begin(), mine.end(), [this](Span* span) { return !read(span); });
      {
        const std::lock_guard<std::mutex> guard(lock_);
        std::for_each(over, mine.end(), [this](Span* span) { done(span); });
        under_way_.insert(under_way_.end(), mine.begin(), over);
      }
      while (Iteration* one = next_over()) tell(one);
      sleep_a_little();
    }
  }

  bool is_over() const noexcept {
    if (stopped_ || (off_ && under_way_.empty())) return true;
    const bool marked = ring::monotonic_ns() - marked_ns_.load(std::memory_order_relaxed) < kMarkedNs;
    return under_way_.empty() && over_.empty() && !marked && !is_ordered();
  }

  // Often while times are ordered; else a few times in an iteration, as events wait for us.
  void sleep_a_little() noexcept {
    std::uint64_t us = std::min<std::uint64_t>(period_ns_ / 8000, kLongestLookUs);
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (under_way_.empty() && over_.empty() && current_ == nullptr) us = std::max<std::uint64_t>(us, kIdleLookUs);
    }
    if (is_ordered()) us = 0;
    do {
      usleep(kLookUs);
      us -= std::min<std::uint64_t>(us, kLookUs);
      if (!events_.is_coming()) break;
      if (!off_ && !events_.renew()) fail("an event could not be made");
    } while (us > 0);
    if (us > 0) usleep(static_cast<unsigned>(us));
  }

  void done(Span* span) noexcept {
    if (span->iteration != nullptr) {
      span->iteration->blocked_ns += span->took_ns;
      leave(span->iteration, span->unread);
    }
    events_.give_back(span);
  }

  // Whether it is over; its records have their times then.
  bool read(Span* span) noexcept {
    if (off_) return unread(span);
    if (cuda().set_context(span->context->handle) != 0) return unread(span);
    const int state = cuda().query(span->to);
    if (state == Driver::kNotReady) return false;
    float from = 0, to = 0, took = 0;
    if (state != 0 || cuda().elapsed(&took, span->from, span->to) != 0 || cuda().elapsed(&from, span->base->event, span->from) != 0 ||
        cuda().elapsed(&to, span->base->event, span->to) != 0)
      return unread(span);
    const std::uint64_t began = at(*span->base, from), ended = at(*span->base, to);
    span->took_ns = ns_of(took);
    for (ring::Operation& operation : span->operations) {
      operation.waiting_at(began);
      operation.finish_at(false, ended);
    }
    if (span->host_ns != 0) write(Device::wait, span->group, kNobody, 0, span->host_ns, began, ended);
    return true;
  }

  bool unread(Span* span) noexcept {
    fail("CUDA has reported an error");
    for (ring::Operation& operation : span->operations) operation.finish(true);
    span->unread = true;
    return true;
  }

  // The oldest iteration of which all has been read; it is not in the list any more.
  Iteration* next_over() noexcept {
    Iteration* one = nullptr;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (over_.empty() || over_.front()->pending != 0) return nullptr;
      one = over_.front();
    }
    if (!one->spoilt && !off_ && cuda().set_context(one->to->context->handle) == 0 &&
        cuda().query(one->to->from) == Driver::kNotReady)
      return nullptr;
    const std::lock_guard<std::mutex> guard(lock_);
    over_.pop_front();
    return one;
  }

  // Writes the iteration to the ring, and learns from it how often one may be measured.
  void tell(Iteration* one) noexcept {
    float ms = 0, end_ms = 0;
    const Span *from = one->from, *to = one->to;
    if (!one->spoilt && !off_) {
      if (cuda().set_context(to->context->handle) != 0 || cuda().query(to->from) != 0 ||
          cuda().elapsed(&ms, from->from, to->from) != 0 || cuda().elapsed(&end_ms, to->base->event, to->from) != 0) {
        fail("CUDA has reported an error");
      } else {
        const std::uint64_t period = ns_of(ms);
        const std::uint64_t ended = std::max(at(*to->base, end_ms), from->host_ns + period);
        const bool seen = one->replays == 0;
        write(seen ? Device::iteration : Device::blind, -1, static_cast<std::int32_t>(one->number),
              seen ? one->blocked_ns : one->replays, from->host_ns, ended - period, ended);
        learn(*one, period, std::max(period, to->host_ns - from->host_ns));
      }
    }
    const std::lock_guard<std::mutex> guard(lock_);
    for (Span* mark : {one->from, one->to})
      if (mark != nullptr && --mark->users == 0) events_.give_back(mark);
    spare_.push_back(one);
  }

  void learn(const Iteration& one, std::uint64_t period, std::uint64_t paced) noexcept {
    period_ns_ = paced;
    const std::uint64_t allowed = std::max<std::uint64_t>(period / kShare, 1);
    const auto rare = [](std::uint64_t least) {
      std::uint64_t power = 1;
      while (power < least && power < kMostRare) power *= 2;
      return power;
    };
    const std::uint64_t main = (one.events * kEventNs + allowed - 1) / allowed;
    const std::uint64_t often = (kEveryNs + paced - 1) / std::max<std::uint64_t>(paced, 1);
    rare_ = rare(std::max(main, often));
    if (one.calls) calls_rare_ = std::max(rare((one.others * kEventNs + allowed - 1) / allowed), rare_.load());
  }

  // A record of what is over.
  static void write(Device what, std::int16_t group, std::int32_t number, std::uint64_t bytes, std::uint64_t start_ns,
                    std::uint64_t began, std::uint64_t ended) noexcept {
    ring::Writer* writer = recording();
    if (writer == nullptr) return;
    ring::Operation operation;
    writer->start(operation, static_cast<std::uint8_t>(ring::Kind::device), static_cast<std::uint8_t>(what), group, number, bytes,
                  kEnqueued | kTimed, 0, start_ns);
    operation.waiting_at(began);
    operation.finish_at(false, ended);
  }

  std::string path_;
  std::mutex lock_;  // never held in a call of CUDA's that may block: callers take it
  Events events_{lock_};
  bool runs_ = false;
  std::atomic<bool> stopped_{false}, off_{g_device_off};
  std::vector<Span*> under_way_;
  std::atomic<std::uint64_t> rare_{1}, calls_rare_{1}, marked_ns_{0};
  std::uint64_t first_ = 1, newest_ = 0, period_ns_ = 0;
  Iteration iterations_[64];  // the host may be so far ahead
  Iteration* current_ = nullptr;
  std::deque<Iteration*> over_;
  std::vector<Iteration*> spare_ = [this] {
    std::vector<Iteration*> all;
    for (Iteration& one : iterations_) all.push_back(&one);
    return all;
  }();
};

Timing& timing() {
  static auto* made = new Timing;
  return *made;
}

void open_orders(const char* path) noexcept { timing().open(path); }

}  // namespace
}  // namespace keepstep::nccl
