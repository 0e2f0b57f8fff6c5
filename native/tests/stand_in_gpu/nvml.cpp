// A stand-in for the library of NVIDIA's driver, for tests on machines without one: two GPUs that say what the test
// writes into `cards`. Where STAND_IN_NVML names a folder, there are as many as it has files card-0, card-1 ..., and a
// GPU says what is in its file: clock in MHz, degrees Celsius, busy percent, process, reasons to hold the clock down.
// Beside the stand-in GPU its processes are those that have memory there, dead ones whose memory is not free among them.
// Signatures as in nvml.h; functions that are not here are those that an old driver lacks.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {
constexpr int kOk = 0, kNotSupported = 3, kInsufficientSize = 7, kTimeout = 10;
constexpr unsigned kCards = 16, kMostProcesses = 32;
}  // namespace

struct Card {
  unsigned clock, celsius, busy_percent, pid;
  unsigned long long reasons, memory_errors, replays, xid;  // xid: told once, then 0
  unsigned long long recoveries, crc_flits, crc_data;
  unsigned inactive;  // of its one NVLink
  unsigned remap_pending, remap_failed;
};

struct Process {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance, compute_instance;
};

struct Pci {
  char old_address[16];
  unsigned domain, bus, device, identity, subsystem;
  char address[32];
};

struct Event {
  Card* card;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

struct MemoryInfo {
  unsigned long long total, available, used;
};

struct Utilization {
  unsigned gpu, memory;
};

extern "C" {

__attribute__((weak)) unsigned stand_in_holders(unsigned device, unsigned most, unsigned* pids, unsigned long long* bytes);
__attribute__((weak)) void stand_in_memory(unsigned device, unsigned long long* available, unsigned long long* total);

Card cards[kCards];
int init_result = kOk;

unsigned count_of_cards = 2;

// Reads the card's file, if there are files; false: it has none.
static bool read_card(unsigned index) {
  const char* folder = std::getenv("STAND_IN_NVML");
  if (folder == nullptr) return index < count_of_cards;
  char path[4096];
  std::snprintf(path, sizeof path, "%s/card-%u", folder, index);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return false;
  Card& card = cards[index];
  std::fscanf(file, "%u %u %u %u %llu", &card.clock, &card.celsius, &card.busy_percent, &card.pid, &card.reasons);
  std::fclose(file);
  return true;
}

int nvmlInitWithFlags(unsigned) {
  if (std::getenv("STAND_IN_NVML") != nullptr)
    for (count_of_cards = 0; count_of_cards < kCards && read_card(count_of_cards);) ++count_of_cards;
  return init_result;
}

const char* nvmlErrorString(int) { return "the stand-in says no"; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = count_of_cards;
  return kOk;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Card** card) {
  *card = &cards[index];
  return kOk;
}

int nvmlDeviceGetClockInfo(Card* card, unsigned, unsigned* mhz) {
  read_card(static_cast<unsigned>(card - cards));
  *mhz = card->clock;
  return kOk;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Card* card, unsigned long long* reasons) {
  *reasons = card->reasons;
  return kOk;
}

int nvmlDeviceGetTemperature(Card* card, unsigned, unsigned* celsius) {
  *celsius = card->celsius;
  return kOk;
}

int nvmlDeviceGetUtilizationRates(Card* card, Utilization* found) {
  *found = {card->busy_percent, 0};
  return kOk;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Card* card, unsigned* count, Process* found) {
  if (stand_in_holders != nullptr) {
    unsigned pids[kMostProcesses];
    unsigned long long bytes[kMostProcesses];
    const unsigned there = stand_in_holders(static_cast<unsigned>(card - cards), kMostProcesses, pids, bytes);
    const unsigned most = *count;
    *count = there;
    if (there > most) return kInsufficientSize;
    for (unsigned i = 0; i < there; ++i) found[i] = {pids[i], bytes[i], 0, 0};
    return kOk;
  }
  read_card(static_cast<unsigned>(card - cards));
  const unsigned running = card->pid != 0 ? 1 : 0;
  const bool fits = *count >= running;
  *count = running;
  if (!fits) return kInsufficientSize;
  if (running != 0) found[0] = {card->pid, 0, 0, 0};
  return kOk;
}

int nvmlDeviceGetMemoryInfo(Card* card, MemoryInfo* found) {
  if (stand_in_memory == nullptr) return kNotSupported;
  stand_in_memory(static_cast<unsigned>(card - cards), &found->available, &found->total);
  found->used = found->total - found->available;
  return kOk;
}

int nvmlDeviceGetTotalEccErrors(Card* card, unsigned, unsigned, unsigned long long* errors) {
  *errors = card->memory_errors;
  return kOk;
}

int nvmlDeviceGetPciInfo_v3(Card* card, Pci* pci) {
  *pci = {"", 0, 0x3bu + 0x60u * static_cast<unsigned>(card - cards), 0, 0, 0, ""};
  return kOk;
}

int nvmlDeviceGetRemappedRows(Card* card, unsigned* corrected, unsigned* uncorrected, unsigned* pending, unsigned* failed) {
  *corrected = *uncorrected = 0;
  *pending = card->remap_pending;
  *failed = card->remap_failed;
  return kOk;
}

int nvmlDeviceGetNvLinkErrorCounter(Card* card, unsigned link, unsigned counter, unsigned long long* errors) {
  const unsigned long long counts[] = {card->replays, card->recoveries, card->crc_flits, card->crc_data};
  if (link != 0 || counter > 3) return kNotSupported;
  *errors = counts[counter];
  return kOk;
}

int nvmlDeviceGetNvLinkState(Card* card, unsigned link, unsigned* active) {
  if (link != 0) return kNotSupported;
  *active = card->inactive == 0;
  return kOk;
}

int nvmlEventSetCreate(void** events) {
  *events = cards;
  return kOk;
}

int nvmlDeviceRegisterEvents(Card*, unsigned long long, void*) { return kOk; }

int nvmlEventSetWait_v2(void*, Event* found, unsigned) {
  for (Card& card : cards) {
    if (card.xid == 0) continue;
    *found = {&card, 8, card.xid, 0, 0};
    card.xid = 0;
    return kOk;
  }
  return kTimeout;
}
}
