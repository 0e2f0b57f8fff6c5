// What one more thing on a stream costs, what goes on while a stream is held, and when a dead process's memory is free.
//
//     nvcc -O2 -std=c++17 -arch=native -lcuda -o streams benchmarks/gpu/streams.cu && ./streams
//
// Ends in about 20 s on one GPU with 45 GB free. The figures are in docs/design/on-a-gpu.md.
#include <cuda.h>
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = 64 << 20;
constexpr size_t kBig = 40ull << 30;

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) std::printf("%s: %s\n", call, cudaGetErrorString(error));
}
#define CHECK(call) check((call), #call)

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

__global__ void tiny(float* at) { at[threadIdx.x] += 1; }
__global__ void spin_for(long long cycles) {
  for (const long long begun = clock64(); clock64() - begun < cycles;) {}
}
__global__ void spin_until(volatile unsigned* word) {
  while (*word == 0) {}
}
// CUDA loads a kernel at its first launch: one for each way of holding.
template <int kWay>
__global__ void first_launched(float* at) { at[0] = kWay; }

cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

unsigned* pinned_words() {
  unsigned* words;
  CHECK(cudaHostAlloc(&words, 4096, cudaHostAllocMapped));
  std::memset(words, 0, 4096);
  return words;
}

void nothing(void*) {}

// --- what one more thing costs ---------------------------------------------------------------------------------------

void costs(float* device) {
  constexpr int kRounds = 7, kParts = 8, kKernels = 400;
  const cudaStream_t stream = new_stream();
  unsigned* pinned = pinned_words();
  pinned[64] = 1;
  unsigned* word;
  CHECK(cudaMalloc(&word, 4096));
  const auto at = [](const unsigned* address) { return reinterpret_cast<CUdeviceptr>(address); };
  cudaEvent_t plain, timed, begun, ended;
  CHECK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming));
  for (cudaEvent_t* event : {&timed, &begun, &ended}) CHECK(cudaEventCreate(event));
  const std::vector<std::pair<const char*, std::function<void()>>> kinds = {
      {"nothing", [] {}},
      {"an event without timing", [&] { cudaEventRecord(plain, stream); }},
      {"an event with timing", [&] { cudaEventRecord(timed, stream); }},
      {"an event, and a wait for it", [&] { cudaEventRecord(timed, stream), cudaStreamWaitEvent(stream, timed, 0); }},
      {"a value written to the device", [&] { cuStreamWriteValue32(stream, at(word), 1, 0); }},
      {"the same without a memory barrier",
       [&] { cuStreamWriteValue32(stream, at(word), 1, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER); }},
      {"a value written to pinned memory", [&] { cuStreamWriteValue32(stream, at(pinned), 1, 0); }},
      {"a wait for a value that is there",
       [&] { cuStreamWaitValue32(stream, at(pinned + 64), 1, CU_STREAM_WAIT_VALUE_GEQ); }},
      {"a host function", [&] { cudaLaunchHostFunc(stream, nothing, nullptr); }},
  };
  for (const auto& [name, put] : kinds) {
    std::vector<double> gpu_us, host_us;
    for (int round = 0; round < kRounds; ++round) {
      double gpu = 0, host = 0;
      for (int part = 0; part < kParts; ++part) {
        CHECK(cudaStreamSynchronize(stream));
        spin_for<<<1, 1, 0, stream>>>(20'000'000);  // so that the host is ahead
        cudaEventRecord(begun, stream);
        for (int i = 0; i < kKernels; ++i) {
          tiny<<<1, 32, 0, stream>>>(device);
          const double before = now_us();
          put();
          host += now_us() - before;
        }
        cudaEventRecord(ended, stream);
        CHECK(cudaEventSynchronize(ended));
        float part_ms;
        CHECK(cudaEventElapsedTime(&part_ms, begun, ended));
        gpu += part_ms * 1e3;
      }
      gpu_us.push_back(gpu / (kParts * kKernels));
      host_us.push_back(host / (kParts * kKernels));
    }
    std::sort(gpu_us.begin(), gpu_us.end());
    std::sort(host_us.begin(), host_us.end());
    std::printf("%-34s a kernel takes %7.3f us, the call %6.3f us\n", name, gpu_us[kRounds / 2], host_us[kRounds / 2]);
  }
}

