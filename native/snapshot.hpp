// Snapshots of a rank's storages into a slot of the node's cache, by threads of their own.
//
// A slot: one page with the commit record, the storages' bytes, then the header (JSON) and the table of checksums, each
// at a multiple of 64. The record is cleared before anything else is written and set last: a writer that dies in between
// leaves a slot that says nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "crc64.hpp"

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
};

// Copies pieces with several threads and sums them on the way; the threads are detached, so whoever owns the memory must
// `wait` before it goes. Urgent pieces are taken first.
class Work {
 public:
  explicit Work(std::vector<Piece> pieces) : pieces_(std::move(pieces)), sums_(pieces_.size()) {
    cut(true);
    urgent_left_ = urgent_ = chunks_.size();
    cut(false);
    left_ = chunks_.size();
  }
  virtual ~Work() = default;

  static void start(const std::shared_ptr<Work>& work, unsigned threads) {
    if (work->chunks_.empty()) {
      work->finish();
      return;
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

  void wait(bool urgent_only) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ || (urgent_only && urgent_left_ == 0); });
  }

  bool finished() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return finished_;
  }

  const std::vector<uint64_t>& sums() const { return sums_; }

 protected:
  virtual void done() {}

 private:
  struct Chunk {
    size_t piece;
    uint64_t begin, count, sum;
  };

  void cut(bool urgent) {
    for (size_t i = 0; i < pieces_.size(); ++i)
      for (uint64_t done = 0; pieces_[i].urgent == urgent && done < pieces_[i].count; done += kChunk)
        chunks_.push_back({i, done, std::min<uint64_t>(kChunk, pieces_[i].count - done), 0});
  }

  void run() {
    for (;;) {
      const size_t index = next_.fetch_add(1);
      if (index >= chunks_.size()) return;
      Chunk& chunk = chunks_[index];
      const Piece& piece = pieces_[chunk.piece];
      const uint8_t* from = piece.from + chunk.begin;
      chunk.sum = piece.to ? crc64::copy(piece.to + chunk.begin, from, chunk.count) : crc64::extend(0, from, chunk.count);
      if (index < urgent_ && urgent_left_.fetch_sub(1) == 1) {
        const std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
      }
      if (left_.fetch_sub(1) == 1) finish();
    }
  }

  void finish() {
    for (const Chunk& chunk : chunks_)
      sums_[chunk.piece] =
          chunk.begin == 0 ? chunk.sum : crc64::combine(sums_[chunk.piece], chunk.sum, chunk.count);
    done();
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }

  std::vector<Piece> pieces_;
  std::vector<Chunk> chunks_;
  std::vector<uint64_t> sums_;
  size_t urgent_ = 0;
  std::atomic<size_t> next_{0}, left_{0}, urgent_left_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
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
           uint64_t step, uint64_t incarnation, int lock, uint64_t* board, uint64_t board_value)
      : Work(std::move(pieces)),
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
