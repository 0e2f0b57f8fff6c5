// TEST DOUBLE: CUDA's runtime (libcudart.so.12 or .13) over the stand-in's device. What torch wants and is not here says "not
// supported"; tools that build it (benchmarks/stand_in/build.py) add those.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "device.hpp"

using namespace stand_in;

namespace {

cudaError_t code(int error) { return static_cast<cudaError_t>(error); }
Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
Stream* stream(cudaStream_t handle) { return stream_of(handle); }
thread_local int t_last_error = 0;

cudaError_t note(int error) {
  if (error != kOk && error != kNotReady) t_last_error = error;
  return code(error);
}

struct Functions {
  std::mutex lock;
  std::unordered_map<const void*, const char*> names;   // of kernels, by their host function
  std::unordered_map<const void*, Kind> kinds;
};
Functions& functions() {
  static auto* all = new Functions;
  return *all;
}
Kind kind_of_function(const void* function) {
  Functions& all = functions();
  const std::lock_guard<std::mutex> guard(all.lock);
  const auto known = all.kinds.find(function);
  if (known != all.kinds.end()) return known->second;
  const auto name = all.names.find(function);
  const Kind kind = name == all.names.end() ? Kind::other : kind_of(name->second);
  all.kinds[function] = kind;
  return kind;
}

// Pageable memory is copied to a staging buffer before the call returns; to it, the call waits.
int copy(void* to, const void* from, std::size_t bytes, Stream* stream, bool waits) {
  if (const int error = failed()) return error;
  if (bytes == 0) return kOk;
  const Memory source = place_of(from).kind, target = place_of(to).kind;
  if (source == Memory::none && target != Memory::none) {
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    stream->enqueue([=](Ns begin) {
      std::memcpy(to, staged->data(), bytes);
      return begin;
    });
  } else {
    const Point made = stream->enqueue([=](Ns begin) {
      std::memmove(to, from, bytes);
      return begin;
    });
    waits = waits || target == Memory::none;
    if (waits) wait_for(made);
    return failed();
  }
  if (waits) wait_for(stream->tail());
  return failed();
}

int set(void* to, int value, std::size_t bytes, Stream* stream) {
  if (const int error = failed()) return error;
  stream->enqueue([=](Ns begin) {
    std::memset(to, value, bytes);
    return begin;
  });
  return kOk;
}

std::mutex host_functions;  // while one runs, all others of the process wait, as on an H100

}  // namespace

extern "C" {

// --- devices -------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return note(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int device) {
  std::memset(all, 0, sizeof *all);
  std::strcpy(all->name, "keepstep stand-in");
  std::size_t available;
  memory_info(&available, &all->totalGlobalMem);
  all->major = 9;
  all->multiProcessorCount = 4;
  all->warpSize = 32;
  all->maxThreadsPerBlock = 1024;
  all->maxThreadsPerMultiProcessor = 2048;
  all->sharedMemPerBlock = 49152;
  all->sharedMemPerBlockOptin = 232448;
  all->regsPerBlock = 65536;
  all->maxThreadsDim[0] = all->maxThreadsDim[1] = 1024;
  all->maxThreadsDim[2] = 64;
  all->maxGridSize[0] = 2147483647;
  all->maxGridSize[1] = all->maxGridSize[2] = 65535;
  all->pciBusID = device + 1;
  all->l2CacheSize = 50 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (const int error = failed()) return note(error);
  synchronize(current_device());
  return note(failed());
}
cudaError_t cudaGetLastError() {
  const int last = failed() != 0 ? failed() : t_last_error;
  t_last_error = 0;
  return code(last);
}
cudaError_t cudaPeekAtLastError() { return code(failed() != 0 ? failed() : t_last_error); }
const char* cudaGetErrorString(cudaError_t error) {
  switch (static_cast<int>(error)) {
    case kOk: return "no error";
    case kNoMemory: return "out of memory";
    case kHardware: return "uncorrectable ECC error encountered";
    case kIllegalAddress: return "an illegal memory access was encountered";
    case kNotReady: return "device not ready";
    case kUnsupported: return "operation not supported";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "invalid argument";
  }
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (static_cast<int>(error)) {
    case kOk: return "cudaSuccess";
    case kNoMemory: return "cudaErrorMemoryAllocation";
    case kHardware: return "cudaErrorECCUncorrectable";
    case kIllegalAddress: return "cudaErrorIllegalAddress";
    case kNotReady: return "cudaErrorNotReady";
    case kUnsupported: return "cudaErrorNotSupported";
    default: return "cudaErrorInvalidValue";
  }
}

