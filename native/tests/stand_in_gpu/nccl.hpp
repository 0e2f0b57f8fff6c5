// TEST DOUBLE: what the files of the stand-in of NCCL share.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../../nccl_api.hpp"
#include "control.hpp"
#include "device.hpp"

namespace stand_in {

using keepstep::nccl::Result;
using keepstep::nccl::UniqueId;
constexpr Result kSuccess = 0, kCudaError = 1, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6,
                 kInProgress = 7;
constexpr std::size_t kPiece = 1 << 20;  // bytes of a rank that a collective has under way
constexpr std::size_t kBox = 1 << 18;    // bytes of a message likewise

enum class Do { allreduce, broadcast, reduce, allgather, reduce_scatter, alltoall, gather, scatter, send, recv };
constexpr int kDoes = 10;

using Count = std::atomic<std::uint64_t>;
using Time = std::atomic<Ns>;

struct Box {  // of messages from one rank to another
  Count put, taken;
  Time full, empty;  // on the device's clock: when its bytes were there, when they had gone
  char data[kBox];
};
struct Choice {  // of a rank, for a split
  std::atomic<int> color, key;
  char id[16];
};
struct Shared {  // by all ranks of a communicator; zeroed memory is a fresh one
  std::atomic<std::uint32_t> bell;
  std::atomic<int> joined, pid[kMostRanks], job_rank[kMostRanks], device[kMostRanks], aborting[kMostRanks];
  Count arrived[kMostRanks], left[kMostRanks], what[kMostRanks];
  Time at[kMostRanks];
  std::atomic<int> slow[kMostRanks], cut[kMostRanks];  // what each saw of bad pairs when it came, so that all reckon alike
  Count calls[kMostRanks][kDoes];  // enqueued
  Count split_in[kMostRanks], split_out[kMostRanks];
  Choice choices[kMostRanks];
  char grown_id[sizeof(UniqueId)];
  char data[kMostRanks][kPiece];
  Box boxes[kMostRanks][kMostRanks];
};

struct Core {  // a communicator, as long as anything of it is enqueued
  ~Core();
  std::string name;
  int rank = 0, size = 0, device = 0;
  Shared* shared = nullptr;
  std::atomic<bool> aborted{false};
  bool joining = false;  // without blocking: not all ranks were there yet
  std::atomic<Result> error{kSuccess};
  int links_failed = 0;  // of its rank of the job, when it was made
  std::uint64_t step = 0, splits = 0;  // collective pieces; splits made of it
  std::mutex lock;
  Point last, last_captured;           // its operations follow each other, on whatever streams they are
  std::vector<double> factors;         // of reductions that multiply first, by operation
};
using CorePointer = std::shared_ptr<Core>;

struct Work {
  CorePointer core;
  Do what;
  const void* in;
  void* out;
  std::size_t count;
  int type, reduction, whom;
  Stream* stream;
};

void ring(Shared& shared);

// Waits until `ready`, rung; false: the communicator was aborted or the device failed. Notices peers that died.
bool until(Core& core, const std::function<bool()>& ready);

std::size_t width_of(int type);  // bytes; 0: no such type
void reduce(const std::vector<const char*>& parts, std::size_t count, int type, int reduction, void* out);
double value_of(const void* one, int type);
void scale(void* data, std::size_t count, int type, double factor);

int links_failed();  // of this rank of the job, so far

void tell_of(const CorePointer& core);  // to whoever asks RAS

// Runs what one group put on one communicator; the device's time at its end.
Ns run(std::vector<Work>& works, Ns begin);

}  // namespace stand_in

struct ncclComm {
  stand_in::CorePointer core;  // null: destroyed or aborted
};
