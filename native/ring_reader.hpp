// Reader of the event ring: trusts no word of it, copies before it checks, allocates in proportion to the ring at most.
#pragma once

#include <algorithm>
#include <memory>
#include <tuple>

#include "ring.hpp"

namespace keepstep::ring {

// What a reader hands out; the numpy dtypes in reader.py mirror these two.
struct Record {
  std::uint64_t ticket;
  std::int64_t start_ns;
  std::int64_t end_ns;   // 0 = in flight
  std::int64_t wait_ns;  // 0 = none
  std::uint64_t bytes;
  std::uint32_t seq;
  std::int32_t peer;
  std::uint32_t thread;
  std::uint32_t site;
  std::int16_t group;
  std::uint8_t kind;
  std::uint8_t op;
  std::uint16_t flags;
  std::uint16_t unused;
};
static_assert(sizeof(Record) == 64);

struct StreamState {
  std::uint64_t started;
  std::uint64_t completed;
  std::int64_t last_start_ns;
  std::int64_t last_end_ns;
  std::int32_t peer;
  std::int16_t group;
  std::uint8_t kind;
  std::uint8_t op;
};
static_assert(sizeof(StreamState) == 40);

struct HeaderState {
  std::int32_t rank, world_size;
  std::uint64_t pid, incarnation, monotonic_ns, realtime_ns, records, dropped, written, late, overflowed, first_step;
  bool closed;
};

struct GroupState {
  std::int32_t number = 0;
  std::string name, backend, desc;
  std::vector<std::int32_t> members;
};

struct Progress {
  std::vector<Record> started, finished;
  std::vector<Record> others;  // finished ones that were asked for apart
  std::uint64_t lost = 0;      // records never handed out
  std::uint64_t unfinished = 0;  // records handed out as started, overwritten before their end was seen
};

class Reader {
 public:
  explicit Reader(const File& file) : layout_(read_layout(file)), live_(file.mappable()) {
    if (live_) {
      void* memory = mmap(nullptr, layout_.total(), PROT_READ, MAP_SHARED, file.fd(), 0);
      if (memory == MAP_FAILED) throw Error(std::string("cannot map: ") + std::strerror(errno));
      memory_ = static_cast<const char*>(memory);
    } else {
      copy_ = load(file);
    }
    seen_blocks_.assign(layout_.block_count(), 0);
    changed_.assign(layout_.block_count(), 1);
    epoch_ = header().epoch.load(acquire);
    cursor_ = std::max(base(), oldest(written()));
  }
  ~Reader() {
    if (live_) munmap(const_cast<char*>(memory_), layout_.total());
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  HeaderState header_state() const {
    const Header& h = header();
    HeaderState state{};
    for (int attempt = 0; attempt < 100; ++attempt) {
      const std::uint64_t epoch = h.epoch.load(acquire);
      const std::uint64_t rank_world = h.rank_world.load(acquire);
      state.rank = epoch == 0 ? -1 : static_cast<std::int32_t>(rank_world);
      state.world_size = static_cast<std::int32_t>(rank_world >> 32);
      state.pid = h.pid.load(acquire);
      state.incarnation = h.incarnation.load(acquire);
      state.monotonic_ns = h.monotonic_ns.load(acquire);
      state.realtime_ns = h.realtime_ns.load(acquire);
      state.closed = h.closed.load(acquire) != 0;
      state.records = layout_.records;
      state.dropped = h.dropped.load(acquire);
      state.written = written();
      state.late = h.late.load(acquire);
      state.overflowed = h.overflowed.load(acquire);
      state.first_step = h.first_step.load(acquire);
      if ((epoch & 1) == 0 && h.epoch.load(relaxed) == epoch) break;
    }
    return state;
  }

  // Whether the process that claimed the ring still runs; of a saved copy, never.
  bool writer_lives() const { return live_ && claim_lives(header().claim.load(acquire)); }

  // Records with a flag of `apart` are left out, but for those that have ended with one of `kept`.
  Progress poll(std::uint16_t apart = 0, std::uint16_t kept = 0) {
    const std::lock_guard<std::mutex> guard(state_);
    apart_ = apart;
    kept_ = kept;
    Progress progress;
    const std::uint64_t epoch = header().epoch.load(acquire);
    if ((epoch & 1) != 0) return progress;
    if (epoch != epoch_) begin_epoch(epoch, progress);
    const bool ends_came = look_at_blocks();
    const std::uint64_t next = written();
    if (next == cursor_ && gaps_.empty() && !ends_came) return progress;
    revisit_pending(next, progress);
    revisit_gaps(next, progress);
    read_new(next, progress);
    return progress;
  }

  // All valid records of the present claim, in ticket order.
  std::vector<Record> snapshot(bool only_in_flight) const {
    std::vector<Record> records;
    const std::uint64_t next = written();
    for (std::uint64_t i = std::max(base(), oldest(next)); i < next; ++i) {
      Record record;
      if (read(i, record) == Found::valid && (!only_in_flight || record.end_ns == 0)) records.push_back(record);
    }
    return records;
  }

  std::vector<StreamState> streams() const {
    std::vector<StreamState> states;
    const auto* streams = reinterpret_cast<const Stream*>(memory_or_copy() + layout_.streams());
    for (std::size_t i = 0; i < kStreamSlots; ++i) {
      const Stream& stream = streams[i];
      const std::uint64_t key = stream.key.load(acquire);
      if (key >> 63 == 0) continue;
      StreamState state{};
      // Completed before started: the other order could show more ends than starts.
      state.completed = stream.completed.load(acquire);
      state.last_end_ns = static_cast<std::int64_t>(stream.last_end_ns.load(acquire));
      state.started = stream.started.load(acquire);
      state.last_start_ns = static_cast<std::int64_t>(stream.last_start_ns.load(acquire));
      const std::uint64_t op_kind = stream.last_op.load(acquire);
      state.op = static_cast<std::uint8_t>(op_kind);
      state.kind = static_cast<std::uint8_t>(op_kind >> 32);
      state.group = static_cast<std::int16_t>(key >> 32);
      state.peer = static_cast<std::int32_t>(key);
      if (state.started != 0 && stream.key.load(acquire) == key) states.push_back(state);
    }
    std::sort(states.begin(), states.end(), [](const StreamState& a, const StreamState& b) {
      return std::make_tuple(a.group, a.kind, a.peer, a.op) < std::make_tuple(b.group, b.kind, b.peer, b.op);
    });
    return states;
  }

  // By place; each says its id. A damaged entry has no members and the name "damaged group ID".
  std::vector<GroupState> groups() const {
    constexpr std::size_t kMaxMembers = 4U << 20;  // of all groups together: what a damaged file may make us hold
    std::vector<GroupState> groups;
    std::size_t members = 0;
    for (std::size_t id = 0; id < kGroupSlots; ++id) {
      std::uint64_t entry = table(layout_.groups(), id);
      std::string blob;
      bool read = read_blob(entry & ~kLaps, blob);
      const std::uint64_t now = table(layout_.groups(), id);
      if (now != entry) {  // its place was given to another group meanwhile
        entry = now;
        read = read_blob(entry & ~kLaps, blob);
      }
      if (entry == 0) continue;
      GroupState group;
      if (!read || !parse_group(blob, kMaxMembers - members, group)) {
        group = GroupState{};
        group.name = "damaged group " + std::to_string(group_number(entry, id));
      }
      group.number = group_number(entry, id);
      members += group.members.size();
      groups.push_back(std::move(group));
    }
    return groups;
  }

  // By id; id 0 is the unknown site. A damaged entry is empty.
  std::vector<std::string> sites() const {
    std::vector<std::string> sites{""};
    for (std::size_t id = 1; id < kSiteSlots; ++id) {
      const std::uint64_t place = table(layout_.sites(), id);
      if (place == 0) break;
      std::string blob, text;
      std::size_t at = 0;
      if (!read_blob(place, blob) || !take_text(blob, at, text)) text.clear();
      sites.push_back(std::move(text));
    }
    return sites;
  }

  // The ring as a file's content: whole records only, what is half written is left out.
  std::vector<std::uint64_t> copy() const {
    std::vector<std::uint64_t> words(layout_.total() / 8, 0);
    const auto* source = reinterpret_cast<const Word*>(memory_or_copy());
    const std::size_t first_slot = layout_.slots() / 8;
    for (std::size_t i = 0; i < first_slot; ++i) words[i] = source[i].load(acquire);
    const auto* slots = reinterpret_cast<const Slot*>(memory_or_copy() + layout_.slots());
    for (std::uint64_t i = 0; i < layout_.records; ++i) {
      const auto* slot = reinterpret_cast<const Word*>(&slots[i]);
      const std::uint64_t ticket = slot[0].load(acquire);
      if (ticket == 0 || (ticket & 1) != 0) continue;
      std::uint64_t* to = &words[first_slot + i * 8];
      for (int w = 1; w < 8; ++w) to[w] = slot[w].load(acquire);
      to[0] = slot[0].load(relaxed) == ticket ? ticket : 0;
    }
    return words;
  }

 private:
  enum class Found { valid, not_yet, gone };
  static constexpr std::uint64_t kMaxTicket = std::uint64_t{1} << 62;

  static std::unique_ptr<Word[]> load(const File& file) {
    const Layout layout = read_layout(file);
    std::unique_ptr<Word[]> copy(new Word[layout.total() / 8]());
    std::size_t done = 0;
    while (done < layout.total()) {
      const ssize_t got = pread(file.fd(), reinterpret_cast<char*>(copy.get()) + done, layout.total() - done, static_cast<off_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) throw Error("truncated ring: " + std::to_string(done) + " of " + std::to_string(layout.total()) + " bytes");
      done += static_cast<std::size_t>(got);
    }
    std::uint64_t head[5];
    for (int i = 0; i < 5; ++i) head[i] = copy[i].load(relaxed);
    if (checked_layout(head, layout.total()).records != layout.records) throw Error("torn ring: it changed while it was read");
    return copy;
  }

  const char* memory_or_copy() const { return live_ ? memory_ : reinterpret_cast<const char*>(copy_.get()); }
  const Header& header() const { return *reinterpret_cast<const Header*>(memory_or_copy()); }
  // A damaged counter must not overflow the arithmetic on tickets.
  std::uint64_t written() const { return std::min(header().next.load(acquire), kMaxTicket); }
  std::uint64_t base() const { return std::min(header().base.load(acquire), kMaxTicket); }
  std::uint64_t oldest(std::uint64_t next) const { return next > layout_.records ? next - layout_.records : 0; }
  std::size_t block_of(std::uint64_t index) const { return (index & (layout_.records - 1)) / kRecordsPerBlock; }

  // Copies record i if the slot holds it, whole and undamaged.
  Found read(std::uint64_t index, Record& record) const {
    const Slot& slot = reinterpret_cast<const Slot*>(memory_or_copy() + layout_.slots())[index & (layout_.records - 1)];
    const std::uint64_t ticket = slot.ticket.load(acquire);
    if (ticket != published(index)) return ticket > published(index) ? Found::gone : Found::not_yet;
    // Acquire on each: had one been overwritten, the ticket read after them would show it.
    const std::uint64_t start = slot.start_ns.load(acquire);
    const std::uint64_t end = slot.end.load(acquire);
    const std::uint64_t wait = slot.wait.load(acquire);
    const std::uint64_t bytes = slot.bytes.load(acquire);
    const std::uint64_t seq_peer = slot.seq_peer.load(acquire);
    const std::uint64_t thread_site = slot.thread_site.load(acquire);
    const std::uint64_t meta = slot.meta.load(acquire);
    if (slot.ticket.load(relaxed) != ticket) return Found::gone;
    const std::uint64_t tag = lap_tag(index, layout_.records);
    constexpr std::uint64_t tag_mask = ~0ULL << 49;
    if (meta >> 48 != record_check(index, start, bytes, seq_peer, thread_site, meta) || (end & tag_mask) != tag ||
        (wait & tag_mask) != tag)
      return Found::gone;
    const auto time_at = [start](std::uint64_t word) {
      const std::uint64_t offset = word & kDurationMask;
      return offset == 0 ? 0 : static_cast<std::int64_t>(start + offset - 1);
    };
    record.ticket = index;
    record.start_ns = static_cast<std::int64_t>(start);
    record.end_ns = time_at(end);
    record.wait_ns = time_at(wait);
    record.bytes = bytes;
    record.seq = static_cast<std::uint32_t>(seq_peer);
    record.peer = static_cast<std::int32_t>(seq_peer >> 32);
    record.thread = static_cast<std::uint32_t>(thread_site);
    record.site = static_cast<std::uint32_t>(thread_site >> 32);
    record.group = static_cast<std::int16_t>(meta);
    record.kind = static_cast<std::uint8_t>(meta >> 16);
    record.op = static_cast<std::uint8_t>(meta >> 24);
    record.flags = static_cast<std::uint16_t>(meta >> 32);
    if ((end & kFailedBit) != 0) record.flags |= kFlagFailed;
    record.unused = 0;
    return Found::valid;
  }

  // A new process took the ring: what was not read of the old one's is gone.
  void begin_epoch(std::uint64_t epoch, Progress& progress) {
    const std::uint64_t from = base();
    progress.lost += gaps_.size() + (from > cursor_ ? from - cursor_ : 0);
    progress.unfinished += pending_.size();
    gaps_.clear();
    pending_.clear();
    cursor_ = std::max(cursor_, from);
    epoch_ = epoch;
    polls_ = 0;
  }

  // Notes the blocks in which ends were stamped since the last poll; now and then all, because a writer may have been
  // killed between the end and the mark.
  bool look_at_blocks() {
    const auto* marks = reinterpret_cast<const Word*>(memory_or_copy() + layout_.blocks());
    const bool all = polls_++ % 16 == 0 && !pending_.empty();
    bool any = all;
    for (std::size_t b = 0; b < seen_blocks_.size(); ++b) {
      const std::uint64_t mark = marks[b].load(acquire);
      changed_[b] = all || mark != seen_blocks_[b];
      any |= changed_[b] != 0;
      seen_blocks_[b] = mark;
    }
    return any;
  }

  void revisit_pending(std::uint64_t next, Progress& progress) {
    std::size_t kept = 0;
    for (const std::uint64_t index : pending_) {
      Record record;
      if (changed_[block_of(index)] != 0 || index + layout_.records < next) {
        const Found found = read(index, record);
        if (found == Found::valid && record.end_ns != 0) {
          finish(record, progress);
          continue;
        }
        if (found != Found::valid) {
          ++progress.unfinished;
          continue;
        }
      }
      pending_[kept++] = index;
    }
    pending_.resize(kept);
  }

  // Tickets that were taken but not published when the reader came by.
  void revisit_gaps(std::uint64_t next, Progress& progress) {
    if (gaps_.empty()) return;
    const bool nobody_writes = !writer_lives();
    std::size_t kept = 0;
    for (const std::uint64_t index : gaps_) {
      const Found found = take(index, progress);
      if (found == Found::not_yet && !nobody_writes && index + 2 * layout_.records > next)
        gaps_[kept++] = index;
      else if (found != Found::valid)
        ++progress.lost;
    }
    gaps_.resize(kept);
  }

  void read_new(std::uint64_t next, Progress& progress) {
    if (next <= cursor_) return;
    if (oldest(next) > cursor_) {
      progress.lost += oldest(next) - cursor_;
      cursor_ = oldest(next);
    }
    progress.started.reserve(progress.started.size() + (next - cursor_));  // one lap at most
    progress.finished.reserve(progress.finished.size() + (next - cursor_));
    for (; cursor_ < next; ++cursor_) {
      const Found found = take(cursor_, progress);
      if (found == Found::not_yet && live_ && gaps_.size() < layout_.records)
        gaps_.push_back(cursor_);
      else if (found != Found::valid)
        ++progress.lost;
    }
  }

  Found take(std::uint64_t index, Progress& progress) {
    Record record;
    const Found found = read(index, record);
    if (found != Found::valid) return found;
    if ((record.flags & apart_) == 0) progress.started.push_back(record);
    if (record.end_ns != 0)
      finish(record, progress);
    else
      pending_.push_back(index);
    return found;
  }

  void finish(const Record& record, Progress& progress) const {
    if ((record.flags & apart_) == 0)
      progress.finished.push_back(record);
    else if ((record.flags & kept_) != 0)
      progress.others.push_back(record);
  }

  std::uint64_t table(std::size_t at, std::size_t id) const {
    return reinterpret_cast<const Word*>(memory_or_copy() + at)[id].load(acquire);
  }

  bool read_blob(std::uint64_t place, std::string& blob) const {
    const std::size_t size = static_cast<std::uint32_t>(place);
    const std::size_t at = (place & ~(1ULL << 63)) >> 32;
    const std::size_t words = (sizeof(std::uint32_t) + size + 7) / 8;
    if (at % 8 != 0 || at > kArenaBytes || words * 8 > kArenaBytes - at) return false;
    std::string content(words * 8, '\0');
    const auto* arena = reinterpret_cast<const Word*>(memory_or_copy() + layout_.arena() + at);
    for (std::size_t i = 0; i < words; ++i) {
      const std::uint64_t word = arena[i].load(relaxed);
      std::memcpy(&content[i * 8], &word, 8);
    }
    std::uint32_t check;
    std::memcpy(&check, content.data(), sizeof check);
    blob = content.substr(sizeof check, size);
    return check == fnv1a(blob.data(), blob.size());
  }

  static bool take_text(const std::string& blob, std::size_t& at, std::string& text) {
    std::uint32_t size;
    if (blob.size() - at < sizeof size) return false;
    std::memcpy(&size, blob.data() + at, sizeof size);
    at += sizeof size;
    if (size > kMaxText || blob.size() - at < (size + 3) / 4 * 4) return false;
    text = blob.substr(at, size);
    at += (size + 3) / 4 * 4;
    return true;
  }

  static bool parse_group(const std::string& blob, std::size_t room, GroupState& group) {
    std::size_t at = 0;
    if (!take_text(blob, at, group.name) || !take_text(blob, at, group.backend) || !take_text(blob, at, group.desc)) return false;
    if ((blob.size() - at) % 12 != 0) return false;
    for (; at < blob.size(); at += 12) {
      std::int32_t run[3];
      std::memcpy(run, blob.data() + at, sizeof run);
      if (run[2] < 1 || static_cast<std::size_t>(run[2]) > room - group.members.size()) return false;
      const std::int64_t last = run[0] + std::int64_t{run[1]} * (run[2] - 1);
      if (last < INT32_MIN || last > INT32_MAX) return false;
      for (std::int32_t i = 0; i < run[2]; ++i) group.members.push_back(static_cast<std::int32_t>(run[0] + std::int64_t{run[1]} * i));
    }
    return true;
  }

  Layout layout_;
  bool live_;
  const char* memory_ = nullptr;
  std::unique_ptr<Word[]> copy_;

  std::uint16_t apart_ = 0, kept_ = 0;
  std::mutex state_;
  std::uint64_t epoch_ = 0;
  std::uint64_t cursor_ = 0;
  std::uint64_t polls_ = 0;
  std::vector<std::uint64_t> pending_;  // handed out as started, end not seen; each in another slot or overwritten
  std::vector<std::uint64_t> gaps_;
  std::vector<std::uint64_t> seen_blocks_;
  std::vector<std::uint8_t> changed_;
};

}  // namespace keepstep::ring
