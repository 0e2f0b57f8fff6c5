// Snapshots of random pieces, on the host and on the stand-in for CUDA, by several threads, two at a time; each is held
// against its pieces. Usage: snapshot_program ROUNDS SEED
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../snapshot.hpp"

extern "C" {
int cuCtxSetCurrent(void* context);
std::uint64_t stand_in_launch(void* stream, std::uint64_t ns);
int stand_in_wrong();
}

namespace snapshot = keepstep::snapshot;
namespace crc64 = keepstep::crc64;

namespace {

struct Source {
  std::vector<std::uint8_t> bytes;
  bool urgent, on_device;
};

std::vector<Source> draw(std::mt19937& chances) {
  std::vector<Source> all(chances() % 40 + 1);
  for (Source& one : all) {
    const std::size_t most = chances() % 20 == 0 ? 40 << 20 : chances() % 3 == 0 ? 3 << 20 : 5000;
    one.bytes.resize(chances() % most);
    for (std::size_t i = 0; i < one.bytes.size(); i += 997) one.bytes[i] = static_cast<std::uint8_t>(chances());
    one.urgent = chances() % 2 == 0;
    one.on_device = chances() % 3 != 0;
  }
  return all;
}

bool round(unsigned seed) {
  std::mt19937 chances(seed);
  cuCtxSetCurrent(reinterpret_cast<void*>(0x77));
  void* stream = reinterpret_cast<void*>(0x10 + chances() % 3);
  const std::vector<Source> sources = draw(chances);
  std::uint64_t data_bytes = 0;
  for (const Source& one : sources) data_bytes += snapshot::aligned(one.bytes.size());
  const std::string header = "{}";
  std::vector<std::uint8_t> slot(snapshot::slot_bytes(data_bytes, header.size(), sources.size()));
  std::vector<snapshot::Piece> pieces;
  std::uint64_t at = snapshot::kDataOffset;
  for (const Source& one : sources) {
    pieces.push_back({one.bytes.data(), slot.data() + at, one.bytes.size(), one.urgent, one.on_device});
    at += snapshot::aligned(one.bytes.size());
  }
  stand_in_launch(stream, chances() % 2'000'000);
  std::uint64_t board = 0;
  auto work = std::make_shared<snapshot::Snapshot>(pieces, slot.data(), data_bytes, header, 1, 1, -1, &board, 7,
                                                   std::make_unique<keepstep::device::Moment>(stream));
  snapshot::Work::start(work, chances() % 4 + 1);
  const auto there = [&](std::size_t i) { return std::equal(pieces[i].from, pieces[i].from + pieces[i].count, pieces[i].to); };
  bool good = true;
  work->wait(true);
  for (std::size_t i = 0; i < sources.size(); ++i) good = good && (!sources[i].urgent || there(i));
  work->wait(false);
  for (std::size_t i = 0; i < sources.size(); ++i)
    good = good && there(i) && work->sums()[i] == crc64::extend(0, pieces[i].from, pieces[i].count);
  return good && board == 7;
}

}  // namespace

int main(int, char** argv) {
  const int rounds = std::atoi(argv[1]), seed = std::atoi(argv[2]);
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int part = 0; part < 2; ++part)
    threads.emplace_back([&, part] {
      for (int i = part; i < rounds; i += 2)
        if (!round(static_cast<unsigned>(seed + i))) {
          std::fprintf(stderr, "seed %d is bad\n", seed + i);
          ++bad;
        }
    });
  for (std::thread& one : threads) one.join();
  if (stand_in_wrong() != 0) std::fprintf(stderr, "%d calls that CUDA forbids\n", stand_in_wrong());
  return bad.load() == 0 && stand_in_wrong() == 0 ? 0 : 1;
}
