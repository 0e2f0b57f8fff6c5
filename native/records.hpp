// What the agent does with every record of a rank: keeps those of the unfinished iteration, and sums one that has ended.
// The tests' twin does the same with numpy (tests/twins/agent).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "ring_reader.hpp"

namespace keepstep::records {

using ring::Record;
using Time = std::int64_t;  // ns

// Numbers of core/events.py.
constexpr std::uint8_t kPhase = 3;
constexpr std::uint8_t kBackward = 2, kOptimizer = 3, kData = 4, kGc = 7;
constexpr std::uint16_t kAsync = 1, kEndByWait = 2, kFailed = 4, kSyncKnown = 8;

struct Span {
  const Record* first;
  const Record* last;
  const Record* begin() const { return first; }
  const Record* end() const { return last; }
  std::size_t size() const { return static_cast<std::size_t>(last - first); }
};

inline bool is_operation(const Record& record) { return record.kind != kPhase; }

// Whether it belongs to the sequence that repeats in each iteration: communication and backward passes.
inline bool is_symbol(const Record& record) { return is_operation(record) || record.op == kBackward; }

// Equal for records with equal kind, operation, group, peer and bytes.
inline std::uint64_t symbol(const Record& record) {
  const std::uint64_t place = static_cast<std::uint64_t>(record.op) << 8 | record.kind |
                              static_cast<std::uint64_t>(static_cast<std::int64_t>(record.group)) << 16;
  return (place * 0x9E3779B97F4A7C15) ^ (record.bytes * 0xC2B2AE3D27D4EB4F) ^
         (static_cast<std::uint64_t>(static_cast<std::int64_t>(record.peer)) * 0x165667B19E3779F9);
}

inline Time end_of(const Record& record, Time open_ns) { return record.end_ns == 0 ? open_ns : record.end_ns; }

// The records of one rank that are not cut into iterations yet, in order of tickets.
class Pending {
 public:
  // False: the oldest half was dropped because nothing was cut for too long.
  bool add(Span started, Span finished) {
    for (const Record& record : started) {
      if (rows_.empty() || record.ticket > rows_.back().ticket) {
        rows_.push_back(record);
        continue;
      }
      const auto place = find(record.ticket);
      if (place->ticket != record.ticket) rows_.insert(place, record);
    }
    auto place = rows_.begin();  // mostly that of the record after the one before
    for (const Record& record : finished) {
      if (place == rows_.end() || place->ticket != record.ticket) place = find(record.ticket);
      if (place != rows_.end() && place->ticket == record.ticket) *place++ = record;
    }
    if (rows_.size() <= kMost) return true;
    rows_.erase(rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(rows_.size() / 2));
    return false;
  }

  void drop_before(Time edge_ns) {
    const auto is_over = [edge_ns](const Record& record) {
      return record.start_ns < edge_ns && record.end_ns != 0 && record.end_ns <= edge_ns;
    };
    rows_.erase(std::remove_if(rows_.begin(), rows_.end(), is_over), rows_.end());
  }

  const std::vector<Record>& rows() const { return rows_; }

 private:
  static constexpr std::size_t kMost = 1U << 17;

  std::vector<Record>::iterator find(std::uint64_t ticket) {
    const auto before = [](const Record& record, std::uint64_t wanted) { return record.ticket < wanted; };
    return std::lower_bound(rows_.begin(), rows_.end(), ticket, before);
  }

  std::vector<Record> rows_;
};

// --- intervals ------------------------------------------------------------------------------------------------------

using Interval = std::pair<Time, Time>;

// A union of intervals, as sorted, disjoint ones.
class Union {
 public:
  explicit Union(std::vector<Interval> parts) {
    parts.erase(std::remove_if(parts.begin(), parts.end(), [](const Interval& one) { return one.second <= one.first; }),
                parts.end());
    if (!std::is_sorted(parts.begin(), parts.end())) std::sort(parts.begin(), parts.end());
    for (const Interval& part : parts) {
      if (!parts_.empty() && part.first <= parts_.back().second)
        parts_.back().second = std::max(parts_.back().second, part.second);
      else
        parts_.push_back(part);
    }
    before_.reserve(parts_.size());
    for (const Interval& part : parts_) {
      before_.push_back(total_);
      total_ += part.second - part.first;
    }
  }

