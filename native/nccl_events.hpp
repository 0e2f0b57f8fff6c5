// Pairs of CUDA events that are used again and again, and how the GPU's clock lies against the node's.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"
#include "nccl_behind.hpp"

namespace keepstep::nccl {
namespace {

constexpr std::uint64_t kBaseNs = 1'000'000'000;  // a base is used for so long: elapsed times are floats
constexpr std::size_t kSpans = 256;               // that are made at once for a context,
constexpr std::size_t kMostSpans = 4096;          // and at most: so much is under way where the host is far ahead

using cuda::Driver;

// An event whose time is known on both clocks.
struct Base {
  Handle event;
  std::uint64_t ns;
  int users;
};

struct Context {
  Handle handle, stream = nullptr;
  std::deque<Base> bases{};  // the last is the newest
  std::size_t spans = 0;
};

struct Iteration;

// Two events of a stream, and what began and ended between them: operations, or a wait of the compute stream. Or one event
// at the boundary of an iteration.
struct Span {
  Context* context = nullptr;
  Base* base = nullptr;
  Handle from = nullptr, to = nullptr;
  std::deque<ring::Operation> operations{};
  Iteration* iteration = nullptr;  // whose compute stream was blocked between the events
  std::uint64_t host_ns = 0;       // when a wait, or a boundary, was put onto the stream; 0: these are operations
  std::int16_t group = -1;         // of what the wait is for
  int users = 0;                   // iterations of which this is a boundary
  std::uint64_t took_ns = 0;       // between the events, once they are read,
  bool unread = false;             // unless they could not be
};

inline std::uint64_t ns_of(float ms) noexcept { return static_cast<std::uint64_t>(std::max(static_cast<double>(ms) * 1e6, 0.0)); }

// On the node's clock: where the event lies that came `ms` after the base.
inline std::uint64_t at(const Base& base, float ms) noexcept {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(base.ns) + static_cast<std::int64_t>(static_cast<double>(ms) * 1e6));
}

// All but `make` and `renew`, which call CUDA, are to be called with the lock held.
class Events {
 public:
  explicit Events(std::mutex& lock) : lock_(lock) {}

  // Free events of this context; null where there are none: more will be made, unless there are enough.
  Span* take(Handle handle) noexcept {
    for (std::size_t i = free_.size(); i-- > 0;) {
      Span* span = free_[i];
      if (span->context->handle != handle || span->context->bases.empty()) continue;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      span->base = &span->context->bases.back();
      ++span->base->users;
      return span;
    }
    bool enough = false;
    for (const Context& one : contexts_)
      enough = enough || (one.handle == handle && (one.spans >= kMostSpans || one.bases.empty()));
    if (!enough) wanted_ = handle;
    return nullptr;
  }

  void give_back(Span* span) noexcept {
    if (span->base != nullptr) --span->base->users;
    span->base = nullptr;
    span->operations.clear();
    span->iteration = nullptr;
    span->host_ns = span->took_ns = 0;
    span->group = -1;
    span->users = 0;
    span->unread = false;
    free_.push_back(span);
  }

  std::size_t made() const noexcept { return made_; }

  // By the thread alone: events for a context that has none, or none free. False: CUDA has failed.
  bool make() noexcept try {
    Handle handle = nullptr;
    Context* context = nullptr;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      handle = std::exchange(wanted_, nullptr);
      for (Context& one : contexts_)
        if (one.handle == handle) context = &one;
    }
    if (handle == nullptr) return true;
    const Driver& cuda = *Driver::get();
    if (cuda.set_context(handle) != 0) return false;
    Handle stream = nullptr;
    if (context == nullptr && cuda.make_stream(&stream, Driver::kNonBlocking) != 0) return false;
    std::vector<Span*> spans;
    while (spans.size() < kSpans) {
      auto span = std::make_unique<Span>();
      if (cuda.make_event(&span->from, 0) != 0 || cuda.make_event(&span->to, 0) != 0) return false;
      spans.push_back(span.release());  // kept for the process's life
    }
    const std::lock_guard<std::mutex> guard(lock_);
    if (context == nullptr) {
      contexts_.push_back({handle, stream});
      context = &contexts_.back();
    }
    context->spans += spans.size();
    made_ += spans.size();
    for (Span* span : spans) span->context = context;
    free_.reserve(made_);
    free_.insert(free_.end(), spans.begin(), spans.end());
    return true;
  } catch (...) {
    return false;
  }

  // By the thread alone: a base of now for each context that has none or an old one. False: CUDA has failed.
  bool renew() noexcept try {
    const std::uint64_t now = ring::monotonic_ns();
    for (Context& context : contexts_) {  // only this thread changes them
      if (!context.bases.empty() && now - context.bases.back().ns < kBaseNs) continue;
      Base made{take_base(context), 0, 0};
      if (made.event == nullptr || !lay_against_clock(made, context)) return false;
      const std::lock_guard<std::mutex> guard(lock_);
      context.bases.push_back(made);
    }
    return true;
  } catch (...) {
    return false;
  }

 private:
  // Between two looks at the clock; again where we were kept from looking, and content with less each time. The event of an
  // empty stream comes at once: nothing is waited for but that.
  static bool lay_against_clock(Base& base, const Context& context) noexcept {
    constexpr std::uint64_t kMostNs = 1'000'000'000;
    const Driver& cuda = *Driver::get();
    std::uint64_t close = 100'000;
    for (int tries = 0; tries < 10; ++tries, close *= 2) {
      const std::uint64_t before = ring::monotonic_ns();
      if (cuda.set_context(context.handle) != 0 || cuda.record(base.event, context.stream) != 0) return false;
      std::uint64_t after = before;
      int state = Driver::kNotReady;
      while (state == Driver::kNotReady && after - before < kMostNs) {
        state = cuda.query(base.event);
        after = ring::monotonic_ns();
      }
      if (state != 0) return false;
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
    const Driver& cuda = *Driver::get();
    Handle event = nullptr;
    return cuda.set_context(context.handle) == 0 && cuda.make_event(&event, 0) == 0 ? event : nullptr;
  }

  std::mutex& lock_;
  Handle wanted_ = nullptr;
  std::deque<Context> contexts_;
  std::vector<Span*> free_;
  std::size_t made_ = 0;
};

}  // namespace
}  // namespace keepstep::nccl
