// The event ring's writer; the format is in ring_format.hpp. docs/design/ring.md has the reasoning.
#pragma once

#include <sched.h>

#include <algorithm>
#include <deque>
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

  void waiting() noexcept { waiting_at(monotonic_ns()); }           // the caller begins to wait for it; the first call counts
  void finish(bool failed) noexcept { finish_at(failed, monotonic_ns()); }  // the first call counts
  inline void waiting_at(std::uint64_t ns) noexcept;
  inline void finish_at(bool failed, std::uint64_t ns) noexcept;
  bool ended() const noexcept { return ended_.load(relaxed); }
  std::uint32_t seq() const noexcept { return seq_; }

 private:
  friend class Writer;
  Writer* writer_ = nullptr;
  Slot* slot_ = nullptr;  // null: the record was dropped
  Stream* stream_ = nullptr;
  std::uint64_t key_ = 0;  // of the stream
  std::uint64_t index_ = 0;
  std::uint64_t start_ns_ = 0;
  std::uint32_t seq_ = 0;
  std::atomic<bool> ended_{false};
};

class Writer {
 public:
  // Claims the ring for this process, or joins the claim that it has already, if `join`. Error when it is no ring, too old
  // or new, or its writer lives.
  Writer(const File& file, std::int32_t rank, std::int32_t world_size, std::uint64_t incarnation, bool join = false)
      : layout_(read_layout(file)), mine_(claim_of_this_process()) {
    if (!file.mappable()) throw Error("not a live ring: only one made by create() can be written (this is a plain file)");
    void* memory = mmap(nullptr, layout_.total(), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
    if (memory == MAP_FAILED) throw Error(std::string("cannot map: ") + std::strerror(errno));
    memory_ = static_cast<char*>(memory);
    generation_ = fork_generation().load(relaxed);
    try {
      if (!join || !join_claim()) claim(rank, world_size, incarnation);
    } catch (...) {
      munmap(memory_, layout_.total());
      throw;
    }
  }

  // Nothing of this process can be inside start() of this writer any more; with its last one goes its claim, so that
  // another process may claim at once.
  ~Writer() {
    if (generation_ == fork_generation().load(relaxed)) {
      close();
      if ((header().writers.fetch_sub(1, std::memory_order_acq_rel) & kWritersMask) == 1) header().claim.store(0, release);
    }
    munmap(memory_, layout_.total());
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Instead of the destructor, where threads may still be inside: what they write goes nowhere from now on, and the ring's
  // memory is free. The claim stays with this process.
  void abandon() noexcept {
    mmap(memory_, layout_.total(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  }

  // Publishes the start of an operation. Never fails: without a slot it counts a drop. Never blocks, but the first operation
  // of a stream waits while another thread of this writer enters something into a table. `at_ns`: when it started, if that
  // is over.
  void start(Operation& operation, std::uint8_t kind, std::uint8_t op, std::int16_t group, std::int32_t peer,
             std::uint64_t bytes, std::uint16_t flags, std::uint32_t site, std::uint64_t at_ns = 0) noexcept {
    if (!writable()) return;
    const std::uint64_t now = at_ns != 0 ? at_ns : monotonic_ns();
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

  // Id of a group with these properties, the same for the same properties; -1 (counted) when there is no room. Where all
  // places are taken, it gets that of the group that was retired first.
  std::int32_t group(const std::string& name, const std::vector<std::int32_t>& members, const std::string& backend,
                     const std::string& desc) noexcept {
    try {
      std::string blob;
      const std::vector<std::int32_t> runs = runs_of(members);
      append_text(blob, name);
      append_text(blob, backend);
      append_text(blob, desc);
      blob.append(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(std::int32_t));
      return enter_group(blob);
    } catch (...) {
      return -1;
    }
  }

  // No operation will be started on this group any more; its place may be given to another one.
  void retire(std::int32_t group) noexcept {
    try {
      const std::lock_guard<std::mutex> guard(tables_);
      const auto found = entered_.find(group);
      if (found == entered_.end() || found->second.retired) return;
      found->second.retired = true;
      groups_.erase(found->second.blob);
      retired_.push_back(group);
    } catch (...) {
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

  // No more records from this process; says to readers that the end was orderly.
  void close() noexcept {
    if (writable()) header().closed.store(1, release);
  }

  // The training goes on from there: its steps are counted from it.
  void begins_at(std::uint64_t step) noexcept {
    if (writable()) header().first_step.store(step, release);
  }

  bool writable() const noexcept { return generation_ == fork_generation().load(relaxed) && header().closed.load(relaxed) == 0; }
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

  static constexpr std::uint64_t kWritersMask = 0xff;
  static std::uint64_t first_writer(std::uint64_t claim) { return ((claim * 0x9e3779b97f4a7c15ULL) & ~kWritersMask) | 1; }

  // False: this process has not claimed the ring. Another thread may be claiming it just now.
  bool join_claim() {
    constexpr std::uint64_t kPatienceNs = 2'000'000'000;
    Header& h = header();
    const std::uint64_t until = monotonic_ns() + kPatienceNs;
    while (h.claim.load(acquire) == mine_) {
      std::uint64_t writers = h.writers.load(acquire);
      const std::uint64_t count = writers & kWritersMask;
      const bool ours = (writers & ~kWritersMask) == (first_writer(mine_) & ~kWritersMask) && count != 0;
      if (ours && count == kWritersMask) throw Error("this process has too many writers of it");
      if (ours && h.closed.load(relaxed) != 0) throw Error("this process has closed it");
      if (ours && h.writers.compare_exchange_weak(writers, writers + 1, std::memory_order_acq_rel, relaxed)) return true;
      if (monotonic_ns() > until) throw Error("this process began to claim it and does not come to an end");
      sched_yield();
    }
    return false;
  }

  void claim(std::int32_t rank, std::int32_t world_size, std::uint64_t incarnation) {
    Header& h = header();
    const std::uint64_t mine = mine_;
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
    h.writers.store(first_writer(mine), release);
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
    if (group < 0 || kind >= static_cast<std::uint8_t>(Kind::communicator)) return 0;
    const std::uint64_t key = stream_key(kind, op, group, peer);
    Stream* stream = find_stream(key);
    operation.stream_ = stream;
    operation.key_ = key;
    if (stream == nullptr) return 0;
    const std::uint64_t seq = stream->started.fetch_add(1, relaxed) + 1;
    stream->last_start_ns.store(now, relaxed);
    stream->last_op.store(halves(op, kind), relaxed);
    return static_cast<std::uint32_t>(seq);
  }

  Stream* find_stream(std::uint64_t key) noexcept {
    Stream* known = known_stream(key);
    return known != nullptr ? known : begin_stream(key);
  }

  // Not inlined, as it comes once for each stream.
  __attribute__((noinline)) Stream* begin_stream(std::uint64_t key) noexcept {
    // Two threads that begin a stream must not take two places for it.
    const std::lock_guard<std::mutex> guard(tables_);
    if (Stream* known = known_stream(key)) return known;
    if (Stream* made = make_stream(key)) return made;
    for (const std::int32_t group : retired_) free_streams(group);
    if (Stream* made = make_stream(key)) return made;
    header().overflowed.fetch_add(1, relaxed);
    return nullptr;
  }

  Stream* known_stream(std::uint64_t key) noexcept {
    std::uint64_t place = (key * 0x9e3779b97f4a7c15ULL) >> 32;
    for (std::size_t probe = 0; probe < kStreamProbes; ++probe, ++place) {
      Stream& stream = streams()[place & (kStreamSlots - 1)];
      const std::uint64_t found = stream.key.load(acquire);
      if (found == key) return &stream;
      if (found == 0) return nullptr;
    }
    return nullptr;
  }

  Stream* make_stream(std::uint64_t key) noexcept {
    std::uint64_t place = (key * 0x9e3779b97f4a7c15ULL) >> 32;
    for (std::size_t probe = 0; probe < kStreamProbes; ++probe, ++place) {
      Stream& stream = streams()[place & (kStreamSlots - 1)];
      std::uint64_t found = stream.key.load(relaxed);
      if ((found == 0 || found == kFreed) && stream.key.compare_exchange_strong(found, key, std::memory_order_acq_rel, relaxed))
        return &stream;
    }
    return nullptr;
  }

  void free_streams(std::int32_t group) noexcept {
    for (std::size_t i = 0; i < kStreamSlots; ++i) {
      Stream& stream = streams()[i];
      const std::uint64_t key = stream.key.load(relaxed);
      if (key >> 63 == 0 || static_cast<std::int16_t>(key >> 32) != static_cast<std::int16_t>(group)) continue;
      for (Word* word : {&stream.started, &stream.completed, &stream.last_start_ns, &stream.last_end_ns, &stream.last_op})
        word->store(0, release);
      stream.key.store(kFreed, release);
    }
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

  // Blob in the arena: checksum, then the content; then its place (offset, length) becomes visible in the table. Other
  // writers of this process enter theirs meanwhile: each takes the first free place, and learns what they entered.
  std::int32_t enter(Ids& ids, Word* table, std::size_t first, std::size_t slots, const std::string& blob, std::int32_t none) {
    if (!writable()) return none;
    const std::lock_guard<std::mutex> guard(tables_);
    const auto known = ids.find(blob);
    if (known != ids.end()) return known->second;
    const std::size_t words = words_of(blob);
    std::uint64_t place = 0;
    for (std::size_t id = first + ids.size(); id < slots; ++id) {
      std::uint64_t there = table[id].load(acquire);
      if (there == 0) {
        if (place == 0) place = put(blob, words);
        if (place == 0) break;
        if (table[id].compare_exchange_strong(there, place, std::memory_order_acq_rel, acquire)) {
          ids.emplace(blob, static_cast<std::int32_t>(id));
          return static_cast<std::int32_t>(id);
        }
      }
      std::string theirs = blob_at(there);
      const bool same = theirs == blob;
      ids.emplace(std::move(theirs), static_cast<std::int32_t>(id));
      if (same) return static_cast<std::int32_t>(id);
    }
    header().overflowed.fetch_add(1, relaxed);
    return none;
  }

  std::int32_t enter_group(const std::string& blob) {
    if (!writable()) return -1;
    const std::lock_guard<std::mutex> guard(tables_);
    const auto known = groups_.find(blob);
    if (known != groups_.end()) return known->second;
    Word* table = reinterpret_cast<Word*>(memory_ + layout_.groups());
    const std::size_t words = words_of(blob);
    std::uint64_t entry = 0;
    for (; next_place_ < kGroupSlots; ++next_place_) {
      const auto number = static_cast<std::int32_t>(next_place_);
      std::uint64_t there = table[next_place_].load(acquire);
      if (there == 0) {
        if (entry == 0) entry = put(blob, words);
        if (entry == 0) break;
        if (table[next_place_].compare_exchange_strong(there, entry, std::memory_order_acq_rel, acquire)) {
          note(number, blob, entry, words);
          ++next_place_;
          return number;
        }
      }
      std::string theirs = blob_at(there);
      const bool same = theirs == blob;
      groups_.emplace(std::move(theirs), group_number(there, next_place_));
      if (same) return group_number(there, next_place_++);
    }
    return enter_again(blob, words);
  }

  // Gives the place of a retired group to another one: of the one that was retired first, or first had room in the arena.
  std::int32_t enter_again(const std::string& blob, std::size_t words) {
    const auto usable = [](std::int32_t group) { return group + static_cast<std::int32_t>(kGroupSlots) < kMostGroups; };
    auto chosen = std::find_if(retired_.begin(), retired_.end(),
                               [&](std::int32_t group) { return usable(group) && entered_.at(group).words >= words; });
    if (chosen == retired_.end()) chosen = std::find_if(retired_.begin(), retired_.end(), usable);
    if (chosen != retired_.end()) {
      const std::int32_t old = *chosen, number = old + static_cast<std::int32_t>(kGroupSlots);
      Entry& before = entered_.at(old);
      const std::uint64_t lap = static_cast<std::uint64_t>(number) / kGroupSlots << 52;
      Word& word = reinterpret_cast<Word*>(memory_ + layout_.groups())[static_cast<std::size_t>(old) % kGroupSlots];
      std::uint64_t at = before.at;
      std::size_t room = before.words;
      if (room < words) {
        const std::uint64_t entry = put(blob, words);
        if (entry == 0) return overflow();
        at = (entry & ~kEntered) >> 32;
        room = words;
      }
      word.store(0, release);  // while the arena is written, nobody reads there
      free_streams(old);
      const std::uint64_t entry = write(blob, words, at) | lap;
      entered_.erase(old);
      retired_.erase(chosen);
      note(number, blob, entry, room);
      word.store(entry, release);
      return number;
    }
    return overflow();
  }

  std::int32_t overflow() {
    header().overflowed.fetch_add(1, relaxed);
    return -1;
  }

  void note(std::int32_t number, const std::string& blob, std::uint64_t entry, std::size_t words) {
    entered_.emplace(number, Entry{blob, (entry & ~kEntered & ~kLaps) >> 32, words, false});
    groups_.emplace(blob, number);
  }

  static std::size_t words_of(const std::string& blob) { return (sizeof(std::uint32_t) + blob.size() + 7) / 8; }

  // What goes to the table for a blob that is now in the arena; 0 when there is no room.
  std::uint64_t put(const std::string& blob, std::size_t words) {
    std::uint64_t at = header().arena_used.load(relaxed);
    do {
      if (at + words * 8 > kArenaBytes) return 0;
    } while (!header().arena_used.compare_exchange_weak(at, at + words * 8, relaxed));
    return write(blob, words, at);
  }

  std::uint64_t write(const std::string& blob, std::size_t words, std::uint64_t at) {
    std::string content(words * 8, '\0');
    const std::uint32_t check = fnv1a(blob.data(), blob.size());
    std::memcpy(content.data(), &check, sizeof check);
    std::memcpy(content.data() + sizeof check, blob.data(), blob.size());
    Word* arena = arena_at(at);
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t word;
      std::memcpy(&word, content.data() + i * 8, 8);
      arena[i].store(word, relaxed);
    }
    return halves(static_cast<std::uint32_t>(blob.size()), static_cast<std::uint32_t>(at)) | kEntered;
  }

  // The blob that another writer of this process entered.
  std::string blob_at(std::uint64_t place) const {
    const std::size_t size = static_cast<std::uint32_t>(place), words = (sizeof(std::uint32_t) + size + 7) / 8;
    std::string content(words * 8, '\0');
    const Word* arena = arena_at((place & ~kEntered & ~kLaps) >> 32);
    for (std::size_t i = 0; i < words; ++i) {
      const std::uint64_t word = arena[i].load(relaxed);
      std::memcpy(content.data() + i * 8, &word, 8);
    }
    return content.substr(sizeof(std::uint32_t), size);
  }

  Word* arena_at(std::uint64_t offset) const { return reinterpret_cast<Word*>(memory_ + layout_.arena() + offset); }

  Layout layout_;
  std::uint64_t mine_;
  char* memory_ = nullptr;
  std::uint32_t generation_ = 0;
  std::atomic<std::uint32_t> phases_[256] = {};
  std::mutex tables_;
  Ids groups_, sites_;
  struct Entry {
    std::string blob;
    std::uint64_t at;   // its place in the arena
    std::size_t words;  // and the room there
    bool retired;
  };
  std::unordered_map<std::int32_t, Entry> entered_;  // groups that this writer has entered, by number
  std::deque<std::int32_t> retired_;                 // of them, in the order in which they were retired
  std::size_t next_place_ = 0;                       // places before it are taken
};

inline void Operation::waiting_at(std::uint64_t ns) noexcept {
  if (slot_ == nullptr || !writer_->writable() || slot_->ticket.load(acquire) != published(index_)) return;
  std::uint64_t expected = lap_tag(index_, writer_->layout_.records);
  slot_->wait.compare_exchange_strong(expected, expected | offset_word(ns, start_ns_), release, relaxed);
}

inline void Operation::finish_at(bool failed, std::uint64_t now) noexcept {
  if (ended_.exchange(true, relaxed) || writer_ == nullptr || !writer_->writable()) return;
  if (slot_ != nullptr) {
    std::uint64_t expected = lap_tag(index_, writer_->layout_.records);
    const std::uint64_t end = expected | offset_word(now, start_ns_) | (failed ? kFailedBit : 0);
    // The lap tag decides; the ticket is looked at first so that a tag that came round again cannot match.
    if (slot_->ticket.load(acquire) == published(index_) &&
        slot_->end.compare_exchange_strong(expected, end, release, relaxed))
      // Another value than any that was there: that is all a reader looks at, and cheaper than to count.
      writer_->block_of(index_).store(now + index_ * 0x9e3779b97f4a7c15ULL, release);
    else
      writer_->header().late.fetch_add(1, relaxed);
  }
  if (stream_ != nullptr && stream_->key.load(relaxed) == key_) {  // else its group was retired, and the place freed
    stream_->last_end_ns.store(now, relaxed);
    stream_->completed.fetch_add(1, release);
  }
}

}  // namespace keepstep::ring
