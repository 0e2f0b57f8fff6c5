// The event ring: its shared-memory format, and how a ring is made, checked and claimed. C++17, no Python, no dependencies.
//
// One ring holds what one rank did last. Threads of one process write it; any number of readers, in any process, read it
// while it is written or after its writer died. Nobody ever waits for anybody. docs/design/ring.md has the reasoning.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "clock.hpp"

namespace keepstep::ring {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the ring is read on the machine type that wrote it");

using Word = std::atomic<std::uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free, "words in shared memory must not hide a lock");

constexpr auto relaxed = std::memory_order_relaxed;
constexpr auto acquire = std::memory_order_acquire;
constexpr auto release = std::memory_order_release;

// --- format -----------------------------------------------------------------------------------------------------

constexpr std::uint64_t kMagic = 0x474e52505453504bULL;  // "KPSTPRNG"
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kMinRecords = 64;
constexpr std::uint64_t kMaxRecords = 1ULL << 22;
constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kStreamSlots = 4096;
constexpr std::size_t kStreamProbes = 128;
constexpr std::size_t kGroupSlots = 1024;
constexpr std::int32_t kMostGroups = 1 << 15;  // in a writer's life; the number of a group is never used again
constexpr std::size_t kSiteSlots = 4096;
constexpr std::size_t kArenaBytes = 1U << 20;
constexpr std::size_t kRecordsPerBlock = 64;  // ends change their block's word, so that a reader looks only where some came
constexpr std::size_t kMaxText = 1024;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Header {
  // Written once by create(), guarded by `check`.
  Word magic;
  Word version;
  Word records;
  Word total_bytes;
  Word check;

  // Written by the process that claims the ring; `epoch` is odd meanwhile.
  alignas(64) Word claim;  // pid in the low half, its start time in the high half; 0 = nobody
  Word epoch;
  Word base;       // first ticket of this claim
  Word rank_world; // rank in the low half
  Word pid;
  Word incarnation;
  Word monotonic_ns;
  Word realtime_ns;

  alignas(64) Word next;  // next ticket
  alignas(64) Word dropped;
  Word late;        // ends that came after their record was overwritten
  Word overflowed;  // groups, sites and streams that found no room
  Word closed;
  Word arena_used;
  Word first_step;  // of the training, of this claim's first iteration
  Word writers;     // how many writers the claiming process has (low byte), and which claim it is about (the rest)
};
static_assert(sizeof(Header) <= kHeaderBytes);

// Ticket word of record i: 2i+1 while written, 2i+2 once published. It only ever grows.
struct alignas(64) Slot {
  Word ticket;
  Word start_ns;
  Word end;   // lap tag (15 bits), failed (1), duration + 1 in ns (48); 0 in the low 49 bits = in flight
  Word wait;  // lap tag (15 bits), 0 (1), start of the wait after start_ns + 1 (48)
  Word bytes;
  Word seq_peer;     // seq in the low half
  Word thread_site;  // thread in the low half
  Word meta;         // group (16), kind (8), op (8), flags (8, element type 5, reduction 3), check (16), from the low end
};
static_assert(sizeof(Slot) == 64);

struct alignas(64) Stream {
  Word key;  // 0 = free
  Word started;
  Word completed;
  Word last_start_ns;
  Word last_end_ns;
  Word last_op;
  Word spare[2];
};
static_assert(sizeof(Stream) == 64);

// Where things lie; everything but the number of records is fixed by the version.
struct Layout {
  std::uint64_t records;

  std::size_t streams() const { return kHeaderBytes; }
  std::size_t groups() const { return streams() + kStreamSlots * sizeof(Stream); }
  std::size_t sites() const { return groups() + kGroupSlots * sizeof(Word); }
  std::size_t arena() const { return sites() + kSiteSlots * sizeof(Word); }
  std::size_t blocks() const { return arena() + kArenaBytes; }
  std::size_t block_count() const { return records / kRecordsPerBlock; }
  std::size_t slots() const { return (blocks() + block_count() * sizeof(Word) + 63) / 64 * 64; }
  std::size_t total() const { return slots() + records * sizeof(Slot); }
};

constexpr std::uint64_t kDurationMask = (1ULL << 48) - 1;
constexpr std::uint64_t kFailedBit = 1ULL << 48;

constexpr std::uint64_t writing(std::uint64_t index) { return 2 * index + 1; }
constexpr std::uint64_t published(std::uint64_t index) { return 2 * index + 2; }
constexpr std::uint64_t lap_tag(std::uint64_t index, std::uint64_t records) { return (index / records) << 49; }
constexpr std::uint64_t halves(std::uint32_t low, std::uint32_t high) { return low | static_cast<std::uint64_t>(high) << 32; }

