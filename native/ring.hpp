// The event ring's writer; the format is in ring_format.hpp. docs/design/ring.md has the reasoning.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ring_format.hpp"

namespace keepstep::ring {

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
