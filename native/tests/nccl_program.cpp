// A program linked to NCCL: four ranks in four threads, each call alone and in groups. Usage: nccl_program ROUNDS [bench|pace RATE]
// bench: nanoseconds of the stand-in's cheapest call, the median of single calls; with and without the shim preloaded.
// pace: so many of these calls, RATE of them a second; prints how many a second they were.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../nccl_api.hpp"

using namespace keepstep::nccl;
extern "C" {
Result ncclCommInitAll(Comm* comms, int count, const int* devices);
Result ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm comm, Stream stream);
Result ncclCommSplit(Comm comm, int color, int key, Comm* made, void* config);
Result ncclCommDestroy(Comm comm);
Result ncclGroupStart();
Result ncclGroupEnd();
int cuCtxSetCurrent(void* context) __attribute__((weak));  // where it is linked to the stand-in for CUDA, too
}

namespace {

constexpr int kRanks = 4, kFloat = 7;
const Stream kStream = reinterpret_cast<Stream>(0x10);

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "nccl_program: %s\n", what);
  std::exit(1);
}

void sum(Comm comm, float rank, float expected) {
  float value = rank;
  require(ncclAllReduce(&value, &value, 1, kFloat, 0, comm, kStream) == kSuccess && value == expected, "sum");
}

void play(Comm comm, int rank, int rounds) {
  if (cuCtxSetCurrent != nullptr) cuCtxSetCurrent(comm);
  const auto own = static_cast<float>(rank);
  for (int i = 0; i < rounds; ++i) {
    sum(comm, own, 6);
    float value = own;
    require(ncclGroupStart() == kSuccess, "start");
    require(ncclAllReduce(&value, &value, 1, kFloat, 0, comm, kStream) == kSuccess && value == own, "in a group");
    require(ncclGroupEnd() == kSuccess && value == 6, "end");
    Comm half = nullptr;
    require(ncclCommSplit(comm, rank % 2, rank, &half, nullptr) == kSuccess, "split");
    sum(half, own, rank % 2 == 0 ? 2 : 4);
    require(ncclCommDestroy(half) == kSuccess, "destroy");
  }
}

double median_ns(int calls) {
  Comm comm = nullptr;
  require(ncclCommInitAll(&comm, 1, nullptr) == kSuccess, "init");
  std::vector<double> found;
  float value = 0;
  for (int i = 0; i < calls; ++i) {
    const auto from = std::chrono::steady_clock::now();
    ncclAllReduce(&value, &value, 1, kFloat, 0, comm, kStream);
    found.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - from).count());
  }
  std::nth_element(found.begin(), found.begin() + calls / 2, found.end());
  return found[static_cast<std::size_t>(calls / 2)];
}

double paced(int calls, double rate) {
  using clock = std::chrono::steady_clock;
  using seconds = std::chrono::duration<double>;
  constexpr int kAtOnce = 32;
  Comm comm = nullptr;
  require(ncclCommInitAll(&comm, 1, nullptr) == kSuccess, "init");
  std::this_thread::sleep_for(seconds(3));  // as long as any training takes to its first call: the agent is there then
  float value = 0;
  const auto from = clock::now();
  for (int i = 0; i < calls; ++i) {
    if (i % kAtOnce == 0) while (seconds(clock::now() - from).count() * rate < i) {}
    ncclAllReduce(&value, &value, 1, kFloat, 0, comm, kStream);
  }
  return calls / seconds(clock::now() - from).count();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  if (argc > 2) {
    std::printf("%.1f\n", argc > 3 ? paced(rounds, std::atof(argv[3])) : median_ns(rounds));
    return 0;
  }
  Comm comms[kRanks];
  require(ncclCommInitAll(comms, kRanks, nullptr) == kSuccess, "init");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(play, comms[rank], rank, rounds);
  for (std::thread& one : threads) one.join();
  return 0;
}
