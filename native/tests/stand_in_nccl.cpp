// TEST DOUBLE: a stand-in for NCCL with its binary interface, for machines without a GPU. Ranks are threads and processes
// of one machine, buffers are host memory, streams are ignored (but see `launch`): a call returns when the operation is done. It has what
// NCCL 2.27 had. STAND_IN_VERSION in the environment is what ncclGetVersion says; empty: it fails. With
// STAND_IN_NONBLOCKING a split goes on behind its call, until ncclCommGetAsyncError of the parent says otherwise.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../nccl_api.hpp"

using namespace keepstep::nccl;

namespace {

constexpr int kMostRanks = 8, kDepth = 16;
constexpr std::size_t kMostBytes = 65536, kMessageBytes = 2048;
constexpr Result kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6;
using Count = std::atomic<std::uint64_t>;

struct Pipe {
  Count sent, received;
  char messages[kDepth][kMessageBytes];
};
struct Shared {  // zeroed memory is a fresh one
  Count here, arrived, left;
  char data[kMostRanks][kMostBytes];
  Pipe pipes[kMostRanks][kMostRanks];
};

std::size_t size_of(int type) {
  static const std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type > 11 ? 0 : sizes[type];
}

}  // namespace

struct ncclComm {
  std::string name;
  int rank, size;
  Shared* shared = nullptr;
  std::uint64_t rounds = 0;
  unsigned children = 0;
  std::atomic<bool> aborted{false}, busy{false};
};

namespace {

template <typename Ready>
Result wait(Comm comm, Ready ready) {
  for (unsigned i = 0; !ready(); ++i) {
    if (comm->aborted.load()) return kRemoteError;
    if (i < 100)
      sched_yield();
    else
      usleep(100);
  }
  return kSuccess;
}

enum class Do { allreduce, broadcast, reduce, allgather, reduce_scatter, send, recv, join };
struct Work {  // first all of a group is put where others find it, then all is taken
  Do what;
  const void* in;
  void* out;
  std::size_t count;
  int type, whom;
  Comm comm;
  std::uint64_t round;
  Stream stream = nullptr;
};

thread_local int depth = 0;
thread_local std::vector<Work> queued;

bool is_collective(const Work& work) { return work.what <= Do::reduce_scatter; }

Result put(Work& work) {
  const Comm comm = work.comm;
  Shared& all = *comm->shared;
  const std::size_t bytes = work.count * size_of(work.type), ranks = static_cast<std::size_t>(comm->size);
  const std::size_t given = work.what == Do::reduce_scatter ? bytes * ranks : bytes;
  if (work.what == Do::join) {
    ++all.here;
    return kSuccess;
  }
  if (work.whom < -1 || work.whom >= comm->size || size_of(work.type) == 0 || given > kMostBytes) return kInvalidArgument;
  if (work.what == Do::send) {
    if (bytes > kMessageBytes) return kInvalidArgument;
    Pipe& pipe = all.pipes[comm->rank][work.whom];
    const Result room = wait(comm, [&] { return pipe.sent - pipe.received < kDepth; });
    if (room != kSuccess) return room;
    std::memcpy(pipe.messages[pipe.sent % kDepth], work.in, bytes);
    ++pipe.sent;
  } else if (is_collective(work)) {
    work.round = ++comm->rounds;
    const Result empty = wait(comm, [&] { return all.left >= ranks * (work.round - 1); });
    if (empty != kSuccess) return empty;
    if (work.what != Do::broadcast || work.whom == comm->rank) std::memcpy(all.data[comm->rank], work.in, given);
    ++all.arrived;
  }
  return kSuccess;
}

// Of the stand-in for CUDA, where it is loaded: the all-reduce takes STAND_IN_GPU_MS on the stream.
void launch(Stream stream) {
  static const auto work = reinterpret_cast<void (*)(Stream, std::uint64_t)>(dlsym(RTLD_DEFAULT, "stand_in_launch"));
  const char* ms = work == nullptr || stream == nullptr ? nullptr : std::getenv("STAND_IN_GPU_MS");
  if (ms != nullptr) work(stream, static_cast<std::uint64_t>(std::atof(ms) * 1e6));
}

template <typename Number>
void add(void* sum, const char* more, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Number a, b;
    std::memcpy(&a, static_cast<char*>(sum) + i * sizeof a, sizeof a);
    std::memcpy(&b, more + i * sizeof b, sizeof b);
    a = static_cast<Number>(a + b);
    std::memcpy(static_cast<char*>(sum) + i * sizeof a, &a, sizeof a);
  }
}

