// Python face of the copy engine. Whatever copies runs without the GIL; threads never touch Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include "snapshot.hpp"

namespace nb = nanobind;
namespace snapshot = keepstep::snapshot;
namespace crc64 = keepstep::crc64;

namespace {

// A view of somebody's memory, held until this object goes.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~Buffer() {
    const nb::gil_scoped_acquire held;
    PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
  std::uint64_t size() const { return static_cast<std::uint64_t>(view_.len); }

  std::uint8_t* part(std::uint64_t offset, std::uint64_t count) const {
    if (offset > size() || count > size() - offset) throw nb::value_error("a piece lies outside the buffer");
    return data() + offset;
  }

 private:
  Py_buffer view_{};
};

// Packed numbers (array('Q')), `fields` for each piece.
class Plan {
 public:
  Plan(nb::handle packed, std::size_t fields) : buffer_(packed, false), fields_(fields) {
    if (buffer_.size() % (8 * fields) != 0) throw nb::value_error("a plan of broken length");
  }
  std::size_t size() const { return buffer_.size() / (8 * fields_); }
  std::uint64_t at(std::size_t piece, std::size_t field) const {
    std::uint64_t value;
    std::memcpy(&value, buffer_.data() + 8 * (piece * fields_ + field), 8);
    return value;
  }

 private:
  Buffer buffer_;
  std::size_t fields_;
};

constexpr std::uint64_t kUrgent = 1, kOnDevice = 2;

std::uint8_t* address(std::uint64_t number) { return reinterpret_cast<std::uint8_t*>(number); }

std::vector<std::uint64_t> carry_out(std::vector<snapshot::Piece> pieces, unsigned threads) {
  const nb::gil_scoped_release others_run;
  const auto work = std::make_shared<snapshot::Work>(std::move(pieces));
  snapshot::Work::start(work, threads);
  work->wait(false);
  return work->sums();
}

std::vector<std::uint64_t> checksums(nb::handle source, nb::handle plan, unsigned threads) {
  const Buffer buffer(source, false);
  const Plan rows(plan, 2);
  std::vector<snapshot::Piece> pieces;
  for (std::size_t i = 0; i < rows.size(); ++i)
    pieces.push_back({buffer.part(rows.at(i, 0), rows.at(i, 1)), nullptr, rows.at(i, 1)});
  return carry_out(std::move(pieces), threads);
}

std::vector<std::uint64_t> copy_out(nb::handle source, nb::handle plan, unsigned threads, bool fresh) {
  const Buffer buffer(source, false);
  const Plan rows(plan, 3);
  std::vector<snapshot::Piece> pieces;
  for (std::size_t i = 0; i < rows.size(); ++i)
    pieces.push_back({buffer.part(rows.at(i, 0), rows.at(i, 2)), address(rows.at(i, 1)), rows.at(i, 2), false, false,
                      true, fresh});
  return carry_out(std::move(pieces), threads);
}

std::uint64_t checksum(nb::handle data, std::uint64_t before) {
  const Buffer buffer(data, false);
  const nb::gil_scoped_release others_run;
  return crc64::extend(before, buffer.data(), buffer.size());
}

void clear(nb::handle slot) {
  const Buffer buffer(slot, true);
  snapshot::clear(buffer.part(0, snapshot::kDataOffset));
}

void populate(nb::handle memory, std::uint64_t begin, std::uint64_t count) {
  const Buffer buffer(memory, true);
  std::uint8_t* data = buffer.part(begin, count);
  const nb::gil_scoped_release others_run;
  if (madvise(data, count, MADV_POPULATE_WRITE) == 0) return;
  // A kernel without it. Adding nothing touches a page for writing and changes no byte, whoever writes there meanwhile.
  for (std::uint64_t i = 0; i < count; i += 4096) __atomic_fetch_add(data + i, 0, __ATOMIC_RELAXED);
}

