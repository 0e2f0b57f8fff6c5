// What C++ says before it aborts a process goes to stderr, which may be nobody's but the console's. Here it is left in
// a file, too. The file is opened only then, so that a process which ends well leaves none.
//
// Whoever throws uses the C++ library of the process, and this module may have been linked with a copy of its own: what
// counts is taken from the library of the process by name.
#include <Python.h>
#include <dlfcn.h>
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

struct Library {
  std::terminate_handler (*set_terminate)(std::terminate_handler) = nullptr;
  std::type_info* (*current_exception_type)() = nullptr;
  std::exception_ptr (*current_exception)() = nullptr;
  char* (*demangle)(const char*, char*, size_t*, int*) = nullptr;

  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }

  bool find_all() {
    void* library = dlopen("libstdc++.so.6", RTLD_NOW);
    return library != nullptr && find(library, "_ZSt13set_terminatePFvvE", set_terminate) &&
           find(library, "__cxa_current_exception_type", current_exception_type) &&
           find(library, "_ZSt17current_exceptionv", current_exception) &&
           find(library, "__cxa_demangle", demangle);
  }
} g_library;

// The text of an exception; empty if it is not a std::exception. A rethrow would ask the wrong library.
const char* what([[maybe_unused]] const std::type_info* type) {
#ifdef __GLIBCXX__  // elsewhere types are not laid out like those of the process
  void* object = nullptr;
  // It holds nothing but the address of the exception. Kept: it must not be destroyed here.
  static_assert(sizeof(std::exception_ptr) == sizeof object);
  std::memcpy(&object, static_cast<void*>(new std::exception_ptr(g_library.current_exception())), sizeof object);
  // How a handler is found that catches the base of a class: the address is moved to that of the base.
  if (object != nullptr && typeid(std::exception).__do_catch(type, &object, 1)) {
    return static_cast<std::exception*>(object)->what();
  }
#endif
  return "";
}

void tell() {
  const std::type_info* type = g_library.current_exception_type();
  if (type == nullptr) return;
  int status = 0;
  char* readable = g_library.demangle(type->name(), nullptr, nullptr, &status);
  leave(readable != nullptr ? readable : type->name(), what(type));
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
  if (g_library.demangle == nullptr && !g_library.find_all()) {
    PyErr_SetString(PyExc_OSError, "no libstdc++.so.6 in this process");
    return nullptr;
  }
  std::memcpy(g_path, path, size + 1);
  g_process = getpid();
  if (g_previous == nullptr) g_previous = g_library.set_terminate(tell_and_terminate);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"install", install, METH_O, "Leave what C++ says before it aborts this process in a file, too, whose path is given."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_last_words", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__last_words() { return PyModule_Create(&definition); }
