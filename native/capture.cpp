// The probe's calls in the middle of a training step, as plain CPython without torch. Between two of them the caches go
// cold, and then every Python function that is entered costs microseconds; what is here enters none.
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>

#include <deque>
#include <initializer_list>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

class Ref {  // an owned reference, or none
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

PyObject *g_start, *g_stumbled, *g_nbytes, *g_dtype, *g_is_completed, *g_waiting, *g_wait, *g_fail, *g_computed, *g_generation;
PyTypeObject* g_bucket_call_type;

template <typename State>
struct Object {  // a Python object around C++ state
  PyObject_HEAD
  vectorcallfunc call;
  State state;
};

template <typename State>
State& state_of(PyObject* self) {
  return reinterpret_cast<Object<State>*>(self)->state;
}

template <typename State>
PyObject* make(PyTypeObject* type, vectorcallfunc call, State&& state) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* object = reinterpret_cast<Object<State>*>(self);
  new (&object->state) State(std::move(state));
  object->call = call;
  return self;
}

template <typename State>
void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  state_of<State>(self).~State();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename State>
PyMemberDef* vectorcall_member() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, static_cast<Py_ssize_t>(offsetof(Object<State>, call)), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  return members;
}

PyCFunction method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

// --- Here: the line of the user's code ----------------------------------------------------------------------------

constexpr int kMostFrames = 160;            // deeper than any library nests between the user's line and a collective
constexpr std::size_t kMostKnown = 8192;    // bounds our memory in a program that makes code as it runs

struct Line {
  PyObject* code;
  int instruction;
  long through;        // what the judge said of the library that it called; 0: of none
  PyObject* inner;     // code of that or another library's that called torch; none where there is no library
  bool operator==(const Line& other) const {
    return code == other.code && instruction == other.instruction && through == other.through && inner == other.inner;
  }
};

struct LineHash {
  std::size_t operator()(const Line& line) const {
    const std::size_t at = (reinterpret_cast<std::size_t>(line.code) >> 4) * 31 + static_cast<std::size_t>(line.instruction);
    return (at * 31 + static_cast<std::size_t>(line.through)) * 31 + (reinterpret_cast<std::size_t>(line.inner) >> 4);
  }
};

struct Here {
  Ref judge, enter;
  std::unordered_map<PyObject*, std::pair<Ref, long>> judged;     // by file name, by identity; with what keeps it valid
  struct Known {
    Ref site, code, inner;  // the codes keep the key valid
  };
  std::unordered_map<Line, Known, LineHash> known;
};

int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  Ref number(PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_lasti"));
  return number ? static_cast<int>(PyLong_AsLong(number.get())) : -1;
#endif
}

constexpr long kUsers = 0, kSkipped = 1;  // what the judge says of a file; more is the number of a library

// What the judge says of a file, -1 with an error set.
long owner_of(Here& here, PyObject* file) {
  const auto found = here.judged.find(file);
  if (found != here.judged.end()) return found->second.second;
  const Ref said(PyObject_CallOneArg(here.judge.get(), file));
  if (!said) return -1;
  const long owner = PyLong_AsLong(said.get());
  if (owner < 0 && PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_ValueError, "the judge said a negative number");
  if (owner >= 0 && here.judged.size() < kMostKnown) here.judged.emplace(file, std::make_pair(Ref::to(file), owner));
  return owner;
}

// The site of a line that called a library: ``inner`` is the code of the innermost function of a library below it.
PyObject* site_of(Here& here, PyFrameObject* frame, Ref code, long through, Ref inner) {
  const Line line{code.get(), instruction_of(frame), through, inner.get()};
  const auto found = here.known.find(line);
  if (found != here.known.end()) return Py_NewRef(found->second.site.get());
  if (here.known.size() >= kMostKnown) return PyLong_FromLong(0);
  const Ref number(PyLong_FromLong(through));
  if (!number) return nullptr;
  PyObject* arguments[] = {reinterpret_cast<PyObject*>(frame), number.get(), inner ? inner.get() : Py_None};
  Ref site(PyObject_Vectorcall(here.enter.get(), arguments, 3, nullptr));
  if (site) here.known.emplace(line, Here::Known{Ref::to(site.get()), std::move(code), std::move(inner)});
  return site.release();
}