// --- what goes on while a stream is held -----------------------------------------------------------------------------

// Says whether the action ends within 300 ms, else that it ends once the stream is let go.
void tell(const char* held_by, const char* what, const std::function<void()>& action,
          const std::function<void()>& let_go) {
  std::atomic<double> ended_us{0};
  const double begun_us = now_us();
  std::thread thread([&] {
    action();
    ended_us = now_us();
  });
  while (ended_us.load() == 0 && now_us() - begun_us < 300e3) usleep(200);
  const bool went_on = ended_us.load() != 0;
  let_go();
  thread.join();
  std::printf("%-14s %-40s %s\n", held_by, what, went_on ? "goes on" : "WAITS until the stream is let go");
}

std::atomic<bool> g_let_go{false}, g_held{false};

void hold(void*) {
  g_held = true;
  while (!g_let_go.load()) usleep(50);
}

template <int kWay>
void while_held(const char* held_by, const std::function<void(cudaStream_t)>& take,
                const std::function<void()>& let_go) {
  const cudaStream_t held = new_stream(), other = new_stream();
  float *a, *b, *pinned, *pageable = static_cast<float*>(std::calloc(kBytes, 1));
  for (float** at : {&a, &b}) CHECK(cudaMalloc(at, kBytes));
  CHECK(cudaHostAlloc(&pinned, kBytes, 0));
  void *to_free, *to_free_on_host, *fresh;
  CHECK(cudaMalloc(&to_free, kBytes));
  CHECK(cudaHostAlloc(&to_free_on_host, kBytes, 0));
  cudaEvent_t event;
  CHECK(cudaEventCreate(&event));
  tiny<<<1, 32, 0, held>>>(a);
  CHECK(cudaDeviceSynchronize());
  const auto wait = [&] { CHECK(cudaStreamSynchronize(other)); };
  const auto copy = [&](void* target, const void* source) {
    CHECK(cudaMemcpyAsync(target, source, kBytes, cudaMemcpyDefault, other)), wait();
  };
  size_t bytes_free, bytes;
  const std::vector<std::pair<const char*, std::function<void()>>> actions = {
      {"a kernel on another stream", [&] { tiny<<<1, 32, 0, other>>>(a), wait(); }},
      {"a kernel on the legacy stream", [&] { tiny<<<1, 32>>>(a), CHECK(cudaStreamSynchronize(nullptr)); }},
      {"a copy on the device", [&] { copy(a, b); }},
      {"a copy to pinned memory", [&] { copy(pinned, a); }},
      {"a copy from pinned memory", [&] { copy(a, pinned); }},
      {"a copy to pageable memory", [&] { copy(pageable, a); }},
      {"a host function on another stream", [&] { CHECK(cudaLaunchHostFunc(other, nothing, nullptr)), wait(); }},
      {"an event", [&] { CHECK(cudaEventRecord(event, other)), CHECK(cudaEventSynchronize(event)); }},
      {"a new stream", [&] { CHECK(cudaStreamDestroy(new_stream())); }},
      {"cudaMemGetInfo", [&] { CHECK(cudaMemGetInfo(&bytes_free, &bytes)); }},
      {"cudaMalloc", [&] { CHECK(cudaMalloc(&fresh, kBytes)); }},
      {"cudaMallocAsync", [&] { CHECK(cudaMallocAsync(&fresh, kBytes, other)), wait(); }},
      {"cudaHostAlloc", [&] { CHECK(cudaHostAlloc(&fresh, kBytes, 0)); }},
      {"cudaFree", [&] { CHECK(cudaFree(to_free)); }},
      {"cudaFreeHost", [&] { CHECK(cudaFreeHost(to_free_on_host)); }},
      {"a kernel that was never loaded", [&] { first_launched<kWay><<<1, 1, 0, other>>>(a), wait(); }},
      {"cudaDeviceSynchronize", [&] { CHECK(cudaDeviceSynchronize()); }},
  };
  for (const auto& [what, action] : actions) {
    take(held);
    tell(held_by, what, action, let_go);
    CHECK(cudaDeviceSynchronize());
  }
  take(held);
  std::atomic<int> launched{0};
  std::thread thread([&] {
    for (int i = 0; i < 4000; ++i) tiny<<<1, 32, 0, held>>>(a), ++launched;
  });
  usleep(300'000);
  std::printf("%-14s launches that fit behind it: %d\n", held_by, launched.load());
  let_go();
  thread.join();
  CHECK(cudaDeviceSynchronize());
}

void all_ways() {
  while_held<1>(
      "host function",
      [](cudaStream_t stream) {
        g_let_go = g_held = false;
        CHECK(cudaLaunchHostFunc(stream, hold, nullptr));
        while (!g_held.load()) usleep(50);
      },
      [] { g_let_go = true; });
  volatile unsigned* word = pinned_words();
  unsigned* address = const_cast<unsigned*>(word);
  const auto let_go = [&] { *word = 1; };
  while_held<2>(
      "value",
      [&](cudaStream_t stream) {
        *word = 0;
        cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(address), 1, CU_STREAM_WAIT_VALUE_GEQ);
      },
      let_go);
  while_held<3>(
      "kernel",
      [&](cudaStream_t stream) {
        *word = 0;
        spin_until<<<1, 1, 0, stream>>>(address);
        usleep(2000);
      },
      let_go);
}

