// Preloaded: makes the files below FAULTY_PREFIX fail as disks do. Each read, write, fsync and rename there fails with
// the probability FAULTY_RATE until the time FAULTY_UNTIL (Unix seconds): with an error, with half of it done, or (reads
// and writes) silently with one bit changed. What is done to a write is done to what stands on the disk, not to the
// caller's memory.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <mutex>
#include <random>
#include <vector>

namespace {

enum class Fault { kNone, kError, kHalf, kFlip };

template <typename F>
F real(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

const char* setting(const char* name, const char* otherwise) {
  const char* found = getenv(name);
  return found == nullptr ? otherwise : found;
}

bool below_prefix(const char* path) {
  static const char* prefix = setting("FAULTY_PREFIX", "");
  return prefix[0] != '\0' && path != nullptr && strncmp(path, prefix, strlen(prefix)) == 0;
}

bool is_ours(int descriptor) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length <= 0) return false;
  path[length] = '\0';
  return below_prefix(path);
}

double chance() {
  static std::mutex guard;
  static std::mt19937_64 engine(strtoull(setting("FAULTY_SEED", "0"), nullptr, 10) * 1000003 + getpid());
  const std::lock_guard<std::mutex> held(guard);
  return std::uniform_real_distribution<>(0, 1)(engine);
}

Fault draw() {
  static const double rate = atof(setting("FAULTY_RATE", "0")), until = atof(setting("FAULTY_UNTIL", "0"));
  if (static_cast<double>(time(nullptr)) >= until || chance() >= rate) return Fault::kNone;
  const double which = chance();
  return which < 0.4 ? Fault::kError : which < 0.7 ? Fault::kHalf : Fault::kFlip;
}

int error() {
  const double which = chance();
  return which < 0.5 ? EIO : which < 0.8 ? ENOSPC : ESTALE;
}

size_t anywhere(size_t count) { return static_cast<size_t>(chance() * static_cast<double>(count)) % count; }

}  // namespace

extern "C" {

ssize_t write(int descriptor, const void* data, size_t count) {
  static const auto next = real<ssize_t (*)(int, const void*, size_t)>("write");
  if (count == 0 || descriptor <= 2 || !is_ours(descriptor)) return next(descriptor, data, count);
  switch (draw()) {
    case Fault::kError:
      errno = error();
      return -1;
    case Fault::kHalf:
      return next(descriptor, data, (count + 1) / 2);
    case Fault::kFlip: {
      const auto* bytes = static_cast<const unsigned char*>(data);
      std::vector<unsigned char> changed(bytes, bytes + count);
      changed[anywhere(count)] ^= static_cast<unsigned char>(1U << anywhere(8));
      return next(descriptor, changed.data(), count);
    }
    case Fault::kNone:
      break;
  }
  return next(descriptor, data, count);
}

ssize_t read(int descriptor, void* data, size_t count) {
  static const auto next = real<ssize_t (*)(int, void*, size_t)>("read");
  if (count == 0 || descriptor <= 2 || !is_ours(descriptor)) return next(descriptor, data, count);
  const Fault fault = draw();
  if (fault == Fault::kError) {
    errno = EIO;
    return -1;
  }
  const ssize_t done = next(descriptor, data, fault == Fault::kHalf ? (count + 1) / 2 : count);
  if (fault == Fault::kFlip && done > 0)
    static_cast<unsigned char*>(data)[anywhere(static_cast<size_t>(done))] ^= static_cast<unsigned char>(1U << anywhere(8));
  return done;
}

int fsync(int descriptor) {
  static const auto next = real<int (*)(int)>("fsync");
  if (is_ours(descriptor) && draw() != Fault::kNone) {
    errno = EIO;
    return -1;
  }
  return next(descriptor);
}

int rename(const char* from, const char* to) {
  static const auto next = real<int (*)(const char*, const char*)>("rename");
  if (below_prefix(to) && draw() != Fault::kNone) {
    errno = error();
    return -1;
  }
  return next(from, to);
}

}  // extern "C"