  Time total() const { return total_; }

  // How much of it lies before this time.
  Time until(Time time) const {
    const auto after = std::upper_bound(parts_.begin(), parts_.end(), time,
                                        [](Time wanted, const Interval& part) { return wanted < part.first; });
    if (after == parts_.begin()) return 0;
    const auto place = static_cast<std::size_t>(after - parts_.begin()) - 1;
    return before_[place] + std::min(time, parts_[place].second) - parts_[place].first;
  }

  Time less(const Union& other) const {
    Time inside = 0;
    for (const Interval& part : parts_) inside += other.until(part.second) - other.until(part.first);
    return total_ - inside;
  }

  Union joined(const Union& other) const {
    if (other.parts_.empty()) return *this;
    std::vector<Interval> all(parts_);
    all.insert(all.end(), other.parts_.begin(), other.parts_.end());
    return Union(std::move(all));
  }

 private:
  std::vector<Interval> parts_;
  std::vector<Time> before_;
  Time total_ = 0;
};

inline Interval clipped(Time start, Time end, Time low, Time high) { return {std::max(start, low), std::min(end, high)}; }

// --- waits ----------------------------------------------------------------------------------------------------------

// From when to when the rank waits in each operation among ``rows``; summarise.py has the rules. ``open_ns`` stands for
// ends that are not known.
template <typename Rows>
std::vector<Interval> waits(const Rows& rows, Time open_ns) {
  constexpr std::uint16_t kKnownAsync = kAsync | kSyncKnown;
  const auto known_async = [](const Record& record) {
    return (record.flags & kKnownAsync) == kKnownAsync && is_operation(record);
  };
  std::vector<std::int16_t> shown;  // groups on which waits for asynchronous operations were recorded
  for (const Record& record : rows)
    if (known_async(record) && record.wait_ns > 0 && std::find(shown.begin(), shown.end(), record.group) == shown.end())
      shown.push_back(record.group);
  std::vector<Interval> found;
  found.reserve(rows.size());
  for (const Record& record : rows) {
    if (!is_operation(record)) continue;
    const Time end = end_of(record, open_ns);
    const bool would_show = (record.flags & kEndByWait) != 0 ||
                            (known_async(record) && std::find(shown.begin(), shown.end(), record.group) != shown.end());
    found.emplace_back(record.wait_ns > 0 ? record.wait_ns : would_show ? end : record.start_ns, end);
  }
  return found;
}

inline std::vector<Record> operations_in(Span rows) {
  std::vector<Record> found;
  found.reserve(rows.size());
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(found), is_operation);
  return found;
}

// How long the rank waited or paused from ``start`` to ``end``, and how long it was in phases while it did neither.
struct OwnTimes {
  Time waited, gc, optimizer, data, backward;
};

inline OwnTimes own_times(Span rows, Time start, Time end, const Union& pauses) {
  std::vector<Interval> parts = waits(rows, end);
  for (Interval& part : parts) part = clipped(part.first, part.second, start, end);
  Union taken = Union(std::move(parts)).joined(pauses);
  OwnTimes times{taken.total(), 0, 0, 0, 0};
  // A moment that lies in several phases counts as the first of these.
  constexpr std::uint8_t codes[] = {kGc, kOptimizer, kData, kBackward};
  Time* const owns[] = {&times.gc, &times.optimizer, &times.data, &times.backward};
  std::vector<Interval> spans[4];
  for (const Record& record : rows) {
    if (is_operation(record)) continue;
    const auto place = std::find(std::begin(codes), std::end(codes), record.op) - codes;
    if (place < 4) spans[place].push_back(clipped(record.start_ns, end_of(record, end), start, end));
  }
  for (std::size_t place = 0; place < 4; ++place) {
    Time* const own = owns[place];
    if (spans[place].empty()) continue;
    const Union span(std::move(spans[place]));
    *own = span.less(taken);
    taken = taken.joined(span);
  }
  return times;
}

