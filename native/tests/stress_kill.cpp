// A writer dies at any instruction; what a reader then finds must be right, and the next writer must get the ring.
// Usage: stress_kill random ROUNDS     several threads, SIGKILL at a random moment
//        stress_kill step              one thread, stopped and judged at every instruction of start, wait and end (ptrace)
//        stress_kill takeover STRIDE   as step, but killed there and the ring taken over
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <csignal>
#include <thread>

#include "checked_record.hpp"

namespace ring = checked::ring;

namespace {

constexpr int kCannotTrace = 77;

void write_for_ever(int fd) {
  ring::Writer writer(ring::File(fd), 0, 1, 0);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&writer, t] {
      for (std::uint64_t i = 0;; ++i) {
        ring::Operation operation;
        const std::uint64_t number = static_cast<std::uint64_t>(t) << 40 | i;
        checked::start(writer, operation, number);
        if (i % 7 != 0) checked::wait_and_end(operation, number);
      }
    });
  for (auto& t : threads) t.join();
}

int random_kills(int rounds) {
  const int fd = ring::create(64);
  const ring::File file(fd);
  ring::Reader lasting(file);
  checked::Account account;
  std::uint64_t random = 1, half_written = 0;
  for (int round = 0; round < rounds; ++round) {
    random = checked::mix(random + static_cast<unsigned>(round));
    const pid_t child = fork();
    if (child == 0) {
      write_for_ever(fd);
      _exit(0);
    }
    while (lasting.header_state().pid != static_cast<std::uint64_t>(child)) account.take(lasting.poll());
    const std::uint64_t until = ring::monotonic_ns() + 50'000 + random % 2'000'000;
    while (ring::monotonic_ns() < until) account.take(lasting.poll());
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    for (int i = 0; i < 32; ++i) account.take(lasting.poll());
    const ring::HeaderState header = lasting.header_state();
    checked::require(!lasting.writer_lives(), "a dead writer is said to live");
    checked::require(header.incarnation == static_cast<std::uint64_t>(round), "incarnation");
    ring::Reader late(file);
    checked::Account of_late;
    for (int i = 0; i < 3; ++i) of_late.take(late.poll());
    for (const ring::Record& r : late.snapshot(false)) checked::check(r);
    half_written += of_late.lost();
    checked::require(account.started() + account.lost() == header.written, "records unaccounted for");
  }
  std::printf("%d kills: %llu records got, %llu lost, %llu left half-written\n", rounds,
              static_cast<unsigned long long>(account.started()), static_cast<unsigned long long>(account.lost()),
              static_cast<unsigned long long>(half_written));
  close(fd);
  return 0;
}

constexpr std::uint64_t kBefore = 70;  // more than a lap of 64: every slot has a past

// The traced child: stops itself, then does one operation, then stops again.
void one_operation(int fd) {
  ring::Writer writer(ring::File(fd), 0, 1, 0);
  for (std::uint64_t i = 0; i < kBefore; ++i) {
    ring::Operation operation;
    checked::start(writer, operation, i);
    checked::wait_and_end(operation, i);
  }
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(kCannotTrace);
  ring::Operation operation;
  std::uint64_t number = kBefore;
  while (!checked::waits(checked::mix(number))) ++number;
  raise(SIGSTOP);
  checked::start(writer, operation, number);
  checked::wait_and_end(operation, number);
  raise(SIGUSR1);
  _exit(0);
}

pid_t traced_child(int fd, int& status) {
  const pid_t child = fork();
  if (child == 0) one_operation(fd);
  waitpid(child, &status, 0);
  return child;
}

// Runs the child one instruction further; false when it has reached its end.
bool step(pid_t child) {
  int status = 0;
  if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) return false;
  waitpid(child, &status, 0);
  return WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP;
}

void end(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// The records before must be all there but the one whose slot is being reused; the new one whole or not at all.
int judge(const ring::File& file) {
  ring::Reader reader(file);
  const std::vector<ring::Record> records = reader.snapshot(false);
  bool there = false, ended = false;
  std::size_t older = 0;
  for (const ring::Record& r : records) {
    checked::check(r);
    if (r.ticket == kBefore) {
      there = true;
      ended = r.end_ns != 0;
    } else {
      checked::require(r.end_ns != 0, "an older record lost its end", r);
      ++older;
    }
  }
  checked::require(older >= 63 && older + (there ? 1U : 0U) <= 64, "an older record vanished");
  return there ? (ended ? 2 : 1) : 0;
}

int every_step() {
  const int fd = ring::create(64);
  int status = 0;
  const pid_t child = traced_child(fd, status);
  if (!WIFSTOPPED(status)) return kCannotTrace;
  const ring::File file(fd);
  std::uint64_t steps = 0, seen[3] = {};
  do {
    ++seen[judge(file)];
    ++steps;
  } while (step(child));
  end(child);
  std::printf("%llu instructions: record absent at %llu, in flight at %llu, ended at %llu\n", static_cast<unsigned long long>(steps),
              static_cast<unsigned long long>(seen[0]), static_cast<unsigned long long>(seen[1]),
              static_cast<unsigned long long>(seen[2]));
  checked::require(seen[0] > 0 && seen[1] > 0 && seen[2] > 0, "the steps did not cover the operation");
  close(fd);
  return 0;
}

int every_takeover(std::uint64_t stride) {
  std::uint64_t at = 0;
  for (bool more = true; more; at += stride) {
    const int fd = ring::create(64);
    const ring::File file(fd);
    int status = 0;
    const pid_t child = traced_child(fd, status);
    if (!WIFSTOPPED(status)) return kCannotTrace;
    for (std::uint64_t i = 0; i < at && more; ++i) more = step(child);
    ring::Reader reader(file);
    checked::Account account;
    account.take(reader.poll());
    end(child);
    {
      ring::Writer next(file, 0, 1, 0);
      checked::require(next.incarnation() == 1, "incarnation after a takeover");
      for (std::uint64_t i = 1000; i < 1100; ++i) {
        ring::Operation operation;
        checked::start(next, operation, i);
        checked::wait_and_end(operation, i);
      }
      checked::require(next.dropped() == 0, "a slot stayed busy after the takeover");
      account.take(reader.poll());
      account.take(reader.poll());
      checked::require(reader.snapshot(false).size() == 64, "records after the takeover");
    }
    close(fd);
  }
  std::printf("taken over after each of %llu deaths\n", static_cast<unsigned long long>(at / stride));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "step";
  const int number = argc > 2 ? std::atoi(argv[2]) : 1;
  if (mode == "random") return random_kills(number);
  if (mode == "takeover") return every_takeover(static_cast<std::uint64_t>(number));
  return every_step();
}
