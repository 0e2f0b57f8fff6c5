// TEST DOUBLE: NCCL's RAS service: a server at NCCL_RAS_ADDR (localhost:28028) that tells how many collectives each rank
// has called. As with NCCL each process tries to be it, and the first to come has the port; NCCL_RAS_ENABLE=0: none does.
// What it says is laid out as NCCL 2.28's answers are, in tests/recorded/h100.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>

#include "nccl.hpp"

namespace stand_in {
namespace {

constexpr const char* kVersion = "2.30.7";
struct Told {
  Do what;
  const char* name;
};
constexpr Told kTold[] = {{Do::broadcast, "Broadcast"}, {Do::reduce, "Reduce"}, {Do::allgather, "AllGather"},
                          {Do::reduce_scatter, "ReduceScatter"}, {Do::allreduce, "AllReduce"}};

struct Known {
  std::mutex lock;
  std::vector<std::weak_ptr<Core>> all;
};
Known& known() {
  static auto* made = new Known;
  return *made;
}

std::vector<CorePointer> alive() {
  Known& here = known();
  const std::lock_guard<std::mutex> guard(here.lock);
  std::vector<CorePointer> found;
  for (const auto& one : here.all)
    if (CorePointer core = one.lock(); core != nullptr && !core->aborted) found.push_back(core);
  return found;
}

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

std::string hash_of(const Core& core) { return core.name.substr(0, 16); }
std::uint64_t calls(const Core& core, int rank, Do what) { return core.shared->calls[rank][static_cast<int>(what)]; }
bool is_missing(const Core& core, int rank) { return is_dead(core.shared->pid[rank]); }
bool differ(const Core& core, Do what) {
  for (int rank = 1; rank < core.size; ++rank)
    if (calls(core, rank, what) != calls(core, 0, what)) return true;
  return false;
}

std::string as_json(const std::vector<CorePointer>& cores) {
  char now[32];
  const std::time_t seconds = std::time(nullptr);
  std::strftime(now, sizeof now, "%Y-%m-%d %H:%M:%S", std::localtime(&seconds));
  std::string out = text("{\n  \"nccl_version\": \"%s\",\n  \"cuda_runtime_version\": 13000,\n", kVersion) +
                    text("  \"cuda_driver_version\": 13000,\n  \"timestamp\": \"%s\",\n", now) +
                    text("  \"communicators_count\": %zu,\n  \"communicators\": [", cores.size());
  for (const CorePointer& core : cores) {
    std::string ranks, missing;
    int here = 0;
    for (int rank = 0; rank < core->size; ++rank) {
      const int pid = core->shared->pid[rank], device = core->shared->device[rank];
      const std::string who = text("{\n          \"rank\": %d,\n          \"host\": \"127.0.0.1\",\n          \"pid\": %d,\n", rank, pid) +
                              text("          \"cuda_dev\": %d,\n          \"nvml_dev\": %d", device, device);
      if (is_missing(*core, rank)) {
        missing += (missing.empty() ? "\n        " : ",\n        ") + who + "\n        }";
        continue;
      }
      ++here;
      const Result error = rank == core->rank ? core->error.load() : kSuccess;
      ranks += (ranks.empty() ? "\n        " : ",\n        ") + who +
               text(",\n          \"status\": {\n            \"init_state\": 0,\n            \"async_error\": %d,\n", error) +
               "            \"finalize_called\": false,\n            \"destroy_flag\": false,\n            \"abort_flag\": false\n" +
               "          },\n          \"collective_counts\": {";
      for (const Told& told : kTold)
        ranks += text("%s\n            \"%s\": %llu", &told == kTold ? "" : ",", told.name,
                      static_cast<unsigned long long>(calls(*core, rank, told.what)));
      ranks += "\n          }\n        }";
    }
    out += text("%s\n    {\n      \"hash\": \"0x%s\",\n", core == cores.front() ? "" : ",", hash_of(*core).c_str()) +
           text("      \"secondary_hash\": \"0x%s:0x0\",\n      \"size\": %d,\n", hash_of(*core).c_str(), core->size) +
           text("      \"ranks_count\": %d,\n      \"missing_ranks_count\": %d,\n", here, core->size - here) +
           "      \"ranks\": [" + ranks + "\n      ],\n      \"missing_ranks\": [" + missing + "\n      ]\n    }";
  }
  return out + "\n  ]\n}\n";
}

std::string as_text(const std::vector<CorePointer>& cores) {
  std::string out = text("NCCL version %s compiled with CUDA 13.0\n", kVersion) +
                    "CUDA runtime version 13000, driver version 13000\n\nCommunicators... (0.000s)\n=============\n\n"
                    "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
                    "    #  in group  per comm  per node  per comm  in group\n";
  std::string errors, warnings;
  int number = 0;
  for (const CorePointer& core : cores) {
    int missing = 0;
    bool mismatch = false;
    for (int rank = 0; rank < core->size; ++rank) missing += is_missing(*core, rank);
    const std::string name = text("#%d-0 (%s)", number, hash_of(*core).c_str());
    for (const Told& told : kTold) {
      if (!differ(*core, told.what)) continue;
      mismatch = true;
      warnings += "\n" + name + text(" MISMATCH\n  Communicator ranks have different %s operation counts\n", told.name);
      for (int rank = 0; rank < core->size; ++rank)
        warnings += text("  Rank %d has launched up to operation %llu -- GPU %d managed by process %d on node 127.0.0.1\n", rank,
                         static_cast<unsigned long long>(calls(*core, rank, told.what)), core->shared->device[rank].load(),
                         core->shared->pid[rank].load());
    }
    if (missing > 0) errors += "\n" + name + text(" INCOMPLETE\n  Missing communicator data from %d rank(s)\n", missing);
    out += text("%5d%10d%10d%10d%10d%10d   RUNNING  %s\n", number++, 1, 1, core->size, core->size, core->size - missing,
                missing > 0 ? "INCOMPLETE" : mismatch ? "MISMATCH" : "OK");
  }
  if (!errors.empty()) out += "\nErrors\n======\n" + errors;
  if (!warnings.empty()) out += "\nWarnings\n========\n" + warnings;
  return out;
}

void say(int client, const std::string& words) {
  for (std::size_t from = 0; from < words.size();) {
    const ssize_t sent = send(client, words.data() + from, words.size() - from, MSG_NOSIGNAL);
    if (sent <= 0) return;
    from += static_cast<std::size_t>(sent);
  }
}

void serve(int client) {
  std::string heard;
  bool json = false;
  char part[256];
  for (;;) {
    const std::size_t end = heard.find('\n');
    if (end == std::string::npos) {
      const ssize_t read = recv(client, part, sizeof part, 0);
      if (read <= 0 || heard.size() > 4096) return;
      heard.append(part, static_cast<std::size_t>(read));
      continue;
    }
    std::string line = heard.substr(0, end);
    heard.erase(0, end + 1);
    std::transform(line.begin(), line.end(), line.begin(), [](unsigned char c) { return std::toupper(c); });
    if (line.rfind("CLIENT PROTOCOL", 0) == 0) {
      say(client, "SERVER PROTOCOL 2\n");
    } else if (line.rfind("SET FORMAT ", 0) == 0) {
      json = line.find("JSON") != std::string::npos;
      say(client, "OK\n");
    } else if (line.rfind("TIMEOUT", 0) == 0) {
      say(client, "OK\n");
    } else if (line.find("STATUS") != std::string::npos) {
      return say(client, json ? as_json(alive()) : as_text(alive()));
    } else {
      return say(client, "ERROR: Unknown command\n");
    }
  }
}

void listen_at(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<std::uint16_t>(std::atoi(address.c_str() + (colon == std::string::npos ? 0 : colon + 1))));
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(server, reinterpret_cast<sockaddr*>(&where), sizeof where) != 0 || listen(server, 8) != 0) {
    close(server);  // another rank has it
    return;
  }
  for (;;) {
    const int client = accept4(server, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    serve(client);
    close(client);
  }
}

}  // namespace

void tell_of(const CorePointer& core) {
  static const bool enabled = setting("NCCL_RAS_ENABLE", 1) != 0;
  if (!enabled) return;
  Known& here = known();
  const std::lock_guard<std::mutex> guard(here.lock);
  if (here.all.empty())
    std::thread(listen_at, std::string(setting("NCCL_RAS_ADDR") == nullptr ? "localhost:28028" : setting("NCCL_RAS_ADDR"))).detach();
  here.all.erase(std::remove_if(here.all.begin(), here.all.end(), [](const auto& one) { return one.expired(); }), here.all.end());
  here.all.push_back(core);
}

}  // namespace stand_in
