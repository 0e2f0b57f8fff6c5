// A library linked to NCCL, as torch's is: caller_X calls X through the dynamic linker. What the stand-in lacks is weak here,
// so that this can be loaded without the shim as well.
#include "../nccl_api.hpp"

namespace keepstep::nccl {
extern "C" Result ncclGetUniqueId(UniqueId* id);

#define FORWARD(name, parameters, arguments, ...)        \
  extern "C" __attribute__((weak)) Result name parameters; \
  extern "C" Result caller_##name parameters { return name arguments; }
KEEPSTEP_NCCL_CONFIGURABLE(FORWARD)
KEEPSTEP_NCCL_PLAIN(FORWARD)
KEEPSTEP_NCCL_LIFE(FORWARD)
extern "C" Result caller_ncclGetUniqueId(UniqueId* id) { return ncclGetUniqueId(id); }
}  // namespace keepstep::nccl
