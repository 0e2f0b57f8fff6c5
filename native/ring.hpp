// The event ring: shared-memory format and writer. One header, C++17, no Python, no dependencies.
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
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

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
constexpr std::size_t kSiteSlots = 4096;
constexpr std::size_t kArenaBytes = 1U << 20;
constexpr std::size_t kRecordsPerBlock = 64;  // ends are counted per block, so that a reader looks only where some came
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
  Word meta;         // group (16), kind (8), op (8), flags (16), check (16), from the low end
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

enum class Kind : std::uint8_t { collective = 1, p2p = 2, phase = 3 };
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

// --- clock, processes, mappings -----------------------------------------------------------------------------------

inline std::uint64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<std::uint64_t>(t.tv_nsec);
}
inline std::uint64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

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

// --- writer -------------------------------------------------------------------------------------------------------

class Writer;

// One operation between its start and its end. Copy-free: lives where the caller keeps it, not longer than its Writer.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  inline void waiting() noexcept;           // the caller begins to wait for it; the first call counts
  inline void finish(bool failed) noexcept;  // the first call counts
  bool ended() const noexcept { return ended_.load(relaxed); }
  std::uint32_t seq() const noexcept { return seq_; }

 private:
  friend class Writer;
  Writer* writer_ = nullptr;
  Slot* slot_ = nullptr;  // null: the record was dropped
  Stream* stream_ = nullptr;
  std::uint64_t index_ = 0;
  std::uint64_t start_ns_ = 0;
  std::uint32_t seq_ = 0;
  std::atomic<bool> ended_{false};
};

