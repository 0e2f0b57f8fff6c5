// TEST DOUBLE: of cuBLAS and cuBLASLt the calls that put a matrix product on a stream: kernels of the kind "gemm". They
// compute nothing (operators.cpp does, where values are asked for). All others succeed and do nothing; tools that build
// it (benchmarks/stand_in/build.py) add those.
#include <cstring>

#include "device.hpp"

using namespace stand_in;

struct cublasContext {
  void* stream = nullptr;
};

namespace {
constexpr int kExecutionFailed = 13;
int product(void* stream) { return launch(stream_of(stream), Kind::gemm) == kOk ? 0 : kExecutionFailed; }
}  // namespace

extern "C" {
int cublasCreate_v2(cublasContext** made) {
  *made = new cublasContext;
  return 0;
}
int cublasDestroy_v2(cublasContext* handle) {
  delete handle;
  return 0;
}
int cublasSetStream_v2(cublasContext* handle, void* stream) {
  handle->stream = stream;
  return 0;
}

#define PRODUCT(name) \
  int name(cublasContext* handle) { return product(handle->stream); }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmBatched)
PRODUCT(cublasDgemmBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)

int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                   void*, const void*, void*, std::size_t, void* stream) {
  return product(stream);
}

struct HeuristicResult {  // as in cublasLt.h
  std::uint64_t algorithm[8];
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, HeuristicResult* results,
                                   int* found) {
  *found = wanted > 0 ? 1 : 0;
  if (wanted > 0) std::memset(results, 0, sizeof *results);
  return 0;
}
}
