// Records whose fields follow from one number, so that a reader can tell a right one from a mixture of two.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <unordered_set>

#include "../ring_reader.hpp"

namespace checked {

namespace ring = keepstep::ring;

inline std::uint64_t mix(std::uint64_t v) {
  v = (v ^ v >> 31) * 0x7fb5d329728ea185ULL;
  v = (v ^ v >> 27) * 0x81dadef4bc2dd44dULL;
  return v ^ v >> 33;
}

constexpr int kGroup = 5;

inline std::uint8_t op_of(std::uint64_t h) { return static_cast<std::uint8_t>(1 + h % 9); }
inline std::int32_t peer_of(std::uint64_t h) { return static_cast<std::int32_t>(h >> 32); }
inline std::uint32_t site_of(std::uint64_t h) { return static_cast<std::uint32_t>(mix(h + 1)); }
inline std::uint16_t flags_of(std::uint64_t h) { return static_cast<std::uint16_t>(h >> 8 & 3); }
inline bool fails(std::uint64_t h) { return (h >> 20 & 1) != 0; }
inline bool waits(std::uint64_t h) { return (h >> 21 & 1) != 0; }

inline void start(ring::Writer& writer, ring::Operation& operation, std::uint64_t number) {
  const std::uint64_t h = mix(number);
  writer.start(operation, 1, op_of(h), kGroup, peer_of(h), number, flags_of(h), site_of(h));
}

inline void wait_and_end(ring::Operation& operation, std::uint64_t number) {
  const std::uint64_t h = mix(number);
  if (waits(h)) operation.waiting();
  operation.finish(fails(h));
}

inline void require(bool good, const char* what, const ring::Record& r) {
  if (good) return;
  std::fprintf(stderr, "WRONG RECORD (%s): ticket %llu bytes %llu start %lld end %lld wait %lld seq %u peer %d flags %u\n", what,
               static_cast<unsigned long long>(r.ticket), static_cast<unsigned long long>(r.bytes),
               static_cast<long long>(r.start_ns), static_cast<long long>(r.end_ns), static_cast<long long>(r.wait_ns), r.seq,
               r.peer, r.flags);
  std::abort();
}

inline void require(bool good, const char* what) { require(good, what, ring::Record{}); }

// An end or wait that belongs to another record shows as well: whether there may be one follows from the number.
inline void check(const ring::Record& r) {
  const std::uint64_t h = mix(r.bytes);
  require(r.kind == 1 && r.group == kGroup, "kind, group", r);
  require(r.op == op_of(h) && r.peer == peer_of(h) && r.site == site_of(h), "op, peer, site", r);
  require(r.seq != 0 && r.thread != 0, "seq, thread", r);
  const std::uint16_t failed = r.end_ns != 0 && fails(h) ? ring::kFlagFailed : 0;
  require(r.flags == (flags_of(h) | failed), "flags", r);
  require(r.end_ns == 0 || r.end_ns >= r.start_ns, "end", r);
  require(r.wait_ns == 0 || (waits(h) && r.wait_ns >= r.start_ns), "wait", r);
  require(r.end_ns == 0 || !waits(h) || (r.wait_ns != 0 && r.wait_ns <= r.end_ns), "end without wait", r);
}

// What one reader got so far: every ticket once.
class Account {
 public:
  void take(const ring::Progress& progress) {
    for (const ring::Record& r : progress.started) {
      check(r);
      require(started_.insert(r.ticket).second, "started twice", r);
    }
    for (const ring::Record& r : progress.finished) {
      check(r);
      require(r.end_ns != 0, "finished without end", r);
      require(started_.count(r.ticket) == 1, "finished before started", r);
      require(finished_.insert(r.ticket).second, "finished twice", r);
    }
    lost_ += progress.lost;
    unfinished_ += progress.unfinished;
  }
  std::uint64_t started() const { return started_.size(); }
  std::uint64_t finished() const { return finished_.size(); }
  std::uint64_t lost() const { return lost_; }
  std::uint64_t unfinished() const { return unfinished_; }

 private:
  std::unordered_set<std::uint64_t> started_, finished_;
  std::uint64_t lost_ = 0, unfinished_ = 0;
};

}  // namespace checked
