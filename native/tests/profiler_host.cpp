// A stand-in for NCCL as a host of profiler plugins, not NCCL: loads the plugin by dlopen and calls it in the orders that
// NCCL's net transport does, with no GPU and no network. docs/design/links.md says what it cannot show.
// Usage: profiler_host LIBRARY ABI orders|hold|extras|fork           prints "ready", ends when its input does
//        profiler_host LIBRARY ABI threads THREADS OPERATIONS  prints the steps made, ends when its input does
//        profiler_host LIBRARY ABI for_ever THREADS            until it is killed
//        profiler_host LIBRARY ABI storm THREADS EVENTS        events, states and handles that make no sense
//        profiler_host LIBRARY ABI bench
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../link_table.hpp"
#include "../nccl/profiler_v3.h"
#include "../nccl/profiler_v4.h"
#include "../nccl/profiler_v5.h"
#include "../nccl/profiler_v6.h"
#include "../nccl/profiler_v7.h"

namespace {

using keepstep::links::now_ns;

template <int V>
struct Abi;
#define ABI(V)                                        \
  template <>                                         \
  struct Abi<V> {                                     \
    using Plugin = ncclProfiler_v##V##_t;             \
    using Event = ncclProfilerEventDescr_v##V##_t;    \
    using State = ncclProfilerEventStateArgs_v##V##_t; \
  };
ABI(3) ABI(4) ABI(5) ABI(6) ABI(7)

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "WRONG: %s\n", what);
  std::abort();
}

