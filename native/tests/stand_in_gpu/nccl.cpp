// TEST DOUBLE: NCCL (libnccl.so.2) between processes of one machine, on the stand-in's device. Calls enqueue, as NCCL's
// do; calls inside a group become one operation at its end. What torch wants and is not here does nothing.
#include "nccl.hpp"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace stand_in;
using Comm = ncclComm*;

namespace {

constexpr int kVersion = 23007;
constexpr const char* kFolder = "/dev/shm/keepstep-stand-in-";

CorePointer core_of(Comm comm) { return comm == nullptr ? nullptr : std::atomic_load(&comm->core); }

std::string name_of(const char* id) {
  std::string name;
  char two[3];
  for (int i = 0; i < 12; ++i) {
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(id[i]));
    name += two;
  }
  return name;
}

thread_local int t_depth = 0;
thread_local std::vector<Work> t_works;
thread_local const char* t_last_error = "";
thread_local std::vector<CorePointer> t_joining;

// All ranks of a communicator find each other in one file, gone once all have it.
Result together(const CorePointer& core) {
  Shared& shared = *core->shared;
  const bool all = until(*core, [&] { return shared.joined >= core->size; });
  if (core->rank == 0) unlink((kFolder + core->name).c_str());
  log("communicator %s rank %d of %d", core->name.c_str(), core->rank, core->size);
  return all ? kSuccess : kSystemError;
}

// The caller's ncclConfig_t, as far as it is looked at here.
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};
bool blocks(const void* config) { return config == nullptr || static_cast<const Config*>(config)->blocking != 0; }

Result join(Comm* made, const char* id, int size, int rank, bool blocking = true) {
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) return kInvalidArgument;
  auto core = std::make_shared<Core>();
  core->name = name_of(id);
  core->rank = rank;
  core->size = size;
  core->device = current_device();
  look_at_rank();
  core->links_failed = links_failed();
  groups_are_made();
  core->shared = static_cast<Shared*>(mapped(kFolder + core->name, sizeof(Shared)));
  if (core->shared == nullptr) return kSystemError;
  core->shared->pid[rank] = getpid();
  core->shared->job_rank[rank] = job_rank();
  core->shared->device[rank] = core->device;
  ++core->shared->joined;
  ring(*core->shared);
  tell_of(core);
  *made = new ncclComm{core};
  if (t_depth > 0) {
    t_joining.push_back(core);
    return kSuccess;
  }
  core->joining = !blocking;
  return blocking ? together(core) : kInProgress;
}

// Whether those that do not block are all there; asked by ncclCommGetAsyncError.
Result look_for_the_others(const CorePointer& core) {
  if (!core->joining) return kSuccess;
  if (core->shared->joined < core->size) return kInProgress;
  core->joining = false;
  return together(core);
}

// One operation for each communicator, in the order of their first calls.
Result submit(std::vector<Work> works) {
  while (!works.empty()) {
    const CorePointer core = works.front().core;
    auto now = std::make_shared<std::vector<Work>>();
    std::vector<Work> later;
    for (Work& work : works) (work.core == core ? *now : later).push_back(work);
    Stream* stream = now->front().stream;
    std::vector<Stream*> others;
    std::vector<Point> after;
    for (const Work& work : *now)
      if (work.stream != stream && std::find(others.begin(), others.end(), work.stream) == others.end())
        others.push_back(work.stream);
    for (Stream* other : others) after.push_back(other->tail());
    const std::lock_guard<std::mutex> guard(core->lock);
    Point& before = stream->capturing() != nullptr ? core->last_captured : core->last;
    after.push_back(before);
    after.erase(std::remove(after.begin(), after.end(), nullptr), after.end());
    before = stream->enqueue([now](Ns begin) { return run(*now, begin); }, after);
    for (Stream* other : others) other->enqueue(nullptr, {before});
    works = std::move(later);
  }
  return kSuccess;
}

