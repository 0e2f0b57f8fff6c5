// What C++ says before it aborts a process goes to stderr, which may be nobody's but the console's. Here it is left in
// a file, too. The file is opened only then, so that a process which ends well leaves none.
#include <Python.h>
#include <cxxabi.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <typeinfo>

namespace {

constexpr size_t kMostBytes = 8192;

char g_path[4096];
pid_t g_process = 0;  // children that are forked keep the handler, and their words are not this process's
std::terminate_handler g_previous = nullptr;
std::atomic_flag g_told = ATOMIC_FLAG_INIT;

void leave(const char* type, const char* what) {
  const int file = open(g_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file < 0) return;
  char text[kMostBytes];
  const int size =
      std::snprintf(text, sizeof text, "terminate called after throwing an instance of '%s'\n  what():  %s\n", type, what);
  if (size > 0 && write(file, text, std::min<size_t>(size, sizeof text - 1)) < 0) {
    // Nobody is left to tell.
  }
  close(file);
}

void tell() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return;
  int status = 0;
  char* readable = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  const char* name = readable != nullptr ? readable : type->name();
  try {
    throw;
  } catch (const std::exception& error) {
    leave(name, error.what());
  } catch (...) {
    leave(name, "");
  }
}

[[noreturn]] void tell_and_terminate() {
  if (getpid() == g_process && !g_told.test_and_set()) tell();
  g_previous();
  std::abort();
}

PyObject* install(PyObject*, PyObject* argument) {
  Py_ssize_t size = 0;
  const char* path = PyUnicode_AsUTF8AndSize(argument, &size);
  if (path == nullptr) return nullptr;
  if (static_cast<size_t>(size) >= sizeof g_path) {
    PyErr_SetString(PyExc_ValueError, "the path is too long");
    return nullptr;
  }
  std::memcpy(g_path, path, size + 1);
  g_process = getpid();
  if (g_previous == nullptr) g_previous = std::set_terminate(tell_and_terminate);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"install", install, METH_O, "Leave what C++ says before it aborts this process in a file, too, whose path is given."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_last_words", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__last_words() { return PyModule_Create(&definition); }
