// A gate on the training's stream before the optimizer's kernels, so that none of them runs on what an aborted collective
// has left. NCCL tells nobody of an abort: the collective's kernel ends, its tensor holds what was not reduced.
//
// The stream waits until a word of page-locked memory is 0 (2 µs of the GPU's time, no host function). Whoever aborts sets it
// to 1 *before* NCCL is told, so that a stream that comes from an aborted collective finds the gate closed. After a second the
// gate opens by itself: a process that nobody helps had better go on and fail. What comes after an abort is spoilt until the
// groups are whole again, and no snapshot of it is sealed.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "nccl_timing.hpp"

namespace keepstep::nccl {
namespace {

class Gate {
 public:
  // False: CUDA has no such waits here, or no memory; or the stream is captured, and whoever replays the graph passes us by.
  bool put(Stream stream) noexcept {
    const cuda::Driver* driver = cuda::Driver::get();
    int captured = 0;
    if (driver == nullptr || driver->wait_value == nullptr || driver->is_captured(stream, &captured) != 0 || captured != 0 ||
        !prepare(*driver))
      return false;
    return driver->wait_value(stream, reinterpret_cast<std::uint64_t>(word_.load()), 0, cuda::Driver::kEqual) == 0;
  }

  // A communicator is about to be aborted or revoked. By the main thread it is the script's own doing, as at the end of a
  // process group, and it knows what is computed then.
  void abort_comes() noexcept {
    if (syscall(SYS_gettid) == getpid()) return;
    close();
    if (is_left_.load()) open();  // torch's watchdog aborts again for each operation that it finds broken
  }

  void close() noexcept {
    aborts_.fetch_add(1);
    std::uint32_t* word = word_.load();
    if (word == nullptr) return;
    closed_ns_.store(ring::monotonic_ns());
    __atomic_store_n(word, 1, __ATOMIC_SEQ_CST);
    if (watched_.exchange(true)) return;
    try {
      std::thread([this, word] { watch(word); }).detach();
    } catch (...) {  // nobody would open it
      open();
    }
  }

  void open() noexcept {
    if (std::uint32_t* word = word_.load()) __atomic_store_n(word, 0, __ATOMIC_SEQ_CST);
  }
  // The training is left, and all that is still on the stream is spoilt: let it run, whatever is aborted until `renew`.
  void leave_open() noexcept {
    is_left_.store(true);
    open();
  }
  // The groups are whole again: what comes from now on is not spoilt.
  void renew() noexcept {
    whole_at_.store(aborts_.load());
    open();
    is_left_.store(false);
  }
  std::uint64_t aborts() const noexcept { return aborts_.load(); }
  // A communicator is made by a call that comes through the shim: the calls that abort it will come through it, too.
  void sees() noexcept { sees_.store(true); }
  bool has_seen() const noexcept { return sees_.load(); }
  // Whether what a snapshot is begun of comes after an abort. Without a gate nobody tells when the groups are whole again:
  // then it is the first one only, as collectives of later steps are called after the abort, which NCCL refuses.
  bool spoils_next() noexcept {
    const std::uint64_t aborts = aborts_.load();
    return aborts != (word_.load() == nullptr ? whole_at_.exchange(aborts) : whole_at_.load());
  }

 private:
  static constexpr std::int64_t kLongestNs = 1'000'000'000;

  bool prepare(const cuda::Driver& driver) noexcept {
    if (word_.load(std::memory_order_relaxed) != nullptr) return true;
    void* found = nullptr;
    if (driver.lock_memory(&found, sizeof(std::uint32_t), cuda::Driver::kPortable) != 0) return false;
    *static_cast<std::uint32_t*>(found) = 0;
    renew();  // no step was made yet that an abort could have fed
    word_.store(static_cast<std::uint32_t*>(found));
    return true;
  }

  void watch(std::uint32_t* word) noexcept {
    for (timespec pause{0, 20'000'000}; __atomic_load_n(word, __ATOMIC_SEQ_CST) != 0; nanosleep(&pause, nullptr))
      if (static_cast<std::int64_t>(ring::monotonic_ns() - closed_ns_.load()) > kLongestNs) open();
    watched_.store(false);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != 0 && !watched_.exchange(true)) watch(word);  // closed meanwhile
  }

  std::atomic<std::uint32_t*> word_{nullptr};  // null: there is no gate
  std::atomic<std::uint64_t> aborts_{0}, whole_at_{0}, closed_ns_{0};
  std::atomic<bool> watched_{false}, is_left_{false}, sees_{false};
};

Gate& gate() {
  static auto* made = new Gate;  // outlives what runs at exit
  return *made;
}

}  // namespace
}  // namespace keepstep::nccl
