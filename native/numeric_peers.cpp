// torch's store asks the resolver for the name of every process that connects, one after the other, in the one thread
// that serves them all. Here libtorch's own calls of getnameinfo are led past the resolver; nobody else's are.
#include <Python.h>
#include <elf.h>
#include <link.h>
#include <netdb.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {

#if defined(__x86_64__)
constexpr uint64_t kJumpSlot = R_X86_64_JUMP_SLOT, kData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint64_t kJumpSlot = R_AARCH64_JUMP_SLOT, kData = R_AARCH64_GLOB_DAT;
#else
constexpr uint64_t kJumpSlot = ~uint64_t{0}, kData = ~uint64_t{0};
#endif

int numeric_getnameinfo(const sockaddr* address, socklen_t size, char* host, socklen_t host_size, char* service,
                        socklen_t service_size, int flags) {
  return getnameinfo(address, size, host, host_size, service, service_size, flags | NI_NUMERICHOST);
}

struct Library {
  ElfW(Addr) base = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * calls = nullptr;  // of functions
  size_t calls_size = 0;
  const ElfW(Rela) * others = nullptr;
  size_t others_size = 0;
};

Library read(const dl_phdr_info& info) {
  Library library;
  library.base = info.dlpi_addr;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      const auto at = entry->d_un.d_ptr + (entry->d_un.d_ptr < info.dlpi_addr ? info.dlpi_addr : 0);  // absolute in glibc
      switch (entry->d_tag) {
        case DT_SYMTAB: library.symbols = reinterpret_cast<const ElfW(Sym)*>(at); break;
        case DT_STRTAB: library.names = reinterpret_cast<const char*>(at); break;
        case DT_JMPREL: library.calls = reinterpret_cast<const ElfW(Rela)*>(at); break;
        case DT_PLTRELSZ: library.calls_size = entry->d_un.d_val; break;
        case DT_RELA: library.others = reinterpret_cast<const ElfW(Rela)*>(at); break;
        case DT_RELASZ: library.others_size = entry->d_un.d_val; break;
        default: break;
      }
    }
  }
  return library;
}

bool lead(void** slot) {
  if (*slot == reinterpret_cast<void*>(numeric_getnameinfo)) return true;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & ~(page - 1));
  // It may lie in what the loader made read-only; as a writable page it does no more harm than the others.
  if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, reinterpret_cast<void*>(numeric_getnameinfo), __ATOMIC_RELEASE);
  return true;
}

long lead_all(const Library& library, const ElfW(Rela) * relocations, size_t size) {
  long led = 0;
  for (size_t i = 0; relocations != nullptr && i < size / sizeof(ElfW(Rela)); ++i) {
    const auto kind = ELF64_R_TYPE(relocations[i].r_info);
    if (kind != kJumpSlot && kind != kData) continue;
    const char* name = library.names + library.symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
    if (std::strcmp(name, "getnameinfo") != 0) continue;
    led += lead(reinterpret_cast<void**>(library.base + relocations[i].r_offset));
  }
  return led;
}

int visit(dl_phdr_info* info, size_t, void* led) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  if (std::strncmp(slash != nullptr ? slash + 1 : info->dlpi_name, "libtorch_cpu.so", 15) != 0) return 0;
  const Library library = read(*info);
  if (library.symbols == nullptr || library.names == nullptr) return 0;
  long found = lead_all(library, library.calls, library.calls_size);
  if (found == 0) found = lead_all(library, library.others, library.others_size);  // linked with -fno-plt
  *static_cast<long*>(led) += found;
  return 0;
}

PyObject* install(PyObject*, PyObject*) {
  long led = 0;
  dl_iterate_phdr(visit, &led);
  return PyLong_FromLong(led);
}

PyMethodDef methods[] = {
    {"install", install, METH_NOARGS,
     "Lead libtorch's calls of getnameinfo past the resolver; how many places call it (0: torch is not loaded)."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_numeric_peers", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__numeric_peers() { return PyModule_Create(&definition); }
