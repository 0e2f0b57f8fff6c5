// TEST DOUBLE: what the ranks of one job on the stand-in share, and whoever tests them may change from outside: a file,
// STAND_IN_CONTROL, whose zero bytes mean a healthy machine. benchmarks/stand_in/control.py has the same layout.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace stand_in {

constexpr int kMostRanks = 16, kMostDevices = 16, kMostHolders = 32;

struct Holder {  // a process that has memory of a device
  std::atomic<std::int32_t> pid, unused;
  std::atomic<std::int64_t> bytes, gone_ns;  // gone: when it was first seen to be dead; 0: it was not
};

struct Control {
  std::atomic<std::int32_t> cut[kMostRanks][kMostRanks];   // not 0: nothing goes from the first rank of the job to the second
  std::atomic<std::int32_t> slow[kMostRanks][kMostRanks];  // percent more time from the first to the second
  std::atomic<std::int64_t> enqueued[kMostRanks], started[kMostRanks], completed[kMostRanks];  // NCCL's operations
  Holder holders[kMostDevices][kMostHolders];
  std::atomic<std::int32_t> links_failed[kMostRanks];  // how often those of a rank have
};

void* mapped(const std::string& path, std::size_t bytes);  // shared, made if need be; null: it cannot be had
Control& control();  // of this process alone where there is no file
int job_rank();      // RANK of the environment; -1: there is none
void look_at_rank();  // the process may be another rank by now
bool is_dead(int pid);  // a zombie is

}  // namespace stand_in
