// Which streams carry communication, and which CUDA events were recorded behind it: so that a wait of the compute stream
// for such an event is known to be a wait for communication.
#pragma once

#include "nccl_watch.hpp"

namespace keepstep::nccl {
namespace {

// A fixed table: nothing is ever allocated, and what finds no room is told, so that nobody takes a wait for computing.
class Behind {
 public:
  // A call of this group was put onto the stream, or the stream waits for what was.
  void carries(Stream stream, std::int16_t group) noexcept {
    for (Carrier& one : carriers_) {
      Stream there = one.stream.load(std::memory_order_acquire);
      if (there == kFree && one.stream.compare_exchange_strong(there, stream, std::memory_order_acq_rel)) there = stream;
      if (there != stream) continue;
      if (one.group.load(std::memory_order_relaxed) != group) one.group.store(group, std::memory_order_relaxed);
      return;
    }
    ++lost_;
  }

  // An event was recorded on a stream. `main`: the compute stream, on which an event says nothing of communication.
  void recorded(Handle event, Stream stream, Stream main) noexcept {
    const Carrier* carrier = stream == main ? nullptr : find(stream);
    if (carrier == nullptr && !has(event)) return;
    const std::lock_guard<std::mutex> guard(lock_);
    Entry* set = set_of(event);
    Entry* place = nullptr;
    for (Entry* one = set; one < set + kWays; ++one)
      if (one->event.load(std::memory_order_relaxed) == event) place = one;
    if (carrier == nullptr) {
      if (place != nullptr) place->event.store(nullptr, std::memory_order_relaxed);
      return;
    }
    for (Entry* one = set; place == nullptr && one < set + kWays; ++one)
      if (one->event.load(std::memory_order_relaxed) == nullptr) place = one;
    if (place == nullptr) {
      place = set + turn_++ % kWays;
      ++lost_;
    }
    place->group = carrier->group.load(std::memory_order_relaxed);
    place->event.store(event, std::memory_order_relaxed);
  }

  // Whether this event lies behind communication, and of which group.
  bool find(Handle event, std::int16_t* group) noexcept {
    if (!has(event)) return false;
    const std::lock_guard<std::mutex> guard(lock_);
    const Entry* set = set_of(event);
    for (const Entry* one = set; one < set + kWays; ++one) {
      if (one->event.load(std::memory_order_relaxed) != event) continue;
      *group = one->group;
      return true;
    }
    return false;
  }

  bool carries(Stream stream) const noexcept { return find(stream) != nullptr; }

  // How often something found no room: it grows where a wait for communication may have gone unseen.
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kSets = 1024, kWays = 8, kCarriers = 64;
  inline static const Stream kFree = reinterpret_cast<Stream>(~std::uintptr_t{0});  // null is the default stream

  struct Carrier {
    std::atomic<Stream> stream{kFree};
    std::atomic<std::int16_t> group{-1};
  };
  struct Entry {
    std::atomic<Handle> event{nullptr};
    std::int16_t group = -1;
  };

  const Carrier* find(Stream stream) const noexcept {
    for (const Carrier& one : carriers_) {
      const Stream there = one.stream.load(std::memory_order_acquire);
      if (there == stream) return &one;
      if (there == kFree) break;
    }
    return nullptr;
  }
  Entry* set_of(Handle event) noexcept {
    const std::uint64_t mixed = reinterpret_cast<std::uintptr_t>(event) * 0x9e3779b97f4a7c15ULL;
    return entries_ + (mixed >> 54) * kWays;
  }
  bool has(Handle event) noexcept {
    const Entry* set = set_of(event);
    for (const Entry* one = set; one < set + kWays; ++one)
      if (one->event.load(std::memory_order_relaxed) == event) return true;
    return false;
  }

  Carrier carriers_[kCarriers];
  Entry entries_[kSets * kWays];
  std::mutex lock_;  // held for a few instructions, never in a call of CUDA's
  std::size_t turn_ = 0;
  std::atomic<std::uint64_t> lost_{0};
};

}  // namespace
}  // namespace keepstep::nccl
