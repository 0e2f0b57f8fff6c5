// Bytes of a CUDA device, brought to the host through a ring of page-locked segments on a stream of our own (TRANSOM,
// algorithm 2). CUDA is called where the process has it: neither linked nor loaded by us.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace keepstep::device {

using Handle = void*;

struct Driver {  // CUDA's driver interface; 0 is success
  int (*context)(Handle*);
  int (*set_context)(Handle);
  int (*capture_mode)(int*);
  int (*make_stream)(Handle*, unsigned);
  int (*stream_wait)(Handle, Handle, unsigned);
  int (*make_event)(Handle*, unsigned);
  int (*record)(Handle, Handle);
  int (*wait)(Handle);
  int (*drop_event)(Handle);
  int (*lock_memory)(void**, std::size_t, unsigned);
  int (*to_host)(void*, std::uint64_t, std::size_t, Handle);
  int (*error_name)(int, const char**);

  static constexpr int kRelaxed = 2;  // capture mode: what this thread does is no part of what others capture, nor ends it

  // Null: this process has no CUDA, or had none at the first call.
  static const Driver* get() {
    static const Driver found = find();
    return found.error_name == nullptr ? nullptr : &found;
  }

  void check(int result, const char* what) const {
    const char* name = nullptr;
    if (result == 0) return;
    if (error_name(result, &name) != 0 || name == nullptr) name = "unknown error";
    throw std::runtime_error(std::string(what) + ": " + name);
  }

 private:
  static Driver find() {
    Driver all{};
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    const auto one = [library](auto& function, const char* name) {
      function = library == nullptr ? nullptr : reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    if (!(one(all.context, "cuCtxGetCurrent") && one(all.set_context, "cuCtxSetCurrent") &&
          one(all.capture_mode, "cuThreadExchangeStreamCaptureMode") &&
          one(all.make_stream, "cuStreamCreate") && one(all.stream_wait, "cuStreamWaitEvent") &&
          one(all.make_event, "cuEventCreate") && one(all.record, "cuEventRecord") && one(all.wait, "cuEventSynchronize") &&
          one(all.drop_event, "cuEventDestroy_v2") && one(all.lock_memory, "cuMemHostAlloc") &&
          one(all.to_host, "cuMemcpyDtoHAsync_v2") && one(all.error_name, "cuGetErrorName")))
      all.error_name = nullptr;
    return all;
  }
};

// The moment on a stream from which on bytes may be read.
class Moment {
 public:
  explicit Moment(Handle stream) {
    const Driver* driver = Driver::get();
    if (driver == nullptr) throw std::runtime_error("this process has no CUDA");
    driver->check(driver->context(&context_), "cuCtxGetCurrent");
    if (context_ == nullptr) throw std::runtime_error("this thread has no CUDA context");
    driver->check(driver->make_event(&event_, kNoTiming), "cuEventCreate");
    const int result = driver->record(event_, stream);
    if (result != 0) driver->drop_event(event_);
    driver->check(result, "cuEventRecord");
  }
  ~Moment() { Driver::get()->drop_event(event_); }
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

  Handle context() const { return context_; }
  Handle event() const { return event_; }

  static constexpr unsigned kBlocking = 1, kNoTiming = 2;

 private:
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
    constexpr unsigned kPortable = 1, kNonBlocking = 1;
    if (stream == nullptr) driver.check(driver.make_stream(&stream, kNonBlocking), "cuStreamCreate");
    for (Handle& event : arrived)
      if (event == nullptr) driver.check(driver.make_event(&event, Moment::kNoTiming | Moment::kBlocking), "cuEventCreate");
    if (memory != nullptr) return;
    void* found = nullptr;
    driver.check(driver.lock_memory(&found, kSegments * kSegmentBytes, kPortable), "cuMemHostAlloc");
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