PyObject* here_call(PyObject* self, PyObject* const*, size_t, PyObject*) {
  auto& here = state_of<Here>(self);
  PyFrameObject* asking = PyEval_GetFrame();
  Ref frame(asking == nullptr ? nullptr : reinterpret_cast<PyObject*>(PyFrame_GetBack(asking)));
  Ref library_frame, library_code;  // the innermost of a library: the answer where no line is the user's
  long through = 0;
  for (int i = 0; frame && i < kMostFrames; ++i) {
    auto* current = reinterpret_cast<PyFrameObject*>(frame.get());
    Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(current)));
    const long owner = owner_of(here, reinterpret_cast<PyCodeObject*>(code.get())->co_filename);
    if (owner < 0) return nullptr;
    if (owner == kUsers) return site_of(here, current, std::move(code), through, std::move(library_code));
    if (owner != kSkipped) {
      through = owner;
      if (!library_frame) {
        library_frame = Ref::to(frame.get());
        library_code = std::move(code);
      }
    }
    frame = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(current)));
  }
  if (!library_frame) return PyLong_FromLong(0);
  return site_of(here, reinterpret_cast<PyFrameObject*>(library_frame.get()), std::move(library_code), 0, Ref());
}

PyObject* here_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *judge, *enter;
  if (PyArg_ParseTuple(args, "OO", &judge, &enter) == 0) return nullptr;
  return make(type, here_call, Here{Ref::to(judge), Ref::to(enter), {}, {}});
}

// --- Buckets: the all-reduces of DDP's reducer in one backward ----------------------------------------------------

struct Pending {
  Ref work, operation;
};

struct Buckets {
  Ref recorder, here, queue, compiling, observers, kind, op, peer, flags;
  Ref typed;                     // flags by the gradients' type; ``flags`` where it has none
  Ref site;                      // of the backward in progress; none before our callback is queued
  std::deque<Pending> pending;  // oldest first
  bool plain = false;            // inside a backward that has no other backward inside it
  bool failed = false;           // a Work has: what is pending is left to the reducer, which meets the same error
};

bool called(PyObject* callable) { return static_cast<bool>(Ref(PyObject_CallNoArgs(callable))); }
bool called(PyObject* object, PyObject* name) { return static_cast<bool>(Ref(PyObject_CallMethodNoArgs(object, name))); }

// Leaves the error that is set with the recorder; false where it is none of ours (an interrupt), and stays set.
bool stumbled(Buckets& buckets) {
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return false;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref held_type(type), held(value), held_trace(trace);
  if (Ref(PyObject_CallMethodOneArg(buckets.recorder.get(), g_stumbled, value))) return true;
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return false;
  PyErr_Clear();
  return true;
}

// Waits for a Work and ends its operation. False with an error of ours, or an interrupt, set.
bool end(Buckets& buckets, const Pending& each) {
  if (called(each.work.get(), g_wait)) return called(each.operation.get());
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return false;
  PyErr_Clear();
  buckets.failed = true;
  return called(each.operation.get(), g_fail);
}

// Ends what is complete by now: the end is then known to within a bucket. False with an error set.
bool end_completed(Buckets& buckets) {
  auto& pending = buckets.pending;
  while (!pending.empty() && !buckets.failed) {
    const Ref work = Ref::to(pending.front().work.get());
    const Ref completed(PyObject_CallMethodNoArgs(work.get(), g_is_completed));
    if (completed.get() != Py_True) return static_cast<bool>(completed);
    if (pending.empty() || pending.front().work.get() != work.get()) continue;  // another thread took it meanwhile
    const Pending done = std::move(pending.front());
    pending.pop_front();
    if (!called(done.operation.get(), g_waiting) || !end(buckets, done)) return false;
  }
  return true;
}

// The site of the backward in progress. At its first bucket, has the autograd engine call us when the gradients are
// computed. None with an error set.
Ref queue(PyObject* self, Buckets& buckets) {
  if (buckets.site) return Ref::to(buckets.site.get());
  const Ref computed(PyObject_GetAttr(self, g_computed));
  Ref site(computed ? PyObject_CallNoArgs(buckets.here.get()) : nullptr);
  if (!site || !Ref(PyObject_CallOneArg(buckets.queue.get(), computed.get()))) return Ref();
  buckets.site = Ref::to(site.get());
  return site;
}

// The work of an operation that has begun; only an interrupt comes out of it.
bool began(Buckets& buckets, PyObject* work, Ref operation) {
  const bool good = end_completed(buckets) || stumbled(buckets);  // of those before it
  buckets.pending.push_back({Ref::to(work), std::move(operation)});
  return good;
}

