// Stands in front of NCCL in a watched worker (LD_PRELOAD) and records its calls into the rank's ring. No Python, no CUDA,
// no NCCL linked: docs/design/nccl-shim.md has the reasoning. Whatever goes wrong in here, the call itself is made.
#include "nccl_gate.hpp"

namespace keepstep::nccl {
namespace {

constexpr std::size_t kMostMembers = 16384;  // of a group of calls, whose ends are held until the group's
constexpr int kMostDevices = 1024;           // of a process: more is a wrong argument, which NCCL refuses

// --- recording ---------------------------------------------------------------------------------------------------------

bool is_bad(Result result) { return result != kSuccess && result != kInProgress; }

// One operation: of its own, held to the end of the group that the thread is in, or until the GPU is done with it.
class Recorded {
 public:
  void start(ring::Writer* writer, const char* name, const Call& call, std::int16_t group, std::uint64_t bytes,
             Span* span = nullptr) noexcept {
    const bool in_group = t_thread.depth > 0;
    auto* held = span != nullptr ? &span->operations : in_group ? &grouped().operations : nullptr;
    if (held != nullptr) try {
        if (held->size() < kMostMembers) here_ = &held->emplace_back();
      } catch (...) {
      }
    const auto flags = (in_group ? kEnqueued | kGrouped : kEnqueued) | (span != nullptr ? kTimed : 0);
    writer->start(*here_, static_cast<std::uint8_t>(call.kind), call.op, group, call.peer, bytes,
                  static_cast<std::uint16_t>(flags), site_of(writer, name, call, in_group));
  }
  Result end(Result result) noexcept {
    if (here_ == &own_ || is_bad(result)) here_->finish(is_bad(result));
    return result;
  }

