// The functions of CUDA's driver that we call, where the process has it: we neither link nor load it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace keepstep::cuda {

using Handle = void*;

struct Driver {  // 0 is success
  int (*context)(Handle*);
  int (*set_context)(Handle);
  int (*capture_mode)(int*);
  int (*is_captured)(Handle, int*);
  int (*make_stream)(Handle*, unsigned);
  int (*stream_wait)(Handle, Handle, unsigned);
  int (*make_event)(Handle*, unsigned);
  int (*drop_event)(Handle);
  int (*record)(Handle, Handle);
  int (*query)(Handle);
  int (*wait)(Handle);
  int (*elapsed)(float*, Handle, Handle);  // milliseconds
  int (*lock_memory)(void**, std::size_t, unsigned);
  int (*to_host)(void*, std::uint64_t, std::size_t, Handle);
  int (*wait_value)(Handle, std::uint64_t, std::uint32_t, unsigned);  // null: it has none
  int (*error_name)(int, const char**);

  static constexpr int kNotReady = 600;
  static constexpr int kRelaxed = 2;  // capture mode: what this thread does is no part of what others capture, nor ends it
  static constexpr unsigned kNonBlocking = 1;                  // a stream
  static constexpr unsigned kBlocking = 1, kNoTiming = 2;      // an event
  static constexpr unsigned kPortable = 1;                     // memory
  static constexpr unsigned kEqual = 1;                        // a wait for a value

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
    const bool complete =
        one(all.context, "cuCtxGetCurrent") && one(all.set_context, "cuCtxSetCurrent") &&
        one(all.capture_mode, "cuThreadExchangeStreamCaptureMode") && one(all.is_captured, "cuStreamIsCapturing") &&
        one(all.make_stream, "cuStreamCreate") && one(all.stream_wait, "cuStreamWaitEvent") &&
        one(all.make_event, "cuEventCreate") && one(all.drop_event, "cuEventDestroy_v2") && one(all.record, "cuEventRecord") &&
        one(all.query, "cuEventQuery") && one(all.wait, "cuEventSynchronize") && one(all.elapsed, "cuEventElapsedTime") &&
        one(all.lock_memory, "cuMemHostAlloc") && one(all.to_host, "cuMemcpyDtoHAsync_v2") &&
        one(all.error_name, "cuGetErrorName");
    if (!complete) all.error_name = nullptr;
    one(all.wait_value, "cuStreamWaitValue32_v2");
    return all;
  }
};

}  // namespace keepstep::cuda
