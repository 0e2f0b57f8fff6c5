// The link table: shared-memory format and writer's operations. One header, C++17, no Python, nothing of the C++ library.
//
// It counts what one process has under way on each of NCCL's network links. Any number of threads write it, without locks;
// any process reads it, also after its writer was killed. docs/design/links.md has the reasoning.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace keepstep::links {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the table is read on the machine type that wrote it");

using Word = std::atomic<uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free, "words in shared memory must not hide a lock");

constexpr auto relaxed = std::memory_order_relaxed;
constexpr auto acquire = std::memory_order_acquire;
constexpr auto release = std::memory_order_release;
constexpr auto acq_rel = std::memory_order_acq_rel;

// --- format -----------------------------------------------------------------------------------------------------

constexpr uint64_t kMagic = 0x4b4e494c5453504bULL;  // "KPSTLINK"
constexpr uint64_t kVersion = 1;
constexpr uint64_t kMinLinks = 16;
constexpr uint64_t kMaxLinks = 1 << 16;
constexpr uint32_t kComms = 255;
constexpr uint32_t kForeign = 255;  // transfers made for another process, whose communicators nobody here knows
constexpr uint64_t kWindow = 65;    // completions: MegaTrace's 64 (section III-B, equation 1) lie between 65 times
constexpr uint32_t kProbes = 64;
constexpr size_t kHeaderBytes = 4096;

struct Header {
  Word magic, version, links, total_bytes, check;  // written once by the creator

  alignas(64) Word claim;  // pid in the low half, its start time in the high half; 0: nobody yet
  Word epoch;              // odd while the table is wiped for another process
  Word abi;                // version of NCCL's profiler interface in use
  Word pid, monotonic_ns, realtime_ns;

  alignas(64) Word lost_comms;  // found no row
  Word lost_links;
  Word lost_operations;  // no slot to follow them by
  Word lost_notes;       // another thread was writing the communicator's last operation
  Word stale;            // events of what has ended, or of nothing known
  Word foreign;          // operations made for another process
};
static_assert(sizeof(Header) <= kHeaderBytes);

enum CommState : uint64_t { kFree, kOpening, kOpen, kClosed };  // the low two bits of Comm::state; above: its generation

struct Operation {  // the last one that was started, as a whole: `check` covers the other words and the row's state
  Word version;     // odd while written
  Word check;
  Word function[2], datatype[2], algorithm[2], protocol;  // names, padded with zeros
  Word seq, count, started_ns;
  Word how;  // channels (8), warps (8), kind (8), 0 (8), root or peer (32), from the low end
};

struct alignas(64) Comm {
  Word state;
  Word identity_check;  // over the next eleven
  Word id;
  Word rank_size;  // rank in the low half
  Word nodes;      // 0: not known
  Word name[8];
  Word opened_ns, closed_ns;
  Word collectives, p2ps, enqueued;       // started; ended, which means enqueued
  Word kernels, kernel_ns, kernel_end_ns;  // sampled; by the GPU's clock where NCCL gives it
  alignas(64) Operation last;
  Word spare[11];
};
static_assert(sizeof(Comm) == 384);

struct Completion {
  Word time;    // units of 256 ns (48 bits), lap (16)
  Word amount;  // bytes (32), busy time in units of 256 ns (24), lap (8), from the low end
};

// The five counters only grow, each never above the one before it, whatever moment the writer is killed at.
struct alignas(64) Link {
  Word key;        // 0: free
  Word started;    // steps that have a buffer
  Word ready;      // send: the GPU filled it
  Word posted;     // handed to the network
  Word completed;  // send: taken off; receive: arrived
  Word finished;   // receive: the GPU took it
  Word bytes;      // of the completed
  Word busy;       // time with something posted, in units of 256 ns
  Word since_ns;   // when something was posted after nothing was
  Word posted_ns, completed_ns, moved_ns;  // last times; `moved`: anything
  Word abandoned;                          // steps that ended without completing
  Word net_posted, net_completed, net_bytes;  // work requests or socket calls, of NCCL builds that tell of them
  Completion window[kWindow];
};
static_assert(sizeof(Link) == 1216);

