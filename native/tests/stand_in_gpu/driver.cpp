// TEST DOUBLE: of CUDA's driver (libcuda.so.1) what torch, NCCL's callers and our own shim call, over the stand-in's
// device. All other functions of cuda.h succeed and do nothing; tools that build it (benchmarks/stand_in/build.py) add
// those.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "device.hpp"

#undef cuStreamGetCaptureInfo
#undef cuEventElapsedTime
#undef cuMemcpyDtoHAsync
#undef cuGetProcAddress

using namespace stand_in;

namespace {
CUresult code(int error) { return static_cast<CUresult>(error); }
Event* event_of(CUevent event) { return reinterpret_cast<Event*>(event); }
char contexts[64];
thread_local CUcontext t_context = nullptr;
}  // namespace

extern "C" {
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
// The runtime's primary context of a device is there without a call.
CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = t_context != nullptr ? t_context : reinterpret_cast<CUcontext>(&contexts[current_device() % 64]);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext wanted) {
  t_context = wanted;
  if (wanted != nullptr) current_device() = static_cast<int>(reinterpret_cast<char*>(wanted) - contexts);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "error of the stand-in";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 214 ? "CUDA_ERROR_ECC_UNCORRECTABLE" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = stream_of(stream)->capturing() != nullptr ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return code(failed());
}
CUresult cuStreamCreate(CUstream* made, unsigned flags) {
  if (const int error = failed()) return code(error);
  *made = reinterpret_cast<CUstream>(new Stream(current_device(), (flags & CU_STREAM_NON_BLOCKING) == 0, 0));
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  return code(make_wait(stream_of(stream), event_of(event)));
}
CUresult cuStreamSynchronize(CUstream stream) {
  wait_for(stream_of(stream)->tail());
  return code(failed());
}
CUresult cuEventCreate(CUevent* event, unsigned flags) {
  if (const int error = failed()) return code(error);
  auto* made = new Event;
  made->timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *event = reinterpret_cast<CUevent>(made);
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) {
  delete event_of(event);
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) { return code(record(event_of(event), stream_of(stream))); }
CUresult cuEventQuery(CUevent event) { return code(query(event_of(event))); }
CUresult cuEventSynchronize(CUevent event) { return code(wait_for(event_of(event))); }
CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) { return code(elapsed(ms, event_of(from), event_of(to))); }
CUresult cuEventElapsedTime_v2(float* ms, CUevent from, CUevent to) { return cuEventElapsedTime(ms, from, to); }
CUresult cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) { return code(allocate(memory, bytes, Memory::pinned)); }
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  if (const int error = failed()) return code(error);
  const Point made = stream_of(stream)->enqueue([=](Ns begin) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return begin;
  });
  if (place_of(to).kind == Memory::none) wait_for(made);
  return code(failed());
}
// >= with flag 0, == with flag 1, as on a 32-bit word of memory that the host may write.
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  if (const int error = failed()) return code(error);
  stream_of(stream)->enqueue([=](Ns begin) {
    const auto* word = reinterpret_cast<const volatile std::uint32_t*>(address);
    const Ns before = real_now();
    const auto there = [&] {
      return (flags & 1) != 0 ? *word == value : static_cast<std::int32_t>(*word - value) >= 0;
    };
    for (timespec pause{0, 20'000}; !there() && failed() == 0;) nanosleep(&pause, nullptr);
    if (real_now() - before > 1'000'000) was_held(before);
    return is_virtual() ? begin : begin + (real_now() - before);
  });
  return CUDA_SUCCESS;
}
CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  if (const int error = failed()) return code(error);
  stream_of(stream)->enqueue([=](Ns begin) {
    *reinterpret_cast<volatile std::uint32_t*>(address) = value;
    return begin;
  });
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  *function = library == nullptr ? nullptr : dlsym(library, name);
  for (const char* suffix : {"_v3", "_v2"})  // the newest of a function that has versions
    if (library != nullptr)
      if (void* newer = dlsym(library, (std::string(name) + suffix).c_str()); newer != nullptr) {
        *function = newer;
        break;
      }
  if (result != nullptr) *result = *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
