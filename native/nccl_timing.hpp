// When the GPU began and ended what was called, for as long as the agent orders it: CUDA events around a call on its
// stream, read by a thread of ours.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"
#include "nccl_watch.hpp"

namespace keepstep::nccl {
namespace {

constexpr std::uint16_t kTimed = 64;                      // core/events.py: Flag
constexpr std::uint64_t kMostOrderedNs = 600'000'000'000;  // whatever is ordered
constexpr std::uint64_t kBaseNs = 1'000'000'000;           // a base is used for so long: elapsed times are floats
constexpr unsigned kLookUs = 2000;
constexpr int kSpans = 256;  // of a context, under way at once

using cuda::Driver;
using cuda::Handle;

// An event whose time is known on both clocks.
struct Base {
  Handle event;
  std::uint64_t ns;
  int users;
};

struct Context {
  Handle handle, stream = nullptr;
  std::deque<Base> bases{};  // the last is the newest
};

// Two events of a stream, and the operations that began and ended between them.
struct Span {
  Context* context = nullptr;
  Base* base = nullptr;
  Handle from = nullptr, to = nullptr;
  std::deque<ring::Operation> operations{};
};

std::atomic<const std::atomic<std::uint64_t>*> g_orders{nullptr};  // the rank's page

// The order as it stands; 0, mostly: there is none.
std::uint64_t ordered_until() noexcept {
  constexpr int kUntil = 5;  // ring/orders.py: Word
  const auto* words = g_orders.load(std::memory_order_acquire);
  return words == nullptr ? 0 : words[kUntil].load(std::memory_order_relaxed);
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

  // For operations on this stream; null where they are not to be timed, or cannot be: the stream is captured into a graph
  // (an event would go into the graph), or it is the default one and another's capture forbids that, or too much is under way.
  __attribute__((noinline)) Span* take(Stream stream) noexcept {
    const Driver* driver = ordered() ? Driver::get() : nullptr;
    if (driver == nullptr) return nullptr;
    Handle handle = nullptr;
    int captured = 0;
    if (driver->context(&handle) != 0 || handle == nullptr || driver->is_captured(stream, &captured) != 0 || captured != 0)
      return nullptr;
    const std::lock_guard<std::mutex> guard(lock_);
    if (!runs_ && !start()) return nullptr;
    for (std::size_t i = free_.size(); i-- > 0;) {
      Span* span = free_[i];
      if (span->context->handle != handle || span->context->bases.empty()) continue;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      span->base = &span->context->bases.back();
      ++span->base->users;
      return span;
    }
    bool known = false;
    for (const Context& one : contexts_) known = known || one.handle == handle;
    if (!known) wanted_ = handle;
    return nullptr;
  }

  void begin(Span* span, Stream stream) noexcept { began(span, cuda().record(span->from, stream) == 0); }

  // After the calls. What did not come onto the stream as it should has its end now.
  void end(Span* span, Stream stream, Result result) noexcept {
    const bool bad = result != kSuccess && result != kInProgress;
    const bool there = result == kSuccess && span->base != nullptr && cuda().record(span->to, stream) == 0;
    if (!there)
      for (ring::Operation& operation : span->operations) operation.finish(bad);
    const std::lock_guard<std::mutex> guard(lock_);
    if (there)
      under_way_.push_back(span);
    else
      give_back(span);
  }

 private:
  static const Driver& cuda() noexcept { return *Driver::get(); }  // once something is to be timed

  static bool ordered() noexcept {
    const std::uint64_t until = ordered_until();
    return until != 0 && until - ring::monotonic_ns() < kMostOrderedNs;
  }

  void began(Span* span, bool well) noexcept {
    if (well) return;
    const std::lock_guard<std::mutex> guard(lock_);
    let_go(span);
  }

  static void let_go(Span* span) noexcept {
    if (span->base != nullptr) --span->base->users;
    span->base = nullptr;
  }

  void give_back(Span* span) noexcept {
    let_go(span);
    span->operations.clear();
    free_.push_back(span);
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
      prepare();
      renew();
      std::vector<Span*> mine;
      {
        const std::lock_guard<std::mutex> guard(lock_);
        if (stopped_ || (under_way_.empty() && !ordered())) {
          runs_ = false;
          return;
        }
        mine.swap(under_way_);
      }
      const auto over = std::partition(mine.begin(), mine.end(), [this](Span* span) { return !read(span); });
      {
        const std::lock_guard<std::mutex> guard(lock_);
        std::for_each(over, mine.end(), [this](Span* span) { give_back(span); });
        under_way_.insert(under_way_.end(), mine.begin(), over);
      }
      usleep(kLookUs);
    }
  }