Result add(Comm comm, Do what, const void* in, void* out, std::size_t count, int type, int reduction, int whom, void* stream) {
  const CorePointer core = core_of(comm);
  t_last_error = core == nullptr ? "comm argument is NULL" : "";
  if (core == nullptr || width_of(type) == 0 || whom < -1 || whom >= core->size) return kInvalidArgument;
  stand_in::count(kCommunications);
  if (core->error != kSuccess) return core->error;
  if (failed() != 0) return kCudaError;
  if (core->aborted) return kInvalidUsage;
  ++core->shared->calls[core->rank][static_cast<int>(what)];
  if (job_rank() >= 0 && job_rank() < kMostRanks) ++control().enqueued[job_rank()];
  t_works.push_back({core, what, in, out, count, type, reduction, whom, stream_of(stream)});
  if (t_depth > 0) return kSuccess;
  std::vector<Work> works;
  works.swap(t_works);
  return submit(std::move(works));
}

// Links that failed are noticed. So is a peer that died, as over sockets, which close; not so with STAND_IN_NOTICE_DEATH=0, as
// over NVLink.
Result look_for_errors(Core& core) {
  static const bool notices = setting("STAND_IN_NOTICE_DEATH", 1) != 0;
  if (core.aborted || core.error != kSuccess) return core.error;
  if (core.links_failed != links_failed()) {
    log("links of %s failed", core.name.c_str());
    return core.error = kRemoteError;
  }
  if (!notices) return kSuccess;
  for (int rank = 0; rank < core.size; ++rank) {
    if (rank == core.rank || !is_dead(core.shared->pid[rank])) continue;
    core.error = kRemoteError;
    log("rank %d of %s is dead", rank, core.name.c_str());
  }
  return core.error;
}

// STAND_IN_ABORT: "quick" returns at once; "slow" after half a second, as on an H100; "stream" when all that was enqueued of the
// communicator has left the device, and with it all that is enqueued before; "ranks" when all living ranks have called it, too;
// "never" does not return; "fails" does nothing, and says so.
Result abort_core(const CorePointer& core) {
  static const std::string how = setting("STAND_IN_ABORT") == nullptr ? "quick" : setting("STAND_IN_ABORT");
  if (how == "fails") return kInvalidUsage;
  core->aborted = true;
  core->shared->aborting[core->rank] = 1;
  if (core->joining) unlink((kFolder + core->name).c_str());
  ring(*core->shared);
  log("abort %s %lld", core->name.c_str(), static_cast<long long>(host_now()));
  if (how == "slow") usleep(500'000);
  if (how == "quick" || how == "slow") return kSuccess;
  while (how == "never") pause();
  Point last;
  {
    const std::lock_guard<std::mutex> guard(core->lock);
    last = core->last;
  }
  wait_for(last, false);
  const auto gone = [&] {
    for (int rank = 0; rank < core->size; ++rank)
      if (core->shared->aborting[rank] == 0 && !is_dead(core->shared->pid[rank])) return false;
    return true;
  };
  while (how == "ranks" && !gone()) usleep(1000);
  return kSuccess;
}

}  // namespace

namespace stand_in {

Core::~Core() {
  if (shared != nullptr) munmap(shared, sizeof(Shared));
}

}  // namespace stand_in

extern "C" {

Result ncclGetVersion(int* version) {
  const char* told = std::getenv("STAND_IN_NCCL_VERSION");  // an older one, such as 21403
  *version = told == nullptr ? kVersion : std::atoi(told);
  return kSuccess;
}
Result ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  return getrandom(id->internal, 16, 0) == 16 ? kSuccess : kSystemError;
}
Result ncclCommInitRank(Comm* made, int size, UniqueId id, int rank) { return join(made, id.internal, size, rank); }
Result ncclCommInitRankConfig(Comm* made, int size, UniqueId id, int rank, void* config) {
  return join(made, id.internal, size, rank, blocks(config));
}
Result ncclCommInitRankScalable(Comm* made, int size, int rank, int, UniqueId* ids, void*) {
  return join(made, ids->internal, size, rank);
}
Result ncclCommInitAll(Comm* made, int count, const int* devices) {
  UniqueId id;
  const int before = current_device();
  Result result = ncclGetUniqueId(&id);
  ++t_depth;
  for (int rank = 0; rank < count && result == kSuccess; ++rank) {
    current_device() = devices == nullptr ? rank : devices[rank];
    result = join(&made[rank], id.internal, count, rank);
  }
  current_device() = before;
  --t_depth;
  std::vector<CorePointer> joining;
  joining.swap(t_joining);
  for (const CorePointer& core : joining)
    if (result == kSuccess) result = together(core);
  return result;
}

