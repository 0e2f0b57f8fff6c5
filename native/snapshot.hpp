// Snapshots of a rank's storages into a slot of the node's cache, by threads of their own.
//
// A slot: one page with the commit record, the storages' bytes, then the header (JSON) and the table of checksums, each
// at a multiple of 64. The record is cleared before anything else is written and set last: a writer that dies in between
// leaves a slot that says nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#include "crc64.hpp"
#include "device_copy.hpp"

namespace keepstep::snapshot {

using std::size_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint64_t kMagic = 0x3154'4F4C'5353'4B00ull;  // "\0KSSLOT1"
constexpr size_t kDataOffset = 4096;
constexpr size_t kChunk = 1 << 20;

struct Record {
  uint64_t magic, step, incarnation, data_bytes, header_bytes, storages, header_crc, record_crc;
};
static_assert(sizeof(Record) == 64);

constexpr uint64_t aligned(uint64_t count) { return (count + 63) / 64 * 64; }
constexpr uint64_t header_offset(uint64_t data_bytes) { return kDataOffset + aligned(data_bytes); }
constexpr uint64_t table_offset(uint64_t data_bytes, uint64_t header_bytes) {
  return header_offset(data_bytes) + aligned(header_bytes);
}
constexpr uint64_t slot_bytes(uint64_t data_bytes, uint64_t header_bytes, uint64_t storages) {
  return table_offset(data_bytes, header_bytes) + 8 * storages;
}

// One storage: `count` bytes at `from` belong at `to`.
struct Piece {
  const uint8_t* from;
  uint8_t* to;  // nullptr: only sum them
  uint64_t count;
  bool urgent = false;
  bool on_device = false;  // `from` is an address there
  // Pages that have not been mapped yet, many at once, take half the time:
  bool map_from = false, map_to = false;
};

// Has the kernel map whole pages of [begin, begin + count), for writing or for reading; where it cannot, nothing happens.
inline void map_pages(const uint8_t* begin, uint64_t count, bool writing) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + count) / kPage * kPage;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, writing ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

// Copies pieces with several threads and sums them on the way; the threads are detached, so whoever owns the memory must
// `wait` before it goes. Urgent pieces are taken first. Pieces on a device come through its ring of page-locked segments:
// one thread more orders them there, in the order in which the others take them out.
class Work {
 public:
  // `moment`: from which on the pieces on the device may be read; null where there are none.
  explicit Work(std::vector<Piece> pieces, std::unique_ptr<device::Moment> moment = nullptr)
      : pieces_(std::move(pieces)), sums_(pieces_.size()), moment_(std::move(moment)) {
    for (const bool urgent : {true, false}) {
      for (const bool on_device : {false, true}) cut(urgent, on_device);
      if (urgent) urgent_left_ = urgent_ = chunks_.size();
    }
    left_ = chunks_.size();
  }
  virtual ~Work() = default;

  static void start(const std::shared_ptr<Work>& work, unsigned threads) {
    if (work->chunks_.empty()) {
      work->finish();
      return;
    }
    if (!work->segments_.empty()) {
      try {
        std::thread([work] { work->bring(); }).detach();
      } catch (const std::system_error&) {
        work->fail("no thread is to be had");
      }
    }
    const size_t most = std::min<size_t>(threads == 0 ? 1 : threads, work->chunks_.size());
    for (size_t i = 0; i < most; ++i) {
      try {
        std::thread([work] { work->run(); }).detach();
      } catch (const std::system_error&) {  // no thread to be had
        if (i == 0) work->run();
        break;
      }
    }
  }

