// The stand-in's memory: of the device and pinned, both host memory. See device.hpp.
#include <sys/mman.h>

#include <cstring>
#include <map>

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

std::size_t in_use(const Blocks& held, int device) {
  std::size_t sum = 0;
  for (const auto& [at, block] : held.all)
    if (block.place.kind == Memory::device && block.place.device == device) sum += block.bytes;
  return sum;
}

}  // namespace

int allocate(void** memory, std::size_t bytes, Memory kind) {
  *memory = nullptr;
  if (const int error = failed()) return error;
  if (bytes == 0) return kOk;
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  const int device = current_device();
  if (kind == Memory::device && in_use(held, device) + bytes > capacity()) return kNoMemory;
  // Pages come with their first use: what is never touched costs nothing.
  const std::size_t mapped = (bytes + kAlign - 1) / kAlign * kAlign + kAlign;
  void* whole = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return kNoMemory;
  const auto from = reinterpret_cast<std::uintptr_t>(whole), start = (from + kAlign - 1) / kAlign * kAlign;
  const std::uintptr_t end = start + mapped - kAlign;
  if (start > from) munmap(whole, start - from);
  if (from + mapped > end) munmap(reinterpret_cast<void*>(end), from + mapped - end);
  held.all[start] = {bytes, {kind, device}, true};
  *memory = reinterpret_cast<void*>(start);
  return kOk;
}

void release(void* memory) {
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  const auto found = held.all.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == held.all.end() || !found->second.ours) return;
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

void memory_info(std::size_t* available, std::size_t* total) {
  Blocks& held = blocks();
  const std::lock_guard<std::mutex> guard(held.lock);
  *total = capacity();
  *available = capacity() - in_use(held, current_device());
}

}  // namespace stand_in
