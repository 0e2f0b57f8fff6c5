// TEST DOUBLE: a stand-in for the functions of CUDA's driver that we call, for machines without a GPU. A stream is any
// pointer; its work takes the time that stand_in_launch says, an event on it comes when all work before it is over. The
// device's memory is the host's; what is copied is read as late as can be, when an event behind it is waited for. Like the
// real one it refuses calls without a context, and calls that a capture of a stream forbids.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace {

constexpr int kOk = 0, kNoContext = 201, kNotReady = 600, kCaptured = 900, kImplicit = 906, kFailed = 719;
constexpr std::uint64_t kNever = ~0ULL;

struct Event {
  std::uint64_t ns = kNever;
  void* stream = nullptr;
};

struct Copy {
  void* to;
  std::uint64_t from;
  std::size_t count;
  std::uint64_t ns;  // not before
};

std::mutex lock;
std::map<void*, std::uint64_t> busy_until;
std::map<void*, bool> captured;
std::map<void*, std::deque<Copy>> copies;
std::atomic<std::int64_t> copies_left{1LL << 60};
std::atomic<int> captures{0}, wrong{0}, broken{0};
thread_local void* context = nullptr;
thread_local int capture_mode = 0;  // global

std::uint64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<std::uint64_t>(t.tv_nsec);
}

int check(bool unsafe) {
  if (broken.load() != 0) return kFailed;
  if (context == nullptr) return ++wrong, kNoContext;
  if (unsafe && captures.load() != 0 && capture_mode != 2) return ++wrong, kCaptured;
  return kOk;
}

}  // namespace

extern "C" {

// --- for the tests -------------------------------------------------------------------------------------------------------

std::uint64_t stand_in_launch(void* stream, std::uint64_t ns) {  // until when the stream has work now
  const std::lock_guard<std::mutex> guard(lock);
  return busy_until[stream] = std::max(busy_until[stream], now()) + ns;
}
void stand_in_capture(void* stream, int on) {
  const std::lock_guard<std::mutex> guard(lock);
  captures += on != 0 ? 1 : -1;
  captured[stream] = on != 0;
}
void stand_in_break() { broken = 1; }
void stand_in_mend() { broken = 0, copies_left = 1LL << 60; }
void stand_in_copies(std::int64_t count) { copies_left = count; }  // that it makes, before it breaks
int stand_in_wrong() { return wrong.load(); }  // calls that the real one forbids

// --- as in cuda.h ----------------------------------------------------------------------------------------------------------

int cuCtxGetCurrent(void** found) {
  *found = context;
  return kOk;
}
int cuCtxSetCurrent(void* wanted) {
  context = wanted;
  return broken.load() != 0 ? kFailed : kOk;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kOk;
}
int cuStreamIsCapturing(void* stream, int* found) {
  const std::lock_guard<std::mutex> guard(lock);
  *found = captured[stream] ? 1 : 0;
  return stream == nullptr && captures.load() != 0 ? kImplicit : check(false);
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = new char;
  return check(true);
}
int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return check(true);
}
int cuEventRecord(void* event, void* stream) {
  const std::lock_guard<std::mutex> guard(lock);
  const int result = check(false);
  if (result != kOk) return result;
  if (captured[stream]) return ++wrong, kCaptured;
  *static_cast<Event*>(event) = {std::max(busy_until[stream], now()), stream};
  return kOk;
}
int cuEventQuery(void* event) {
  const int result = check(true);
  const std::lock_guard<std::mutex> guard(lock);
  const Event& one = *static_cast<Event*>(event);
  if (result != kOk) return result;
  if (one.ns > now()) return kNotReady;
  for (auto& queue = copies[one.stream]; !queue.empty() && queue.front().ns <= one.ns; queue.pop_front())
    std::memcpy(queue.front().to, reinterpret_cast<void*>(queue.front().from), queue.front().count);
  return kOk;
}
int cuEventSynchronize(void* event) {
  int result;
  while ((result = cuEventQuery(event)) == kNotReady) usleep(10);
  return result;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return kOk;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::lock_guard<std::mutex> guard(lock);
  busy_until[stream] = std::max(busy_until[stream], static_cast<Event*>(event)->ns);
  return check(false);
}
int cuMemHostAlloc(void** memory, std::size_t count, unsigned) {
  const int result = check(true);
  *memory = result == kOk ? std::malloc(count) : nullptr;
  return result;
}
int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t count, void* stream) {
  const std::lock_guard<std::mutex> guard(lock);
  if (--copies_left < 0) broken = 1;
  copies[stream].push_back({to, from, count, std::max(busy_until[stream], now())});
  return check(false);
}
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_LAUNCH_FAILED";
  return kOk;
}
int cuEventElapsedTime(float* ms, void* from, void* to) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto passed = static_cast<std::int64_t>(static_cast<Event*>(to)->ns - static_cast<Event*>(from)->ns);
  *ms = static_cast<float>(static_cast<double>(passed) / 1e6);
  return check(false);
}
}
