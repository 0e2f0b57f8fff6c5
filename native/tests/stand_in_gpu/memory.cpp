// The stand-in's memory: of the device and pinned, both host memory. See device.hpp.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "control.hpp"
#include "device.hpp"

namespace stand_in {
namespace {

struct Block {
  std::size_t bytes;
  Place place;
  bool ours;
};

struct Blocks {
  std::mutex lock;
  std::map<std::uintptr_t, Block> all;
};
Blocks& blocks() {
  static auto* made = new Blocks;
  return *made;
}

constexpr std::size_t kAlign = 2U << 20;

std::size_t capacity() {
  static const auto bytes = static_cast<std::size_t>(setting("STAND_IN_MEMORY_GB", 8) * (1U << 30));
  return bytes;
}

Holder* holder_of(int device, int pid) {  // pid 0: a free place
  for (Holder& one : control().holders[device % kMostDevices])
    if (one.pid == pid) return &one;
  return nullptr;
}

void hold(int device, std::int64_t bytes) {
  Holder* mine = holder_of(device, getpid());
  while (mine == nullptr) {
    Holder* place = holder_of(device, 0);
    std::int32_t none = 0;
    if (place == nullptr) return;  // more processes than we keep: not counted
    if (place->pid.compare_exchange_strong(none, getpid())) mine = place;
  }
  mine->bytes += bytes;
}

// Calls `each` with every holder; what a dead one had is free STAND_IN_FREED_AFTER_MS after its death was first seen.
template <typename Each>
void for_holders(int device, Each each) {
  static const Ns late = static_cast<Ns>(setting("STAND_IN_FREED_AFTER_MS", 0) * 1e6);
  for (Holder& one : control().holders[device % kMostDevices]) {
    const std::int32_t pid = one.pid;
    if (pid == 0) continue;
    if (pid != getpid() && is_dead(pid)) {
      std::int64_t unseen = 0;
      one.gone_ns.compare_exchange_strong(unseen, real_now());
      if (real_now() - one.gone_ns >= late) {
        one.bytes = 0;
        one.gone_ns = 0;
        one.pid = 0;
        continue;
      }
    }
    each(pid, one.bytes.load());
  }
}

std::size_t in_use(int device) {  // by all processes
  std::int64_t sum = 0;
  for_holders(device, [&sum](std::int32_t, std::int64_t bytes) { sum += bytes; });
  return static_cast<std::size_t>(sum);
}

}  // namespace

int allocate(void** memory, std::size_t bytes, Memory kind) {
  *memory = nullptr;
  if (const int error = failed()) return error;
  if (bytes == 0) return kOk;
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  const int device = current_device();
  if (kind == Memory::device && in_use(device) + bytes > capacity()) return kNoMemory;
  // Pages come with their first use: what is never touched costs nothing.
  const std::size_t mapped = (bytes + kAlign - 1) / kAlign * kAlign + kAlign;
  void* whole = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return kNoMemory;
  const auto from = reinterpret_cast<std::uintptr_t>(whole), start = (from + kAlign - 1) / kAlign * kAlign;
  const std::uintptr_t end = start + mapped - kAlign;
  if (start > from) munmap(whole, start - from);
  if (from + mapped > end) munmap(reinterpret_cast<void*>(end), from + mapped - end);
  held.all[start] = {bytes, {kind, device}, true};
  if (kind == Memory::device) hold(device, static_cast<std::int64_t>(bytes));
  *memory = reinterpret_cast<void*>(start);
  return kOk;
}

void release(void* memory) {
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  const auto found = held.all.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == held.all.end() || !found->second.ours) return;
  const auto& [kind, device] = found->second.place;
  if (kind == Memory::device) hold(device, -static_cast<std::int64_t>(found->second.bytes));
  munmap(memory, (found->second.bytes + kAlign - 1) / kAlign * kAlign);
  held.all.erase(found);
}

Place place_of(const void* memory) {
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  auto found = held.all.upper_bound(at);
  if (found == held.all.begin()) return {};
  --found;
  return at < found->first + found->second.bytes ? found->second.place : Place{};
}

void adopt(void* memory, std::size_t bytes) {
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  held.all[reinterpret_cast<std::uintptr_t>(memory)] = {bytes, {Memory::pinned, current_device()}, false};
}

void disown(void* memory) {
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  held.all.erase(reinterpret_cast<std::uintptr_t>(memory));
}

void memory_info(int device, std::size_t* available, std::size_t* total) {
  *total = capacity();
  *available = capacity() - std::min(capacity(), in_use(device));
}

void memory_info(std::size_t* available, std::size_t* total) { memory_info(current_device(), available, total); }

}  // namespace stand_in

// For the driver's library, which knows of dead processes, too. Returns how many there are, also beyond `most`.
extern "C" unsigned stand_in_holders(unsigned device, unsigned most, unsigned* pids, unsigned long long* bytes) {
  unsigned count = 0;
  stand_in::for_holders(static_cast<int>(device), [&](std::int32_t pid, std::int64_t held) {
    if (count < most) {
      pids[count] = static_cast<unsigned>(pid);
      bytes[count] = static_cast<unsigned long long>(held);
    }
    ++count;
  });
  return count;
}

extern "C" void stand_in_memory(unsigned device, unsigned long long* available, unsigned long long* total) {
  std::size_t left = 0, all = 0;
  stand_in::memory_info(static_cast<int>(device), &left, &all);
  *available = left;
  *total = all;
}
