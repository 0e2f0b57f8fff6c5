// Bytes of a CUDA device, brought to the host through a ring of page-locked segments on a stream of our own (TRANSOM,
// algorithm 2).
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "cuda_driver.hpp"

namespace keepstep::device {

using cuda::Driver;
using cuda::Handle;

// The moment on a stream from which on bytes may be read.
class Moment {
 public:
  explicit Moment(Handle stream) : aborts_(aborts()), spoilt_(call("keepstep_gate_spoils_next")) {
    const Driver* driver = Driver::get();
    if (driver == nullptr) throw std::runtime_error("this process has no CUDA");
    driver->check(driver->context(&context_), "cuCtxGetCurrent");
    if (context_ == nullptr) throw std::runtime_error("this thread has no CUDA context");
    driver->check(driver->make_event(&event_, Driver::kNoTiming), "cuEventCreate");
    const int result = driver->record(event_, stream);
    if (result != 0) driver->drop_event(event_);
    driver->check(result, "cuEventRecord");
  }
  ~Moment() { Driver::get()->drop_event(event_); }
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

  // Whether collectives were aborted since the groups were made, before or after the moment: bytes of it may be no state of
  // a step, as NCCL tells nobody of an abort (nccl_gate.hpp).
  bool is_spoilt() const { return spoilt_ || aborts() != aborts_; }
  Handle context() const { return context_; }
  Handle event() const { return event_; }

 private:
  static std::uint64_t aborts() { return call("keepstep_gate_aborts"); }
  // What the NCCL shim of this process says; 0: there is none.
  static std::uint64_t call(const char* name) {
    const auto function = reinterpret_cast<std::uint64_t (*)()>(dlsym(RTLD_DEFAULT, name));
    return function == nullptr ? 0 : function();
  }

  std::uint64_t aborts_ = 0;
  bool spoilt_ = false;
  Handle context_ = nullptr, event_ = nullptr;
};

// A context's ring. Whoever uses it holds `busy`. Kept for the process's life.
struct Ring {
  static constexpr std::size_t kSegments = 8, kSegmentBytes = 8 << 20;

  std::mutex busy;
  Handle context, stream = nullptr, arrived[kSegments] = {};
  std::uint8_t* memory = nullptr;

  explicit Ring(Handle of) : context(of) {}

  std::uint8_t* segment(std::size_t number) const { return memory + number % kSegments * kSegmentBytes; }
  Handle event(std::size_t number) const { return arrived[number % kSegments]; }

  // Makes what there is not yet. Throws what CUDA says.
  void prepare(const Driver& driver) {
    if (stream == nullptr) driver.check(driver.make_stream(&stream, Driver::kNonBlocking), "cuStreamCreate");
    for (Handle& event : arrived)
      if (event == nullptr) driver.check(driver.make_event(&event, Driver::kNoTiming | Driver::kBlocking), "cuEventCreate");
    if (memory != nullptr) return;
    void* found = nullptr;
    driver.check(driver.lock_memory(&found, kSegments * kSegmentBytes, Driver::kPortable), "cuMemHostAlloc");
    memory = static_cast<std::uint8_t*>(found);
  }

  static Ring& of(Handle context) {
    static std::mutex lock;
    static auto* all = new std::deque<Ring>;
    const std::lock_guard<std::mutex> guard(lock);
    for (Ring& ring : *all)
      if (ring.context == context) return ring;
    return all->emplace_back(context);
  }
};

}  // namespace keepstep::device