class Snapshot {
 public:
  Snapshot(nb::handle slot, nb::handle plan, nb::object owners, nb::bytes header, std::uint64_t data_bytes,
           std::uint64_t step, std::uint64_t incarnation, int lock, nb::handle board,
           std::uint64_t board_index, std::uint64_t board_value, unsigned threads, std::uint64_t stream)
      : owners_(std::move(owners)), slot_(std::make_unique<Buffer>(slot, true)), process_(getpid()) {
    const Plan rows(plan, 4);
    const std::string text(header.c_str(), header.size());
    slot_->part(snapshot::kDataOffset, data_bytes);
    slot_->part(0, snapshot::slot_bytes(data_bytes, text.size(), rows.size()));
    std::vector<snapshot::Piece> pieces;
    std::unique_ptr<keepstep::device::Moment> moment;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::uint64_t offset = rows.at(i, 1), count = rows.at(i, 2);
      if (offset > data_bytes || count > data_bytes - offset) throw nb::value_error("a piece lies outside the data");
      const bool on_device = (rows.at(i, 3) & kOnDevice) != 0;
      pieces.push_back({address(rows.at(i, 0)), slot_->data() + snapshot::kDataOffset + offset, count,
                        (rows.at(i, 3) & kUrgent) != 0, on_device});
      if (on_device && !moment) moment = std::make_unique<keepstep::device::Moment>(address(stream));
    }
    std::uint64_t* word = nullptr;
    if (!board.is_none()) {
      board_ = std::make_unique<Buffer>(board, true);
      word = reinterpret_cast<std::uint64_t*>(board_->part(8 * board_index, 8));
    }
    work_ = std::make_shared<snapshot::Snapshot>(std::move(pieces), slot_->data(), data_bytes, text, step,
                                                 incarnation, lock, word, board_value, std::move(moment));
    snapshot::Work::start(work_, threads);
  }

  ~Snapshot() {
    if (!work_) return;
    if (process_ == getpid()) {
      const nb::gil_scoped_release others_run;
      work_->await_end();
    } else {
      slot_.release();  // a forked child has none of the threads, and must not unmap what it did not map
      board_.release();
    }
  }

  void wait(bool urgent) {
    if (process_ != getpid()) throw nb::value_error("this snapshot belongs to another process");
    const nb::gil_scoped_release others_run;
    work_->wait(urgent);
  }

  bool finished() { return work_->finished(); }

  std::vector<std::uint64_t> sums() {
    wait(false);
    return work_->sums();
  }

 private:
  nb::object owners_;  // goes only after the destructor has waited
  std::unique_ptr<Buffer> slot_, board_;
  std::shared_ptr<snapshot::Work> work_;
  int process_;
};

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a snapshot in flight lives as long as its process
  m.doc() = "Native part of keepstep.checkpoint: checksums, and copies that are summed on the way.";
  m.attr("DATA_OFFSET") = snapshot::kDataOffset;
  m.attr("MAGIC") = snapshot::kMagic;
  m.def("checksum", &checksum, nb::arg("data"), nb::arg("before") = 0);
  m.def("combine", &crc64::combine, nb::arg("first"), nb::arg("second"), nb::arg("nbytes"));
  m.def("checksums", &checksums, nb::arg("source"), nb::arg("plan"), nb::arg("threads") = 1);
  m.def("copy_out", &copy_out, nb::arg("source"), nb::arg("plan"), nb::arg("threads") = 1, nb::arg("fresh") = false);
  m.def("has_cuda", [] { return keepstep::device::Driver::get() != nullptr; });
  m.attr("URGENT") = kUrgent;
  m.attr("ON_DEVICE") = kOnDevice;
  m.def("clear", &clear, nb::arg("slot"));
  m.def("populate", &populate, nb::arg("memory"), nb::arg("begin"), nb::arg("nbytes"));
  m.def("slot_bytes", &snapshot::slot_bytes, nb::arg("data_bytes"), nb::arg("header_bytes"), nb::arg("storages"));
  nb::class_<Snapshot>(m, "Snapshot")
      .def(nb::init<nb::handle, nb::handle, nb::object, nb::bytes, std::uint64_t, std::uint64_t, std::uint64_t,
                    int, nb::handle, std::uint64_t, std::uint64_t, unsigned, std::uint64_t>(),
           nb::arg("slot"), nb::arg("plan"), nb::kw_only(), nb::arg("owners").none() = nb::none(), nb::arg("header"),
           nb::arg("data_bytes"), nb::arg("step"), nb::arg("incarnation"), nb::arg("lock") = -1,
           nb::arg("board").none() = nb::none(), nb::arg("board_index") = 0, nb::arg("board_value") = 0, nb::arg("threads") = 1,
           nb::arg("stream") = 0)
      .def("wait", &Snapshot::wait, nb::arg("urgent") = false)
      .def("sums", &Snapshot::sums)
      .def_prop_ro("finished", &Snapshot::finished);
}
