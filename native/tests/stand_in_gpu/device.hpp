// TEST DOUBLE: the device behind the stand-ins of CUDA's driver, CUDA's runtime and NCCL. Device memory is host memory, a
// stream is a queue with a thread. docs/design/stand-in-gpu.md has the reasoning, and the variables that set it up.
//
// Time on the device is virtual: nanoseconds on CLOCK_MONOTONIC's axis. An operation begins when its stream and all it
// waits for have come so far, and no earlier than it was enqueued; its body returns its end. In real pace the stream then
// sleeps until that end, and a machine that is late does not make the device late. With STAND_IN_CLOCK=virtual nothing
// sleeps and the host's clock does not count: the host's time is that of the device it last waited for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace stand_in {

using Ns = std::int64_t;

enum Error : int {
  kOk = 0, kInvalid = 1, kNoMemory = 2, kHardware = 214, kInvalidHandle = 400, kNotReady = 600, kIllegalAddress = 700, kUnsupported = 801,
  kCaptureUnsupported = 900, kCapturedEvent = 907,
};

// STAND_IN_... of the environment.
const char* setting(const char* name);
double setting(const char* name, double otherwise);

Ns real_now();
bool is_virtual();
Ns host_now();              // when the host enqueues, on the device's axis
void host_reached(Ns when);  // it has waited until then

struct Stream;

struct Graph;

struct Operation {
  Stream* stream;
  Graph* graph;  // what it was captured for: it runs with each launch of that, and is never `done`
  Ns enqueued;
  std::function<Ns(Ns)> body;  // begin -> end; none: no time
  std::vector<std::shared_ptr<Operation>> after;
  bool done = false;  // under the stream's lock, as is `end`
  Ns end = 0;
};
using Point = std::shared_ptr<Operation>;

// Blocks until the device has done it, or failed. Counted as a synchronisation of the host if `counts`.
void wait_for(const Point& point, bool counts = true);
bool is_done(const Point& point);

struct Stream {
  Stream(int device, bool blocking, int priority);
  const int device;
  const bool blocking;  // it waits for the legacy stream, and that for it
  const int priority;
  unsigned long number;
  std::atomic<std::int64_t> waits{0}, awaited{0};  // that were put on it; of the host for what is on it

  // Blocks while the queue is full, as a launch does. The body runs on the stream's thread.
  Point enqueue(std::function<Ns(Ns)> body, std::vector<Point> after = {});
  Point tail();  // what was enqueued last; null: nothing was
  bool idle();
  Graph* capturing();  // null: its operations run
  void begin_capture();
  std::shared_ptr<Graph> end_capture();  // of all streams that have joined; null: there was none
  void close();  // its thread ends when all is done; the object stays
  void wake();

 private:
  friend void wait_for(const Point&, bool);
  friend bool is_done(const Point&);
  void run();
  std::shared_ptr<Graph> current_graph();
  void share_capture(Stream& other);
  Point capture(Graph& graph, std::function<Ns(Ns)> body, std::vector<Point> after);
  std::mutex lock_;
  std::condition_variable changed_;
  std::shared_ptr<Graph> graph_;
  std::deque<Point> queue_;
  Point tail_, running_;
  Ns time_ = 0;
  bool started_ = false, closed_ = false;
};

// A captured graph. Its operations run in the order of their capture, on one thread, each from when those that it
// follows have ended on the device; what lies on different streams overlaps on the device's clock as it would there.
struct Graph {
  std::mutex lock;
  std::vector<Point> operations;
  std::vector<Stream*> streams;  // that have joined the capture; the first began it
};
int launch(const std::shared_ptr<Graph>& graph, Stream* stream);

struct Event {
  std::mutex lock;
  Point last;  // each recording has a fate of its own: whoever waits holds the one it saw
  bool timed = true;
  Point get() {
    const std::lock_guard<std::mutex> guard(lock);
    return last;
  }
};
int record(Event* event, Stream* stream);
int query(Event* event);
int wait_for(Event* event);
int make_wait(Stream* stream, Event* event);
int elapsed(float* ms, Event* from, Event* to);  // a float, as in CUDA

int device_count();
int& current_device();           // of the calling thread
Stream* stream_of(void* handle);  // 0 and 1: the legacy stream of the calling thread's device
std::vector<Stream*> streams(int device);
void synchronize(int device);

// --- memory --------------------------------------------------------------------------------------------------------------

enum class Memory { none, device, pinned };
struct Place {
  Memory kind = Memory::none;
  int device = 0;
};
int allocate(void** memory, std::size_t bytes, Memory kind);
void release(void* memory);
Place place_of(const void* memory);
void adopt(void* memory, std::size_t bytes);  // pinned, though not by us
void disown(void* memory);
void memory_info(std::size_t* available, std::size_t* total);

// --- kernels, faults, counts -----------------------------------------------------------------------------------------

// By what a kernel does: STAND_IN_KERNEL_US sets the time of each, "300" or "gemm=300,optimizer=50,other=10".
enum class Kind { gemm, reduction, optimizer, copy, other };
constexpr int kKinds = 5;
int launch(Stream* stream, Kind kind);
Kind kind_of(const char* mangled_name);

// Log, each once until groups are made again, that an operation of NCCL was aborted on the device, that a stream was held
// then, and that a kernel of the optimizer's ran after it ("fed"), and whether keepstep's shim knew of an abort by then.
void groups_are_made();
void was_aborted();
void was_held(Ns from);

int failed();  // sticky, as after an illegal access; 0: whole

enum Counter { kLaunches, kEvents, kSynchronizations, kQueries, kStreamWaits, kCommunications, kCounters };
void count(Counter what);
// A line for the file rank-RANK of the folder STAND_IN_LOG.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace stand_in

// For tests and jobs, by ctypes. All of this process only, but for faults between ranks.
extern "C" {
int stand_in_kernel_us(const char* kind, double us);  // of launches from here on; null: every kind
void stand_in_kernel_factor(double factor);            // the same, times this
void stand_in_hang_next(const char* kind);             // the next kernel (of this kind) never ends
void stand_in_fail_next(const char* kind, int error);  // the next kernel (of this kind) fails: 700, 214; from then on every call
void stand_in_fail(int error);                         // the device has failed now; 0: it is whole again
void stand_in_host_ns(std::int64_t ns);                // the host works so long, where the clock is virtual
void stand_in_mark(void* stream, std::int64_t tag);    // "mark TAG NS" into the log when the stream gets there
void stand_in_pair(void* stream, int slow, int from, int to, int value);  // Control's fault, when the stream gets there
std::int64_t stand_in_counter(int which);
std::int64_t stand_in_stream_counter(void* stream, int which);  // 0: waits that were put on it; 1: of the host for it
// A call on the stream that takes no time on the device; more than one, if it is captured. `drop` is called in the end.
void stand_in_enqueue(void* stream, void (*call)(void*), void (*drop)(void*), void* argument);
void stand_in_wait(void* stream);
}