  // Events for a context in which something is to be timed for the first time.
  void prepare() noexcept try {
    Context made{};
    {
      const std::lock_guard<std::mutex> guard(lock_);
      made.handle = std::exchange(wanted_, nullptr);
    }
    if (made.handle == nullptr || cuda().set_context(made.handle) != 0) return;
    if (cuda().make_stream(&made.stream, Driver::kNonBlocking) != 0) made.stream = nullptr;
    std::vector<Span*> spans;
    while (made.stream != nullptr && spans.size() < kSpans) {
      auto span = std::make_unique<Span>();
      if (cuda().make_event(&span->from, 0) != 0 || cuda().make_event(&span->to, 0) != 0) break;
      spans.push_back(span.release());  // kept for the process's life
    }
    const std::lock_guard<std::mutex> guard(lock_);
    contexts_.push_back(std::move(made));
    for (Span* span : spans) span->context = &contexts_.back();
    free_.insert(free_.end(), spans.begin(), spans.end());
    free_.reserve(contexts_.size() * kSpans);
    under_way_.reserve(contexts_.size() * kSpans);
  } catch (...) {
  }

  // A base of now for each context that has none or an old one. An empty stream's event comes at once.
  void renew() noexcept try {
    const std::uint64_t now = ring::monotonic_ns();
    for (Context& context : contexts_) {  // only this thread changes them
      if (context.stream == nullptr || (!context.bases.empty() && now - context.bases.back().ns < kBaseNs)) continue;
      Base made{take_base(context), 0, 0};
      if (made.event == nullptr || !lay_against_clock(made, context)) continue;
      const std::lock_guard<std::mutex> guard(lock_);
      context.bases.push_back(made);
    }
  } catch (...) {
  }

  // Between two looks at the clock; again where we were kept from looking, and content with less each time.
  bool lay_against_clock(Base& base, const Context& context) noexcept {
    std::uint64_t close = 100'000;
    for (int tries = 0; tries < 10; ++tries, close *= 2) {
      const std::uint64_t before = ring::monotonic_ns();
      if (cuda().set_context(context.handle) != 0 || cuda().record(base.event, context.stream) != 0 || cuda().wait(base.event) != 0)
        return false;
      const std::uint64_t after = ring::monotonic_ns();
      base.ns = before + (after - before) / 2;
      if (after - before < close) break;
    }
    return true;
  }

  // The event of a base that nobody uses any more, else a new one.
  Handle take_base(Context& context) {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (context.bases.size() > 1 && context.bases.front().users == 0) {
        Handle event = context.bases.front().event;
        context.bases.pop_front();
        return event;
      }
    }
    Handle event = nullptr;
    return cuda().set_context(context.handle) == 0 && cuda().make_event(&event, 0) == 0 ? event : nullptr;
  }

  // Whether it is over; its operations have their times then.
  bool read(Span* span) noexcept {
    if (cuda().set_context(span->context->handle) != 0) return fail(span);
    const int state = cuda().query(span->to);
    if (state == Driver::kNotReady) return false;
    float from = 0, to = 0;
    if (state != 0 || cuda().elapsed(&from, span->base->event, span->from) != 0 ||
        cuda().elapsed(&to, span->base->event, span->to) != 0)
      return fail(span);
    const auto at = [span](float ms) {
      return static_cast<std::uint64_t>(static_cast<std::int64_t>(span->base->ns) + static_cast<std::int64_t>(ms * 1e6));
    };
    for (ring::Operation& operation : span->operations) {
      operation.waiting_at(at(from));
      operation.finish_at(false, at(to));
    }
    return true;
  }

  static bool fail(Span* span) noexcept {
    for (ring::Operation& operation : span->operations) operation.finish(true);
    return true;
  }

  std::string path_;
  std::mutex lock_;  // never held in a call of CUDA's: callers take it
  bool runs_ = false;
  std::atomic<bool> stopped_{false};
  Handle wanted_ = nullptr;
  std::deque<Context> contexts_;
  std::vector<Span*> free_, under_way_;
};

Timing& timing() {
  static auto* made = new Timing;
  return *made;
}

void open_orders(const char* path) noexcept { timing().open(path); }

}  // namespace
}  // namespace keepstep::nccl