constexpr size_t total_bytes(uint64_t links) { return kHeaderBytes + kComms * sizeof(Comm) + links * sizeof(Link); }

// Link keys: used (1), send (1), channel (8), communicator (8), its generation (16), peer (24), from the low end.
constexpr uint64_t link_key(bool send, uint32_t channel, uint32_t comm, uint64_t generation, uint32_t peer) {
  return 1 | static_cast<uint64_t>(send) << 1 | static_cast<uint64_t>(channel & 0xff) << 2 |
         static_cast<uint64_t>(comm & 0xff) << 10 | (generation & 0xffff) << 18 |
         static_cast<uint64_t>(peer & 0xffffff) << 34;
}
constexpr uint32_t comm_of(uint64_t key) { return static_cast<uint32_t>(key >> 10 & 0xff); }
constexpr uint64_t generation_of(uint64_t key) { return key >> 18 & 0xffff; }
constexpr uint64_t kTaken = 2;  // a key, while a link of a closed communicator is made another's

constexpr uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9e3779b97f4a7c15ULL;
  return h ^ h >> 29;
}

inline uint64_t header_check(uint64_t links) { return mix(mix(kMagic, kVersion), links) | 1; }

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ULL + static_cast<uint64_t>(t.tv_nsec);
}

// Text in words, cut to fit; anything but printable ASCII becomes '?'.
inline void put_text(Word* words, size_t count, const char* text) {
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t word = 0;
    for (unsigned b = 0; b < 8 && text != nullptr && text[at] != 0; ++b, ++at)
      word |= static_cast<uint64_t>(text[at] < 32 || text[at] > 126 ? '?' : text[at]) << 8 * b;
    words[i].store(word, relaxed);
  }
}

// --- who may write ----------------------------------------------------------------------------------------------

inline bool process_started(uint32_t pid, uint64_t& ticks, char& state) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  if (got <= 0) return false;
  text[got] = 0;
  const char* after = strrchr(text, ')');
  unsigned long long value = 0;
  if (after == nullptr ||
      sscanf(after + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &state, &value) != 2)
    return false;
  ticks = value;
  return true;
}

inline uint64_t own_claim() {
  uint64_t ticks = 0;
  char state = 0;
  process_started(static_cast<uint32_t>(getpid()), ticks, state);
  return static_cast<uint32_t>(getpid()) | ticks << 32;
}

inline bool claim_lives(uint64_t claim) {
  const uint32_t pid = static_cast<uint32_t>(claim);
  if (pid == 0 || pid > 0x7fffffffU || (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH)) return false;
  uint64_t ticks = 0;
  char state = 0;
  if (!process_started(pid, ticks, state)) return kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM;
  return state != 'Z' && state != 'X' && (claim >> 32 == 0 || claim >> 32 == (ticks & 0xffffffff));
}

// --- the writer -------------------------------------------------------------------------------------------------

