// The stand-in's NCCL: how collectives and messages go through shared memory, and what time they take on the device.
//
// A collective ends at the last rank's arrival plus 5 us and its bytes by STAND_IN_GBPS; a slow pair within the
// communicator slows everybody, a cut one stops everybody, as rings do. A send ends when its bytes are in the mailbox, as
// NCCL's do while they fit its buffers, a receive when they have come.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "nccl.hpp"

namespace stand_in {
namespace {

Ns cost(std::size_t bytes, int slow) {
  static const double gbps = setting("STAND_IN_GBPS", 10);
  const Ns healthy = 5'000 + static_cast<Ns>(static_cast<double>(bytes) / gbps);
  return healthy + healthy * slow / 100;
}

int fault_of(const Core& core, const std::atomic<std::int32_t> (&table)[kMostRanks][kMostRanks], int from, int to) {
  const int a = core.shared->job_rank[from], b = core.shared->job_rank[to];
  return a < 0 || b < 0 || a >= kMostRanks || b >= kMostRanks ? 0 : table[a][b].load();
}
template <typename Table>
int worst(const Core& core, const Table& table) {
  int most = 0;
  for (int from = 0; from < core.size; ++from)
    for (int to = 0; to < core.size; ++to) most = std::max(most, fault_of(core, table, from, to));
  return most;
}

bool all_at(const Core& core, const Count (&counts)[kMostRanks], std::uint64_t step) {
  return std::all_of(counts, counts + core.size, [step](const Count& one) { return one >= step; });
}

bool meet(Core& core, Count (&counts)[kMostRanks]) {
  counts[core.rank] = core.step;
  if (all_at(core, counts, core.step)) ring(*core.shared);  // only the last one: the others have nothing to wake for
  return until(core, [&] { return all_at(core, counts, core.step); });
}

bool reads_all(Do what) { return what == Do::reduce_scatter || what == Do::alltoall; }

// One piece of `count` elements from element `from` on, of each rank's part where there are parts.
bool move_piece(Work& work, std::size_t from, std::size_t count, Ns begin, Ns* all_here, int* slow) {
  Core& core = *work.core;
  Shared& shared = *core.shared;
  const std::size_t width = width_of(work.type), bytes = count * width, ranks = static_cast<std::size_t>(core.size);
  const bool is_root = work.whom == core.rank;
  const auto* in = static_cast<const char*>(work.in);
  auto* out = static_cast<char*>(work.out);
  char* mine = shared.data[core.rank];
  const auto part = [&](std::size_t rank) { return (rank * work.count + from) * width; };
  ++core.step;
  if (reads_all(work.what) || (work.what == Do::scatter && is_root)) {
    for (std::size_t rank = 0; rank < ranks; ++rank) std::memcpy(mine + rank * bytes, in + part(rank), bytes);
  } else if (work.what != Do::scatter && (work.what != Do::broadcast || is_root)) {
    std::memcpy(mine, in + from * width, bytes);
  }
  if (static_cast<std::size_t>(work.reduction) > 4 && static_cast<std::size_t>(work.reduction) - 5 < core.factors.size())
    scale(mine, reads_all(work.what) ? count * ranks : count, work.type, core.factors[static_cast<std::size_t>(work.reduction) - 5]);
  const std::uint64_t what = static_cast<std::uint64_t>(work.count) << 16 | static_cast<std::uint64_t>(work.type) << 8 |
                             static_cast<std::uint64_t>(work.what);
  shared.what[core.rank] = what;
  shared.at[core.rank] = begin;
  shared.slow[core.rank] = worst(core, control().slow);
  shared.cut[core.rank] = worst(core, control().cut);
  if (core.links_failed != links_failed()) {  // what it sends still comes to the others, nothing comes to it
    shared.arrived[core.rank] = shared.left[core.rank] = core.step;
    ring(shared);
    return until(core, [] { return false; });
  }
  if (!meet(core, shared.arrived)) return false;
  for (int rank = 0; rank < core.size; ++rank) {
    *all_here = std::max(*all_here, shared.at[rank].load());
    *slow = std::max(*slow, shared.slow[rank].load());
    if (shared.cut[rank] != 0 && !until(core, [&] { return worst(core, control().cut) == 0; })) return false;
    if (shared.what[rank] == what) continue;
    log("mismatch with rank %d of %s: nobody gets on", rank, core.name.c_str());
    return until(core, [] { return false; });
  }
  std::vector<const char*> parts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    parts.push_back(shared.data[rank] + (reads_all(work.what) ? static_cast<std::size_t>(core.rank) * bytes : 0));
  const char* root = shared.data[std::max(work.whom, 0)];
  switch (work.what) {
    case Do::reduce:
      if (!is_root) break;
      [[fallthrough]];
    case Do::allreduce:
    case Do::reduce_scatter: reduce(parts, count, work.type, work.reduction, out + from * width); break;
    case Do::broadcast: std::memcpy(out + from * width, root, bytes); break;
    case Do::scatter: std::memcpy(out + from * width, root + static_cast<std::size_t>(core.rank) * bytes, bytes); break;
    case Do::gather:
      if (!is_root) break;
      [[fallthrough]];
    default:
      for (std::size_t rank = 0; rank < ranks; ++rank) std::memcpy(out + part(rank), parts[rank], bytes);
  }
  return meet(core, shared.left);
}

Ns collective(Work& work, Ns begin) {
  const Core& core = *work.core;
  const std::size_t width = width_of(work.type), ranks = static_cast<std::size_t>(core.size);
  const std::size_t most = kPiece / width / ranks;
  Ns all_here = begin;
  int slow = 0;
  for (std::size_t from = 0; from == 0 || from < work.count; from += most) {
    Ns here = begin;
    if (!move_piece(work, from, std::min(most, work.count - from), begin, &here, &slow)) return begin;
    if (from == 0) all_here = here;
  }
  const std::size_t total = work.count * width;
  return all_here + cost(work.what == Do::allreduce ? 2 * total * (ranks - 1) / ranks : total * (ranks - 1), slow);
}

struct Message {
  Work* work;
  std::size_t done = 0;
};

// As far as it goes now; true: it is through.
bool move(Message& message, Ns begin, Ns* end) {
  Work& work = *message.work;
  Core& core = *work.core;
  const bool sends = work.what == Do::send;
  const int from = sends ? core.rank : work.whom, to = sends ? work.whom : core.rank;
  Box& box = core.shared->boxes[from][to];
  const std::size_t total = work.count * width_of(work.type);
  if (fault_of(core, control().cut, from, to) != 0) return false;
  do {
    if (sends ? box.put != box.taken : box.put == box.taken) return false;
    const std::size_t bytes = std::min(total - message.done, kBox);
    if (sends) {
      std::memcpy(box.data, static_cast<const char*>(work.in) + message.done, bytes);
      const Ns full = std::max(begin, box.empty.load()) + cost(bytes, fault_of(core, control().slow, from, to));
      box.full = full;
      *end = std::max(*end, full);
      ++box.put;
    } else {
      std::memcpy(static_cast<char*>(work.out) + message.done, box.data, bytes);
      const Ns gone = std::max(begin, box.full.load());
      box.empty = gone;
      *end = std::max(*end, gone);
      ++box.taken;
    }
    message.done += bytes;
    ring(*core.shared);
  } while (message.done < total);
  return true;
}

bool is_message(const Work& work) { return work.what == Do::send || work.what == Do::recv; }

}  // namespace

int links_failed() {
  const int rank = job_rank();
  return rank < 0 || rank >= kMostRanks ? 0 : control().links_failed[rank].load();
}

void ring(Shared& shared) {
  ++shared.bell;
  syscall(SYS_futex, &shared.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool until(Core& core, const std::function<bool()>& ready) {
  for (;;) {
    const std::uint32_t bell = core.shared->bell;
    if (core.aborted.load() || failed() != 0) return false;
    if (ready()) return true;
    const timespec most{0, 100'000'000};  // a fault from outside and a device that failed do not ring
    syscall(SYS_futex, &core.shared->bell, FUTEX_WAIT, bell, &most, nullptr, 0);
  }
}

namespace {

Ns carry(std::vector<Work>& works, Ns begin) {
  Core& core = *works.front().core;
  Ns end = begin;
  for (Work& work : works)
    if (!is_message(work) && !core.aborted.load()) end = collective(work, end);
  begin = end;
  std::vector<Message> left;
  for (Work& work : works)
    if (is_message(work)) left.push_back({&work});
  if (left.empty()) return end;
  until(core, [&] {
    for (std::size_t i = 0; i < left.size();) {
      const Work& work = *left[i].work;  // messages of one pair and direction keep their order
      const bool behind = std::any_of(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(i), [&](const Message& other) {
        return other.work->what == work.what && other.work->whom == work.whom;
      });
      if (!behind && move(left[i], begin, &end))
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
      else
        ++i;
    }
    return left.empty();
  });
  return end;
}

}  // namespace

Ns run(std::vector<Work>& works, Ns begin) {
  const auto count = static_cast<std::int64_t>(works.size());
  const int rank = job_rank();
  if (rank >= 0 && rank < kMostRanks) control().started[rank] += count;
  const Ns end = carry(works, begin);
  if (works.front().core->aborted.load()) was_aborted();
  if (rank >= 0 && rank < kMostRanks && !works.front().core->aborted.load() && failed() == 0)
    control().completed[rank] += count;
  return end;
}

}  // namespace stand_in