// --- a dead process's memory -----------------------------------------------------------------------------------------

void be_killed(const std::string& how) {
  void* big;
  CHECK(cudaMalloc(&big, kBig));
  CHECK(cudaMemset(big, 1, kBig));
  CHECK(cudaDeviceSynchronize());
  unsigned* word = pinned_words();
  if (how == "in a kernel") spin_until<<<1, 1>>>(word);
  if (how == "with 4 GiB pinned") {
    CHECK(cudaHostAlloc(&big, 4ull << 30, 0));
    std::memset(big, 1, 4ull << 30);
  }
  usleep(10'000);
  if (write(STDOUT_FILENO, "x", 1) == 1) pause();
}

void dead_memory(const char* self, const char* how) {
  size_t before, held, now, bytes;
  int pipe_of_child[2];
  CHECK(cudaMemGetInfo(&before, &bytes));
  if (pipe(pipe_of_child) != 0) return;
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_of_child[1], STDOUT_FILENO);
    execl(self, self, how, static_cast<char*>(nullptr));
    _exit(1);
  }
  close(pipe_of_child[1]);
  char ready;
  if (read(pipe_of_child[0], &ready, 1) == 1) {
    CHECK(cudaMemGetInfo(&held, &bytes));
    const double killed_us = now_us();
    kill(child, SIGKILL);
    do {
      usleep(200);
      cudaMemGetInfo(&now, &bytes);
    } while (now + (1ull << 30) < before && now_us() - killed_us < 20e6);
    std::printf("killed %-18s with %.1f GB on the device: they are free after %.0f ms\n", how, (before - held) / 1e9,
                (now_us() - killed_us) / 1e3);
  }
  close(pipe_of_child[0]);
  waitpid(child, nullptr, 0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    be_killed(arguments[1]);
    return 1;
  }
  float* device;
  CHECK(cudaMalloc(&device, kBytes));
  costs(device);
  for (const char* how : {"idle", "in a kernel", "with 4 GiB pinned"}) dead_memory(arguments[0], how);
  all_ways();
  return 0;
}