// Time after `start`, shifted by one so that 0 is free to mean "not yet"; saturates after 3 days.
inline std::uint64_t offset_word(std::uint64_t now, std::uint64_t start) {
  const std::uint64_t offset = now > start ? now - start : 0;
  return offset >= kDurationMask ? kDurationMask : offset + 1;
}

// Where a table's entry lies: its place in the arena in bits 32 to 51, its length in the low half. Of a group also the lap:
// group `lap * kGroupSlots + place` is the one that has this place now.
constexpr std::uint64_t kEntered = 1ULL << 63;
constexpr std::uint64_t kLaps = std::uint64_t{kMostGroups / kGroupSlots - 1} << 52;
constexpr std::uint64_t kFreed = 1;  // key of a stream that was freed: those behind it are looked for beyond it
inline std::int32_t group_number(std::uint64_t entry, std::size_t place) {
  return static_cast<std::int32_t>((entry & kLaps) >> 52) * static_cast<std::int32_t>(kGroupSlots) + static_cast<std::int32_t>(place);
}

// 16 bits over what never changes once a record is published; a damaged file shows here.
inline std::uint64_t record_check(std::uint64_t index, std::uint64_t start, std::uint64_t bytes, std::uint64_t seq_peer,
                                  std::uint64_t thread_site, std::uint64_t meta) {
  constexpr std::uint64_t k = 0x9e3779b97f4a7c15ULL;
  const auto turn = [](std::uint64_t v, int by) { return v << by | v >> (64 - by); };
  std::uint64_t h = (index + 1) * k ^ turn(start * k, 29) ^ turn(bytes * k, 7) ^ turn(seq_peer * k, 41) ^
                    turn(thread_site * k, 53) ^ turn((meta & 0x0000ffffffffffffULL) * k, 17);
  h *= 0xd6e8feb86659fd93ULL;
  return h >> 48;
}

