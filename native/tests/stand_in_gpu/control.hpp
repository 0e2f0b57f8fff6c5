// TEST DOUBLE: what the ranks of one job on the stand-in share, and whoever tests them may change from outside: a file,
// STAND_IN_CONTROL, whose zero bytes mean a healthy machine. benchmarks/stand_in/control.py has the same layout.
#pragma once

#include <atomic>
#include <cstdint>

namespace stand_in {

constexpr int kMostRanks = 16;

struct Control {
  std::atomic<std::int32_t> cut[kMostRanks][kMostRanks];   // not 0: nothing goes from the first rank of the job to the second
  std::atomic<std::int32_t> slow[kMostRanks][kMostRanks];  // percent more time from the first to the second
};

Control& control();  // of this process alone where there is no file
int job_rank();      // RANK of the environment; -1: there is none

}  // namespace stand_in