void add(int type, void* sum, const char* more, std::size_t count) {
  if (type == 7) return add<float>(sum, more, count);
  if (type == 8) return add<double>(sum, more, count);
  if (size_of(type) == 4) return add<std::uint32_t>(sum, more, count);
  if (size_of(type) == 8) return add<std::uint64_t>(sum, more, count);
  add<std::uint8_t>(sum, more, count * size_of(type));
}

Result take(Work& work) {
  const Comm comm = work.comm;
  Shared& all = *comm->shared;
  const std::size_t bytes = work.count * size_of(work.type), ranks = static_cast<std::size_t>(comm->size);
  if (work.what == Do::send) return kSuccess;
  if (work.what == Do::join) return wait(comm, [&] { return all.here >= ranks; });
  if (work.what == Do::recv) {
    Pipe& pipe = all.pipes[work.whom][comm->rank];
    const Result there = wait(comm, [&] { return pipe.sent > pipe.received; });
    if (there != kSuccess) return there;
    std::memcpy(work.out, pipe.messages[pipe.received % kDepth], std::min(bytes, kMessageBytes));
    ++pipe.received;
    return kSuccess;
  }
  const Result there = wait(comm, [&] { return all.arrived >= ranks * work.round; });
  if (there != kSuccess) return there;
  const std::size_t from = work.what == Do::reduce_scatter ? bytes * static_cast<std::size_t>(comm->rank) : 0;
  if (work.what == Do::broadcast) {
    std::memcpy(work.out, all.data[work.whom], bytes);
  } else if (work.what == Do::allgather) {
    for (std::size_t i = 0; i < ranks; ++i) std::memcpy(static_cast<char*>(work.out) + i * bytes, all.data[i], bytes);
  } else if (work.what != Do::reduce || work.whom == comm->rank) {
    std::memcpy(work.out, all.data[0] + from, bytes);
    for (std::size_t i = 1; i < ranks; ++i) add(work.type, work.out, all.data[i] + from, work.count);
  }
  ++all.left;
  launch(work.stream);
  return kSuccess;
}

// Several collectives of one communicator follow each other; all else of a group goes together.
Result run(std::vector<Work> works) {
  while (!works.empty()) {
    std::vector<Work> now, later;
    for (const Work& work : works) {
      const bool again = is_collective(work) && std::any_of(now.begin(), now.end(), [&](const Work& other) {
                           return is_collective(other) && other.comm == work.comm;
                         });
      (again ? later : now).push_back(work);
    }
    Result result = kSuccess;
    for (Work& work : now)
      if (result == kSuccess) result = put(work);
    for (Work& work : now)
      if (result == kSuccess) result = take(work);
    if (result != kSuccess) return result;
    works = std::move(later);
  }
  return kSuccess;
}

Result submit(const Work& work) {
  if (work.comm == nullptr) return kInvalidArgument;
  if (depth == 0) return run({work});
  queued.push_back(work);
  return kSuccess;
}

// Everything of a communicator lies in one file, gone once all its ranks have it.
Result make(Comm* made, const std::string& name, int size, int rank, bool together) {
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) return kInvalidArgument;
  const std::string path = "/dev/shm/" + name;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return kSystemError;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return kSystemError;
  *made = new ncclComm{name, rank, size, static_cast<Shared*>(memory)};
  if (!together) return kSuccess;
  const Result all = submit({Do::join, nullptr, nullptr, 0, 0, -1, *made, 0});
  if (depth == 0) unlink(path.c_str());
  return all;
}

Result split(Comm comm, int color, int key, Comm* made) {
  struct Choice {
    int color, key, rank;
  };
  const Choice mine{color, key, comm->rank};
  std::vector<Choice> all(static_cast<std::size_t>(comm->size)), ours;
  const Result told = run({{Do::allgather, &mine, all.data(), sizeof mine, 0, -1, comm, 0}});
  if (told != kSuccess) return told;
  ++comm->children;
  if (color == kNoColor) return kSuccess;
  for (const Choice& one : all)
    if (one.color == color) ours.push_back(one);
  std::sort(ours.begin(), ours.end(), [](const Choice& a, const Choice& b) { return a.key < b.key || (a.key == b.key && a.rank < b.rank); });
  const auto me = std::find_if(ours.begin(), ours.end(), [&](const Choice& one) { return one.rank == comm->rank; });
  const std::string name = comm->name + "-" + std::to_string(comm->children) + "-" + std::to_string(color);
  return make(made, name, static_cast<int>(ours.size()), static_cast<int>(me - ours.begin()), true);
}