uint64_t next_random(uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

void quiet_log(int, unsigned long, const char*, int, const char*, ...) {}

// A table of the process's own, where nobody has made one.
void make_table() {
  namespace links = keepstep::links;
  constexpr uint64_t kLinks = 64, kSize = links::total_bytes(kLinks);
  const int fd = memfd_create("links", MFD_ALLOW_SEALING);
  require(fd >= 0 && posix_fallocate(fd, 0, kSize) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0, "memfd");
  const uint64_t header[] = {links::kMagic, links::kVersion, kLinks, kSize, links::header_check(kLinks)};
  require(pwrite(fd, header, sizeof header, 0) == sizeof header, "the table's header");
  setenv("KEEPSTEP_LINKS", ("/proc/self/fd/" + std::to_string(fd)).c_str(), 1);
}

constexpr size_t kChunk = 65536;

template <int V>
struct Host {
  using Event = typename Abi<V>::Event;
  using State = typename Abi<V>::State;
  typename Abi<V>::Plugin* plugin = nullptr;
  int mask = 0;

  explicit Host(const char* library) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    require(handle != nullptr, "the plugin does not load");
    const std::string symbol = "ncclProfiler_v" + std::to_string(V);
    plugin = static_cast<typename Abi<V>::Plugin*>(dlsym(handle, symbol.c_str()));
    require(plugin != nullptr && std::strcmp(plugin->name, "keepstep") == 0, "the plugin's symbol");
  }

  void* open(const char* name, uint64_t id, int rank, int size, int nodes) {
    void* context = nullptr;
    ncclResult_t result;
    if constexpr (V == 3)
      result = plugin->init(&context, &mask);
    else if constexpr (V == 4)
      result = plugin->init(&context, &mask, name, id, nodes, size, rank, quiet_log);
    else
      result = plugin->init(&context, id, &mask, name, nodes, size, rank, quiet_log);
    require(result == ncclSuccess && context != nullptr, "init");
    return context;
  }

  void close(void* context) { require(plugin->finalize(context) == ncclSuccess, "finalize"); }

  void* start(void* context, Event& event, int rank) {
    event.rank = rank;
    void* handle = &event;  // to be overwritten
    require(plugin->startEvent(context, &handle, &event) == ncclSuccess, "startEvent");
    require(handle != &event, "the handle was left as it was");
    return handle;
  }
  void stop(void* handle) { require(plugin->stopEvent(handle) == ncclSuccess, "stopEvent"); }
  void record(void* handle, int state, State* args) {
    require(plugin->recordEventState(handle, state, args) == ncclSuccess, "recordEventState");
  }

  Event of_type(uint64_t type) {
    Event e;
    std::memset(&e, 0, sizeof e);
    e.type = static_cast<decltype(e.type)>(type);
    return e;
  }

  void* enclosing(void* context, uint64_t type) {
    Event e = of_type(type);
    return start(context, e, 0);
  }

  // A collective as it is enqueued: API events around it, the group, the task, and all are stopped before data flows.
  void* collective(void* context, uint64_t id, const char* name, int rank, uint64_t seq) {
    void *api = nullptr, *call = nullptr;
    if constexpr (V >= 5) api = enclosing(context, ncclProfileGroupApi), call = enclosing(context, ncclProfileCollApi);
    void* group = enclosing(context, ncclProfileGroup);
    Event e = of_type(ncclProfileColl);
    e.parentObj = V >= 5 ? call : group;
    if constexpr (V == 3)
      e.coll.name = name, e.coll.commHash = id, e.coll.nMaxChannels = 2;
    else
      e.coll.nChannels = 2;
    if constexpr (V >= 5) e.coll.parentGroup = group;
    e.coll.seqNumber = seq;
    e.coll.func = "AllReduce", e.coll.datatype = "ncclBfloat16", e.coll.algo = "RING", e.coll.proto = "SIMPLE";
    e.coll.count = 1 << 20, e.coll.nWarps = 16;
    (void)id, (void)name;
    void* task = start(context, e, rank);
    for (void* handle : {task, group, call, api})
      if (handle != nullptr) stop(handle);
    return task;
  }

  void* p2p(void* context, uint64_t id, const char* name, int rank, int peer) {
    Event e = of_type(ncclProfileP2p);
    if constexpr (V == 3) e.p2p.name = name, e.p2p.commHash = id;
    (void)id, (void)name;
    e.p2p.func = "Send", e.p2p.datatype = "ncclFloat32", e.p2p.count = 77, e.p2p.peer = peer;
    void* task = start(context, e, rank);
    stop(task);
    return task;
  }

  struct Transfer {
    void* context;
    void* handle;
    bool send;
    size_t total = 0;
    void* steps[8] = {};
  };

  Transfer transfer(void* context, void* task, int channel, int peer, bool send, int steps, pid_t pid = getpid()) {
    Event e = of_type(ncclProfileProxyOp);
    e.parentObj = task;
    e.proxyOp.pid = pid, e.proxyOp.channelId = static_cast<uint8_t>(channel), e.proxyOp.peer = peer;
    e.proxyOp.nSteps = steps, e.proxyOp.chunkSize = kChunk, e.proxyOp.isSend = send;
    Transfer t{context, start(context, e, 0), send};
    if constexpr (V >= 4)
      if (t.handle != nullptr) {
        State a{};
        record(t.handle, ncclProfilerProxyOpInProgress_v4, &a);
      }
    return t;
  }

  void op_state(Transfer& t, int state, int steps) {
    if constexpr (V == 3) {
      State a{};
      a.proxyOp.transSize = t.total, a.proxyOp.steps = steps;
      if (t.handle != nullptr) record(t.handle, state, &a);
    }
    (void)t, (void)state, (void)steps;
  }
  void step_state(Transfer& t, int step, int state, size_t size) {
    if (t.handle == nullptr || t.steps[step % 8] == nullptr) return;
    if constexpr (V == 3) {
      record(t.steps[step % 8], state, nullptr);
    } else {
      State a{};
      a.proxyStep.transSize = size;
      record(t.steps[step % 8], state, &a);
    }
    (void)size;
  }

  void begin(Transfer& t, int step) {
    Event e = of_type(ncclProfileProxyStep);
    e.parentObj = t.handle;
    e.proxyStep.step = step;
    t.steps[step % 8] = start(t.context, e, 0);
    if (t.send)
      op_state(t, 0, step + 1), step_state(t, step, ncclProfilerProxyStepSendGPUWait, 0);
    else
      op_state(t, 4, step + 1), step_state(t, step, ncclProfilerProxyStepRecvWait, 0);
  }
  void filled(Transfer& t, int step, int polls) {  // NCCL says so each time it tries to send
    for (int i = 0; i < polls; ++i)
      op_state(t, ncclProfilerProxyOpSendRemFifoWait, step + 1), step_state(t, step, ncclProfilerProxyStepSendPeerWait_v4, 1);
  }
  void sent(Transfer& t, int step, size_t size) {
    t.total += size;
    op_state(t, ncclProfilerProxyOpSendTransmitted, step + 1);
    step_state(t, step, ncclProfilerProxyStepSendWait, size);
  }
  void arrived(Transfer& t, int step, size_t size) {
    t.total += size;
    op_state(t, ncclProfilerProxyOpRecvReceived, step + 1);
    step_state(t, step, ncclProfilerProxyStepRecvFlushWait, size);
  }
  void done(Transfer& t, int step) {
    if (t.steps[step % 8] != nullptr) stop(t.steps[step % 8]);
    t.steps[step % 8] = nullptr;
    op_state(t, t.send ? 3 : 7, step + 1);
  }
  void end(Transfer& t) {
    if (t.handle != nullptr) stop(t.handle);
    t.handle = nullptr;
  }

  // Whole transfers with up to `depth` steps at once, as the proxy interleaves them.
  void move(Transfer& t, int steps, int depth, uint64_t* random = nullptr) {
    for (int first = 0; first < steps; first += depth) {
      const int last = std::min(first + depth, steps);
      for (int i = first; i < last; ++i) begin(t, i);
      for (int i = first; i < last; ++i) {
        const size_t size = random != nullptr ? 1 + next_random(*random) % kChunk : kChunk;
        if (t.send)
          filled(t, i, 2), sent(t, i, size);
        else
          arrived(t, i, size), step_state(t, i, ncclProfilerProxyStepRecvGPUWait, size);
      }
      for (int i = first; i < last; ++i) done(t, i);
    }
    end(t);
  }

  void wait_for_end() {
    std::printf("ready\n");
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
  }

  void orders() {
    void* dp = open("dp group", 0xabcdef, 1, 4, 2);
    for (uint64_t seq = 0; seq < 3; ++seq) {
      void* task = collective(dp, 0xabcdef, "dp group", 1, seq);
      for (int channel = 0; channel < 2; ++channel) {
        Transfer to = transfer(dp, task, channel, 2, true, 20), from = transfer(dp, task, channel, 0, false, 20);
        move(to, 20, 8);
        move(from, 20, 8);
      }
    }
    p2p(dp, 0xabcdef, "dp group", 1, 3);
    void* split = open(nullptr, 0x77, 0, 2, 1);  // split off, used, finalised
    Transfer t = transfer(split, collective(split, 0x77, nullptr, 0, 0), 5, 1, true, 3);
    move(t, 3, 2);
    close(split);
    stop(enclosing(split, ncclProfileColl));  // after its end
    void* aborted = open("aborted", 0x78, 0, 2, 1);
    Transfer under_way = transfer(aborted, nullptr, 0, 1, true, 8);
    for (int i = 0; i < 5; ++i) begin(under_way, i);
    for (int i = 0; i < 3; ++i) filled(under_way, i, 1);
    sent(under_way, 0, kChunk);
    close(aborted);
    done(under_way, 0);  // late
    end(under_way);
    // For another process (PXN): context and task are that process's addresses.
    Transfer foreign = transfer(reinterpret_cast<void*>(0x7f0012345678), reinterpret_cast<void*>(0x7f0087654321), 1, 9, true, 4,
                                getpid() + 1);
    move(foreign, 4, 4);
    wait_for_end();
    close(dp);
  }

  void hold() {
    void* dp = open("held", 5, 0, 8, 8);
    if constexpr (V >= 4) {  // a validation's own, which is left out
      void* ours = open("keepstep", 6, 0, 2, 2);
      Transfer test = transfer(ours, nullptr, 0, 1, true, 1);
      begin(test, 0), filled(test, 0, 1), sent(test, 0, kChunk), done(test, 0);
      end(test);
    }
    void* task = collective(dp, 5, "held", 0, 41);
    std::vector<Transfer> ts;
    for (int peer = 0; peer < 6; ++peer) ts.push_back(transfer(dp, task, 0, peer, peer != 3 && peer != 4, 100));
    for (Transfer& t : ts)
      for (int i = 0; i < 64; ++i) {
        begin(t, i);
        if (t.send)
          filled(t, i, 1), sent(t, i, kChunk);
        else
          arrived(t, i, kChunk);
        done(t, i);
      }
    for (int i = 64; i < 68; ++i) {
      for (int peer = 0; peer < 5; ++peer) begin(ts[static_cast<size_t>(peer)], i);
      filled(ts[1], i, 3), filled(ts[2], i, 1);
      sent(ts[2], i, kChunk);
      arrived(ts[4], i, kChunk);
    }
    end(ts[5]);
    wait_for_end();
  }

  // What only some builds and settings tell of: network events, kernels, copy engines.
  void extras() {
    void* dp = open("extras", 6, 0, 2, 2);
    Transfer t = transfer(dp, nullptr, 0, 1, true, 1);
    begin(t, 0);
    ncclProfilerNetIbDescr_v1_t ib{};
    ib.qp.length = 1000;
    ncclProfilerNetSockDescr_v1_t sock{};
    sock.sock.length = 24;
    Event e = of_type(ncclProfileNetPlugin);
    e.parentObj = t.steps[0];
    e.netPlugin.id = NCCL_PROFILER_NET_TYPE_IB | 1, e.netPlugin.data = &ib;
    stop(start(dp, e, 0));
    e.netPlugin.id = NCCL_PROFILER_NET_TYPE_SOCK | 1, e.netPlugin.data = &sock;
    stop(start(dp, e, 0));
    e.netPlugin.id = NCCL_PROFILER_NET_TYPE_IB | 2;  // of a version that nobody here knows: not looked into
    start(dp, e, 0);
    for (uint64_t seq = 0; seq < 6; ++seq) {
      collective(dp, 6, "extras", 0, seq);
      if ((mask & ncclProfileKernelCh) == 0) continue;
      Event kernel = of_type(ncclProfileKernelCh);
      if constexpr (V > 3) kernel.kernelCh.pTimer = 1'700'000'000'000'000'000 + seq;
      void* handle = start(dp, kernel, 0);
      if constexpr (V > 3) {
        State a{};
        a.kernelCh.pTimer = 1'700'000'000'000'000'500 + seq;
        record(handle, ncclProfilerKernelChStop, &a);
      }
      stop(handle);
    }
    if constexpr (V >= 6) {
      Event ce = of_type(ncclProfileCeColl);
      ce.ceColl.func = "AllGather", ce.ceColl.datatype = "ncclInt8", ce.ceColl.seqNumber = 9, ce.ceColl.count = 5;
      stop(start(dp, ce, 0));
    }
    wait_for_end();
  }

  void forks() {
    void* dp = open("parent", 9, 0, 2, 2);
    const pid_t child = fork();
    if (child == 0) {
      Transfer t = transfer(dp, nullptr, 0, 1, true, 4);
      require(t.handle == nullptr, "a forked child's events are counted");
      void* other = open("child", 10, 0, 2, 2);
      Transfer u = transfer(other, nullptr, 0, 1, true, 4);
      require(u.handle == nullptr, "a forked child's events are counted");
      _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    require(status == 0, "the forked child failed");
    Transfer t = transfer(dp, nullptr, 0, 1, true, 4);
    move(t, 4, 4);
    wait_for_end();
  }

  // Each thread has communicators of its own that come and go; all threads send on a shared one, too, on the same links.
  uint64_t work(void* shared, unsigned thread, uint64_t operations) {
    uint64_t random = 88172645463325252ULL + thread, steps = 0;
    void* own = open("own", thread + 1, 0, 64, 64);
    for (uint64_t i = 0; i < operations; ++i) {
      if (i % 64 == 63) close(own), own = open("own", thread + 1 + i, 0, 64, 64);
      void* context = i % 2 == 0 ? shared : own;
      void* task = collective(context, 1, "shared", 0, i);
      const int count = 1 + static_cast<int>(next_random(random) % 24);
      Transfer t = transfer(context, task, static_cast<int>(i % 2), 1 + static_cast<int>(next_random(random) % 3), i % 3 != 0, count);
      if (context == shared && t.handle != nullptr) steps += static_cast<uint64_t>(count);
      move(t, count, 8, &random);
    }
    close(own);
    return steps;
  }

  void threads(unsigned count, uint64_t operations) {
    void* shared = open("shared", 1, 0, 64, 64);
    std::vector<uint64_t> steps(count);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < count; ++i)
      running.emplace_back([&, i] { steps[i] = work(shared, i, operations); });
    for (auto& t : running) t.join();
    uint64_t sum = 0;
    for (uint64_t s : steps) sum += s;
    std::printf("%llu\n", static_cast<unsigned long long>(sum));
    wait_for_end();
  }

  void storm(unsigned count, uint64_t events) {
    void* context = open("storm", 3, 0, 2, 2);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < count; ++i)
      running.emplace_back([&, i] {
        uint64_t random = 0x9e3779b97f4a7c15ULL + i;
        std::vector<void*> handles(64, context);
        for (uint64_t n = 0; n < events; ++n) {
          void*& slot = handles[next_random(random) % handles.size()];
          const uint64_t what = next_random(random);
          void* any = what % 5 == 0 ? reinterpret_cast<void*>(next_random(random)) : handles[what / 8 % handles.size()];
          switch (what >> 32 & 3) {
            case 0:
            case 1: {
              Event e = of_type(uint64_t{1} << (next_random(random) % 16));
              e.parentObj = any;
              if (e.type == ncclProfileProxyOp)
                e.proxyOp.pid = getpid(), e.proxyOp.peer = static_cast<int>(what % 9), e.proxyOp.isSend = what & 1;
              if (e.type == ncclProfileProxyStep) e.proxyStep.step = static_cast<int>(next_random(random) % 32) - 4;
              slot = start(what % 7 == 0 ? any : context, e, 0);
              break;
            }
            case 2:
              if (what & 1) {
                State a{};
                record(any, static_cast<int>(next_random(random) % 32), &a);
              } else {
                record(any, static_cast<int>(next_random(random) % 32), nullptr);
              }
              break;
            default:
              stop(any);
          }
        }
      });
    for (auto& t : running) t.join();
    close(context);
    wait_for_end();
  }

  void bench() {
    make_table();
    void* dp = open("bench", 1, 0, 2, 2);
    Transfer t = transfer(dp, collective(dp, 1, "bench", 0, 0), 0, 1, true, 1 << 30);
    require(t.handle != nullptr, "the table does not take the operation");
    constexpr int kCount = 1'000'000;
    double best[2] = {1e18, 1e18}, clock = 1e18;
    uint64_t sum = 0;
    for (int run = 0; run < 7; ++run) {
      uint64_t from = now_ns();
      for (int i = 0; i < kCount; ++i) sum += now_ns();
      clock = std::min(clock, static_cast<double>(now_ns() - from) / kCount);
      from = now_ns();
      for (int i = 0; i < kCount; ++i) begin(t, i), sent(t, i, kChunk), done(t, i);
      best[0] = std::min(best[0], static_cast<double>(now_ns() - from) / kCount);
      from = now_ns();
      for (int i = 0; i < kCount; ++i) begin(t, i), filled(t, i, 1), sent(t, i, kChunk), done(t, i);
      best[1] = std::min(best[1], static_cast<double>(now_ns() - from) / kCount);
    }
    std::printf("clock read                                  %7.1f ns%s\n", clock, sum == 0 ? " " : "");
    std::printf("step: start, handed to network, stop        %7.1f ns\n", best[0]);
    std::printf("step with all states that NCCL records      %7.1f ns\n", best[1]);
  }

  int run(int argc, char** argv) {
    const std::string mode = argv[3];
    const auto number = [&](int i) { return argc > i ? std::strtoull(argv[i], nullptr, 10) : 0ULL; };
    if (mode == "orders") return orders(), 0;
    if (mode == "hold") return hold(), 0;
    if (mode == "extras") return extras(), 0;
    if (mode == "fork") return forks(), 0;
    if (mode == "threads") return threads(static_cast<unsigned>(number(4)), number(5)), 0;
    if (mode == "for_ever") return threads(static_cast<unsigned>(number(4)), ~0ULL), 0;
    if (mode == "storm") return storm(static_cast<unsigned>(number(4)), number(5)), 0;
    if (mode == "bench") return bench(), 0;
    return 2;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  switch (std::atoi(argv[2])) {
    case 3: return Host<3>(argv[1]).run(argc, argv);
    case 4: return Host<4>(argv[1]).run(argc, argv);
    case 5: return Host<5>(argv[1]).run(argc, argv);
    case 6: return Host<6>(argv[1]).run(argc, argv);
    case 7: return Host<7>(argv[1]).run(argc, argv);
    default: return 2;
  }
}
