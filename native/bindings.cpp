// Python face of the ring. RingWriter.start and Operation are plain CPython: they are on the training's path.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include <optional>

#include "ring_reader.hpp"

namespace nb = nanobind;
namespace ring = keepstep::ring;

namespace {

PyObject* g_ring_error = nullptr;
PyTypeObject* g_operation_type = nullptr;

// --- Operation ----------------------------------------------------------------------------------------------------

struct PyOperation {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* writer;  // keeps the mapping
  ring::Operation operation;
};

PyOperation* as_operation(PyObject* self) { return reinterpret_cast<PyOperation*>(self); }

PyObject* operation_call(PyObject* self, PyObject* const*, size_t, PyObject*) {
  as_operation(self)->operation.finish(false);
  Py_RETURN_NONE;
}

PyObject* operation_fail(PyObject* self, PyObject* const*, Py_ssize_t) {
  as_operation(self)->operation.finish(true);
  Py_RETURN_NONE;
}

PyObject* operation_waiting(PyObject* self, PyObject* const*, Py_ssize_t) {
  as_operation(self)->operation.waiting();
  Py_RETURN_NONE;
}

PyObject* operation_seq(PyObject* self, void*) { return PyLong_FromUnsignedLong(as_operation(self)->operation.seq()); }

PyObject* operation_ended(PyObject* self, void*) { return PyBool_FromLong(as_operation(self)->operation.ended()); }

void operation_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(as_operation(self)->writer);
  as_operation(self)->operation.~Operation();
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef operation_methods[] = {
    {"fail", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(operation_fail)), METH_FASTCALL,
     "End it now, marked FAILED. The first end counts; arguments are ignored."},
    {"waiting", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(operation_waiting)), METH_FASTCALL,
     "The caller begins to wait for it now. The first call counts; arguments are ignored."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef operation_properties[] = {
    {"seq", operation_seq, nullptr, "Sequence number in its stream, from 1; 0 when it has none.", nullptr},
    {"ended", operation_ended, nullptr, "Whether its end was stamped.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef operation_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, static_cast<Py_ssize_t>(offsetof(PyOperation, call)), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot operation_slots[] = {
    {Py_tp_doc, const_cast<char*>("One operation between its start and its end. Calling it stamps the end now.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(operation_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, operation_methods},
    {Py_tp_getset, operation_properties},
    {Py_tp_members, operation_members},
    {0, nullptr}};

PyType_Spec operation_spec = {"keepstep.ring._native.Operation", sizeof(PyOperation), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                              operation_slots};

PyOperation* new_operation(PyObject* writer) {
  auto* self = as_operation(g_operation_type->tp_alloc(g_operation_type, 0));
  if (self == nullptr) return nullptr;
  new (&self->operation) ring::Operation();
  self->call = operation_call;
  self->writer = Py_NewRef(writer);
  return self;
}

// --- RingWriter.start ---------------------------------------------------------------------------------------------

constexpr const char* kStartNames[] = {"kind", "op", "group", "peer", "nbytes", "flags", "site"};
constexpr long long kStartLow[] = {0, 0, INT16_MIN, INT32_MIN, 0, 0, 0};
constexpr long long kStartHigh[] = {UINT8_MAX, UINT8_MAX, INT16_MAX, INT32_MAX, INT64_MAX, UINT16_MAX, UINT32_MAX};

bool take_number(PyObject* object, int which, long long& value) {
  value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  return value >= kStartLow[which] && value <= kStartHigh[which];
}

int start_argument_index(PyObject* name) {
  for (int i = 0; i < 7; ++i)
    if (PyUnicode_CompareWithASCIIString(name, kStartNames[i]) == 0) return i;
  return -1;
}

PyObject* writer_start(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  auto* writer = nb::inst_ptr<ring::Writer>(nb::handle(self));
  PyOperation* operation = new_operation(self);
  if (operation == nullptr) return nullptr;
  long long v[7] = {0, 0, -1, -1, 0, 0, 0};
  bool good = positional <= 7;
  for (Py_ssize_t i = 0; good && i < positional; ++i) good = take_number(args[i], static_cast<int>(i), v[i]);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; good && i < named; ++i) {
    const int which = start_argument_index(PyTuple_GET_ITEM(names, i));
    good = which >= positional && take_number(args[positional + i], which, v[which]);
  }
  if (good)
    writer->start(operation->operation, static_cast<std::uint8_t>(v[0]), static_cast<std::uint8_t>(v[1]),
                  static_cast<std::int16_t>(v[2]), static_cast<std::int32_t>(v[3]), static_cast<std::uint64_t>(v[4]),
                  static_cast<std::uint16_t>(v[5]), static_cast<std::uint32_t>(v[6]));
  else
    writer->drop();  // a wrong argument must not end a training step
  return reinterpret_cast<PyObject*>(operation);
}

PyMethodDef writer_methods[] = {
    {"start", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(writer_start)), METH_FASTCALL | METH_KEYWORDS,
     "Publish the start of an operation; never raises. Numbers that do not fit are a counted drop."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot writer_slots[] = {{Py_tp_methods, writer_methods}, {0, nullptr}};

// --- everything else ------------------------------------------------------------------------------------------------

// Text as UTF-8, whatever it holds: file names may carry lone surrogates.
std::string utf8(nb::str text) {
  nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return std::string(PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())));
}

template <typename Row>
nb::object packed(const std::vector<Row>& rows) {
  return nb::steal(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(rows.data()),
                                                 static_cast<Py_ssize_t>(rows.size() * sizeof(Row))));
}

// "ring PATH: what is wrong", for whatever was given: a path (str, bytes, PathLike) or a descriptor.
template <typename Use>
auto with_file(nb::handle where, int flags, Use use) {
  if (PyLong_Check(where.ptr())) {
    const int fd = nb::cast<int>(where);
    try {
      const ring::File file(fd);
      return use(file);
    } catch (const ring::Error& error) {
      throw ring::Error("ring on descriptor " + std::to_string(fd) + ": " + error.what());
    }
  }
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(where.ptr(), &encoded) == 0) throw nb::python_error();
  const std::string path(PyBytes_AS_STRING(encoded), static_cast<std::size_t>(PyBytes_GET_SIZE(encoded)));
  Py_DECREF(encoded);
  try {
    const ring::File file(path, flags);
    return use(file);
  } catch (const ring::Error& error) {
    throw ring::Error("ring " + path + ": " + error.what());
  }
}

