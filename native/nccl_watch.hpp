// What the shim knows of a watched process: its ring, its communicators, and what each thread has looked up of them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <deque>

#include "nccl_real.hpp"
#include "ring.hpp"

namespace keepstep::nccl {
namespace {

constexpr int kNobody = -1, kNoOp = -1, kNoType = -1;
constexpr std::uint16_t kEnqueued = 16, kGrouped = 32;  // core/events.py: Flag
constexpr std::uint32_t kMostSites = 3072;              // leaves the rest of the table to the Python probe

struct Communicator {
  std::string name;  // the same on all its ranks
  int rank = -1, size = -1;
  std::vector<std::int32_t> members{};  // global ranks, where they follow from what this process knows
  std::string origin{};
  std::int16_t group = -1;  // in the ring
  unsigned children = 0;
};

// A call that makes a communicator, until NCCL has put that where the caller wants it.
struct Birth {
  Comm parent;
  Comm* where;
  Communicator what;
};

struct World {
  std::mutex lock;
  std::vector<Birth> births;  // that go on when their calls have returned (non-blocking)
  std::string tried;  // which ring was opened, or was not to be had
  std::atomic<int> rank{-1}, size{-1};
  std::unordered_map<Comm, Communicator> communicators;
};

World& world() {
  static auto* made = new World;  // outlives what runs at exit
  return *made;
}
std::atomic<ring::Writer*> g_writer{nullptr};  // null: nothing is recorded
std::atomic<std::uint64_t> g_changes{1};       // of the communicators
std::atomic<bool> g_sites_full{false};
std::atomic<bool> g_births{false};  // there may be some

struct KnownGroup {
  Comm comm;
  std::uint64_t changes;
  std::int16_t group;
};
struct KnownSite {
  const char* call;
  Stream stream;
  const ring::Writer* writer;
  std::int16_t type, op;
  bool grouped;
  std::uint32_t site;
};
struct Thread {
  unsigned inside;  // a call of ours: what NCCL calls in it of its own functions is part of it
  unsigned depth;   // of groups
  KnownGroup groups[8];
  KnownSite sites[16];
};
thread_local Thread t_thread __attribute__((tls_model("initial-exec")));

struct Inside {
  Inside() { ++t_thread.inside; }
  ~Inside() { --t_thread.inside; }
};

struct Span;  // nccl_timing.hpp

struct Grouped {  // what a thread's group of calls holds until its end
  std::deque<ring::Operation> operations;
  std::vector<std::pair<Stream, Span*>> spans;
  std::vector<Birth> births;
};
Grouped& grouped() {
  static thread_local Grouped ours;
  return ours;
}

const char* title(int type) {
  static const char* const kTitles[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                        "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return type < 0 || type > 11 ? "" : kTitles[type];
}
std::uint64_t bytes_of(int type) {
  static const unsigned char kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type > 11 ? 0 : kBytes[type];
}

struct Call {
  ring::Kind kind;
  std::uint8_t op;
  std::size_t count;
  int type, reduction, peer;
  Comm comm;
  Stream stream;
};
Call collective(Op op, std::size_t count, int type, int reduction, int root, Comm comm, Stream stream) {
  return {ring::Kind::collective, static_cast<std::uint8_t>(op), count, type, reduction, root, comm, stream};
}
Call message(Op op, std::size_t count, int type, int peer, Comm comm, Stream stream) {
  return {ring::Kind::p2p, static_cast<std::uint8_t>(op), count, type, kNoOp, peer, comm, stream};
}

std::int16_t group_of(Comm comm) noexcept {
  KnownGroup& known = t_thread.groups[(reinterpret_cast<std::uintptr_t>(comm) >> 6) % 8];
  const std::uint64_t changes = g_changes.load(std::memory_order_acquire);
  if (known.comm == comm && known.changes == changes) return known.group;
  const std::lock_guard<std::mutex> guard(world().lock);
  const auto found = world().communicators.find(comm);
  known = {comm, changes, found == world().communicators.end() ? std::int16_t{-1} : found->second.group};
  return known.group;
}

// The call as text, in the place of a call site: what of it has no field in a record.
std::uint32_t site_of(ring::Writer* writer, const char* name, const Call& call, bool in_group) noexcept {
  const std::uintptr_t mixed = (reinterpret_cast<std::uintptr_t>(call.stream) >> 4) ^ (reinterpret_cast<std::uintptr_t>(name) >> 2) ^
                               static_cast<unsigned>(call.type * 3 + call.reduction) ^ (in_group ? 8U : 0U);
  KnownSite& known = t_thread.sites[(mixed ^ mixed >> 4 ^ mixed >> 8) % 16];
  const auto type = static_cast<std::int16_t>(call.type), op = static_cast<std::int16_t>(call.reduction);
  if (known.call == name && known.stream == call.stream && known.writer == writer && known.type == type && known.op == op &&
      known.grouped == in_group)
    return known.site;
  std::uint32_t site = 0;
  if (!g_sites_full.load(std::memory_order_relaxed)) try {
      static const char* const kReductions[] = {"sum", "prod", "max", "min", "avg"};
      char stream[32] = "";
      if (call.kind != ring::Kind::communicator) std::snprintf(stream, sizeof stream, " stream %p", call.stream);
      std::string text = name;
      if (call.type >= 0) text.append(" ").append(title(call.type));
      if (call.reduction >= 0) text.append(" ").append(call.reduction < 5 ? kReductions[call.reduction] : "own operator");
      site = writer->site(text + stream + (in_group ? " in a group" : ""));
    } catch (...) {
    }
  if (site > kMostSites) g_sites_full = true;
  known = {name, call.stream, writer, type, op, in_group, site};
  return site;
}

std::string named(std::uint64_t number) {
  char text[32];
  std::snprintf(text, sizeof text, "nccl-%016llx", static_cast<unsigned long long>(number));
  return text;
}
std::uint64_t hash(const void* data, std::size_t size) {
  std::uint64_t h = 14695981039346656037ULL;
  for (std::size_t i = 0; i < size; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ULL;
  return h;
}
std::uint64_t hash(const std::string& text) { return hash(text.data(), text.size()); }

// --- watching ---------------------------------------------------------------------------------------------------------

// Before any fork: a child of ours never records, as it has no claim (docs/design/ring.md).
const std::uint32_t g_loaded = ring::fork_generation().load(std::memory_order_relaxed);

// The writer, for a call that is to be recorded; null in a call inside another.
ring::Writer* recording() noexcept {
  ring::Writer* writer = g_writer.load(std::memory_order_acquire);
  return writer == nullptr || t_thread.inside != 0 || !writer->writable() ? nullptr : writer;
}

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == 0 ? otherwise : std::atoi(text);
}

// "2.14.3" of 21403, "2.8.4" of 2804.
std::string version_text(int version) {
  const int major = version < 10000 ? 1000 : 10000;
  return std::to_string(version / major) + "." + std::to_string(version % major / 100) + "." + std::to_string(version % 100);
}

void open_ring(const char* path) {
  int version = 0;
  if (!real_ncclGetVersion.find(nullptr) || real_ncclGetVersion(&version) != kSuccess)
    throw ring::Error("the loaded NCCL does not tell its version");
  auto made = new ring::Writer(ring::File(path, O_RDWR), world().rank, world().size,
                               static_cast<std::uint64_t>(number_of("KEEPSTEP_INCARNATION", 0)), true);
  if (version < kOldestVersion) {  // the agent says so, once for all ranks; core/events.py: NCCL_NOTE
    made->site("keepstep: NCCL's calls are not recorded: version " + version_text(version) + " is older than 2.18");
    made->abandon();
    return;
  }
  g_sites_full = false;
  g_writer.store(made, std::memory_order_release);
}

void open_orders(const char* path) noexcept;  // nccl_timing.hpp

// The writer, at the birth of a communicator: opened at the first, and anew where the process plays in another incarnation
// by now. Null when this process is not watched.
ring::Writer* watching() noexcept {
  ring::Writer* writer = recording();
  const char* path = std::getenv("KEEPSTEP_RING");
  if (writer != nullptr || t_thread.inside != 0 || path == nullptr) return writer;
  if (ring::fork_generation().load(std::memory_order_relaxed) != g_loaded) return nullptr;
  try {
    const std::lock_guard<std::mutex> guard(world().lock);
    const char* incarnation = std::getenv("KEEPSTEP_INCARNATION");
    std::string now = std::string(path) + " " + (incarnation == nullptr ? "" : incarnation);
    if (now == world().tried) return recording();
    world().tried = std::move(now);
    world().rank = number_of("RANK", 0);
    world().size = number_of("WORLD_SIZE", 1);
    world().communicators.clear();
    world().births.clear();
    ++g_changes;
    ring::Writer* old = g_writer.exchange(nullptr);
    if (old != nullptr) old->abandon();
    open_ring(path);
    open_orders(std::getenv("KEEPSTEP_ORDERS"));
  } catch (const std::exception& error) {
    say(std::string("the NCCL calls of this process are not recorded: ") + error.what());
  }
  return recording();
}

// Writes a communicator to the ring's table of groups.
void enter(ring::Writer* writer, Communicator& one) {
  if (one.members.empty() && one.size == 1) one.members = {world().rank};
  if (one.members.empty() && one.size == world().size && one.rank == world().rank)
    for (int rank = 0; rank < one.size; ++rank) one.members.push_back(rank);
  std::string place = one.size < 0 ? "rank not known" : "rank " + std::to_string(one.rank) + " of " + std::to_string(one.size);
  one.group = static_cast<std::int16_t>(writer->group(one.name, one.members, "nccl", place + one.origin));
}

void adopt(ring::Writer* writer, Comm comm, Communicator& one) noexcept try {
  if (one.group < 0) {
    if (one.size < 0 && real_ncclCommCount.find(nullptr) && real_ncclCommUserRank.find(nullptr) &&
        (real_ncclCommCount(comm, &one.size) != kSuccess || real_ncclCommUserRank(comm, &one.rank) != kSuccess))
      one.size = one.rank = -1;
    enter(writer, one);
  }
  const std::lock_guard<std::mutex> guard(world().lock);
  world().communicators[comm] = std::move(one);
  ++g_changes;
} catch (...) {
}

// The call has returned well. Without a communicator the rank is in none (no color), or it is still being made.
void born(ring::Writer* writer, Birth&& birth, Result result) noexcept try {
  if (*birth.where != nullptr) return adopt(writer, *birth.where, birth.what);
  if (result != kInProgress) return;
  const std::lock_guard<std::mutex> guard(world().lock);
  world().births.push_back(std::move(birth));
  g_births = true;
} catch (...) {
}

// Those made of a communicator are complete when it says so: NCCL has written where they are, and its caller hears of it
// by the same answer.
void complete(ring::Writer* writer, Comm parent) noexcept try {
  std::vector<Birth> ready, others;
  {
    const std::lock_guard<std::mutex> guard(world().lock);
    for (Birth& birth : world().births) (birth.parent == parent ? ready : others).push_back(std::move(birth));
    g_births = !others.empty();
    world().births = std::move(others);
  }
  for (Birth& birth : ready) born(writer, std::move(birth), kSuccess);
} catch (...) {
}

void forget(Comm comm) noexcept {
  const std::lock_guard<std::mutex> guard(world().lock);
  const auto gone = world().communicators.find(comm);
  ring::Writer* writer = g_writer.load();
  if (gone != world().communicators.end() && writer != nullptr) writer->retire(gone->second.group);
  std::vector<Birth>& births = world().births;
  births.erase(std::remove_if(births.begin(), births.end(), [&](const Birth& one) { return one.parent == comm; }), births.end());
  world().communicators.erase(comm);
  ++g_changes;
}

// The communicator that comes of another one: its name follows from what all members of the new one know.
Communicator child_of(Comm parent, const char* how, const std::string& which) {
  const std::lock_guard<std::mutex> guard(world().lock);
  const auto found = world().communicators.find(parent);
  Communicator child{};
  if (found == world().communicators.end()) {
    child.name = named(0);
    child.origin = std::string("; ") + how + " of a communicator made before this process was watched";
    return child;
  }
  Communicator& from = found->second;
  const std::string told = std::string(how) + " " + std::to_string(++from.children) + " of " + from.name + which;
  child.name = named(hash(told));
  child.origin = "; " + told;
  return child;
}

}  // namespace
}  // namespace keepstep::nccl