class Writer {
 public:
  // Claims the ring for this process. Error when it is no ring, too old or new, or its writer lives.
  Writer(const File& file, std::int32_t rank, std::int32_t world_size, std::uint64_t incarnation) : layout_(read_layout(file)) {
    if (!file.mappable()) throw Error("not a live ring: only one made by create() can be written (this is a plain file)");
    void* memory = mmap(nullptr, layout_.total(), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
    if (memory == MAP_FAILED) throw Error(std::string("cannot map: ") + std::strerror(errno));
    memory_ = static_cast<char*>(memory);
    generation_ = fork_generation().load(relaxed);
    try {
      claim(rank, world_size, incarnation);
    } catch (...) {
      munmap(memory_, layout_.total());
      throw;
    }
  }

  // Nothing of this process can be inside start() any more, so that another may claim at once.
  ~Writer() {
    if (generation_ == fork_generation().load(relaxed)) {
      close();
      header().claim.store(0, release);
    }
    munmap(memory_, layout_.total());
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Publishes the start of an operation. Never blocks, never fails: without a slot it counts a drop.
  void start(Operation& operation, std::uint8_t kind, std::uint8_t op, std::int16_t group, std::int32_t peer,
             std::uint64_t bytes, std::uint16_t flags, std::uint32_t site) noexcept {
    if (!writable()) return;
    const std::uint64_t now = monotonic_ns();
    operation.writer_ = this;
    operation.start_ns_ = now;
    operation.seq_ = next_seq(operation, kind, op, group, peer, now);

    const std::uint64_t index = header().next.fetch_add(1, relaxed);
    Slot& slot = slots()[index & (layout_.records - 1)];
    std::uint64_t before = slot.ticket.load(relaxed);
    if ((before & 1) != 0 || before > writing(index) ||
        !slot.ticket.compare_exchange_strong(before, writing(index), std::memory_order_acq_rel, relaxed)) {
      drop();
      return;
    }
    const std::uint64_t tag = lap_tag(index, layout_.records);
    const std::uint64_t seq_peer = halves(operation.seq_, static_cast<std::uint32_t>(peer));
    const std::uint64_t thread_site = halves(thread_id(generation_), site);
    const std::uint64_t meta = static_cast<std::uint16_t>(group) | static_cast<std::uint64_t>(kind) << 16 |
                               static_cast<std::uint64_t>(op) << 24 | static_cast<std::uint64_t>(flags) << 32;
    // Release on each: whoever sees one of these values also sees the odd ticket before them.
    slot.start_ns.store(now, release);
    slot.end.store(tag, release);
    slot.wait.store(tag, release);
    slot.bytes.store(bytes, release);
    slot.seq_peer.store(seq_peer, release);
    slot.thread_site.store(thread_site, release);
    slot.meta.store(meta | record_check(index, now, bytes, seq_peer, thread_site, meta) << 48, release);
    slot.ticket.store(published(index), release);
    operation.index_ = index;
    operation.slot_ = &slot;
  }

  void drop() noexcept {
    if (writable()) header().dropped.fetch_add(1, relaxed);
  }

  // Id of a group with these properties, the same for the same properties; -1 (counted) when there is no room.
  std::int32_t group(const std::string& name, const std::vector<std::int32_t>& members, const std::string& backend,
                     const std::string& desc) noexcept {
    try {
      std::string blob;
      const std::vector<std::int32_t> runs = runs_of(members);
      append_text(blob, name);
      append_text(blob, backend);
      append_text(blob, desc);
      blob.append(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(std::int32_t));
      return enter(groups_, reinterpret_cast<Word*>(memory_ + layout_.groups()), 0, kGroupSlots, blob, -1);
    } catch (...) {
      return -1;
    }
  }

  // Id of a call site's text, the same for the same text; 0 (counted) when there is no room.
  std::uint32_t site(const std::string& text) noexcept {
    try {
      std::string blob;
      append_text(blob, text);
      return static_cast<std::uint32_t>(
          enter(sites_, reinterpret_cast<Word*>(memory_ + layout_.sites()), 1, kSiteSlots, blob, 0));
    } catch (...) {
      return 0;
    }
  }

  // No more records from here; says to readers that the end was orderly.
  void close() noexcept {
    if (!writable()) return;
    closed_.store(true, relaxed);
    header().closed.store(1, release);
  }

  // The training goes on from there: its steps are counted from it.
  void begins_at(std::uint64_t step) noexcept {
    if (writable()) header().first_step.store(step, release);
  }

  bool writable() const noexcept { return generation_ == fork_generation().load(relaxed) && !closed_.load(relaxed); }
  std::uint64_t dropped() const noexcept { return header().dropped.load(relaxed); }
  std::uint64_t incarnation() const noexcept { return header().incarnation.load(relaxed); }

 private:
  friend class Operation;
  using Ids = std::unordered_map<std::string, std::int32_t>;

  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Slot* slots() const { return reinterpret_cast<Slot*>(memory_ + layout_.slots()); }
  Stream* streams() const { return reinterpret_cast<Stream*>(memory_ + layout_.streams()); }
  Word& block_of(std::uint64_t index) const {
    return reinterpret_cast<Word*>(memory_ + layout_.blocks())[(index & (layout_.records - 1)) / kRecordsPerBlock];
  }

  void claim(std::int32_t rank, std::int32_t world_size, std::uint64_t incarnation) {
    Header& h = header();
    const std::uint64_t mine = claim_of_this_process();
    std::uint64_t held = h.claim.load(acquire);
    if (held != 0 && claim_lives(held))
      throw Error("claimed by process " + std::to_string(static_cast<std::uint32_t>(held)) + ", which still runs");
    if (!h.claim.compare_exchange_strong(held, mine, std::memory_order_acq_rel, acquire))
      throw Error("claimed by process " + std::to_string(static_cast<std::uint32_t>(held)) + " at the same moment");
    const bool used = h.epoch.load(relaxed) != 0;
    const std::uint64_t epoch = h.epoch.load(relaxed) | 1;
    h.epoch.store(epoch, release);
    if (used) {
      wipe();
      const std::uint64_t last = h.incarnation.load(relaxed);
      if (incarnation <= last) incarnation = last + 1;
    }
    h.base.store(h.next.load(relaxed), release);
    h.rank_world.store(halves(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(world_size)), release);
    h.pid.store(static_cast<std::uint64_t>(getpid()), release);
    h.incarnation.store(incarnation, release);
    h.monotonic_ns.store(monotonic_ns(), release);
    h.realtime_ns.store(clock_ns(CLOCK_REALTIME), release);
    h.closed.store(0, release);
    h.first_step.store(0, release);
    h.epoch.store(epoch + 1, release);
  }

  // Takes a dead writer's leftovers away: half-written slots, and ids that mean nothing to the new writer.
  void wipe() {
    const auto clear = [this](std::size_t from, std::size_t to) {
      Word* words = reinterpret_cast<Word*>(memory_ + from);
      for (std::size_t i = 0; i < (to - from) / sizeof(Word); ++i) words[i].store(0, release);
    };
    clear(layout_.groups(), layout_.arena());
    clear(layout_.streams(), layout_.groups());
    for (std::uint64_t i = 0; i < layout_.records; ++i) slots()[i].ticket.store(0, release);
    header().arena_used.store(0, release);
  }

  std::uint32_t next_seq(Operation& operation, std::uint8_t kind, std::uint8_t op, std::int16_t group, std::int32_t peer,
                         std::uint64_t now) noexcept {
    if (kind == static_cast<std::uint8_t>(Kind::phase)) return phases_[op].fetch_add(1, relaxed) + 1;
    if (group < 0) return 0;
    Stream* stream = find_stream(stream_key(kind, op, group, peer));
    operation.stream_ = stream;
    if (stream == nullptr) return 0;
    const std::uint64_t seq = stream->started.fetch_add(1, relaxed) + 1;
    stream->last_start_ns.store(now, relaxed);
    stream->last_op.store(halves(op, kind), relaxed);
    return static_cast<std::uint32_t>(seq);
  }

  Stream* find_stream(std::uint64_t key) noexcept {
    std::uint64_t place = (key * 0x9e3779b97f4a7c15ULL) >> 32;
    for (std::size_t probe = 0; probe < kStreamProbes; ++probe, ++place) {
      Stream& stream = streams()[place & (kStreamSlots - 1)];
      std::uint64_t found = stream.key.load(relaxed);
      if (found == key) return &stream;
      if (found == 0 && (stream.key.compare_exchange_strong(found, key, std::memory_order_acq_rel, relaxed) || found == key))
        return &stream;
    }
    header().overflowed.fetch_add(1, relaxed);
    return nullptr;
  }

  // Members as runs (first, stride, count): the world group of 100,000 ranks takes 12 bytes.
  static std::vector<std::int32_t> runs_of(const std::vector<std::int32_t>& members) {
    std::vector<std::int32_t> runs;
    for (std::size_t i = 0; i < members.size();) {
      const std::int64_t stride = i + 1 < members.size() ? std::int64_t{members[i + 1]} - members[i] : 1;
      std::size_t end = i + 1;
      while (end < members.size() && std::int64_t{members[end]} - members[end - 1] == stride) ++end;
      runs.insert(runs.end(), {members[i], static_cast<std::int32_t>(stride), static_cast<std::int32_t>(end - i)});
      i = end;
    }
    return runs;
  }

  static void append_text(std::string& blob, const std::string& text) {
    std::size_t size = text.size();
    if (size > kMaxText) {
      size = kMaxText;
      while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;  // not inside a UTF-8 character
    }
    const auto length = static_cast<std::uint32_t>(size);
    blob.append(reinterpret_cast<const char*>(&length), sizeof length);
    blob.append(text, 0, size);
    blob.append((4 - size % 4) % 4, '\0');
  }

  // Blob in the arena: checksum, then the content; then its place (offset, length) becomes visible in the table.
  std::int32_t enter(Ids& ids, Word* table, std::size_t first, std::size_t slots, const std::string& blob, std::int32_t none) {
    if (!writable()) return none;
    const std::lock_guard<std::mutex> guard(tables_);
    const auto known = ids.find(blob);
    if (known != ids.end()) return known->second;
    const std::size_t id = first + ids.size();
    const std::uint64_t at = header().arena_used.load(relaxed);
    const std::size_t words = (sizeof(std::uint32_t) + blob.size() + 7) / 8;
    if (id >= slots || at + words * 8 > kArenaBytes) {
      header().overflowed.fetch_add(1, relaxed);
      return none;
    }
    std::string content(words * 8, '\0');
    const std::uint32_t check = fnv1a(blob.data(), blob.size());
    std::memcpy(content.data(), &check, sizeof check);
    std::memcpy(content.data() + sizeof check, blob.data(), blob.size());
    Word* arena = reinterpret_cast<Word*>(memory_ + layout_.arena() + at);
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t word;
      std::memcpy(&word, content.data() + i * 8, 8);
      arena[i].store(word, relaxed);
    }
    header().arena_used.store(at + words * 8, relaxed);
    table[id].store(halves(static_cast<std::uint32_t>(blob.size()), static_cast<std::uint32_t>(at)) | 1ULL << 63, release);
    ids.emplace(blob, static_cast<std::int32_t>(id));
    return static_cast<std::int32_t>(id);
  }

  Layout layout_;
  char* memory_ = nullptr;
  std::uint32_t generation_ = 0;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> phases_[256] = {};
  std::mutex tables_;
  Ids groups_, sites_;
};

inline void Operation::waiting() noexcept {
  if (slot_ == nullptr || !writer_->writable() || slot_->ticket.load(acquire) != published(index_)) return;
  std::uint64_t expected = lap_tag(index_, writer_->layout_.records);
  slot_->wait.compare_exchange_strong(expected, expected | offset_word(monotonic_ns(), start_ns_), release, relaxed);
}

inline void Operation::finish(bool failed) noexcept {
  if (ended_.exchange(true, relaxed) || writer_ == nullptr || !writer_->writable()) return;
  const std::uint64_t now = monotonic_ns();
  if (slot_ != nullptr) {
    std::uint64_t expected = lap_tag(index_, writer_->layout_.records);
    const std::uint64_t end = expected | offset_word(now, start_ns_) | (failed ? kFailedBit : 0);
    // The lap tag decides; the ticket is looked at first so that a tag that came round again cannot match.
    if (slot_->ticket.load(acquire) == published(index_) &&
        slot_->end.compare_exchange_strong(expected, end, release, relaxed))
      writer_->block_of(index_).fetch_add(1, release);
    else
      writer_->header().late.fetch_add(1, relaxed);
  }
  if (stream_ != nullptr) {
    stream_->last_end_ns.store(now, relaxed);
    stream_->completed.fetch_add(1, release);
  }
}

}  // namespace keepstep::ring
