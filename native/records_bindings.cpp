// Python face of what the agent does with records. Tables come and go as packed bytes.
#include <nanobind/nanobind.h>

#include "records.hpp"

namespace nb = nanobind;
namespace records = keepstep::records;
using records::Interval;
using records::Record;
using records::Span;
using records::Time;

namespace {

// A table that somebody else holds, as rows; held until this object goes.
template <typename Row>
class Table {
 public:
  explicit Table(nb::handle packed) {
    if (PyObject_GetBuffer(packed.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const auto size = static_cast<Py_ssize_t>(sizeof(Row));
    // An array whose rows have another layout could be of fitting length by chance.
    if ((view_.itemsize != 1 && view_.itemsize != size) || view_.len % size != 0 ||
        reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(Row) != 0) {
      PyBuffer_Release(&view_);
      throw nb::value_error("no whole, aligned rows");
    }
  }
  ~Table() { PyBuffer_Release(&view_); }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const Row* begin() const { return static_cast<const Row*>(view_.buf); }
  const Row* end() const { return begin() + view_.len / static_cast<Py_ssize_t>(sizeof(Row)); }
  std::size_t size() const { return static_cast<std::size_t>(end() - begin()); }

 private:
  Py_buffer view_{};
};

using Records = Table<Record>;

Span span(const Records& rows) { return {rows.begin(), rows.end()}; }

template <typename Row>
nb::object packed(const std::vector<Row>& rows) {
  return nb::steal(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(rows.data()),
                                                 static_cast<Py_ssize_t>(rows.size() * sizeof(Row))));
}

template <typename Row>
nb::object frozen(const std::vector<Row>& rows) {
  return nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(rows.data()),
                                             static_cast<Py_ssize_t>(rows.size() * sizeof(Row))));
}

records::Union union_of(nb::handle starts, nb::handle ends) {
  const Table<Time> from(starts), to(ends);
  if (from.size() != to.size()) throw nb::value_error("as many starts as ends are needed");
  std::vector<Interval> parts;
  parts.reserve(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) parts.emplace_back(from.begin()[i], to.begin()[i]);
  return records::Union(std::move(parts));
}

template <typename Keep>
nb::object kept(Span rows, Keep keep) {
  const auto count = std::count_if(rows.begin(), rows.end(), keep);
  nb::object found = nb::steal(PyByteArray_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(Record))));
  if (!found.is_valid()) throw nb::python_error();
  std::copy_if(rows.begin(), rows.end(), reinterpret_cast<Record*>(PyByteArray_AS_STRING(found.ptr())), keep);
  return found;
}

nb::tuple told(const Record& one) {
  return nb::make_tuple(one.op, one.seq, one.ticket, one.start_ns, one.end_ns, one.thread, one.peer, one.wait_ns,
                        one.bytes);
}

nb::list of_kind(nb::handle rows, std::uint8_t kind) {
  nb::list found;
  for (const Record& one : Records(rows))
    if (one.kind == kind) found.append(told(one));
  return found;
}

nb::tuple outline(nb::handle rows) {
  const Records table(rows);
  std::int16_t group = -1;
  Time end_ns = 0;
  std::size_t failed = 0;
  nb::list phases;
  for (const Record& record : table) {
    group = std::max(group, record.group);
    if ((record.flags & records::kFailed) != 0)
      ++failed;
    else
      end_ns = std::max(end_ns, record.end_ns);
    if (!records::is_operation(record)) phases.append(told(record));
  }
  return nb::make_tuple(group, end_ns, failed, phases);
}

nb::tuple symbols(nb::handle rows, std::uint64_t first_ticket, std::uint64_t end_ticket, Time since_ns) {
  const Records table(rows);
  const auto earlier = [](const Record& record, std::uint64_t ticket) { return record.ticket < ticket; };
  std::vector<std::uint64_t> found;
  std::vector<Time> starts;
  found.reserve(table.size());
  starts.reserve(table.size());
  bool backward = false;
  for (const Record* record = std::lower_bound(table.begin(), table.end(), first_ticket, earlier);
       record != table.end() && record->ticket < end_ticket; ++record) {
    if (!records::is_symbol(*record) || record->start_ns < since_ns) continue;
    found.push_back(records::symbol(*record));
    starts.push_back(record->start_ns);
    backward |= !records::is_operation(*record);
  }
  return nb::make_tuple(frozen(found), frozen(starts), backward);
}

