// The stand-in's shared state of a job. See control.hpp.
#include "control.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.hpp"

namespace stand_in {

void* mapped(const std::string& path, std::size_t bytes) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* memory = fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0
                     ? MAP_FAILED
                     : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  return memory == MAP_FAILED ? nullptr : memory;
}

static std::atomic<int>& own_rank() {
  static std::atomic<int> rank{static_cast<int>(setting("RANK", -1))};
  return rank;
}
int job_rank() { return own_rank(); }
void look_at_rank() { own_rank() = static_cast<int>(setting("RANK", -1)); }

Control& control() {
  static Control* found = [] {
    const char* path = setting("STAND_IN_CONTROL");
    void* memory = path == nullptr ? nullptr : mapped(path, sizeof(Control));
    return memory == nullptr ? new Control() : static_cast<Control*>(memory);
  }();
  return *found;
}

bool is_dead(int pid) {  // a zombie is
  if (pid == 0) return false;
  if (kill(pid, 0) != 0) return errno == ESRCH;
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return true;
  const std::size_t read = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[read] = '\0';
  const char* name_end = std::strrchr(text, ')');
  return name_end != nullptr && (name_end[2] == 'Z' || name_end[2] == 'X');
}

}  // namespace stand_in

using namespace stand_in;

extern "C" void stand_in_fail_links(void* stream, int rank) {
  if (rank < 0 || rank >= kMostRanks) return;
  stream_of(stream)->enqueue([=](Ns begin) {
    ++control().links_failed[rank];
    return begin;
  });
}

extern "C" void stand_in_pair(void* stream, int slow, int from, int to, int value) {
  if (from < 0 || to < 0 || from >= kMostRanks || to >= kMostRanks) return;
  stream_of(stream)->enqueue([=](Ns begin) {
    (slow != 0 ? control().slow : control().cut)[from][to] = value;
    return begin;
  });
}