  // Throws std::runtime_error when the device did not give its bytes: nothing is sealed then.
  void wait(bool urgent_only) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ || (urgent_only && urgent_left_ == 0); });
    if (!failure_.empty()) throw std::runtime_error(failure_);
  }

  // Nothing of this goes on after it.
  void await_end() noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_; });
  }

  bool finished() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return finished_;
  }

  const std::vector<uint64_t>& sums() const { return sums_; }

 protected:
  virtual void done() {}
  bool is_spoilt() const { return moment_ != nullptr && moment_->is_spoilt(); }
  void fail(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = why;
    changed_.notify_all();
  }

 private:
  static constexpr size_t kNoSegment = ~size_t{0};

  struct Chunk {
    size_t piece;
    uint64_t begin, count, sum;
    size_t segment = kNoSegment;
    uint64_t offset = 0;  // in the segment
  };
  struct Segment {
    size_t first, chunks, left;  // `left`: chunks that are still to be taken out
    uint64_t used;
  };

  void cut(bool urgent, bool on_device) {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (piece.urgent != urgent || piece.on_device != on_device) continue;
      for (uint64_t done = 0; done < piece.count; done += kChunk) {
        chunks_.push_back({i, done, std::min<uint64_t>(kChunk, piece.count - done), 0});
        if (on_device) place(chunks_.back());
      }
    }
  }

  // A segment's chunks follow each other in `chunks_`.
  void place(Chunk& chunk) {
    const size_t index = chunks_.size() - 1;
    if (segments_.empty() || segments_.back().first + segments_.back().chunks != index ||
        segments_.back().used + chunk.count > device::Ring::kSegmentBytes)
      segments_.push_back({index, 0, 0, 0});
    Segment& last = segments_.back();
    chunk.segment = segments_.size() - 1;
    chunk.offset = last.used;
    last.used += chunk.count;
    last.left = ++last.chunks;
  }

  void run() {
    for (;;) {
      const size_t index = next_.fetch_add(1);
      if (index >= chunks_.size()) return;
      Chunk& chunk = chunks_[index];
      const Piece& piece = pieces_[chunk.piece];
      const uint8_t* from = chunk.segment == kNoSegment ? piece.from + chunk.begin : arrived(chunk);
      if (piece.map_from) map_pages(from, chunk.count, false);
      if (piece.map_to) map_pages(piece.to + chunk.begin, chunk.count, true);
      if (from != nullptr)
        chunk.sum = piece.to ? crc64::copy(piece.to + chunk.begin, from, chunk.count) : crc64::extend(0, from, chunk.count);
      if (chunk.segment != kNoSegment) taken_out(chunk.segment);
      if (index < urgent_ && urgent_left_.fetch_sub(1) == 1) {
        const std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
      }
      if (left_.fetch_sub(1) == 1) finish();
    }
  }

  // Where the bytes of a chunk are, once they are there; null: they do not come.
  const uint8_t* arrived(const Chunk& chunk) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return chunk.segment < arrived_ || !failure_.empty(); });
    return failure_.empty() ? ring_->segment(chunk.segment) + chunk.offset : nullptr;
  }

  void taken_out(size_t segment) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--segments_[segment].left == 0) changed_.notify_all();
  }

  // Fills the segments in their order, each when the one that had its place is empty.
  void bring() {
    const device::Driver& driver = *device::Driver::get();
    device::Ring& ring = device::Ring::of(moment_->context());
    const std::lock_guard<std::mutex> others(ring.busy);
    try {
      int mode = device::Driver::kRelaxed;
      driver.check(driver.capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
      driver.check(driver.set_context(ring.context), "cuCtxSetCurrent");
      ring.prepare(driver);
      driver.check(driver.stream_wait(ring.stream, moment_->event(), 0), "cuStreamWaitEvent");
      ring_ = &ring;
      size_t ordered = 0;
      for (size_t number = 0; number < segments_.size(); ++number) {
        for (; ordered < segments_.size() && ordered < number + device::Ring::kSegments; ++ordered) {
          if (ordered >= device::Ring::kSegments) await_empty(ordered - device::Ring::kSegments);
          order(driver, ring, ordered);
        }
        driver.check(driver.wait(ring.event(number)), "cuEventSynchronize");
        const std::lock_guard<std::mutex> lock(mutex_);
        arrived_ = number + 1;
        changed_.notify_all();
      }
    } catch (const std::exception& error) {
      fail(error.what());
    }
    await_end();
  }

  void await_empty(size_t segment) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return segments_[segment].left == 0; });
  }

  // Chunks that lie side by side on the device come as one.
  void order(const device::Driver& driver, const device::Ring& ring, size_t number) {
    const Segment& segment = segments_[number];
    for (size_t i = segment.first, end = segment.first + segment.chunks; i < end;) {
      const Chunk& first = chunks_[i];
      uint64_t count = first.count;
      while (++i < end && chunks_[i].piece == first.piece) count += chunks_[i].count;
      const auto from = reinterpret_cast<uint64_t>(pieces_[first.piece].from) + first.begin;
      driver.check(driver.to_host(ring.segment(number) + first.offset, from, count, ring.stream), "cuMemcpyDtoHAsync");
    }
    driver.check(driver.record(ring.event(number), ring.stream), "cuEventRecord");
  }

  void finish() {
    for (const Chunk& chunk : chunks_)
      sums_[chunk.piece] =
          chunk.begin == 0 ? chunk.sum : crc64::combine(sums_[chunk.piece], chunk.sum, chunk.count);
    if (failure_.empty()) done();  // nobody changes it any more
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }

  std::vector<Piece> pieces_;
  std::vector<Chunk> chunks_;
  std::vector<Segment> segments_;
  std::vector<uint64_t> sums_;
  std::unique_ptr<device::Moment> moment_;
  device::Ring* ring_ = nullptr;
  size_t urgent_ = 0, arrived_ = 0;
  std::atomic<size_t> next_{0}, left_{0}, urgent_left_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
  bool finished_ = false;
};