nb::tuple waits(nb::handle rows, Time open_ns) {
  const Records table(rows);
  std::vector<Time> begin, until;
  for (const Interval& one : records::waits(span(table), open_ns)) {
    begin.push_back(one.first);
    until.push_back(one.second);
  }
  return nb::make_tuple(packed(begin), packed(until));
}

nb::tuple own_times(nb::handle rows, Time start_ns, Time end_ns, nb::handle pause_starts, nb::handle pause_ends) {
  const Records table(rows);
  const records::OwnTimes times =
      records::own_times(span(table), start_ns, end_ns, union_of(pause_starts, pause_ends));
  return nb::make_tuple(times.waited, times.gc, times.optimizer, times.data, times.backward);
}

nb::list streams(nb::handle rows, Time start_ns, Time end_ns, nb::handle pause_starts, nb::handle pause_ends,
                 nb::object groups, bool blocked_throughout) {
  const Records table(rows);
  std::vector<Record> operations = records::operations_in(span(table));
  std::vector<Interval> waited;
  if (blocked_throughout)
    for (const Record& record : operations) waited.emplace_back(record.start_ns, records::end_of(record, end_ns));
  else
    waited = records::waits(operations, end_ns);
  if (!groups.is_none()) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      if (!nb::cast<bool>(groups.attr("__contains__")(operations[i].group))) continue;
      operations[count] = operations[i];
      waited[count++] = waited[i];
    }
    operations.resize(count);
    waited.resize(count);
  }
  nb::list found;
  for (const records::StreamSums& one :
       records::streams(operations, std::move(waited), start_ns, end_ns, union_of(pause_starts, pause_ends)))
    found.append(nb::make_tuple(one.group, one.op, one.peer, one.first_seq, one.count, one.start, one.end, one.busy,
                                one.blocked, one.bytes, one.fastest));
  return found;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native part of keepstep.agent.ranks: what is done with every record.";
  constexpr std::uint64_t kEnd = std::numeric_limits<std::uint64_t>::max();
  constexpr Time kBegin = std::numeric_limits<Time>::min();

  m.def("of_kind", &of_kind, nb::arg("rows"), nb::arg("kind"));
  m.def("outline", &outline, nb::arg("rows"));
  m.def("symbols", &symbols, nb::arg("rows"), nb::arg("first_ticket") = 0, nb::arg("end_ticket") = kEnd,
        nb::arg("since_ns") = kBegin);
  m.def("waits", &waits, nb::arg("operations"), nb::arg("open_ns"));
  m.def("own_times", &own_times, nb::arg("rows"), nb::arg("start_ns"), nb::arg("end_ns"), nb::arg("pause_starts"),
        nb::arg("pause_ends"));
  m.def("streams", &streams, nb::arg("rows"), nb::arg("start_ns"), nb::arg("end_ns"), nb::arg("pause_starts"),
        nb::arg("pause_ends"), nb::arg("groups") = nb::none(), nb::arg("blocked_throughout") = false);

  nb::class_<records::Pending>(m, "Pending")
      .def(nb::init<>())
      .def("__len__", [](const records::Pending& self) { return self.rows().size(); })
      .def(
          "add",
          [](records::Pending& self, nb::handle started, nb::handle finished) {
            const Records begun(started), ended(finished);
            return self.add(span(begun), span(ended));
          },
          nb::arg("started"), nb::arg("finished"))
      .def("rows", [](const records::Pending& self) { return packed(self.rows()); })
      .def(
          "begun_before",
          [](const records::Pending& self, Time time_ns) {
            const Record* first = self.rows().data();
            return kept({first, first + self.rows().size()},
                        [time_ns](const Record& record) { return record.start_ns < time_ns; });
          },
          nb::arg("time_ns"))
      .def(
          "repeating_from",
          [](const records::Pending& self, std::uint64_t ticket) {
            const Record* first = self.rows().data();
            return kept({first, first + self.rows().size()}, [ticket](const Record& record) {
              return record.ticket >= ticket && records::is_symbol(record);
            });
          },
          nb::arg("ticket"))
      .def(
          "phases_since",
          [](const records::Pending& self, Time time_ns) {
            nb::list codes;
            for (const Record& record : self.rows())
              if (!records::is_operation(record) && record.start_ns >= time_ns) codes.append(record.op);
            return codes;
          },
          nb::arg("time_ns"))
      .def("drop_before", &records::Pending::drop_before, nb::arg("time_ns"));
}