Result ncclCommSplit(Comm comm, int color, int key, Comm* made, void*) {  // every rank of the parent calls
  const CorePointer parent = core_of(comm);
  *made = nullptr;
  if (parent == nullptr) return kInvalidArgument;
  Shared& shared = *parent->shared;
  const std::uint64_t round = ++parent->splits;
  const auto all = [&](const Count (&counts)[kMostRanks]) {
    return until(*parent, [&] { return std::all_of(counts, counts + parent->size, [&](const Count& one) { return one >= round; }); });
  };
  Choice& mine = shared.choices[parent->rank];
  mine.color = color;
  mine.key = key;
  if (getrandom(mine.id, sizeof mine.id, 0) != sizeof mine.id) return kSystemError;
  shared.split_in[parent->rank] = round;
  ring(shared);
  if (!all(shared.split_in)) return kSystemError;
  int size = 0, rank = 0, first = -1;
  for (int other = 0; other < parent->size; ++other) {
    const Choice& theirs = shared.choices[other];
    if (theirs.color != color) continue;
    if (first < 0) first = other;
    ++size;
    if (theirs.key < key || (theirs.key == key && other < parent->rank)) ++rank;
  }
  char id[sizeof mine.id];
  std::memcpy(id, shared.choices[std::max(first, 0)].id, sizeof id);
  shared.split_out[parent->rank] = round;
  ring(shared);
  if (!all(shared.split_out)) return kSystemError;
  return color == keepstep::nccl::kNoColor ? kSuccess : join(made, id, size, rank);
}

Result ncclCommShrink(Comm comm, int* without, int count, Comm* made, void*, int flags) {  // only those that stay call
  const CorePointer parent = core_of(comm);
  if (parent == nullptr) return kInvalidArgument;
  if ((flags & 1) != 0) abort_core(parent);  // NCCL_SHRINK_ABORT
  std::uint64_t hash = 14695981039346656037ULL;  // all that stay know the same
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  for (char letter : parent->name) mix(static_cast<unsigned char>(letter));
  for (int i = 0; i < count; ++i) mix(static_cast<std::uint64_t>(without[i]) + 1);
  mix(++parent->splits);
  char id[16] = "shrunk";
  std::memcpy(id + 8, &hash, sizeof hash);
  int rank = 0;
  for (int other = 0; other < parent->rank; ++other)
    if (std::find(without, without + count, other) == without + count) ++rank;
  return join(made, id, parent->size - count, rank);
}

Result ncclCommGetUniqueId(Comm comm, UniqueId* id) {  // one rank calls, before all grow
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  const Result result = ncclGetUniqueId(id);
  std::memcpy(core->shared->grown_id, id, sizeof *id);
  return result;
}
Result ncclCommGrow(Comm comm, int size, const UniqueId* id, int rank, Comm* made, void*) {
  const CorePointer parent = core_of(comm);
  if (parent == nullptr && id == nullptr) return kInvalidArgument;
  return join(made, id != nullptr ? id->internal : parent->shared->grown_id, size, parent == nullptr ? rank : parent->rank);
}