inline void publish(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }

inline void clear(uint8_t* slot) {
  publish(reinterpret_cast<uint64_t*>(slot), 0);
  std::memset(slot, 0, sizeof(Record));
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Fills a slot and seals it when every byte is there; then gives up this process's lock on the file `lock` (-1: none),
// and sets `board`, the word that tells others so.
class Snapshot final : public Work {
 public:
  Snapshot(std::vector<Piece> pieces, uint8_t* slot, uint64_t data_bytes, std::string header,
           uint64_t step, uint64_t incarnation, int lock, uint64_t* board, uint64_t board_value,
           std::unique_ptr<device::Moment> moment)
      : Work(std::move(pieces), std::move(moment)),
        slot_(slot),
        data_bytes_(data_bytes),
        header_(std::move(header)),
        step_(step),
        incarnation_(incarnation),
        lock_(lock),
        board_(board),
        board_value_(board_value) {
    clear(slot_);
  }

 private:
  void done() override {
    if (is_spoilt()) return fail("a collective was aborted, so that this may be no state of a step");
    std::memcpy(slot_ + header_offset(data_bytes_), header_.data(), header_.size());
    uint8_t* table = slot_ + table_offset(data_bytes_, header_.size());
    std::memcpy(table, sums().data(), 8 * sums().size());
    Record record{kMagic, step_, incarnation_, data_bytes_, header_.size(), sums().size(), 0, 0};
    record.header_crc = crc64::extend(crc64::extend(0, header_.data(), header_.size()), table, 8 * sums().size());
    record.record_crc = crc64::extend(0, &record, offsetof(Record, record_crc));
    std::memcpy(slot_ + 8, reinterpret_cast<const uint8_t*>(&record) + 8, sizeof(record) - 8);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    publish(reinterpret_cast<uint64_t*>(slot_), record.magic);
    if (lock_ >= 0) {
      struct flock all {};
      all.l_type = F_UNLCK;
      fcntl(lock_, F_SETLK, &all);
    }
    if (board_) publish(board_, board_value_);
  }

  uint8_t* slot_;
  uint64_t data_bytes_;
  std::string header_;
  uint64_t step_, incarnation_;
  int lock_;
  uint64_t* board_;
  uint64_t board_value_;
};

}  // namespace keepstep::snapshot