inline std::uint32_t fnv1a(const void* data, std::size_t size) {
  std::uint32_t h = 2166136261U;
  for (std::size_t i = 0; i < size; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 16777619U;
  return h;
}

inline std::uint64_t header_check(std::uint64_t records, std::uint64_t total_bytes) {
  const std::uint64_t words[] = {kMagic, kVersion, records, total_bytes};
  return fnv1a(words, sizeof words);
}

enum class Kind : std::uint8_t { collective = 1, p2p = 2, phase = 3, communicator = 4, device = 5 };
constexpr std::uint8_t kOpSend = 10;
constexpr std::uint8_t kOpRecv = 11;
constexpr std::uint16_t kFlagFailed = 4;

// Streams: all collectives of a group share one; p2p has one per peer and direction.
inline std::uint64_t stream_key(std::uint8_t kind, std::uint8_t op, std::int16_t group, std::int32_t peer) {
  const bool p2p = kind == static_cast<std::uint8_t>(Kind::p2p);
  const std::uint64_t direction = !p2p ? 0 : op == kOpSend ? 1 : op == kOpRecv ? 2 : 3;
  const std::uint32_t whom = p2p ? static_cast<std::uint32_t>(peer) : 0xffffffffU;
  return 1ULL << 63 | direction << 48 | static_cast<std::uint64_t>(static_cast<std::uint16_t>(group)) << 32 | whom;
}

// --- processes, mappings ------------------------------------------------------------------------------------------

// Grows in every forked child, so that a child knows its parent's writers as not its own, without a system call.
inline std::atomic<std::uint32_t>& fork_generation() {
  static std::atomic<std::uint32_t> generation{0};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation().fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation;
}

inline std::uint32_t thread_id(std::uint32_t generation) {
  struct Cached {
    std::uint32_t id;
    std::uint32_t generation;
  };
  static thread_local Cached cached{0, 0};
  if (cached.id == 0 || cached.generation != generation)
    cached = {static_cast<std::uint32_t>(syscall(SYS_gettid)), generation};
  return cached.id;
}

// (start time in clock ticks since boot, state) of a process; false when there is none or it cannot be looked up.
inline bool process_stat(std::uint32_t pid, std::uint64_t& start_ticks, char& state) {
  char path[32], text[1024];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  if (got <= 0) return false;
  text[got] = 0;
  const char* after_name = std::strrchr(text, ')');
  if (after_name == nullptr) return false;
  unsigned long long ticks = 0;
  if (std::sscanf(after_name + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &state,
                  &ticks) != 2)
    return false;
  start_ticks = ticks;
  return true;
}

inline std::uint64_t claim_of_this_process() {
  std::uint64_t ticks = 0;
  char state = 0;
  process_stat(static_cast<std::uint32_t>(getpid()), ticks, state);
  return halves(static_cast<std::uint32_t>(getpid()), static_cast<std::uint32_t>(ticks));
}

// Whether the process that made this claim still runs: a zombie does not, nor does another that got its pid.
inline bool claim_lives(std::uint64_t claim) {
  const auto pid = static_cast<std::uint32_t>(claim);
  if (pid == 0 || pid > 0x7fffffffU) return false;
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
  std::uint64_t ticks = 0;
  char state = 0;
  if (!process_stat(pid, ticks, state)) return kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM;
  const auto started = static_cast<std::uint32_t>(claim >> 32);
  return state != 'Z' && state != 'X' && (started == 0 || started == static_cast<std::uint32_t>(ticks));
}

class File {  // a descriptor, closed at the end when it was opened here
 public:
  File(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)), owned_(true) {
    if (fd_ < 0) throw Error(std::string("cannot open: ") + std::strerror(errno));
  }
  explicit File(int fd) : fd_(fd), owned_(false) {}
  ~File() {
    if (owned_) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  std::uint64_t size() const {
    struct stat info;
    if (fstat(fd_, &info) != 0) throw Error(std::string("cannot stat: ") + std::strerror(errno));
    if (!S_ISREG(info.st_mode)) throw Error("not a regular file, so not a ring");
    return static_cast<std::uint64_t>(info.st_size);
  }
  // Only what can never shrink may be mapped: a shrunk file answers a load with SIGBUS.
  bool mappable() const {
    const int seals = fcntl(fd_, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  }

 private:
  int fd_;
  bool owned_;
};

// Checks the first words of a ring against the size of the file it came from; the layout it has, or Error.
inline Layout checked_layout(const std::uint64_t (&words)[5], std::uint64_t file_bytes) {
  if (words[0] != kMagic) throw Error("not a keepstep ring (foreign content)");
  if (words[1] != kVersion)
    throw Error("ring format " + std::to_string(words[1]) + ", this keepstep reads format " + std::to_string(kVersion) +
                ": use the keepstep version that wrote it");
  const Layout layout{words[2]};
  if (words[4] != header_check(words[2], words[3])) throw Error("torn ring: the header does not match its checksum");
  if (layout.records < kMinRecords || layout.records > kMaxRecords || (layout.records & (layout.records - 1)) != 0 ||
      layout.total() != words[3])
    throw Error("torn ring: the header names impossible sizes (" + std::to_string(words[2]) + " records, " +
                std::to_string(words[3]) + " bytes)");
  if (file_bytes < layout.total())
    throw Error("truncated ring: " + std::to_string(file_bytes) + " of " + std::to_string(layout.total()) + " bytes");
  return layout;
}

inline Layout read_layout(const File& file) {
  const std::uint64_t size = file.size();
  std::uint64_t words[5] = {};
  if (size < kHeaderBytes) throw Error("truncated: " + std::to_string(size) + " bytes, no ring header fits in that");
  if (pread(file.fd(), words, sizeof words, 0) != static_cast<ssize_t>(sizeof words)) throw Error("cannot read the header");
  return checked_layout(words, size);
}

// A new, empty ring in anonymous memory that goes when its last holder does; its size can never change.
inline int create(std::uint64_t wanted) {
  if (wanted < kMinRecords || wanted > kMaxRecords)
    throw Error("records must be " + std::to_string(kMinRecords) + " to " + std::to_string(kMaxRecords) + ", not " +
                std::to_string(wanted));
  Layout layout{kMinRecords};
  while (layout.records < wanted) layout.records *= 2;
  constexpr unsigned kNoExecSeal = 8U;  // MFD_NOEXEC_SEAL, Linux 6.3
  int fd = memfd_create("keepstep-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0) fd = memfd_create("keepstep-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw Error(std::string("memfd_create: ") + std::strerror(errno));
  const std::uint64_t head[5] = {kMagic, kVersion, layout.records, layout.total(), header_check(layout.records, layout.total())};
  // Pages are taken now: a writer that found no memory later would be killed by SIGBUS.
  int failed = posix_fallocate(fd, 0, static_cast<off_t>(layout.total()));
  if (failed == 0 && pwrite(fd, head, sizeof head, 0) != static_cast<ssize_t>(sizeof head)) failed = errno;
  if (failed == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) failed = errno;
  if (failed != 0) {
    close(fd);
    throw Error("no memory for a ring of " + std::to_string(layout.total()) + " bytes: " + std::strerror(failed));
  }
  return fd;
}

}  // namespace keepstep::ring