class Table {
 public:
  // False: there is no table there, or another living process writes it. Never again after true.
  bool attach(const char* path, int abi) {
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return false;
    struct stat info;
    const int seals = fcntl(fd, F_GET_SEALS);
    void* memory = MAP_FAILED;
    // Only what can never shrink is mapped: a fault would be the training's.
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
        static_cast<size_t>(info.st_size) >= total_bytes(kMinLinks))
      memory = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return false;
    const size_t size = static_cast<size_t>(info.st_size);
    header_ = static_cast<Header*>(memory);
    links_ = header_->links.load(relaxed);
    if (header_->magic.load(relaxed) == kMagic && header_->version.load(relaxed) == kVersion && links_ >= kMinLinks &&
        links_ <= kMaxLinks && total_bytes(links_) == size && header_->total_bytes.load(relaxed) == size &&
        header_->check.load(relaxed) == header_check(links_) && claim(abi))
      return true;
    munmap(memory, size);
    header_ = nullptr;
    return false;
  }

  Header& header() { return *header_; }
  Comm& comm(uint32_t index) { return reinterpret_cast<Comm*>(reinterpret_cast<char*>(header_) + kHeaderBytes)[index]; }
  Link& link(uint32_t index) {
    return reinterpret_cast<Link*>(reinterpret_cast<char*>(header_) + kHeaderBytes + kComms * sizeof(Comm))[index];
  }

  // The row of a new communicator, or kComms. Callers take turns.
  uint32_t open_comm(uint64_t now) {
    uint32_t best = kComms;
    uint64_t oldest = UINT64_MAX;
    for (uint32_t i = 0; i < kComms && oldest != 0; ++i) {
      const uint64_t state = comm(i).state.load(relaxed) & 3;
      const uint64_t closed = state == kFree ? 0 : state == kClosed ? comm(i).closed_ns.load(relaxed) | 1 : UINT64_MAX;
      if (closed < oldest) best = i, oldest = closed;
    }
    if (best == kComms) {
      count(header_->lost_comms);
      return best;
    }
    Comm& row = comm(best);
    row.state.store(((row.state.load(relaxed) >> 2) + 1) << 2 | kOpening, release);
    Word* words = &row.identity_check;
    for (size_t i = 0; i < sizeof(Comm) / 8 - 1; ++i) words[i].store(0, relaxed);
    row.opened_ns.store(now, relaxed);
    return best;
  }

  void name_comm(Comm& row, uint64_t id, const char* name, int rank, int size, int nodes) {
    row.id.store(id, relaxed);
    row.rank_size.store(static_cast<uint32_t>(rank) | static_cast<uint64_t>(static_cast<uint32_t>(size)) << 32, relaxed);
    row.nodes.store(static_cast<uint32_t>(nodes), relaxed);
    put_text(row.name, 8, name);
    uint64_t check = mix(kMagic, row.state.load(relaxed) >> 2);
    for (const Word* word = &row.id; word != row.name + 8; ++word) check = mix(check, word->load(relaxed));
    row.identity_check.store(check | 1, release);
  }

  // The row of a link, made when it is new; -1: no room. Rows never become free again, only another link's, so that a
  // search may end at a free one.
  int32_t find_link(uint64_t key, uint64_t now) {
    const uint64_t home = mix(kMagic, key) % links_;
    for (int pass = 0; pass < 2; ++pass) {
      for (uint64_t i = 0; i < kProbes && i < links_; ++i) {
        const uint32_t index = static_cast<uint32_t>((home + i) % links_);
        Link& row = link(index);
        uint64_t held = row.key.load(acquire);
        if (held == key) return static_cast<int32_t>(index);
        if (held == 0) {
          if (row.key.compare_exchange_strong(held, kTaken, acq_rel)) return make(row, index, key, now);
          if (held == key) return static_cast<int32_t>(index);
        } else if (pass == 1 && held != kTaken && over(held) && row.key.compare_exchange_strong(held, kTaken, acq_rel)) {
          return make(row, index, key, now);
        }
      }
    }
    count(header_->lost_links);
    return -1;
  }

  void note(Comm& row, const char* function, const char* datatype, const char* algorithm, const char* protocol, uint64_t seq,
            uint64_t elements, uint64_t how, uint64_t now) {
    Operation& last = row.last;
    uint64_t version = last.version.load(relaxed);
    if ((version & 1) != 0 || !last.version.compare_exchange_strong(version, version + 1, acq_rel)) {
      count(header_->lost_notes);
      return;
    }
    put_text(last.function, 2, function);
    put_text(last.datatype, 2, datatype);
    put_text(last.algorithm, 2, algorithm);
    put_text(&last.protocol, 1, protocol);
    last.seq.store(seq, relaxed);
    last.count.store(elements, relaxed);
    last.started_ns.store(now, relaxed);
    last.how.store(how, relaxed);
    uint64_t check = mix(kMagic, row.state.load(relaxed) >> 2);
    for (const Word* word = last.function; word != &last.how + 1; ++word) check = mix(check, word->load(relaxed));
    last.check.store(check | 1, release);
    last.version.store(version + 2, release);
  }

  static void count(Word& word, uint64_t by = 1) { word.fetch_add(by, relaxed); }

 private:
  bool claim(int abi) {
    Header& h = *header_;
    uint64_t held = h.claim.load(acquire);
    if ((held != 0 && claim_lives(held)) || !h.claim.compare_exchange_strong(held, own_claim(), acq_rel)) return false;
    const uint64_t epoch = h.epoch.load(relaxed) | 1;
    h.epoch.store(epoch, release);
    Word* words = &h.lost_comms;
    for (size_t i = 0; i < 6; ++i) words[i].store(0, relaxed);
    for (size_t at = kHeaderBytes; at < total_bytes(links_); at += 8)
      reinterpret_cast<Word*>(reinterpret_cast<char*>(header_) + at)->store(0, relaxed);
    timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    h.abi.store(static_cast<uint64_t>(abi), relaxed);
    h.pid.store(static_cast<uint64_t>(getpid()), relaxed);
    h.monotonic_ns.store(now_ns(), relaxed);
    h.realtime_ns.store(static_cast<uint64_t>(real.tv_sec) * 1000000000ULL + static_cast<uint64_t>(real.tv_nsec), relaxed);
    h.epoch.store(epoch + 1, release);
    return true;
  }

  bool over(uint64_t key) {  // its communicator has ended
    if (comm_of(key) >= kComms) return false;
    const uint64_t state = comm(comm_of(key)).state.load(acquire);
    return (state >> 2 & 0xffff) != generation_of(key) || (state & 3) == kClosed;
  }

  int32_t make(Link& row, uint32_t index, uint64_t key, uint64_t now) {
    Word* words = &row.started;
    for (size_t i = 0; i < sizeof(Link) / 8 - 1; ++i) words[i].store(0, relaxed);
    row.moved_ns.store(now, relaxed);
    row.key.store(key, release);
    return static_cast<int32_t>(index);
  }

  Header* header_ = nullptr;
  uint64_t links_ = 0;
};

