// Who sends this process its signals. Python's handlers are not told; ours notes it and then calls Python's.
//
// A blocked signal (signalfd, sigwaitinfo) would tell it, too, but children would inherit that it is blocked.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <csignal>
#include <cstdint>

namespace {

constexpr int kMost = 65;
// Of the newest sender of each signal: si_code, si_pid and si_uid. One thread handles signals; readers may see the
// fields of two signals that come at once, both of which were sent.
struct Sender {
  volatile sig_atomic_t is_known, code, pid;
  volatile uint32_t uid;
};
Sender g_senders[kMost];
struct sigaction g_previous[kMost];

void note(int number, siginfo_t* info, void* context) {
  if (number > 0 && number < kMost) {
    Sender& sender = g_senders[number];
    sender.code = info->si_code;
    sender.pid = info->si_pid;
    sender.uid = info->si_uid;
    sender.is_known = 1;
    const struct sigaction& previous = g_previous[number];
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
      previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
      previous.sa_handler(number);
    }
  }
}

PyObject* watch(PyObject*, PyObject* argument) {
  const long number = PyLong_AsLong(argument);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (number <= 0 || number >= kMost) {
    PyErr_SetString(PyExc_ValueError, "no such signal");
    return nullptr;
  }
  struct sigaction now = {};
  if (sigaction(static_cast<int>(number), nullptr, &now) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  const bool is_ours = (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == note;
  const bool is_handled = (now.sa_flags & SA_SIGINFO) != 0 || (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN);
  if (is_ours) Py_RETURN_TRUE;
  if (!is_handled) Py_RETURN_FALSE;
  g_previous[number] = now;
  now.sa_flags |= SA_SIGINFO;
  now.sa_sigaction = note;
  if (sigaction(static_cast<int>(number), &now, nullptr) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_TRUE;
}

PyObject* sender(PyObject*, PyObject* argument) {
  const long number = PyLong_AsLong(argument);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (number <= 0 || number >= kMost || g_senders[number].is_known == 0) Py_RETURN_NONE;
  const Sender& found = g_senders[number];
  return Py_BuildValue("(iiI)", static_cast<int>(found.code), static_cast<int>(found.pid),
                       static_cast<unsigned int>(found.uid));
}

PyMethodDef methods[] = {
    {"watch", watch, METH_O, "Note from now on who sends this signal; False: Python does not handle it."},
    {"sender", sender, METH_O, "Code, process and user of who has sent this signal last; None: nobody has."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_senders", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__senders() { return PyModule_Create(&definition); }
