// Pairs of CUDA events that are used again and again, and how the GPU's clock lies against the node's.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"
#include "nccl_behind.hpp"

namespace keepstep::nccl {
namespace {

constexpr std::uint64_t kBaseNs = 1'000'000'000;  // a base is used for so long: elapsed times are floats, and clocks drift
// A base that is known no better than this is followed sooner, for the first few.
constexpr std::uint64_t kCloseNs = 200'000, kSoonNs = 50'000'000;
constexpr unsigned kFirstBases = 20;
constexpr std::uint64_t kAtOnceNs = 200'000;      // an idle GPU comes to an event within this time
constexpr std::uint64_t kAwaitedNs = 1'000'000'000;  // for so long a base that is on its way is looked at often
constexpr std::size_t kSpans = 256;               // that are made at once for a context,
constexpr std::size_t kMostSpans = 4096;          // and at most: so much is under way where the host is far ahead

using cuda::Driver;

// An event whose time is known on both clocks.
struct Base {
  Handle event;
  std::uint64_t ns;
  std::uint64_t within_ns;  // of each other lay the two looks at the clock that it came between
  int users;
};

struct Context {
  Handle handle, stream = nullptr;
  std::deque<Base> bases{};  // the last is the newest
  std::size_t spans = 0;
  unsigned followed = 0;          // how many bases there were
  unsigned tries = 0;             // for the first one, of which we were kept from looking in time
  Handle coming = nullptr;        // the event of the next one, on its way
  std::uint64_t asked = 0;        // since when
  std::uint64_t not_before = 0;   // it had not come then
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

// All but `make`, `renew` and `is_coming`, which are the thread's, are to be called with the lock held.
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

  // By the thread alone: a new base for each context that has none or an old one. False: CUDA has failed.
  bool renew() noexcept try {
    for (Context& context : contexts_)  // only this thread changes them
      if ((context.coming != nullptr || is_due(context)) && !follow(context)) return false;
    return true;
  } catch (...) {
    return false;
  }

  // By the thread alone: whether a base has been on its way for a moment, so that it is worth looking often.
  bool is_coming() const noexcept {
    const std::uint64_t now = ring::monotonic_ns();
    return std::any_of(contexts_.begin(), contexts_.end(),
                       [now](const Context& one) { return one.coming != nullptr && now - one.asked < kAwaitedNs; });
  }

 private:
  static bool is_due(const Context& context) noexcept {
    if (context.bases.empty()) return true;
    const Base& last = context.bases.back();
    const bool soon = last.within_ns > kCloseNs && context.followed < kFirstBases;
    return ring::monotonic_ns() - last.ns >= (soon ? kSoonNs : kBaseNs);
  }

  // An event on an empty stream of ours comes at once, or when the GPU has worked off what was queued before it: streams
  // share the hardware's queues, in many trainings a single one (CUDA_DEVICE_MAX_CONNECTIONS=1). So it is looked at in
  // passing. False: CUDA has failed.
  bool follow(Context& context) {
    const Driver& cuda = *Driver::get();
    if (cuda.set_context(context.handle) != 0) return false;
    const std::uint64_t began = ring::monotonic_ns();
    const bool fresh = context.coming == nullptr;
    if (fresh) {
      Handle event = take_base(context);
      if (event == nullptr || cuda.record(event, context.stream) != 0) return false;
      context.coming = event;
      context.asked = context.not_before = began;
    }
    while (true) {
      const std::uint64_t before = ring::monotonic_ns();
      const int state = cuda.query(context.coming);
      const std::uint64_t after = ring::monotonic_ns();
      if (state == 0) return came(context, after);
      if (state != Driver::kNotReady) return false;
      context.not_before = before;
      if (!fresh || after - began > kAtOnceNs) return true;
    }
  }

  // Between two looks at the clock, where it is to be expected from the last base.
  bool came(Context& context, std::uint64_t after) {
    Base made{context.coming, context.not_before + (after - context.not_before) / 2, after - context.not_before, 0};
    if (context.bases.empty()) {
      if (made.within_ns > kSoonNs << context.tries) {  // nothing else says where it lies; content with less each time
        ++context.tries;
        context.not_before = ring::monotonic_ns();
        return Driver::get()->record(made.event, context.stream) == 0;
      }
    } else {
      float ms = 0;
      if (Driver::get()->elapsed(&ms, context.bases.back().event, made.event) != 0) return false;
      made.ns = std::clamp(at(context.bases.back(), ms), context.not_before, after);
    }
    const std::lock_guard<std::mutex> guard(lock_);
    context.bases.push_back(made);
    context.coming = nullptr;
    ++context.followed;
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