nb::tuple poll(ring::Reader& reader, std::uint16_t apart, std::uint16_t kept) {
  ring::Progress progress;
  {
    nb::gil_scoped_release others_run;
    progress = reader.poll(apart, kept);
  }
  const auto rows = [](const std::vector<ring::Record>& records) { return records.empty() ? nb::none() : packed(records); };
  return nb::make_tuple(rows(progress.started), rows(progress.finished), progress.lost, progress.unfinished,
                        rows(progress.others));
}

nb::object snapshot(const ring::Reader& reader, bool only_in_flight) {
  std::vector<ring::Record> records;
  {
    nb::gil_scoped_release others_run;
    records = reader.snapshot(only_in_flight);
  }
  return packed(records);
}

nb::object replaced(const std::string& text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::list groups(const ring::Reader& reader) {
  nb::list all;
  const std::vector<ring::GroupState> known = reader.groups();
  std::int32_t last = -1;
  for (const ring::GroupState& group : known) last = std::max(last, group.number);
  for (std::int32_t number = 0; number <= last; ++number) all.append(nb::none());
  for (const ring::GroupState& group : known) {
    nb::object members = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(group.members.size())));
    if (!members.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < group.members.size(); ++i)
      PyTuple_SET_ITEM(members.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(group.members[i]));
    all[static_cast<std::size_t>(group.number)] =
        nb::make_tuple(replaced(group.name), members, replaced(group.backend), replaced(group.desc));
  }
  return all;
}

nb::list sites(const ring::Reader& reader) {
  nb::list all;
  for (const std::string& site : reader.sites()) all.append(replaced(site));
  return all;
}

nb::tuple header(const ring::Reader& reader) {
  const ring::HeaderState h = reader.header_state();
  return nb::make_tuple(h.rank, h.world_size, h.pid, h.incarnation, h.monotonic_ns, h.realtime_ns, h.records, h.closed,
                        h.dropped, h.written, h.late, h.overflowed, h.first_step);
}

nb::object content(const ring::Reader& reader) {
  std::vector<std::uint64_t> words;
  {
    nb::gil_scoped_release others_run;
    words = reader.copy();
  }
  return packed(words);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a writer lives as long as its process
  m.doc() = "Native part of keepstep.ring: the writer, and the reader's scans.";

  g_ring_error = nb::object(nb::module_::import_("keepstep.core.errors").attr("RingError")).release().ptr();
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const ring::Error& error) {
      PyErr_SetString(g_ring_error, error.what());
    }
  });

  nb::object operation = nb::steal(PyType_FromSpec(&operation_spec));
  if (!operation.is_valid()) throw nb::python_error();
  m.attr("Operation") = operation;
  g_operation_type = reinterpret_cast<PyTypeObject*>(operation.release().ptr());

  m.def("create", &ring::create, nb::arg("records") = 65536);

  nb::class_<ring::Writer>(m, "RingWriter", nb::type_slots(writer_slots))
      .def(
          "__init__",
          [](ring::Writer* self, nb::handle where, std::int32_t rank, std::int32_t world_size, std::uint64_t incarnation,
             bool join) {
            with_file(where, O_RDWR,
                      [&](const ring::File& file) { new (self) ring::Writer(file, rank, world_size, incarnation, join); });
          },
          nb::arg("where"), nb::kw_only(), nb::arg("rank"), nb::arg("world_size"), nb::arg("incarnation") = 0,
          nb::arg("join") = false)
      .def(
          "group",
          [](ring::Writer& self, nb::str name, const std::vector<std::int32_t>& members, nb::str backend, nb::str desc) {
            return self.group(utf8(name), members, utf8(backend), utf8(desc));
          },
          nb::arg("name"), nb::arg("members"), nb::arg("backend"), nb::arg("desc"))
      .def("retire", &ring::Writer::retire, nb::arg("group"))
      .def("site", [](ring::Writer& self, nb::str text) { return self.site(utf8(text)); }, nb::arg("text"))
      .def("begins_at", &ring::Writer::begins_at, nb::arg("step"))
      .def("close", &ring::Writer::close)
      .def_prop_ro("dropped", &ring::Writer::dropped)
      .def_prop_ro("incarnation", &ring::Writer::incarnation)
      .def_prop_ro("writable", &ring::Writer::writable);

  nb::class_<ring::Reader>(m, "Reader")
      .def(
          "__init__",
          [](ring::Reader* self, nb::handle where) {
            with_file(where, O_RDONLY, [&](const ring::File& file) { new (self) ring::Reader(file); });
          },
          nb::arg("where"))
      .def("poll", &poll, nb::arg("apart") = 0, nb::arg("kept") = 0)
      .def("snapshot", &snapshot, nb::arg("only_in_flight"))
      .def("streams", [](const ring::Reader& reader) { return packed(reader.streams()); })
      .def("groups", &groups)
      .def("sites", &sites)
      .def("header", &header)
      .def("content", &content)
      .def("writer_lives", &ring::Reader::writer_lives);
}