// --- streams --------------------------------------------------------------------------------------------------------

// Sums of the operations of one (group, op, peer). Times are shifted as if all pauses had come before the iteration.
struct StreamSums {
  std::int16_t group;
  std::uint8_t op;
  std::int32_t peer;
  std::uint32_t first_seq;
  std::int64_t count, start, end, busy, blocked, bytes, fastest;
};

// Moves the starts of waits behind the last record that the same thread began before each operation ended: an operation
// whose wait was not recorded was not waited for earlier.
inline void make_sure(const std::vector<Record>& operations, std::vector<Interval>& waited) {
  std::map<std::uint32_t, std::vector<Time>> begun;  // by thread, where it is asked for
  const auto is_guessed = [&](std::size_t i) {
    return (operations[i].flags & kAsync) != 0 && waited[i].first == operations[i].start_ns &&
           waited[i].second > waited[i].first;
  };
  for (std::size_t i = 0; i < operations.size(); ++i)
    if (is_guessed(i)) begun[operations[i].thread];
  if (begun.empty()) return;
  for (const Record& record : operations) {
    const auto thread = begun.find(record.thread);
    if (thread != begun.end()) thread->second.push_back(record.start_ns);
  }
  for (auto& [thread, starts] : begun) std::sort(starts.begin(), starts.end());
  for (std::size_t i = 0; i < operations.size(); ++i) {
    if (!is_guessed(i)) continue;
    const std::vector<Time>& starts = begun[operations[i].thread];
    const auto before = std::lower_bound(starts.begin(), starts.end(), waited[i].second);
    const Time last = before == starts.begin() ? starts.front() : *(before - 1);
    waited[i].first = std::max(waited[i].first, std::min(last, waited[i].second));
  }
}

// By group, operation and peer. ``start`` and ``end`` are the iteration's; only operations that began in it are summed.
inline std::vector<StreamSums> streams(const std::vector<Record>& operations, std::vector<Interval> waited, Time start,
                                       Time end, const Union& pauses) {
  make_sure(operations, waited);
  const Time origin = start + pauses.total();
  const auto shifted = [&](Time time) { return time + (pauses.total() - pauses.until(time)) - origin; };
  using Key = std::tuple<std::int16_t, std::uint8_t, std::uint32_t>;
  std::map<Key, std::size_t> places;
  std::vector<StreamSums> sums;
  const auto key_of = [](const Record& record) {
    return Key(record.group, record.op, static_cast<std::uint32_t>(record.peer));
  };
  std::size_t place = 0;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const Record& record = operations[i];
    if (record.start_ns < start) continue;
    const Key key = key_of(record);
    // Most operations are of the stream of the one before.
    if (sums.empty() || Key(sums[place].group, sums[place].op, static_cast<std::uint32_t>(sums[place].peer)) != key) {
      const auto [known, is_new] = places.emplace(key, sums.size());
      place = known->second;
      if (is_new)
        sums.push_back({record.group, record.op, record.peer, record.seq, 0, 0, 0, 0, 0, 0,
                        std::numeric_limits<Time>::max()});
    }
    const Time until = end_of(record, end);
    StreamSums& sum = sums[place];
    sum.count += 1;
    sum.start += shifted(record.start_ns);
    sum.end += shifted(until);
    sum.busy += until - record.start_ns;
    sum.blocked += std::max<Time>(waited[i].second - waited[i].first, 0);
    sum.bytes += static_cast<std::int64_t>(record.bytes);
    sum.fastest = std::min(sum.fastest, until - record.start_ns);
  }
  std::vector<StreamSums> ordered;
  ordered.reserve(sums.size());
  for (const auto& [key, at] : places) ordered.push_back(sums[at]);
  return ordered;
}

}  // namespace keepstep::records
