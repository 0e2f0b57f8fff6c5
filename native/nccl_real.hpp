// The NCCL that a process has, found when a function of it is first called. See docs/design/nccl-shim.md.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <initializer_list>
#include <string>

#include "nccl_api.hpp"

namespace keepstep::nccl {
namespace {

void say(const std::string& text) noexcept {
  const std::string line = "keepstep: " + text + "\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

// Keeps the library of an address loaded: we hold pointers into it.
void pin(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) != 0 && info.dli_fname != nullptr) dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

void* symbol(void* where, const char* name, const char* version) {
  return version == nullptr ? dlsym(where, name) : dlvsym(where, name, version);
}

void* look_in(const char* library, const char* name, const char* version) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : symbol(handle, name, version);
}

// What the caller would have called without us: in the global scope behind us, among what the caller's library was linked
// with (NCCL was loaded RTLD_LOCAL), or under NCCL's usual names. CUDA's runtime has a symbol `version`, which is its
// library's name as well; a process may have two of them.
void* search(const char* name, const char* version, const void* caller) {
  void* found = symbol(RTLD_NEXT, name, version);
  Dl_info info;
  link_map* library = nullptr;
  if (found == nullptr && caller != nullptr &&
      dladdr1(caller, &info, reinterpret_cast<void**>(&library), RTLD_DL_LINKMAP) != 0 && library != nullptr)
    found = look_in(library->l_name, name, version);
  if (found == nullptr && version != nullptr) found = look_in(version, name, version);
  for (const char* usual : {"libnccl.so.2", "librccl.so.1"})
    if (found == nullptr && version == nullptr) found = look_in(usual, name, nullptr);
  if (found != nullptr) pin(found);
  dlerror();  // of a search that failed: nobody else is to find it
  return found;
}

template <typename Function>
struct Real;

template <typename... Arguments>
struct Real<Result(Arguments...)> {
  const char* name;
  const char* version = nullptr;
  std::atomic<void*> address{nullptr};

  bool find(const void* caller) {
    if (address.load(acquire()) != nullptr) return true;
    void* found = search(name, version, caller);
    address.store(found, std::memory_order_release);
    return found != nullptr;
  }
  Result operator()(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(address.load(acquire()))(arguments...);
  }
  static constexpr std::memory_order acquire() { return std::memory_order_acquire; }
};

#define REAL(name, parameters, ...) Real<Result parameters> real_##name{#name};
#define REAL_CONFIG(name, parameters, ...) Real<Result(KEEPSTEP_NCCL_LIST parameters, const void*)> real_##name##Config{#name "Config"};
#define REAL_CUDA(name, parameters, ...)                         \
  Real<Result parameters> real_13_##name{#name, "libcudart.so.13"}; \
  Real<Result parameters> real_12_##name{#name, "libcudart.so.12"};
KEEPSTEP_NCCL_CONFIGURABLE(REAL)
KEEPSTEP_NCCL_CONFIGURABLE(REAL_CONFIG)
KEEPSTEP_NCCL_PLAIN(REAL)
KEEPSTEP_NCCL_LIFE(REAL)
KEEPSTEP_NCCL_ASKED(REAL)
KEEPSTEP_CUDA(REAL_CUDA)

// Only a caller that is linked to a function which its NCCL lacks comes here: without us it would not have started.
Result missing(const char* name) {
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) say(std::string(name) + " was called, but the loaded NCCL has no such function (ncclInvalidUsage)");
  return kInvalidUsage;
}

}  // namespace
}  // namespace keepstep::nccl