 private:
  ring::Operation own_;
  ring::Operation* here_ = &own_;
};

// The span of a stream in the thread's group of calls; null: it is not timed.
Span* span_of(Stream stream) noexcept try {
  for (const auto& [known, span] : grouped().spans)
    if (known == stream) return span;
  Span* span = timing().take(stream);
  if (span != nullptr) grouped().spans.emplace_back(stream, span);
  return span;
} catch (...) {
  return nullptr;
}

template <typename Make>
Result data(const char* name, const Call& call, Make make) {
  ring::Writer* writer = recording();
  if (writer == nullptr) return make();
  const Inside inside;
  const bool in_group = t_thread.depth > 0;
  Span* span = !Timing::wants(call.stream) ? nullptr : in_group ? span_of(call.stream) : timing().take(call.stream);
  const std::int16_t group = group_of(call.comm);
  if (has(kTracked)) behind().carries(call.stream, group);
  Recorded recorded;
  recorded.start(writer, name, call, group, call.count * bytes_of(call.type), span);
  if (span == nullptr || in_group) return recorded.end(make());
  timing().begin(span, call.stream);
  const Result result = make();
  timing().end(span, call.stream, result);
  return result;
}

Call life_of(Life life, Comm comm, int peer) {
  return {ring::Kind::communicator, static_cast<std::uint8_t>(life), 0, kNoType, kNoOp, peer, comm, nullptr};
}

template <typename Make>
Result life(const char* name, Life what, Comm comm, Make make) {
  ring::Writer* writer = recording();
  if (writer == nullptr) return make();
  const Inside inside;
  Recorded recorded;
  recorded.start(writer, name, life_of(what, comm, kNobody), group_of(comm), 0);
  return recorded.end(make());
}

// A call that makes a communicator: `describe` gives what is known of it before. Its record has the new communicator's
// group where rank and size are known by then, else the parent's.
template <typename Describe, typename Make>
Result birth(const char* name, Life what, Comm parent, Comm* where, Describe describe, Make make) {
  gate().sees();
  ring::Writer* writer = watching();
  if (writer == nullptr) return make();
  const Inside inside;
  Recorded recorded;
  Communicator one{};
  try {
    one = describe();
    if (one.size >= 0) enter(writer, one);
    const std::int16_t group = one.group < 0 && parent != nullptr ? group_of(parent) : one.group;
    recorded.start(writer, name, life_of(what, parent, one.rank), group, one.size < 0 ? 0 : static_cast<std::uint64_t>(one.size));
  } catch (...) {
    writer->drop();
  }
  const Result result = recorded.end(make());
  if (is_bad(result) || where == nullptr) return result;
  if (t_thread.depth == 0)
    born(writer, {parent, where, std::move(one)}, result);
  else
    try {
      grouped().births.push_back({parent, where, std::move(one)});
    } catch (...) {
    }
  return result;
}

void end_group(ring::Writer* writer, bool bad, Result result) noexcept {
  Grouped& all = grouped();
  for (ring::Operation& operation : all.operations) operation.finish(bad);
  all.operations.clear();
  for (Birth& birth : all.births)
    if (!bad && writer != nullptr) born(writer, std::move(birth), result);
  all.births.clear();
}

Communicator by_id(const void* ids, int count, int rank, int size) {
  Communicator one{};
  one.name = named(hash(ids, ids == nullptr || count < 1 ? 0 : static_cast<std::size_t>(count) * sizeof(UniqueId)));
  one.rank = rank;
  one.size = size;
  return one;
}

// --- communicators and groups, one function per call -------------------------------------------------------------------

namespace calls {

Result ncclCommInitRank(Comm* comm, int size, const UniqueId& id, int rank) {
  return birth("ncclCommInitRank", Life::init, nullptr, comm, [&] { return by_id(&id, 1, rank, size); },
               [&] { return real_ncclCommInitRank(comm, size, id, rank); });
}

Result ncclCommInitRankConfig(Comm* comm, int size, const UniqueId& id, int rank, void* config) {
  return birth("ncclCommInitRankConfig", Life::init, nullptr, comm, [&] { return by_id(&id, 1, rank, size); },
               [&] { return real_ncclCommInitRankConfig(comm, size, id, rank, config); });
}

Result ncclCommInitRankScalable(Comm* comm, int size, int rank, int count, UniqueId* ids, void* config) {
  return birth("ncclCommInitRankScalable", Life::init, nullptr, comm, [&] { return by_id(ids, count, rank, size); },
               [&] { return real_ncclCommInitRankScalable(comm, size, rank, count, ids, config); });
}

Result ncclCommInitAll(Comm* comms, int count, const int* devices) {
  const auto one = [&](int rank) {  // no id is shared: they are all this process's
    static std::atomic<int> made{0};
    Communicator all{};
    const std::string told = std::to_string(getpid()) + " " + std::to_string(rank == 0 ? ++made : made.load());
    all.name = named(hash(told));
    all.rank = rank;
    all.size = count;
    all.origin = "; all ranks in process " + std::to_string(getpid());
    if (count > 0 && count <= kMostDevices) all.members.assign(static_cast<std::size_t>(count), world().rank);
    return all;
  };
  const Result result = birth("ncclCommInitAll", Life::init, nullptr, comms, [&] { return one(0); },
                              [&] { return real_ncclCommInitAll(comms, count, devices); });
  ring::Writer* writer = recording();
  if (!is_bad(result) && comms != nullptr && writer != nullptr)
    for (int rank = 1; rank < count; ++rank) try {
        Communicator other = one(rank);
        adopt(writer, comms[rank], other);
      } catch (...) {
      }
  return result;
}

Result ncclCommSplit(Comm comm, int color, int key, Comm* made, void* config) {
  return birth("ncclCommSplit", Life::split, comm, made,
               [&] { return child_of(comm, "split", " color " + std::to_string(color)); },
               [&] { return real_ncclCommSplit(comm, color, key, made, config); });
}

Result ncclCommShrink(Comm comm, int* without, int count, Comm* made, void* config, int flags) {
  return birth("ncclCommShrink", Life::shrink, comm, made,
               [&] {
                 std::string gone;
                 std::vector<int> ranks(without, without + (without == nullptr || count < 0 ? 0 : count));
                 std::sort(ranks.begin(), ranks.end());
                 for (int rank : ranks) gone += " " + std::to_string(rank);
                 Communicator child = child_of(comm, "shrink", " without" + gone);
                 const std::lock_guard<std::mutex> guard(world().lock);
                 const auto from = world().communicators.find(comm);
                 if (from != world().communicators.end())
                   for (int rank = 0; rank < static_cast<int>(from->second.members.size()); ++rank)
                     if (!std::binary_search(ranks.begin(), ranks.end(), rank))
                       child.members.push_back(from->second.members[static_cast<std::size_t>(rank)]);
                 return child;
               },
               [&] { return real_ncclCommShrink(comm, without, count, made, config, flags); });
}

Result ncclCommGrow(Comm comm, int size, const UniqueId* id, int rank, Comm* made, void* config) {
  return birth("ncclCommGrow", Life::grow, comm, made,
               [&] {  // those that join know the id only, those that were there but the first know the parent only
                 Communicator grown = comm == nullptr ? by_id(id, id == nullptr ? 0 : 1, rank, size)
                                                      : child_of(comm, "grow", " to " + std::to_string(size));
                 if (comm != nullptr && id != nullptr) grown.origin += "; is " + named(hash(id, sizeof *id));
                 return grown;
               },
               [&] { return real_ncclCommGrow(comm, size, id, rank, made, config); });
}

Result ncclCommRevoke(Comm comm, int flags) {
  gate().abort_comes();
  return life("ncclCommRevoke", Life::revoke, comm, [&] { return real_ncclCommRevoke(comm, flags); });
}
Result ncclCommSuspend(Comm comm, int flags) {
  return life("ncclCommSuspend", Life::suspend, comm, [&] { return real_ncclCommSuspend(comm, flags); });
}
Result ncclCommResume(Comm comm) {
  return life("ncclCommResume", Life::resume, comm, [&] { return real_ncclCommResume(comm); });
}
Result ncclCommFinalize(Comm comm) {
  return life("ncclCommFinalize", Life::finalize, comm, [&] { return real_ncclCommFinalize(comm); });
}
Result ncclCommDestroy(Comm comm) {
  const Result result = life("ncclCommDestroy", Life::destroy, comm, [&] { return real_ncclCommDestroy(comm); });
  if (!is_bad(result) && recording() != nullptr) forget(comm);
  return result;
}
Result ncclCommAbort(Comm comm) {
  gate().abort_comes();
  const Result result = life("ncclCommAbort", Life::abort, comm, [&] { return real_ncclCommAbort(comm); });
  if (!is_bad(result) && recording() != nullptr) forget(comm);
  return result;
}

// Asked many times a second: recorded, as a failure, when there is an error.
Result ncclCommGetAsyncError(Comm comm, Result* error) {
  const Result result = real_ncclCommGetAsyncError(comm, error);
  ring::Writer* writer = recording();
  if (result != kSuccess || error == nullptr || writer == nullptr) return result;
  if (*error == kSuccess && g_births.load(std::memory_order_relaxed)) complete(writer, comm);
  if (!is_bad(*error)) return result;
  ring::Operation operation;
  const Call call = life_of(Life::error, comm, kNobody);
  writer->start(operation, static_cast<std::uint8_t>(call.kind), call.op, group_of(comm), *error, 0, kEnqueued,
                site_of(writer, "ncclCommGetAsyncError", call, false));
  operation.finish(true);
  return result;
}

Result ncclGroupStart() {
  const Result result = real_ncclGroupStart();
  if (result == kSuccess && t_thread.inside == 0) ++t_thread.depth;
  return result;
}

// The outermost end is a record of its own; `bytes` says how many calls before it, on its thread, it has ended.
template <typename Make>
Result leave(const char* name, bool for_real, Make make) {
  if (t_thread.inside != 0 || t_thread.depth == 0 || --t_thread.depth != 0) return make();
  ring::Writer* writer = recording();
  const Inside inside;
  Recorded recorded;
  std::size_t members = grouped().operations.size();
  for (const auto& [stream, span] : grouped().spans) members += span->operations.size();
  if (writer != nullptr && members != 0)
    recorded.start(writer, name, life_of(Life::group, nullptr, kNobody), -1, members);
  for (const auto& [stream, span] : grouped().spans) timing().begin(span, stream);
  const Result result = recorded.end(make());
  for (const auto& [stream, span] : grouped().spans) timing().end(span, stream, for_real ? result : kInvalidUsage);
  grouped().spans.clear();
  end_group(writer, !for_real || is_bad(result), result);
  return result;
}

Result ncclGroupEnd() {
  return leave("ncclGroupEnd", true, [] { return real_ncclGroupEnd(); });
}

Result ncclGroupSimulateEnd(void* information) {  // nothing of the group is ever run
  return leave("ncclGroupSimulateEnd", false, [=] { return real_ncclGroupSimulateEnd(information); });
}

// --- CUDA's runtime: what the compute stream waits for ---------------------------------------------------------------------

Result note(Result result, Handle event, Stream stream) noexcept {
  if (result == 0 && has(kTracked))
    behind().recorded(event, stream, reinterpret_cast<Stream>(g_main.load(std::memory_order_relaxed)));
  return result;
}
template <typename Function>
Result cudaEventRecord(const Function& real, Handle event, Stream stream) {
  return note(real(event, stream), event, stream);
}
template <typename Function>
Result cudaEventRecordWithFlags(const Function& real, Handle event, Stream stream, unsigned flags) {
  return note(real(event, stream, flags), event, stream);
}

template <typename Function>
Result cudaStreamWaitEvent(const Function& real, Stream stream, Handle event, unsigned flags) {
  std::int16_t group = -1;
  Span* span = nullptr;
  if (has(kTracked) && behind().find(event, &group)) {
    if (!is_main(stream))
      behind().carries(stream, group);  // whoever waits for this stream waits for communication
    else if (has(kMeasures) && recording() != nullptr)
      span = timing().take_wait(stream, group);
  }
  const Result result = real(stream, event, flags);
  if (span != nullptr) timing().end(span, stream, result);
  return result;
}

template <typename Function>
Result cudaGraphLaunch(const Function& real, Handle graph, Stream stream) {
  if (has(kMeasures)) timing().replayed();
  return real(graph, stream);
}

}  // namespace calls
}  // namespace

// --- what the linker binds to -------------------------------------------------------------------------------------------

// A hidden symbol version: whoever is linked to NCCL is bound to it, dlsym never finds it. So asking whether a function
// exists is answered by NCCL itself.
#define EXPORT(name, parameters, body)                                                     \
  extern "C" Result keepstep_##name parameters {                                           \
    if (!real_##name.find(__builtin_return_address(0))) return missing(#name);             \
    return body;                                                                           \
  }                                                                                        \
  __asm__(".symver keepstep_" #name "," #name "@KEEPSTEP_NCCL");
// What is linked to CUDA's runtime asks for the symbol version of its library, whose name that is, and gets that one's.
#define EXPORT_RUNTIME(number, name, parameters, arguments)                                    \
  extern "C" Result keepstep_##number##_##name parameters {                                    \
    if (!real_##number##_##name.find(__builtin_return_address(0))) return kNoSuchSymbol;       \
    return calls::name(real_##number##_##name, KEEPSTEP_NCCL_LIST arguments);                  \
  }                                                                                            \
  __asm__(".symver keepstep_" #number "_" #name "," #name "@libcudart.so." #number);
#define EXPORT_CUDA(name, parameters, arguments) \
  EXPORT_RUNTIME(13, name, parameters, arguments) EXPORT_RUNTIME(12, name, parameters, arguments)
#define EXPORT_DATA(name, parameters, arguments, what) EXPORT(name, parameters, data(#name, what, [&] { return real_##name arguments; }))
#define EXPORT_CONFIG(name, parameters, arguments, what)                           \
  EXPORT(name##Config, (KEEPSTEP_NCCL_LIST parameters, const void* config),        \
         data(#name "Config", what, [&] { return real_##name##Config(KEEPSTEP_NCCL_LIST arguments, config); }))
#define EXPORT_LIFE(name, parameters, arguments) EXPORT(name, parameters, calls::name arguments)
KEEPSTEP_NCCL_CONFIGURABLE(EXPORT_DATA)
KEEPSTEP_NCCL_CONFIGURABLE(EXPORT_CONFIG)
KEEPSTEP_NCCL_PLAIN(EXPORT_DATA)
KEEPSTEP_NCCL_LIFE(EXPORT_LIFE)
KEEPSTEP_CUDA(EXPORT_CUDA)

// The Python probe calls it when the optimizer has stepped for the `number`-th time: a boundary of iterations on `stream`.
extern "C" void keepstep_device_mark(std::uint64_t number, Stream stream) {
  if (recording() != nullptr) timing().mark(number, stream);
}

// What a training that is left in its process has of it (session/device_gate.py): docs/design/session.md.
extern "C" bool keepstep_gate_put(Stream stream) { return gate().put(stream); }
extern "C" void keepstep_gate_close() { gate().close(); }
extern "C" void keepstep_gate_open() { gate().leave_open(); }
extern "C" void keepstep_gate_renew() { gate().renew(); }
extern "C" bool keepstep_gate_sees() { return gate().has_seen(); }  // checkpoint/unseen_aborts.py
extern "C" std::uint64_t keepstep_gate_aborts() { return gate().aborts(); }
extern "C" std::uint64_t keepstep_gate_spoils_next() { return gate().spoils_next(); }

}  // namespace keepstep::nccl
