// Tells this node's agent what torch's flight recorder holds, from a thread that needs nothing of Python: it answers
// also while C code keeps the interpreter's lock for good.
//
// torch's functions in C++ return strings of libstdc++, and what they throw is libstdc++'s, too. This module may have
// been compiled with another C++ library: it uses none, but for exceptions, which it takes from that of the process.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

// A std::string as libstdc++ lays it out. Having a destructor, too, it is returned in the same way.
struct Text {
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() {
    if (data != within) operator delete(data);
  }
  char* data;
  size_t size;
  // A short one is kept in here, and data points to it.
  char within[16];
};

// A recorder's content as JSON without stacks, which alone would need the interpreter's lock.
using Dump = Text (*)(bool include_collectives, bool only_active);

constexpr int kMostDumps = 4;
// A dump of 50,000 calls takes one second.
constexpr time_t kPatienceS = 5;
// Every call has this key.
constexpr char kCall[] = "\"collective_seq_id\"";

// A null pointer follows the last one.
Dump g_dumps[kMostDumps + 1] = {};
size_t g_most_bytes = 0;
// It is never closed, so that its number is nobody else's.
int g_listener = -1;
// A child that is forked has all these variables, but not the thread, and another number than this.
pid_t g_process = 0;
std::atomic<bool> g_stopped{false};
// It is held while a recorder is read.
pthread_mutex_t g_reading = PTHREAD_MUTEX_INITIALIZER;

class Reading {
 public:
  Reading() { pthread_mutex_lock(&g_reading); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading() { pthread_mutex_unlock(&g_reading); }
};

class Descriptor {
 public:
  explicit Descriptor(int number) : number(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
  const int number;
};

// Sends the calls in a file in memory, since they may be larger than a message can be, and what they have cost; no
// calls where they are more than the agent reads. The file is mapped, not written: bytes that a process writes are a
// sign that it does not hang.
void hand_over(int connection, const char* calls, size_t size, size_t most_bytes, long long took_us) {
  const Descriptor file(memfd_create("keepstep-calls", MFD_CLOEXEC));
  if (file.number < 0) return;
  if (size > 0 && size <= most_bytes) {
    // Where there is no memory for it, a copy would end the process.
    if (fallocate(file.number, 0, 0, static_cast<off_t>(size)) != 0) return;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.number, 0);
    if (memory == MAP_FAILED) return;
    memcpy(memory, calls, size);
    munmap(memory, size);
  }
  constexpr long long kMostUs = 999'999'999;
  char text[32];
  const int length = snprintf(text, sizeof text, "calls %lld", took_us < kMostUs ? took_us : kMostUs);
  iovec part = {text, static_cast<size_t>(length)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof file.number)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof file.number);
  memcpy(CMSG_DATA(header), &file.number, sizeof file.number);
  // It is the first message on its connection, so there is room for it.
  sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool is_ours(int connection) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == getuid();
}

long long busy_us() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000LL + time.tv_nsec / 1000;
}

// Tells of the first recorder that keeps calls, or that none does; nothing where none can be read any more.
void tell_on(int connection) {
  const long long begun_us = busy_us();
  const Reading reading;
  if (g_stopped) return;
  try {
    for (const Dump* dump = g_dumps; *dump != nullptr; ++dump) {
      const Text calls = (*dump)(true, false);
      if (memmem(calls.data, calls.size, kCall, sizeof kCall - 1) != nullptr) {
        hand_over(connection, calls.data, calls.size, g_most_bytes, busy_us() - begun_us);
        return;
      }
    }
  } catch (...) {
    // Whatever torch throws, the job must go on.
    return;
  }
  hand_over(connection, nullptr, 0, g_most_bytes, busy_us() - begun_us);
}

void* answer_all(void*) {
  for (;;) {
    const Descriptor connection(accept4(g_listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.number >= 0) {
      if (is_ours(connection.number)) tell_on(connection.number);
    } else if (errno != EINTR && errno != ECONNABORTED) {
      break;
    }
  }
  // Who connects from now on is refused, and does not wait for an answer in vain.
  shutdown(g_listener, SHUT_RDWR);
  return nullptr;
}

// Reads no recorder from now on: what torch and CUDA made may be gone soon.
void stop_reading() {
  if (g_process == 0 || getpid() != g_process) return;
  g_stopped = true;
  shutdown(g_listener, SHUT_RDWR);
  timespec until = {};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += kPatienceS;
  if (pthread_mutex_timedlock(&g_reading, &until) == 0) pthread_mutex_unlock(&g_reading);
}

// Starts the thread. It has all signals blocked: Python wants them in threads of its own.
int start() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const int error = pthread_create(&thread, nullptr, answer_all, nullptr);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) return error;
  pthread_setname_np(thread, "keepstep-calls");
  pthread_detach(thread);
  return 0;
}

PyObject* answer(PyObject*, PyObject* args) {
  int listener;
  PyObject* dumps;
  Py_ssize_t most_bytes;
  if (PyArg_ParseTuple(args, "iO!n", &listener, &PyTuple_Type, &dumps, &most_bytes) == 0) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(dumps);
  if (count == 0) Py_RETURN_FALSE;
  if (g_process != 0) {
    PyErr_SetString(PyExc_RuntimeError, "a thread of this process, or of its parent, answers already");
    return nullptr;
  }
  if (count > kMostDumps || most_bytes < 0) {
    PyErr_SetString(PyExc_ValueError, "too many functions, or a negative size");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(dumps, i));
    if (address == nullptr && PyErr_Occurred() != nullptr) return nullptr;
    g_dumps[i] = reinterpret_cast<Dump>(address);
  }
  g_listener = listener;
  g_most_bytes = static_cast<size_t>(most_bytes);
  g_process = getpid();
  if ((errno = start()) != 0) {
    g_process = 0;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  // C code may end the process past Python.
  atexit(stop_reading);
  Py_RETURN_TRUE;
}

PyObject* stop(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  stop_reading();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* tell(PyObject*, PyObject* args) {
  int connection;
  const char* calls;
  Py_ssize_t size, most_bytes;
  long long took_us;
  if (PyArg_ParseTuple(args, "iy#nL", &connection, &calls, &size, &most_bytes, &took_us) == 0) return nullptr;
  hand_over(connection, calls, static_cast<size_t>(size), static_cast<size_t>(most_bytes), took_us);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"answer", answer, METH_VARARGS, "Answer whoever connects, from a thread of its own."},
    {"stop", stop, METH_NOARGS, "Read no recorder from now on."},
    {"tell", tell, METH_VARARGS, "Hand calls over on a connection."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_answers", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__answers() { return PyModule_Create(&definition); }
