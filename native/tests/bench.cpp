// Cost of one record (start and end) and of reading, without Python. Prints nanoseconds, the best of seven runs. With a
// number as its argument it writes so many records and no more, for a tool that counts instructions.
#include <algorithm>
#include <cstdlib>
#include <functional>

#include "../ring_reader.hpp"

namespace ring = keepstep::ring;

namespace {

double best_ns(std::uint64_t count, const std::function<void()>& run) {
  double best = 1e18;
  for (int i = 0; i < 7; ++i) {
    const std::uint64_t from = ring::monotonic_ns();
    run();
    best = std::min(best, static_cast<double>(ring::monotonic_ns() - from) / static_cast<double>(count));
  }
  return best;
}

void write_records(ring::Writer& writer, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    ring::Operation operation;
    writer.start(operation, 1, 1, 0, -1, i, 0, 1);
    operation.finish(false);
  }
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::uint64_t kCount = 1'000'000;
  const int fd = ring::create(65536);
  const ring::File file(fd);
  ring::Writer writer(file, 0, 1, 0);
  if (argc > 1) {
    write_records(writer, std::strtoull(argv[1], nullptr, 10));
    return 0;
  }
  std::uint64_t sum = 0;
  const double clock = best_ns(kCount, [&] {
    for (std::uint64_t i = 0; i < kCount; ++i) sum += ring::monotonic_ns();
  });
  const double record = best_ns(kCount, [&] { write_records(writer, kCount); });
  std::printf("clock read          %7.1f ns\n", clock);
  std::printf("start + end         %7.1f ns   (less its two clock reads: %.1f ns)\n", record, record - 2 * clock);
  ring::Reader reader(file);
  reader.poll();
  std::printf("idle poll           %7.1f ns\n", best_ns(10000, [&] {
                for (int i = 0; i < 10000; ++i) sum += reader.poll().lost;
              }));
  ring::Operation held[4096];
  for (auto& operation : held) writer.start(operation, 1, 1, 0, -1, 0, 0, 1);
  reader.poll();
  std::printf("idle, 4096 pending  %7.1f ns\n", best_ns(10000, [&] {
                for (int i = 0; i < 10000; ++i) sum += reader.poll().lost;
              }));
  std::printf("poll, new record    %7.1f ns each (65536 a poll, attach included)\n", best_ns(65536, [&] {
                ring::Reader fresh(file);
                sum += fresh.poll().started.size();
              }));
  std::printf("snapshot            %7.2f ms (65536 records)\n", best_ns(1, [&] { sum += reader.snapshot(false).size(); }) / 1e6);
  close(fd);
  return sum == 42 ? 1 : 0;
}
