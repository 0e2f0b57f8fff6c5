// The NCCL profiler plugin: counts what NCCL's proxy has under way on each network link into the link table.
//
// NCCL loads it by NCCL_PROFILER_PLUGIN and finds the version of the interface that it knows. Its callbacks wait for nothing,
// allocate nothing and always succeed; without a table (KEEPSTEP_LINKS) they ask NCCL for no events. docs/design/links.md
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "link_table.hpp"
#include "nccl/profiler_v3.h"
#include "nccl/profiler_v4.h"
#include "nccl/profiler_v5.h"
#include "nccl/profiler_v6.h"
#include "nccl/profiler_v7.h"

namespace {

using namespace keepstep::links;

// Handles are numbers, never addresses, so that a stale, repeated or foreign one is recognised. All have a kind in the low
// three bits. Contexts, tasks: communicator (8), its generation (16), sequence number (37). Proxy operations, steps, network
// events: place of the step (3), operation (16), its generation (20), step number (22). Kernels: communicator (8), start (53).
enum Kind : uint64_t { kContext = 1, kTask, kProxyOp, kProxyStep, kNet, kKernel };

constexpr uint32_t kOps = 4096;
constexpr uint32_t kNobody = 0xffffffff;
constexpr uint32_t kSteps = 8;  // NCCL_STEPS: never more of one operation at once
constexpr int kEvents = ncclProfileColl | ncclProfileP2p | ncclProfileProxyOp | ncclProfileProxyStep | ncclProfileNetPlugin;

struct Step {
  Word at{0};  // step number + 1 (32), Stage (8); 0: none
  Word bytes{0};
};

struct alignas(64) Op {
  std::atomic<uint32_t> generation{0};  // odd while in use
  std::atomic<uint32_t> next{0};        // free one
  std::atomic<uint32_t> link{0}, send{0}, comm{0};
  Word total{0}, newest{0};  // version 3 tells bytes so far of the operation, just before the step's state
  Step steps[kSteps];
};

Op g_ops[kOps];
Word g_free{0};  // index of the first free one (32), times changed (32)
Table g_table;
pthread_mutex_t g_comms = PTHREAD_MUTEX_INITIALIZER;  // of init and finalize only
bool g_tried = false;
uint32_t g_open = 0;  // communicators
pid_t g_pid = 0;
std::atomic<bool> g_active{false};
std::atomic<int*> g_mask{nullptr};
uint64_t g_kernel_every = 0;
Word g_collectives{0};

void forked_child() {
  g_active.store(false, relaxed);
  pthread_mutex_init(&g_comms, nullptr);  // whoever held it is not here
}

uint64_t number(const void* handle) { return reinterpret_cast<uint64_t>(handle); }
void* handle_of(uint64_t number) { return reinterpret_cast<void*>(number); }
Kind kind_of(uint64_t handle) { return static_cast<Kind>(handle & 7); }
void stale() { Table::count(g_table.header().stale); }

// --- proxy operations -------------------------------------------------------------------------------------------

uint32_t take_op() {
  uint64_t head = g_free.load(acquire);
  for (;;) {
    const uint32_t index = static_cast<uint32_t>(head);
    if (index >= kOps) return kNobody;
    const uint64_t after = g_ops[index].next.load(relaxed) | ((head >> 32) + 1) << 32;
    if (g_free.compare_exchange_weak(head, after, acq_rel)) return index;
  }
}

void give_op(uint32_t index) {
  uint64_t head = g_free.load(acquire);
  do g_ops[index].next.store(static_cast<uint32_t>(head), relaxed);
  while (!g_free.compare_exchange_weak(head, index | ((head >> 32) + 1) << 32, acq_rel));
}

// The live operation that a handle means, or null.
Op* op_of(uint64_t handle) {
  const uint32_t index = static_cast<uint32_t>(handle >> 6 & 0xffff);
  if (index >= kOps) return nullptr;
  const uint32_t generation = g_ops[index].generation.load(acquire);
  return (generation & 1) != 0 && (generation & 0xfffff) == (handle >> 22 & 0xfffff) ? &g_ops[index] : nullptr;
}

void* start_op(uint32_t comm, uint64_t generation, int channel, int peer, bool send) {
  const uint64_t now = now_ns();
  const int32_t link = g_table.find_link(
      link_key(send, static_cast<uint32_t>(channel), comm, generation, static_cast<uint32_t>(peer)), now);
  if (link < 0) return nullptr;
  const uint32_t index = take_op();
  if (index == kNobody) {
    Table::count(g_table.header().lost_operations);
    return nullptr;
  }
  Op& op = g_ops[index];
  op.link.store(static_cast<uint32_t>(link), relaxed);
  op.send.store(send, relaxed);
  op.comm.store(comm, relaxed);
  op.total.store(0, relaxed);
  op.newest.store(0, relaxed);
  const uint32_t live = op.generation.load(relaxed) + 1;
  op.generation.store(live, release);
  return handle_of(kProxyOp | static_cast<uint64_t>(index) << 6 | static_cast<uint64_t>(live & 0xfffff) << 22);
}

void end_op(uint32_t index, uint32_t generation) {
  Op& op = g_ops[index];
  if (!op.generation.compare_exchange_strong(generation, generation + 1, acq_rel)) return;
  Link& row = g_table.link(op.link.load(relaxed));
  for (Step& step : op.steps) {
    const uint64_t at = step.at.exchange(0, acq_rel);
    if (at != 0) abandon(row, static_cast<uint32_t>(at & 0xff));
  }
  give_op(index);
}

// --- proxy steps ------------------------------------------------------------------------------------------------

void* start_step(uint64_t parent, int step) {
  Op* op = op_of(parent);
  if (kind_of(parent) != kProxyOp || op == nullptr) {
    if (parent != 0) stale();
    return nullptr;
  }
  const uint64_t place = static_cast<uint32_t>(step) % kSteps;
  const bool send = op->send.load(relaxed) != 0;  // nothing of the GPU's is waited for to receive
  const uint64_t at = (static_cast<uint64_t>(static_cast<uint32_t>(step)) + 1) << 8 | (send ? kStarted : kReady);
  Link& row = g_table.link(op->link.load(relaxed));
  Step& slot = op->steps[place];
  slot.bytes.store(0, relaxed);
  const uint64_t before = slot.at.exchange(at, acq_rel);
  if (before != 0) abandon(row, static_cast<uint32_t>(before & 0xff));
  // The clock is read only for what comes to an idle link: when the next stage is reached it is read again.
  if (row.started.load(relaxed) == row.finished.load(relaxed)) row.moved_ns.store(now_ns(), relaxed);
  row.started.fetch_add(1, release);
  if (!send) row.ready.fetch_add(1, release);
  return handle_of((parent & ~uint64_t{0x3f}) | kProxyStep | place << 3 |
                   (static_cast<uint64_t>(static_cast<uint32_t>(step)) & 0x3fffff) << 42);
}

// Moves a step on, once for each stage whoever says so and however often.
void move_step(Op& op, uint64_t place, uint64_t step, uint32_t to, bool last, const size_t* bytes) {
  Step& slot = op.steps[place];
  uint64_t at = slot.at.load(acquire);
  if (bytes != nullptr) slot.bytes.store(*bytes, relaxed);
  do {
    if (at == 0 || (((at >> 8) - 1) & 0x3fffff) != step) return stale();
    if ((at & 0xff) >= to) return;
  } while (!slot.at.compare_exchange_weak(at, last ? 0 : (at & ~uint64_t{0xff}) | to, acq_rel));
  advance(g_table.link(op.link.load(relaxed)), static_cast<uint32_t>(at & 0xff), to, slot.bytes.load(relaxed), now_ns());
}

void record_step(uint64_t handle, int state, const size_t* bytes) {
  Op* op = op_of(handle);
  if (op == nullptr) return stale();
  const uint64_t place = handle >> 3 & 7, step = handle >> 42;
  size_t newest;
  switch (state) {
    case ncclProfilerProxyStepSendPeerWait_v4:
      return move_step(*op, place, step, kReady, false, nullptr);
    case ncclProfilerProxyStepRecvWait:
      return move_step(*op, place, step, kPosted, false, nullptr);
    case ncclProfilerProxyStepSendWait:
    case ncclProfilerProxyStepRecvFlushWait:
      if (bytes == nullptr) newest = op->newest.load(relaxed), bytes = &newest;
      return move_step(*op, place, step, state == ncclProfilerProxyStepSendWait ? kPosted : kCompleted, false, bytes);
    default:
      return;
  }
}

void stop_step(uint64_t handle) {
  Op* op = op_of(handle);
  if (op == nullptr) return stale();
  move_step(*op, handle >> 3 & 7, handle >> 42, kFinished, true, nullptr);
}

// Version 3 tells sizes, and that the peer is waited for, by states of the operation.
void record_op_v3(uint64_t handle, int state, size_t total, int steps) {
  Op* op = op_of(handle);
  if (op == nullptr) return stale();
  if (state == ncclProfilerProxyOpSendTransmitted || state == ncclProfilerProxyOpRecvReceived) {
    op->newest.store(total - op->total.exchange(total, relaxed), relaxed);
  } else if (state == ncclProfilerProxyOpSendRemFifoWait && steps > 0) {
    const uint64_t step = static_cast<uint64_t>(steps - 1);
    const uint64_t at = op->steps[step % kSteps].at.load(relaxed);
    if (at >> 8 == step + 1) move_step(*op, step % kSteps, step & 0x3fffff, kReady, false, nullptr);
  }
}

// --- the rest ---------------------------------------------------------------------------------------------------

void attach(int abi) {
  g_tried = true;
  const char* path = getenv("KEEPSTEP_LINKS");
  if (path == nullptr || *path == 0 || !g_table.attach(path, abi)) return;
  for (uint32_t i = 0; i < kOps; ++i) g_ops[i].next.store(i + 1 < kOps ? i + 1 : kNobody, relaxed);
  g_free.store(0, release);
  g_pid = getpid();
  const char* every = getenv("KEEPSTEP_NCCL_KERNELS_EVERY");
  if (every != nullptr) g_kernel_every = strtoull(every, nullptr, 10);
  if (pthread_atfork(nullptr, nullptr, forked_child) == 0) g_active.store(true, release);
}

ncclResult_t open_context(void** context, int* mask, int abi, const char* name, const uint64_t* id, int rank, int size, int nodes) {
  *context = handle_of(kContext | static_cast<uint64_t>(kComms) << 3);  // never null: NCCL would keep no account of it
  pthread_mutex_lock(&g_comms);
  if (!g_tried) attach(abi);
  if (g_active.load(relaxed)) {
    // A validation's own communicator (validate/device_links.py) is no traffic of the training's.
    const bool ours = name != nullptr && strcmp(name, "keepstep") == 0;
    const uint32_t index = ours ? kComms : g_table.open_comm(now_ns());
    if (index < kComms) {
      ++g_open;
      Comm& row = g_table.comm(index);
      if (id != nullptr) g_table.name_comm(row, *id, name, rank, size, nodes);
      const uint64_t generation = row.state.load(relaxed) >> 2;
      row.state.store(generation << 2 | kOpen, release);
      *context = handle_of(kContext | static_cast<uint64_t>(index) << 3 | (generation & 0xffff) << 11);
    }
    g_mask.store(mask, relaxed);
    __atomic_store_n(mask, kEvents | (abi >= 6 ? ncclProfileCeColl : 0), __ATOMIC_RELAXED);
  }
  pthread_mutex_unlock(&g_comms);
  return ncclSuccess;
}

// The open row of a context or a task, or null.
Comm* comm_of_handle(uint64_t handle) {
  const uint32_t index = static_cast<uint32_t>(handle >> 3 & 0xff);
  if (index >= kComms) return nullptr;
  const uint64_t state = g_table.comm(index).state.load(acquire);
  return (state & 3) == kOpen && (state >> 2 & 0xffff) == (handle >> 11 & 0xffff) ? &g_table.comm(index) : nullptr;
}

ncclResult_t close_context(void* context) {
  pthread_mutex_lock(&g_comms);
  Comm* row = g_active.load(relaxed) && kind_of(number(context)) == kContext ? comm_of_handle(number(context)) : nullptr;
  if (row != nullptr) {
    // Aborted: NCCL tells of no end of what was under way, nor whose the operations for other processes were.
    const uint32_t index = static_cast<uint32_t>(number(context) >> 3 & 0xff);
    const bool last = --g_open == 0;
    for (uint32_t i = 0; i < kOps; ++i) {
      const uint32_t generation = g_ops[i].generation.load(acquire);
      const uint32_t comm = g_ops[i].comm.load(relaxed);
      if ((generation & 1) != 0 && (comm == index || (last && comm == kForeign))) end_op(i, generation);
    }
    row->closed_ns.store(now_ns(), relaxed);
    row->state.store((row->state.load(relaxed) & ~uint64_t{3}) | kClosed, release);
  }
  pthread_mutex_unlock(&g_comms);
  return ncclSuccess;
}

// Every so many collectives NCCL is asked for kernel events; the mask is read anew for each call.
void sample_kernels() {
  int* mask = g_mask.load(relaxed);
  if (g_kernel_every == 0 || mask == nullptr) return;
  const uint64_t count = g_collectives.fetch_add(1, relaxed);
  if (count % g_kernel_every == 0)
    __atomic_fetch_or(mask, ncclProfileKernelCh, __ATOMIC_RELAXED);
  else if (count % g_kernel_every == 1)
    __atomic_fetch_and(mask, ~ncclProfileKernelCh, __ATOMIC_RELAXED);
}

enum How : uint64_t { kCollective = 1, kP2p, kCopyEngine };

struct Task {
  How how;
  const char *function, *datatype, *algorithm, *protocol;
  uint64_t seq, count;
  int channels, warps, other;  // root or peer
};

void* start_task(uint64_t context, Comm* row, const Task& task) {
  if (row == nullptr) return nullptr;
  const bool p2p = task.how == kP2p;
  const uint64_t nth = (p2p ? row->p2ps : row->collectives).fetch_add(1, relaxed);
  if (!p2p) sample_kernels();
  const char* type = task.datatype != nullptr && strncmp(task.datatype, "nccl", 4) == 0 ? task.datatype + 4 : task.datatype;
  g_table.note(*row, task.function, type, task.algorithm, task.protocol, p2p ? nth : task.seq, task.count,
               static_cast<uint64_t>(task.channels & 0xff) | static_cast<uint64_t>(task.warps & 0xff) << 8 |
                   static_cast<uint64_t>(task.how) << 16 | static_cast<uint64_t>(static_cast<uint32_t>(task.other)) << 32,
               now_ns());
  return handle_of((context & 0x7fffff8) | kTask | (task.seq & 0x1fffffffff) << 27);
}

void start_net(void** handle, uint64_t parent, int64_t id, const void* data) {
  Op* op = kind_of(parent) == kProxyStep ? op_of(parent) : nullptr;
  if (op == nullptr) return;
  Link& row = g_table.link(op->link.load(relaxed));
  Table::count(row.net_posted);
  if (data != nullptr && id == (NCCL_PROFILER_NET_TYPE_IB | 1))
    Table::count(row.net_bytes, static_cast<const ncclProfilerNetIbDescr_v1_t*>(data)->qp.length);
  else if (data != nullptr && id == (NCCL_PROFILER_NET_TYPE_SOCK | 1))
    Table::count(row.net_bytes, static_cast<const ncclProfilerNetSockDescr_v1_t*>(data)->sock.length);
  *handle = handle_of((parent & ~uint64_t{7}) | kNet);
}

void end_kernel(uint64_t handle, uint64_t now) {
  Comm& row = g_table.comm(static_cast<uint32_t>(handle >> 3 & 0xff));
  const uint64_t start = handle >> 11, end = now & 0x1fffffffffffff;
  row.kernels.fetch_add(1, relaxed);
  row.kernel_ns.fetch_add(end > start ? end - start : 0, relaxed);
  row.kernel_end_ns.store(now, relaxed);
}

ncclResult_t stop(void* event) {
  if (!g_active.load(relaxed) || event == nullptr) return ncclSuccess;
  const uint64_t handle = number(event);
  switch (kind_of(handle)) {
    case kTask:
      if (Comm* row = comm_of_handle(handle)) Table::count(row->enqueued);
      break;
    case kProxyOp:
      if (const Op* op = op_of(handle)) end_op(static_cast<uint32_t>(op - g_ops), op->generation.load(relaxed));
      break;
    case kProxyStep:
      stop_step(handle);
      break;
    case kNet:
      if (const Op* op = op_of(handle)) Table::count(g_table.link(op->link.load(relaxed)).net_completed);
      break;
    default:
      break;
  }
  return ncclSuccess;
}

// --- one set of callbacks for each version ----------------------------------------------------------------------

template <int V>
struct Abi;
template <>
struct Abi<3> {
  using Event = ncclProfilerEventDescr_v3_t;
  using State = ncclProfilerEventStateArgs_v3_t;
};
template <>
struct Abi<4> {
  using Event = ncclProfilerEventDescr_v4_t;
  using State = ncclProfilerEventStateArgs_v4_t;
};
template <>
struct Abi<5> {
  using Event = ncclProfilerEventDescr_v5_t;
  using State = ncclProfilerEventStateArgs_v5_t;
};
template <>
struct Abi<6> {
  using Event = ncclProfilerEventDescr_v6_t;
  using State = ncclProfilerEventStateArgs_v6_t;
};
template <>
struct Abi<7> {
  using Event = ncclProfilerEventDescr_v7_t;
  using State = ncclProfilerEventStateArgs_v7_t;
};

template <int V, class Event>
Comm* row_of(uint64_t context, const Event& e, bool p2p) {
  Comm* row = kind_of(context) == kContext ? comm_of_handle(context) : nullptr;
  if constexpr (V == 3) {  // init says nothing of the communicator
    if (row != nullptr && row->identity_check.load(relaxed) == 0)
      g_table.name_comm(*row, p2p ? e.p2p.commHash : e.coll.commHash, p2p ? e.p2p.name : e.coll.name, e.rank, 0, 0);
  }
  return row;
}

template <int V>
ncclResult_t start(void* context, void** handle, typename Abi<V>::Event* event) {
  if (handle == nullptr) return ncclSuccess;
  *handle = nullptr;
  if (!g_active.load(relaxed) || event == nullptr) return ncclSuccess;
  const auto& e = *event;
  const uint64_t from = number(context), parent = number(e.parentObj);
  switch (static_cast<uint64_t>(e.type)) {
    case ncclProfileColl: {
      int channels;
      if constexpr (V == 3)
        channels = e.coll.nMaxChannels;
      else
        channels = e.coll.nChannels;
      *handle = start_task(from, row_of<V>(from, e, false),
                           {kCollective, e.coll.func, e.coll.datatype, e.coll.algo, e.coll.proto, e.coll.seqNumber,
                            e.coll.count, channels, e.coll.nWarps, e.coll.root});
      break;
    }
    case ncclProfileP2p: {
      int channels = 0;
      if constexpr (V > 3) channels = e.p2p.nChannels;
      *handle = start_task(from, row_of<V>(from, e, true), {kP2p, e.p2p.func, e.p2p.datatype, nullptr, nullptr, 0,
                                                            e.p2p.count, channels, 0, e.p2p.peer});
      break;
    }
    case ncclProfileProxyOp:
      // Made for another process (PXN), context and parent are addresses of that process.
      if (e.proxyOp.pid != g_pid) {
        Table::count(g_table.header().foreign);
        *handle = start_op(kForeign, 0, e.proxyOp.channelId, e.proxyOp.peer, e.proxyOp.isSend != 0);
      } else if (kind_of(from) == kContext && comm_of_handle(from) != nullptr) {
        *handle = start_op(static_cast<uint32_t>(from >> 3 & 0xff), from >> 11 & 0xffff, e.proxyOp.channelId, e.proxyOp.peer,
                           e.proxyOp.isSend != 0);
      }
      break;
    case ncclProfileProxyStep:
      *handle = start_step(parent, e.proxyStep.step);
      break;
    case ncclProfileNetPlugin:
      start_net(handle, parent, e.netPlugin.id, e.netPlugin.data);
      break;
    case ncclProfileKernelCh: {
      uint64_t now;
      if constexpr (V == 3)
        now = now_ns();
      else
        now = e.kernelCh.pTimer;
      if (kind_of(from) == kContext && comm_of_handle(from) != nullptr)
        *handle = handle_of(kKernel | (from & 0x7f8) | now << 11);
      break;
    }
    case ncclProfileCeColl:
      if constexpr (V >= 6)
        *handle = start_task(from, row_of<V>(from, e, false), {kCopyEngine, e.ceColl.func, e.ceColl.datatype, "CE", nullptr,
                                                              e.ceColl.seqNumber, e.ceColl.count, 0, 0, e.ceColl.root});
      break;
    default:
      break;
  }
  return ncclSuccess;
}

template <int V>
ncclResult_t record(void* event, ncclProfilerEventState_t state, typename Abi<V>::State* args) {
  if (!g_active.load(relaxed) || event == nullptr) return ncclSuccess;
  const uint64_t handle = number(event);
  switch (kind_of(handle)) {
    case kProxyStep:
      if constexpr (V == 3)
        record_step(handle, state, nullptr);
      else
        record_step(handle, state, args == nullptr ? nullptr : &args->proxyStep.transSize);
      break;
    case kProxyOp:
      if constexpr (V == 3)
        if (args != nullptr) record_op_v3(handle, state, args->proxyOp.transSize, args->proxyOp.steps);
      break;
    case kKernel:
      if constexpr (V > 3)
        if (state == ncclProfilerKernelChStop && args != nullptr) end_kernel(handle, args->kernelCh.pTimer);
      break;
    default:
      break;
  }
  return ncclSuccess;
}

ncclResult_t stop_v3(void* event) {
  if (g_active.load(relaxed) && kind_of(number(event)) == kKernel) end_kernel(number(event), now_ns());
  return stop(event);
}

ncclResult_t init_v3(void** context, int* mask) { return open_context(context, mask, 3, nullptr, nullptr, 0, 0, 0); }

ncclResult_t init_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int size, int rank, ncclDebugLogger_t) {
  return open_context(context, mask, 4, name, &id, rank, size, nodes);
}

template <int V>
ncclResult_t init(void** context, uint64_t id, int* mask, const char* name, int nodes, int size, int rank, ncclDebugLogger_t) {
  return open_context(context, mask, V, name, &id, rank, size, nodes);
}

}  // namespace

#define KEEPSTEP_EXPORT __attribute__((visibility("default")))
extern "C" {
KEEPSTEP_EXPORT ncclProfiler_v3_t ncclProfiler_v3 = {"keepstep", init_v3, start<3>, stop_v3, record<3>, close_context};
KEEPSTEP_EXPORT ncclProfiler_v4_t ncclProfiler_v4 = {"keepstep", init_v4, start<4>, stop, record<4>, close_context};
KEEPSTEP_EXPORT ncclProfiler_v5_t ncclProfiler_v5 = {"keepstep", init<5>, start<5>, stop, record<5>, close_context};
KEEPSTEP_EXPORT ncclProfiler_v6_t ncclProfiler_v6 = {"keepstep", init<6>, start<6>, stop, record<6>, close_context};
KEEPSTEP_EXPORT ncclProfiler_v7_t ncclProfiler_v7 = {"keepstep", init<7>, start<7>, stop, record<7>, close_context};
}