std::string text_of(const UniqueId& id) { return std::string(id.internal, strnlen(id.internal, sizeof id.internal)); }

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
  const char* told = std::getenv("STAND_IN_VERSION");
  *version = told == nullptr ? 22703 : std::atoi(told);
  return *version == 0 ? kSystemError : kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<unsigned> made{0};
  std::snprintf(id->internal, sizeof id->internal, "keepstep-stand-in-%d-%u", getpid(), made++);
  return kSuccess;
}

Result ncclCommInitRank(Comm* comm, int size, UniqueId id, int rank) { return make(comm, text_of(id), size, rank, true); }

Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, void*) {
  return make(comm, text_of(id), size, rank, true);
}

Result ncclCommInitAll(Comm* comms, int count, const int*) {
  UniqueId id;
  ncclGetUniqueId(&id);
  Result result = kSuccess;
  for (int rank = 0; rank < count && result == kSuccess; ++rank) result = make(&comms[rank], text_of(id), count, rank, false);
  unlink(("/dev/shm/" + text_of(id)).c_str());
  return result;
}

Result ncclCommSplit(Comm comm, int color, int key, Comm* made, void*) {
  *made = nullptr;
  if (std::getenv("STAND_IN_NONBLOCKING") == nullptr) return split(comm, color, key, made);
  comm->busy = true;
  std::thread([=] {
    split(comm, color, key, made);
    comm->busy = false;
  }).detach();
  return kInProgress;
}

Result ncclCommShrink(Comm comm, int* without, int count, Comm* made, void*, int) {
  const auto gone = [&](int rank) { return std::find(without, without + count, rank) != without + count; };
  int rank = 0, size = 0;
  for (int i = 0; i < comm->size; ++i) {
    if (i == comm->rank) rank = size;
    size += gone(i) ? 0 : 1;
  }
  return make(made, comm->name + "-shrunk-" + std::to_string(++comm->children), size, rank, true);
}

Result ncclCommCount(const Comm comm, int* size) {
  *size = comm->size;
  return kSuccess;
}
Result ncclCommUserRank(const Comm comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}
Result ncclCommGetAsyncError(Comm comm, Result* error) {
  *error = comm->aborted.load() ? kRemoteError : comm->busy.load() ? kInProgress : kSuccess;
  return kSuccess;
}
Result ncclCommFinalize(Comm) { return kSuccess; }
Result ncclCommDestroy(Comm comm) {
  munmap(comm->shared, sizeof(Shared));
  delete comm;
  return kSuccess;
}
Result ncclCommAbort(Comm comm) {  // whoever is inside returns with an error; leaked, as they may still look at it
  comm->aborted = true;
  return kSuccess;
}

Result ncclGroupStart() {
  ++depth;
  return kSuccess;
}
Result ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  if (--depth > 0) return kSuccess;
  std::vector<Work> works;
  works.swap(queued);
  const Result result = run(works);
  for (const Work& work : works)
    if (work.what == Do::join) unlink(("/dev/shm/" + work.comm->name).c_str());
  return result;
}
Result ncclGroupSimulateEnd(void*) {
  if (depth == 0) return kInvalidUsage;
  if (--depth == 0) queued.clear();
  return kSuccess;
}

Result pncclAllReduce(const void* in, void* out, size_t count, int type, int, Comm comm, Stream stream) {
  return submit({Do::allreduce, in, out, count, type, -1, comm, 0, stream});
}
Result ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm comm, Stream stream) {
  return pncclAllReduce(in, out, count, type, op, comm, stream);
}
Result ncclReduce(const void* in, void* out, size_t count, int type, int, int root, Comm comm, Stream) {
  return submit({Do::reduce, in, out, count, type, root, comm, 0});
}
Result ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm comm, Stream) {
  return submit({Do::broadcast, in, out, count, type, root, comm, 0});
}
Result ncclBcast(void* buffer, size_t count, int type, int root, Comm comm, Stream stream) {  // as NCCL does: by its own API
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
Result ncclAllGather(const void* in, void* out, size_t count, int type, Comm comm, Stream) {
  return submit({Do::allgather, in, out, count, type, -1, comm, 0});
}
Result ncclReduceScatter(const void* in, void* out, size_t count, int type, int, Comm comm, Stream) {
  return submit({Do::reduce_scatter, in, out, count, type, -1, comm, 0});
}
Result ncclSend(const void* in, size_t count, int type, int peer, Comm comm, Stream) {
  return submit({Do::send, in, nullptr, count, type, peer, comm, 0});
}
Result ncclRecv(void* out, size_t count, int type, int peer, Comm comm, Stream) {
  return submit({Do::recv, nullptr, out, count, type, peer, comm, 0});
}

}  // extern "C"