// Steps of a transfer. A thread that moves a step does it here, so that the counters grow in their order.
enum Stage : uint32_t { kNone, kStarted, kReady, kPosted, kCompleted, kFinished };

inline void complete(Link& row, uint64_t bytes, uint64_t now) {
  const uint64_t unit = now >> 8;
  const uint64_t before = row.completed_ns.exchange(now, relaxed) >> 8;
  const uint64_t since = row.since_ns.load(relaxed) >> 8;
  const uint64_t from = before > since ? before : since;
  uint64_t busy = unit > from ? unit - from : 0;
  busy = busy > 0xffffff ? 0xffffff : busy;
  const uint64_t size = bytes > 0xffffffff ? 0xffffffff : bytes;
  row.bytes.fetch_add(size, relaxed);
  row.busy.fetch_add(busy, relaxed);
  const uint64_t ticket = row.completed.fetch_add(1, acq_rel);
  const uint64_t lap = ticket / kWindow;
  Completion& entry = row.window[ticket % kWindow];
  entry.amount.store(size | busy << 32 | (lap & 0xff) << 56, relaxed);
  entry.time.store((unit & 0xffffffffffffULL) | (lap & 0xffff) << 48, release);
}

// Moves a step that was at `from` to `to`.
inline void advance(Link& row, uint32_t from, uint32_t to, uint64_t bytes, uint64_t now) {
  if (from < kStarted && to >= kStarted) row.started.fetch_add(1, release);
  if (from < kReady && to >= kReady) row.ready.fetch_add(1, release);
  if (from < kPosted && to >= kPosted) {
    if (row.posted.load(relaxed) == row.completed.load(relaxed)) row.since_ns.store(now, relaxed);
    row.posted_ns.store(now, relaxed);
    row.posted.fetch_add(1, release);
  }
  if (from < kCompleted && to >= kCompleted) complete(row, bytes, now);
  if (from < kFinished && to >= kFinished) row.finished.fetch_add(1, release);
  row.moved_ns.store(now, relaxed);
}

// A step that will never complete: its operation ended without it.
inline void abandon(Link& row, uint32_t from) {
  row.abandoned.fetch_add(1, relaxed);
  if (from < kReady) row.ready.fetch_add(1, release);
  if (from < kPosted) row.posted.fetch_add(1, release);
  if (from < kCompleted) row.completed.fetch_add(1, release);
  row.finished.fetch_add(1, release);
}

}  // namespace keepstep::links