PyObject* buckets_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* v[10];
  if (PyArg_ParseTuple(args, "OOOOOOOOOO!", v, v + 1, v + 2, v + 3, v + 4, v + 5, v + 6, v + 7, v + 8, &PyDict_Type, v + 9) == 0)
    return nullptr;
  Buckets buckets;
  if (PyTuple_Check(v[4]) == 0) return PyErr_Format(PyExc_TypeError, "observers: not a tuple");
  Ref* fields[] = {&buckets.recorder, &buckets.here, &buckets.queue, &buckets.compiling, &buckets.observers,
                   &buckets.kind,     &buckets.op,   &buckets.peer,  &buckets.flags,     &buckets.typed};
  for (int i = 0; i < 10; ++i) *fields[i] = Ref::to(v[i]);
  return make(type, nullptr, std::move(buckets));
}

PyObject* buckets_begin(PyObject* self, PyObject*) {
  auto& buckets = state_of<Buckets>(self);
  std::deque<Pending>().swap(buckets.pending);
  buckets.site = Ref();
  buckets.plain = true;
  buckets.failed = false;
  Py_RETURN_NONE;
}

PyObject* buckets_over(PyObject* self, PyObject*) {
  auto& buckets = state_of<Buckets>(self);
  std::deque<Pending> last;
  last.swap(buckets.pending);
  for (const Pending& each : last)
    if (!called(each.operation.get()) && !stumbled(buckets)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* buckets_computed(PyObject* self, PyObject*) {
  auto& buckets = state_of<Buckets>(self);
  if (!end_completed(buckets) && !stumbled(buckets)) return nullptr;
  if (buckets.failed) Py_RETURN_NONE;
  std::deque<Pending> left;
  left.swap(buckets.pending);
  for (const Pending& each : left)
    if (!called(each.operation.get(), g_waiting) && !stumbled(buckets)) return nullptr;
  for (const Pending& each : left) {
    if (!end(buckets, each) && !stumbled(buckets)) return nullptr;
    if (buckets.failed) break;
  }
  Py_RETURN_NONE;
}

PyObject* buckets_add(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto& buckets = state_of<Buckets>(self);
  if (count != 2) return PyErr_Format(PyExc_TypeError, "add(work, operation), not %zd arguments", count);
  if (!queue(self, buckets) || !began(buckets, args[0], Ref::to(args[1]))) return nullptr;
  Py_RETURN_NONE;
}

PyObject* buckets_plain(PyObject* self, void*) { return PyBool_FromLong(state_of<Buckets>(self).plain); }

int buckets_set_plain(PyObject* self, PyObject* value, void*) {
  const int plain = value == nullptr ? 0 : PyObject_IsTrue(value);
  if (plain < 0) return -1;
  state_of<Buckets>(self).plain = plain == 1;
  return 0;
}

// --- BucketCall: what stands in the place of ``allreduce`` ---------------------------------------------------------

struct BucketCall {
  Ref buckets, whole, direct, group, general;
};

// 1 when somebody looks at the operators that torch dispatches, 0 when nobody does, -1 an error.
int is_observed(const Buckets& buckets) {
  PyObject* observers = buckets.observers.get();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(observers); ++i) {
    const Ref said(PyObject_CallNoArgs(PyTuple_GET_ITEM(observers, i)));
    const int truth = said ? PyObject_IsTrue(said.get()) : -1;
    if (truth != 0) return truth;
  }
  return 0;
}

// The flags of a bucket's record, borrowed; without the type where that is not known. No error comes out of it.
PyObject* flags_of(const Buckets& buckets, PyObject* tensor) {
  const Ref type(PyObject_GetAttr(tensor, g_dtype));
  PyObject* typed = type ? PyDict_GetItemWithError(buckets.typed.get(), type.get()) : nullptr;
  if (typed == nullptr) PyErr_Clear();
  return typed != nullptr ? typed : buckets.flags.get();
}

// The record of a bucket; none, and no error, where the general way must be taken.
Ref begin(PyObject* self, Buckets& buckets, const BucketCall& call, PyObject* tensors) {
  const Ref start(PyObject_GetAttr(buckets.recorder.get(), g_start));
  if (!start || start.get() == Py_None) return Ref();
  const Ref compiling(PyObject_CallNoArgs(buckets.compiling.get()));
  if (compiling.get() != Py_None) return Ref();
  const Ref site = queue(self, buckets);  // ours while others run: they may begin a backward
  if (!site) return Ref();
  const Ref first(PySequence_GetItem(tensors, 0));
  const Ref nbytes(first ? PyObject_GetAttr(first.get(), g_nbytes) : nullptr);
  if (!nbytes) return Ref();
  PyObject* fields[] = {buckets.kind.get(), buckets.op.get(),    call.group.get(),  buckets.peer.get(),
                        nbytes.get(),       flags_of(buckets, first.get()), site.get()};
  return Ref(PyObject_Vectorcall(start.get(), fields, 7, nullptr));
}

PyObject* bucket_call(PyObject* self, PyObject* const* args, size_t flagged, PyObject* names) {
  const auto& call = state_of<BucketCall>(self);
  auto& buckets = state_of<Buckets>(call.buckets.get());
  const Py_ssize_t count = PyVectorcall_NARGS(flagged);
  Ref operation;
  if (buckets.plain && names == nullptr && count > 0)
    operation = begin(call.buckets.get(), buckets, call, args[0]);
  if (!operation) {
    if (PyErr_Occurred() != nullptr && !stumbled(buckets)) return nullptr;
    return PyObject_Vectorcall(call.general.get(), args, static_cast<size_t>(count), names);
  }
  const int observed = is_observed(buckets);
  if (observed < 0 && !stumbled(buckets)) return nullptr;
  const Ref& way = observed == 0 ? call.direct : call.whole;
  Ref work(PyObject_Vectorcall(way.get(), args, static_cast<size_t>(count), nullptr));
  if (!work) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!called(operation.get(), g_fail)) PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return nullptr;
  }
  return began(buckets, work.get(), std::move(operation)) ? work.release() : nullptr;
}

