// The stand-in's device: its clock, streams, kernels and faults. See device.hpp.
#include "device.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <thread>

namespace stand_in {
namespace {

constexpr Ns kShortSleep = 50'000;      // not worth a system call; nothing on the device depends on it
constexpr std::size_t kQueueRoom = 1020;  // launches that a stream of an H100 took before the launching thread waited

std::atomic<std::int64_t> counters[kCounters];
std::atomic<int> failure{0};
std::atomic<Ns> host_clock{0};
std::atomic<double> factor{1};

struct Device {
  std::mutex order;  // of what is enqueued on the legacy stream beside the others
  std::vector<Stream*> streams;
  Stream* legacy = nullptr;
};

// Never destroyed: streams' threads go on while the process exits.
std::vector<Device>& devices() {
  static auto* all = new std::vector<Device>(static_cast<std::size_t>(device_count()));
  return *all;
}
Device& device_of(int device) { return devices()[static_cast<std::size_t>(device)]; }

void sleep_until(Ns when) {
  if (is_virtual() || when - real_now() < kShortSleep) return;
  const timespec until{static_cast<time_t>(when / 1'000'000'000), static_cast<long>(when % 1'000'000'000)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

struct Kernels {
  std::mutex lock;
  double us[kKinds] = {};
  bool hang[kKinds] = {};
  int fail[kKinds] = {};
};
const char* const kNames[kKinds] = {"gemm", "reduction", "optimizer", "copy", "other"};

bool set_times(Kernels& kernels, const char* text) {  // "US" or "KIND=US,KIND=US"
  char* rest = nullptr;
  const double all = std::strtod(text, &rest);
  if (rest != text && *rest == '\0') {
    std::fill_n(kernels.us, kKinds, all);
    return true;
  }
  for (std::string left = text; !left.empty();) {
    const std::string one = left.substr(0, left.find(','));
    left.erase(0, one.size() + 1);
    const std::size_t equals = one.find('=');
    const auto kind = std::find(kNames, kNames + kKinds, one.substr(0, equals));
    if (equals == std::string::npos || kind == kNames + kKinds) return false;
    kernels.us[kind - kNames] = std::atof(one.c_str() + equals + 1);
  }
  return true;
}

Kernels& kernels() {
  static Kernels* all = [] {
    auto* made = new Kernels;
    const char* text = setting("STAND_IN_KERNEL_US");
    if (text != nullptr && !set_times(*made, text)) {
      std::fprintf(stderr, "STAND_IN_KERNEL_US is '%s', expected microseconds, or KIND=US,...\n", text);
      std::abort();
    }
    return made;
  }();
  return *all;
}

// Applies `change` to the kind of this name, or to all; false: there is no such kind.
template <typename Change>
bool each(const char* kind, Change change) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> guard(all.lock);
  bool found = false;
  for (int i = 0; i < kKinds; ++i)
    if (kind == nullptr || std::strcmp(kind, kNames[i]) == 0) change(all, i), found = true;
  return found;
}

void fail(int error) {
  failure = error;
  if (error != 0) log("failed %d %lld", error, static_cast<long long>(host_now()));
  for (Device& device : devices()) {
    const std::lock_guard<std::mutex> guard(device.order);
    for (Stream* stream : device.streams) stream->wake();
  }
}

}  // namespace

const char* setting(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? nullptr : text;
}
double setting(const char* name, double otherwise) {
  const char* text = setting(name);
  return text == nullptr ? otherwise : std::atof(text);
}

Ns real_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}
bool is_virtual() {
  static const bool value = setting("STAND_IN_CLOCK") != nullptr && std::strcmp(setting("STAND_IN_CLOCK"), "virtual") == 0;
  return value;
}
Ns host_now() {
  if (!is_virtual()) return real_now();
  static const Ns start = real_now();
  return std::max(start, host_clock.load());
}
void host_reached(Ns when) {
  for (Ns now = host_clock.load(); now < when && !host_clock.compare_exchange_weak(now, when);) {
  }
}

int device_count() {
  static const int count = std::max(0, static_cast<int>(setting("STAND_IN_DEVICES", 8)));
  return count;
}
int& current_device() {
  thread_local int device = 0;
  return device;
}

// --- streams -------------------------------------------------------------------------------------------------------------

Stream::Stream(int device_, bool blocking_, int priority_) : device(device_), blocking(blocking_), priority(priority_) {
  static std::atomic<unsigned long> made{2};
  number = ++made;
  Device& all = device_of(device);
  const std::lock_guard<std::mutex> guard(all.order);
  all.streams.push_back(this);
}

Stream* stream_of(void* handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  static std::mutex lock;
  const std::lock_guard<std::mutex> guard(lock);
  Device& device = device_of(current_device());
  if (device.legacy == nullptr) device.legacy = new Stream(current_device(), true, 0);
  return device.legacy;
}

std::vector<Stream*> streams(int device) {
  Device& all = device_of(device);
  const std::lock_guard<std::mutex> guard(all.order);
  return all.streams;
}

Point Stream::enqueue(std::function<Ns(Ns)> body, std::vector<Point> after) {
  for (const Point& other : after)  // waiting for what is captured is how another stream joins
    if (other->graph != nullptr) other->stream->share_capture(*this);
  if (const std::shared_ptr<Graph> graph = current_graph()) return capture(*graph, std::move(body), std::move(after));
  Point oldest;
  {
    std::unique_lock<std::mutex> guard(lock_);
    if (queue_.size() >= kQueueRoom) oldest = queue_[queue_.size() - kQueueRoom];
  }
  if (oldest != nullptr) wait_for(oldest, false);
  Device& all = device_of(device);
  const std::lock_guard<std::mutex> ordered(all.order);
  // The legacy stream's rule: it waits for all blocking streams, and they for it.
  if (this == all.legacy) {
    for (Stream* other : all.streams)
      if (other != this && other->blocking)
        if (Point point = other->tail()) after.push_back(std::move(point));
  } else if (blocking && all.legacy != nullptr) {
    if (Point point = all.legacy->tail()) after.push_back(std::move(point));
  }
  auto made = std::make_shared<Operation>(Operation{this, nullptr, host_now(), std::move(body), std::move(after)});
  const std::lock_guard<std::mutex> guard(lock_);
  if (!started_) std::thread([this] { run(); }).detach();
  started_ = true;
  queue_.push_back(made);
  tail_ = made;
  changed_.notify_all();
  return made;
}

void Stream::run() {
  std::unique_lock<std::mutex> guard(lock_);
  for (;;) {
    changed_.wait(guard, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) return;
    running_ = queue_.front();
    Operation& now = *running_;
    Ns begin = std::max(time_, now.enqueued);
    guard.unlock();
    for (const Point& other : now.after) {
      wait_for(other, false);
      const std::lock_guard<std::mutex> theirs(other->stream->lock_);
      begin = std::max(begin, other->end);
    }
    const Ns end = now.body && failed() == 0 ? std::max(begin, now.body(begin)) : begin;
    sleep_until(end);
    now.body = nullptr;
    now.after.clear();
    guard.lock();
    time_ = now.end = end;
    now.done = true;
    queue_.pop_front();
    running_ = nullptr;
    changed_.notify_all();
  }
}

Point Stream::capture(Graph& graph, std::function<Ns(Ns)> body, std::vector<Point> after) {
  auto made = std::make_shared<Operation>(Operation{this, &graph, 0, std::move(body), {}});
  const std::lock_guard<std::mutex> guard(graph.lock);
  // What is not captured has ended long before: nobody captures what depends on what still runs.
  for (Point& other : after)
    if (other->graph == &graph) made->after.push_back(std::move(other));
  graph.operations.push_back(made);
  return made;
}

std::shared_ptr<Graph> Stream::current_graph() {
  const std::lock_guard<std::mutex> guard(lock_);
  return graph_;
}
Graph* Stream::capturing() { return current_graph().get(); }

void Stream::share_capture(Stream& other) {
  const std::shared_ptr<Graph> graph = current_graph();
  if (graph == nullptr || other.capturing() != nullptr) return;
  const std::lock_guard<std::mutex> guard(graph->lock);
  graph->streams.push_back(&other);
  const std::lock_guard<std::mutex> theirs(other.lock_);
  other.graph_ = graph;
}

void Stream::begin_capture() {
  const std::lock_guard<std::mutex> guard(lock_);
  graph_ = std::make_shared<Graph>();
  graph_->streams.push_back(this);
}

std::shared_ptr<Graph> Stream::end_capture() {
  const std::shared_ptr<Graph> graph = current_graph();
  if (graph == nullptr) return nullptr;
  for (Stream* stream : graph->streams) {
    const std::lock_guard<std::mutex> guard(stream->lock_);
    stream->graph_ = nullptr;
  }
  return graph;
}

thread_local double t_factor = 1;  // of the launch of a graph, for its kernels

int launch(const std::shared_ptr<Graph>& graph, Stream* stream) {
  if (const int error = failed()) return error;
  stream->enqueue([graph, slower = factor.load()](Ns begin) {
    std::map<Stream*, Ns> times;  // how far each stream has come
    Ns last = begin;
    t_factor = slower;
    for (const Point& one : graph->operations) {
      Ns from = std::max(begin, times[one->stream]);
      for (const Point& other : one->after) from = std::max(from, other->end);
      one->end = one->body && failed() == 0 ? std::max(from, one->body(from)) : from;
      times[one->stream] = one->end;
      last = std::max(last, one->end);
    }
    return last;
  });
  return kOk;
}

Point Stream::tail() {
  const std::lock_guard<std::mutex> guard(lock_);
  return tail_;
}
bool Stream::idle() {
  const std::lock_guard<std::mutex> guard(lock_);
  return queue_.empty();
}
void Stream::close() {
  {
    Device& all = device_of(device);
    const std::lock_guard<std::mutex> ordered(all.order);
    all.streams.erase(std::remove(all.streams.begin(), all.streams.end(), this), all.streams.end());
  }
  const std::lock_guard<std::mutex> guard(lock_);
  closed_ = true;
  changed_.notify_all();
}
void Stream::wake() {
  const std::lock_guard<std::mutex> guard(lock_);
  changed_.notify_all();
}

void wait_for(const Point& point, bool counts) {
  if (counts) count(kSynchronizations);
  if (point == nullptr) return;
  Stream& stream = *point->stream;
  if (counts) ++stream.awaited;
  std::unique_lock<std::mutex> guard(stream.lock_);
  stream.changed_.wait(guard, [&] { return point->done || failed() != 0; });
  if (counts) host_reached(point->end);
}

bool is_done(const Point& point) {
  if (point == nullptr) return true;
  const std::lock_guard<std::mutex> guard(point->stream->lock_);
  return point->done;
}

int record(Event* event, Stream* stream) {
  if (const int error = failed()) return error;
  count(kEvents);
  const Point made = stream->enqueue(nullptr);
  const std::lock_guard<std::mutex> guard(event->lock);
  event->last = made;
  return kOk;
}
int query(Event* event) {
  if (const int error = failed()) return error;
  count(kQueries);
  const Point last = event->get();
  if (last != nullptr && last->graph != nullptr) return kCapturedEvent;
  return is_done(last) ? kOk : kNotReady;
}
int wait_for(Event* event) {
  if (const int error = failed()) return error;
  const Point last = event->get();
  if (last != nullptr && last->graph != nullptr) return kCapturedEvent;
  wait_for(last);
  return failed();
}
int make_wait(Stream* stream, Event* event) {
  if (const int error = failed()) return error;
  count(kStreamWaits);
  ++stream->waits;
  if (const Point point = event->get()) stream->enqueue(nullptr, {point});
  return kOk;
}
int elapsed(float* ms, Event* from, Event* to) {
  if (const int error = failed()) return error;
  const Point first = from->get(), last = to->get();
  if (first == nullptr || last == nullptr || first->graph != nullptr || last->graph != nullptr || !from->timed || !to->timed) return kInvalidHandle;
  if (!is_done(first) || !is_done(last)) return kNotReady;
  *ms = static_cast<float>(static_cast<double>(last->end - first->end) / 1e6);
  return kOk;
}

void synchronize(int device) {
  count(kSynchronizations);
  for (Stream* stream : streams(device)) {
    const Point point = stream->tail();
    ++stream->awaited;
    wait_for(point, false);
    if (point != nullptr && failed() == 0) host_reached(point->end);
  }
}

// --- kernels -------------------------------------------------------------------------------------------------------------

Kind kind_of(const char* name) {
  const auto has = [name](const char* part) { return std::strstr(name, part) != nullptr; };
  if (has("gemm")) return Kind::gemm;
  if (has("multi_tensor_apply")) return Kind::optimizer;
  if (has("reduce_kernel") || has("norm")) return Kind::reduction;
  if (has("CatArray") || has("copy") || has("Copy") || has("chunk_cat") || has("split_with_sizes")) return Kind::copy;
  return Kind::other;
}

namespace {
std::atomic<bool> aborted{false}, held{false}, stepped{false};

std::atomic<std::uint64_t> aborts_before{0};

// How many aborts keepstep's shim knows of.
std::uint64_t known_aborts() {
  const auto ask = reinterpret_cast<std::uint64_t (*)()>(dlsym(RTLD_DEFAULT, "keepstep_gate_aborts"));
  return ask == nullptr ? 0 : ask();
}

void optimizer_runs() {
  if (!aborted || stepped.exchange(true)) return;
  log("fed %s %lld", known_aborts() == aborts_before ? "unknown" : "known", static_cast<long long>(real_now()));
}
}  // namespace

void groups_are_made() {
  aborted = held = stepped = false;
  aborts_before = known_aborts();
}
void was_aborted() {
  if (!aborted.exchange(true)) log("aborted %lld", static_cast<long long>(real_now()));
}
void was_held(Ns from) {
  if (aborted && !stepped && !held.exchange(true))
    log("held %lld %lld", static_cast<long long>(from), static_cast<long long>(real_now()));
}

int launch(Stream* stream, Kind kind) {
  if (const int error = failed()) return error;
  count(kLaunches);
  Kernels& all = kernels();
  const int i = static_cast<int>(kind);
  double us;
  bool hang;
  int error;
  {
    const std::lock_guard<std::mutex> guard(all.lock);
    us = all.us[i];
    hang = all.hang[i];
    error = all.fail[i];
    // What was asked for every kind is over with the first kernel of any.
    if (hang) std::fill_n(all.hang, kKinds, false);
    if (error != 0) std::fill_n(all.fail, kKinds, 0);
  }
  const bool captured = stream->capturing() != nullptr;
  const double slower = factor.load();
  if (hang) {
    stream->enqueue([stream](Ns begin) {
      log("hang %s %lld", "kernel", static_cast<long long>(begin));
      static std::mutex never;
      static std::condition_variable nobody;
      std::unique_lock<std::mutex> guard(never);
      while (failed() == 0) nobody.wait_for(guard, std::chrono::milliseconds(50));
      return begin;
    });
  } else if (error != 0) {
    stream->enqueue([error](Ns begin) {
      fail(error);
      return begin;
    });
  } else {
    // How slow the device is when it is launched, or when its graph is.
    stream->enqueue([=](Ns begin) {
      if (kind == Kind::optimizer) optimizer_runs();
      return begin + static_cast<Ns>(us * (captured ? t_factor : slower) * 1000);
    });
  }
  return kOk;
}

int failed() { return failure.load(); }
void count(Counter what) { ++counters[what]; }

void log(const char* format, ...) {
  static FILE* file = [] {
    const char *folder = setting("STAND_IN_LOG"), *rank = setting("RANK");
    if (folder == nullptr) return static_cast<FILE*>(nullptr);
    const std::string name = rank != nullptr ? std::string("rank-") + rank : "process-" + std::to_string(getpid());
    return std::fopen((std::string(folder) + "/" + name).c_str(), "ae");
  }();
  if (file == nullptr) return;
  char line[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::fprintf(file, "%s\n", line);
  std::fflush(file);
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {
int stand_in_kernel_us(const char* kind, double us) {
  return each(kind, [us](Kernels& all, int i) { all.us[i] = us; }) ? kOk : kInvalid;
}
void stand_in_kernel_factor(double times) { factor = times; }
void stand_in_hang_next(const char* kind) {
  each(kind, [](Kernels& all, int i) { all.hang[i] = true; });
}
void stand_in_fail_next(const char* kind, int error) {
  each(kind, [error](Kernels& all, int i) { all.fail[i] = error; });
}
void stand_in_fail(int error) { fail(error); }
void stand_in_host_ns(std::int64_t ns) { host_reached(host_now() + ns); }
void stand_in_mark(void* stream, std::int64_t tag) {
  stream_of(stream)->enqueue([tag](Ns begin) {
    log("mark %lld %lld", static_cast<long long>(tag), static_cast<long long>(begin));
    return begin;
  });
}
void stand_in_enqueue(void* stream, void (*call)(void*), void (*drop)(void*), void* argument) {
  stream_of(stream)->enqueue([call, kept = std::shared_ptr<void>(argument, drop)](Ns begin) {
    call(kept.get());
    return begin;
  });
}
void stand_in_wait(void* stream) { wait_for(stream_of(stream)->tail(), false); }
std::int64_t stand_in_counter(int which) { return which < 0 || which >= kCounters ? -1 : counters[which].load(); }
std::int64_t stand_in_stream_counter(void* stream, int which) {
  const Stream& one = *stream_of(stream);
  return which == 0 ? one.waits : one.awaited;
}
}