// --- memory --------------------------------------------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  memory_info(available, total);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return note(allocate(memory, bytes, Memory::device)); }
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) {
  return note(allocate(memory, bytes, Memory::device));
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return note(allocate(memory, bytes, Memory::pinned));
}
cudaError_t cudaFree(void* memory) {  // waits for all streams, as on an H100
  if (memory != nullptr && failed() == 0) {
    synchronize(place_of(memory).device);
    release(memory);
  }
  return note(failed());
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t handle) {
  stream(handle)->enqueue([memory](Ns begin) {
    release(memory);
    return begin;
  });
  return note(failed());
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  adopt(memory, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  disown(memory);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* memory) {
  std::memset(found, 0, sizeof *found);
  const Place place = place_of(memory);
  found->type = place.kind == Memory::device   ? cudaMemoryTypeDevice
                : place.kind == Memory::pinned ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  found->device = place.device;
  if (place.kind != Memory::none) found->devicePointer = const_cast<void*>(memory);
  if (place.kind == Memory::pinned) found->hostPointer = const_cast<void*>(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  return note(copy(to, from, bytes, stream(handle), false));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return note(copy(to, from, bytes, stream(nullptr), true));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t handle) {
  return note(copy(to, from, bytes, stream(handle), false));
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind, cudaStream_t handle) {
  if (const int error = failed()) return note(error);
  const Point made = stream(handle)->enqueue([=](Ns begin) {
    for (std::size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return begin;
  });
  if (place_of(to).kind == Memory::none || place_of(from).kind == Memory::none) wait_for(made);
  return note(failed());
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t handle) {
  return note(set(to, value, bytes, stream(handle)));
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return note(set(to, value, bytes, stream(nullptr))); }

// --- kernels -------------------------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, std::size_t, cudaStream_t handle) {
  return note(launch(stream(handle), kind_of_function(function)));
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, std::size_t, cudaStream_t handle) {
  return note(launch(stream(handle), kind_of_function(function)));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return note(launch(stream(config->stream), kind_of_function(function)));
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, std::size_t, cudaStream_t handle) {
  return note(launch(stream(handle), kind_of_function(kernel)));
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
struct Launched {
  dim3 grid, block;
  std::size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Launched> t_launched;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, cudaStream_t handle) {
  t_launched.push_back({grid, block, shared, handle});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* handle) {
  if (t_launched.empty()) return cudaErrorMissingConfiguration;
  const Launched last = t_launched.back();
  t_launched.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(handle) = last.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* binary;
  return &binary;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Functions& all = functions();
  const std::lock_guard<std::mutex> guard(all.lock);
  all.names[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* all, const void*) {
  std::memset(all, 0, sizeof *all);
  all->maxThreadsPerBlock = 1024;
  all->binaryVersion = all->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, std::size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorNotSupported;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  if (const int error = failed()) return note(error);
  stream(handle)->enqueue([=](Ns begin) {
    const std::lock_guard<std::mutex> alone(host_functions);
    const Ns before = real_now();
    function(argument);
    return is_virtual() ? begin : begin + (real_now() - before);
  });
  return cudaSuccess;
}

// --- streams and events --------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  if (const int error = failed()) return note(error);
  *made = reinterpret_cast<cudaStream_t>(new Stream(current_device(), (flags & cudaStreamNonBlocking) == 0, priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  stream(handle)->close();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream(handle)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (const int error = failed()) return note(error);
  if (stream(handle)->capturing() != nullptr) return note(kCaptureUnsupported);
  wait_for(stream(handle)->tail());
  return note(failed());
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (const int error = failed()) return note(error);
  if (stream(handle)->capturing() != nullptr) return note(kCaptureUnsupported);
  count(kQueries);
  return stream(handle)->idle() ? cudaSuccess : cudaErrorNotReady;
}
// --- graphs --------------------------------------------------------------------------------------------------------------

using Owned = std::shared_ptr<Graph>;  // behind a graph's handle, and that of what is made of it

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  if (const int error = failed()) return note(error);
  stream(handle)->begin_capture();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
  Owned graph = stream(handle)->end_capture();
  if (graph == nullptr) return note(cudaErrorIllegalState);
  *made = reinterpret_cast<cudaGraph_t>(new Owned(std::move(graph)));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  *status = stream(handle)->capturing() != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData**,
#endif
                                     std::size_t*) {
  const Graph* graph = stream(handle)->capturing();
  *status = graph != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = reinterpret_cast<std::uintptr_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Owned(*reinterpret_cast<Owned*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  return note(launch(*reinterpret_cast<Owned*>(graph), stream(handle)));
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = (*reinterpret_cast<Owned*>(graph))->operations.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Owned*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Owned*>(graph);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const int error = failed()) return note(error);
  auto* made = new Event;
  made->timed = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) { return note(record(event_of(event), stream(handle))); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) { return cudaEventRecord(event, handle); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return note(query(event_of(event))); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return note(wait_for(event_of(event))); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return note(elapsed(ms, event_of(from), event_of(to)));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  return note(make_wait(stream(handle), event_of(event)));
}
}