PyObject* buckets_call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "call(whole, direct, group, general), not %zd arguments", count);
  BucketCall call{Ref::to(self), Ref::to(args[0]), Ref::to(args[1]), Ref::to(args[2]), Ref::to(args[3])};
  return make(g_bucket_call_type, bucket_call, std::move(call));
}

// --- Oldest: garbage collections of the oldest generation ----------------------------------------------------------

struct Oldest {
  Ref callback;
};

PyObject* oldest_call(PyObject* self, PyObject* const* args, size_t flagged, PyObject* names) {
  constexpr long kOldest = 2;  // the young are collected many times a step
  PyObject* info = PyVectorcall_NARGS(flagged) == 2 ? args[1] : Py_None;
  PyObject* generation = PyDict_Check(info) ? PyDict_GetItemWithError(info, g_generation) : nullptr;
  if (generation != nullptr && PyLong_Check(generation) && PyLong_AsLong(generation) != kOldest) Py_RETURN_NONE;
  return PyObject_Vectorcall(state_of<Oldest>(self).callback.get(), args, flagged, names);
}

PyObject* oldest_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* callback;
  if (PyArg_ParseTuple(args, "O", &callback) == 0) return nullptr;
  return make(type, oldest_call, Oldest{Ref::to(callback)});
}

// --- Hidden: a method that the compiler does not look into ----------------------------------------------------------

struct Hidden {
  Ref ours, compiling, set_compiling;  // without ``compiling`` there is no compiler to hide from
  Ref original, owner;                 // binds to instances of just this class, else the original does; or to all
};

PyObject* hidden_call(PyObject* self, PyObject* const* args, size_t flagged, PyObject* names) {
  const auto& hidden = state_of<Hidden>(self);
  const Ref callback(hidden.compiling ? PyObject_CallNoArgs(hidden.compiling.get()) : Py_NewRef(Py_None));
  if (!callback) return nullptr;
  if (callback.get() == Py_None) return PyObject_Vectorcall(hidden.ours.get(), args, flagged, names);
  if (!Ref(PyObject_CallOneArg(hidden.set_compiling.get(), Py_None))) return nullptr;
  Ref result(PyObject_Vectorcall(hidden.ours.get(), args, flagged, names));
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (!Ref(PyObject_CallOneArg(hidden.set_compiling.get(), callback.get()))) PyErr_Clear();
  PyErr_Restore(type, value, trace);
  return result.release();
}

PyObject* hidden_get(PyObject* self, PyObject* object, PyObject* type) {
  const auto& hidden = state_of<Hidden>(self);
  if (hidden.owner && (object == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) != hidden.owner.get())) {
    PyObject* original = hidden.original.get();
    const descrgetfunc get = Py_TYPE(original)->tp_descr_get;  // what somebody put there before us may have none
    return get == nullptr ? Py_NewRef(original) : get(original, object, type);
  }
  return object == nullptr ? Py_NewRef(self) : PyMethod_New(self, object);
}

PyObject* hidden_attribute(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return found;
  PyErr_Clear();
  return PyObject_GetAttr(state_of<Hidden>(self).ours.get(), name);
}