Result ncclCommAbort(Comm comm) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kSuccess;
  const Result result = abort_core(core);
  if (result == kSuccess) std::atomic_store(&comm->core, CorePointer());
  return result;
}
Result ncclCommRevoke(Comm comm, int) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  core->aborted = true;
  ring(*core->shared);
  return kSuccess;
}
Result ncclCommDestroy(Comm comm) {
  if (comm != nullptr) std::atomic_store(&comm->core, CorePointer());
  return kSuccess;
}
Result ncclCommFinalize(Comm comm) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  Point last;
  {
    const std::lock_guard<std::mutex> guard(core->lock);
    last = core->last;
  }
  wait_for(last, false);
  return kSuccess;
}
Result ncclCommGetAsyncError(Comm comm, Result* error) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  *error = look_for_errors(*core);
  if (*error == kSuccess) *error = look_for_the_others(core);
  return kSuccess;
}
Result ncclCommCount(const Comm comm, int* size) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  *size = core->size;
  return kSuccess;
}
Result ncclCommUserRank(const Comm comm, int* rank) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  *rank = core->rank;
  return kSuccess;
}
Result ncclCommRegister(Comm, void*, std::size_t, void** handle) {
  static int registered;
  *handle = &registered;
  return kSuccess;
}
Result ncclMemAlloc(void** memory, std::size_t bytes) { return allocate(memory, bytes, Memory::device) == kOk ? kSuccess : kCudaError; }
Result ncclMemFree(void* memory) {
  release(memory);
  return kSuccess;
}
const char* ncclGetErrorString(Result error) {
  switch (error) {
    case kSuccess: return "no error";
    case kCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case kSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case kInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case kInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case kRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}
const char* ncclGetLastError(Comm) { return t_last_error; }

Result ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int, Comm comm) {
  const CorePointer core = core_of(comm);
  if (core == nullptr) return kInvalidArgument;
  const std::lock_guard<std::mutex> guard(core->lock);
  core->factors.push_back(value_of(scalar, type));
  *op = 4 + static_cast<int>(core->factors.size());
  return kSuccess;
}
Result ncclRedOpDestroy(int, Comm) { return kSuccess; }

Result ncclGroupStart() {
  ++t_depth;
  return kSuccess;
}
Result ncclGroupEnd() {
  if (t_depth == 0) return kInvalidUsage;
  if (--t_depth > 0) return kSuccess;
  std::vector<Work> works;
  std::vector<CorePointer> joining;
  works.swap(t_works);
  joining.swap(t_joining);
  for (const CorePointer& core : joining)
    if (const Result result = together(core); result != kSuccess) return result;
  return submit(std::move(works));
}
Result ncclGroupSimulateEnd(void*) {
  if (t_depth == 0) return kInvalidUsage;
  if (--t_depth == 0) t_works.clear();
  return kSuccess;
}

Result ncclAllReduce(const void* in, void* out, std::size_t count, int type, int op, Comm comm, void* stream) {
  return add(comm, Do::allreduce, in, out, count, type, op, -1, stream);
}
Result ncclBroadcast(const void* in, void* out, std::size_t count, int type, int root, Comm comm, void* stream) {
  return add(comm, Do::broadcast, in, out, count, type, 0, root, stream);
}
Result ncclBcast(void* buffer, std::size_t count, int type, int root, Comm comm, void* stream) {  // by its own API, as NCCL
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
Result ncclReduce(const void* in, void* out, std::size_t count, int type, int op, int root, Comm comm, void* stream) {
  return add(comm, Do::reduce, in, out, count, type, op, root, stream);
}
Result ncclAllGather(const void* in, void* out, std::size_t count, int type, Comm comm, void* stream) {
  return add(comm, Do::allgather, in, out, count, type, 0, -1, stream);
}
Result ncclReduceScatter(const void* in, void* out, std::size_t count, int type, int op, Comm comm, void* stream) {
  return add(comm, Do::reduce_scatter, in, out, count, type, op, -1, stream);
}
Result ncclAlltoAll(const void* in, void* out, std::size_t count, int type, Comm comm, void* stream) {
  return add(comm, Do::alltoall, in, out, count, type, 0, -1, stream);
}
Result ncclGather(const void* in, void* out, std::size_t count, int type, int root, Comm comm, void* stream) {
  return add(comm, Do::gather, in, out, count, type, 0, root, stream);
}
Result ncclScatter(const void* in, void* out, std::size_t count, int type, int root, Comm comm, void* stream) {
  return add(comm, Do::scatter, in, out, count, type, 0, root, stream);
}
Result ncclSend(const void* in, std::size_t count, int type, int peer, Comm comm, void* stream) {
  return add(comm, Do::send, in, nullptr, count, type, 0, peer, stream);
}
Result ncclRecv(void* out, std::size_t count, int type, int peer, Comm comm, void* stream) {
  return add(comm, Do::recv, nullptr, out, count, type, 0, peer, stream);
}
}
