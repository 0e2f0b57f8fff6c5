// Many threads write one small ring, ending operations at once, later, or laps too late; readers poll, snapshot and copy
// meanwhile. Any record that mixes two, comes twice or is not accounted for aborts. Built with ThreadSanitizer as well.
// Usage: stress_threads WRITERS READERS OPERATIONS_PER_WRITER RECORDS
#include <deque>
#include <memory>
#include <thread>

#include "checked_record.hpp"

namespace ring = checked::ring;

namespace {

struct Held {
  ring::Operation operation;
  std::uint64_t number;
};

void write_some(ring::Writer& writer, unsigned thread, std::uint64_t count) {
  std::deque<std::unique_ptr<Held>> held;
  std::uint64_t random = checked::mix(thread + 1);
  for (std::uint64_t i = 0; i < count; ++i) {
    random = checked::mix(random + i);
    auto next = std::make_unique<Held>();
    next->number = static_cast<std::uint64_t>(thread) << 40 | i;
    checked::start(writer, next->operation, next->number);
    held.push_back(std::move(next));
    const std::size_t keep = random % 64 == 0 ? 200 : random % 5;  // 200: laps later, in a ring of 64
    while (held.size() > keep && random % 8 != 1) {
      checked::wait_and_end(held.front()->operation, held.front()->number);
      held.pop_front();
    }
  }
  for (auto& last : held) checked::wait_and_end(last->operation, last->number);
}

void read_all(ring::Reader& reader, const std::atomic<bool>& done, bool slow) {
  checked::Account account;
  for (bool last = false; !last;) {
    last = done.load();
    account.take(reader.poll());
    if (slow || last)
      for (const ring::Record& r : reader.snapshot(false)) checked::check(r);
    if (slow) {
      reader.copy();
      for (const ring::StreamState& s : reader.streams()) checked::require(s.completed <= s.started, "stream counts");
    }
  }
  for (int i = 0; i < 32; ++i) account.take(reader.poll());  // every sixteenth poll looks at all that are pending
  const ring::HeaderState header = reader.header_state();
  const std::uint64_t gaps = header.written - account.started() - account.lost();
  // A dropped ticket is known to be lost only when its slot is used again.
  checked::require(gaps <= header.dropped, "records unaccounted for");
  checked::require(account.finished() + account.unfinished() == account.started(), "ends unaccounted for");
  std::printf("reader: %llu written, %llu got, %llu finished, %llu lost, %llu overwritten unfinished; %llu dropped, %llu late\n",
              static_cast<unsigned long long>(header.written), static_cast<unsigned long long>(account.started()),
              static_cast<unsigned long long>(account.finished()), static_cast<unsigned long long>(account.lost()),
              static_cast<unsigned long long>(account.unfinished()), static_cast<unsigned long long>(header.dropped),
              static_cast<unsigned long long>(header.late));
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, std::uint64_t usual) { return argc > i ? std::strtoull(argv[i], nullptr, 10) : usual; };
  const std::uint64_t writers = number(1, 4), readers = number(2, 2), count = number(3, 20000), records = number(4, 64);
  const int fd = ring::create(records);
  const ring::File file(fd);
  {
    ring::Writer writer(file, 3, 8, 0), joined(file, 3, 8, 0, true);  // two of one process, as the probe and the shim are
    std::atomic<bool> done{false};
    std::vector<std::thread> reading, threads;
    for (std::uint64_t i = 0; i < readers; ++i)
      reading.emplace_back([&done, slow = i % 2 == 1, reader = std::make_unique<ring::Reader>(file)] {
        read_all(*reader, done, slow);
      });
    for (std::uint64_t i = 0; i < writers; ++i)
      threads.emplace_back([&, i] {
        ring::Writer& mine = i % 2 == 0 ? writer : joined;
        write_some(mine, static_cast<unsigned>(i), count);
        for (int name = 0; name < 100; ++name) mine.group("group " + std::to_string(name), {name}, "", "");
      });
    for (auto& t : threads) t.join();
    done = true;  // the readers' last poll comes after this
    for (auto& t : reading) t.join();
    ring::Reader late(file);
    const std::vector<ring::GroupState> groups = late.groups();
    std::unordered_set<std::string> names;
    for (const ring::GroupState& group : groups) names.insert(group.name);
    checked::require(groups.size() == 100 && names.size() == 100, "groups that all writers enter");
    const std::vector<ring::StreamState> streams = late.streams();
    checked::require(streams.size() == 1 && streams[0].started == writers * count && streams[0].completed == writers * count,
                     "stream totals");
  }
  close(fd);
  return 0;
}