PyObject* hidden_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *ours, *compiling, *set_compiling, *original = Py_None, *owner = Py_None;
  if (PyArg_ParseTuple(args, "OOO|OO", &ours, &compiling, &set_compiling, &original, &owner) == 0) return nullptr;
  const bool compiler = compiling != Py_None && set_compiling != Py_None;
  Hidden hidden{Ref::to(ours), compiler ? Ref::to(compiling) : Ref(), Ref::to(set_compiling),
                Ref::to(original), owner == Py_None ? Ref() : Ref::to(owner)};
  return make(type, hidden_call, std::move(hidden));
}

// --- the module ---------------------------------------------------------------------------------------------------

PyMethodDef buckets_methods[] = {{"begin", buckets_begin, METH_NOARGS, nullptr},
                                 {"over", buckets_over, METH_NOARGS, nullptr},
                                 {"computed", buckets_computed, METH_NOARGS, nullptr},
                                 {"add", method(buckets_add), METH_FASTCALL, nullptr},
                                 {"call", method(buckets_call), METH_FASTCALL, nullptr},
                                 {nullptr, nullptr, 0, nullptr}};
PyGetSetDef buckets_properties[] = {{"plain", buckets_plain, buckets_set_plain, nullptr, nullptr},
                                    {nullptr, nullptr, nullptr, nullptr, nullptr}};

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

template <typename State>
PyObject* callable_type(const char* name, PyObject* (*make_one)(PyTypeObject*, PyObject*, PyObject*),
                        std::initializer_list<PyType_Slot> more = {}) {
  std::vector<PyType_Slot> slots = {{Py_tp_dealloc, slot(dealloc<State>)},
                                    {Py_tp_call, slot(PyVectorcall_Call)},
                                    {Py_tp_members, vectorcall_member<State>()}};
  if (make_one != nullptr) slots.push_back({Py_tp_new, slot(make_one)});
  slots.insert(slots.end(), more);
  slots.push_back({0, nullptr});
  unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  if (make_one == nullptr) flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec spec = {name, sizeof(Object<State>), 0, flags, slots.data()};
  return PyType_FromSpec(&spec);
}

PyType_Slot buckets_slots[] = {{Py_tp_new, slot(buckets_new)},
                               {Py_tp_dealloc, slot(dealloc<Buckets>)},
                               {Py_tp_methods, buckets_methods},
                               {Py_tp_getset, buckets_properties},
                               {0, nullptr}};
PyType_Spec buckets_spec = {"keepstep.capture._native.Buckets", sizeof(Object<Buckets>), 0, Py_TPFLAGS_DEFAULT, buckets_slots};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_native", "Native part of keepstep.capture.", -1,
                                 nullptr, nullptr, nullptr, nullptr, nullptr};

bool named(PyObject*& name, const char* text) { return (name = PyUnicode_InternFromString(text)) != nullptr; }

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  Ref module(PyModule_Create(&module_definition));
  const bool names = named(g_start, "start") && named(g_stumbled, "stumbled") && named(g_nbytes, "nbytes") &&
                     named(g_dtype, "dtype") &&
                     named(g_is_completed, "is_completed") && named(g_waiting, "waiting") && named(g_wait, "wait") &&
                     named(g_fail, "fail") && named(g_computed, "computed") && named(g_generation, "generation");
  if (!module || !names) return nullptr;
  g_bucket_call_type =
      reinterpret_cast<PyTypeObject*>(callable_type<BucketCall>("keepstep.capture._native.BucketCall", nullptr));
  const Ref here(callable_type<Here>("keepstep.capture._native.Here", here_new));
  const Ref oldest(callable_type<Oldest>("keepstep.capture._native.Oldest", oldest_new));
  const Ref hidden(callable_type<Hidden>("keepstep.capture._native.Hidden", hidden_new,
                                         {{Py_tp_descr_get, slot(hidden_get)}, {Py_tp_getattro, slot(hidden_attribute)}}));
  const Ref buckets(PyType_FromSpec(&buckets_spec));
  if (g_bucket_call_type == nullptr || !here || !oldest || !hidden || !buckets) return nullptr;
  if (PyModule_AddObjectRef(module.get(), "Here", here.get()) < 0 ||
      PyModule_AddObjectRef(module.get(), "Oldest", oldest.get()) < 0 ||
      PyModule_AddObjectRef(module.get(), "Hidden", hidden.get()) < 0 ||
      PyModule_AddObjectRef(module.get(), "Buckets", buckets.get()) < 0)
    return nullptr;
  return module.release();
}
