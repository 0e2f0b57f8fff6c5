// The calls of NCCL (2.18 and later; RCCL has the same) that the shim stands in front of, with their binary interface: no
// header of NCCL or CUDA is needed. Enums are int, structs that only pass through are void. tests/unit/nccl holds this
// against the real nccl.h.
#pragma once

#include <cstddef>

struct ncclComm;

namespace keepstep::nccl {

using Result = int;
using Comm = ncclComm*;
using Stream = void*;
using Handle = void*;  // of an event, a graph or a context of CUDA's
struct UniqueId {
  char internal[128];
};

constexpr Result kSuccess = 0, kInvalidUsage = 5, kInProgress = 7;
constexpr int kNoSuchSymbol = 302;  // cudaErrorSharedObjectSymbolNotFound
constexpr int kOldestVersion = 21800;
constexpr int kNoColor = -1;

// As core/events.py numbers them.
enum class Op : unsigned char {
  allreduce = 1, broadcast, reduce, allgather, reduce_scatter, alltoall, gather, scatter,
  send = 10, recv, put, signal, wait_signal,
};
enum class Life : unsigned char { init = 1, split, shrink, grow, revoke, suspend, resume, finalize, destroy, abort, error, group };

}  // namespace keepstep::nccl

// Data calls: X(name, parameters, arguments, what it is). Those of the first list have a variant ...Config (2.32).
#define KEEPSTEP_NCCL_CONFIGURABLE(X)                                                                                    \
  X(ncclAllReduce, (const void* in, void* out, size_t count, int type, int op, Comm comm, Stream stream),                \
    (in, out, count, type, op, comm, stream), collective(Op::allreduce, count, type, op, kNobody, comm, stream))         \
  X(ncclBroadcast, (const void* in, void* out, size_t count, int type, int root, Comm comm, Stream stream),              \
    (in, out, count, type, root, comm, stream), collective(Op::broadcast, count, type, kNoOp, root, comm, stream))       \
  X(ncclReduce, (const void* in, void* out, size_t count, int type, int op, int root, Comm comm, Stream stream),         \
    (in, out, count, type, op, root, comm, stream), collective(Op::reduce, count, type, op, root, comm, stream))         \
  X(ncclAllGather, (const void* in, void* out, size_t count, int type, Comm comm, Stream stream),                        \
    (in, out, count, type, comm, stream), collective(Op::allgather, count, type, kNoOp, kNobody, comm, stream))          \
  X(ncclReduceScatter, (const void* in, void* out, size_t count, int type, int op, Comm comm, Stream stream),            \
    (in, out, count, type, op, comm, stream), collective(Op::reduce_scatter, count, type, op, kNobody, comm, stream))    \
  X(ncclAlltoAll, (const void* in, void* out, size_t count, int type, Comm comm, Stream stream),                         \
    (in, out, count, type, comm, stream), collective(Op::alltoall, count, type, kNoOp, kNobody, comm, stream))           \
  X(ncclGather, (const void* in, void* out, size_t count, int type, int root, Comm comm, Stream stream),                 \
    (in, out, count, type, root, comm, stream), collective(Op::gather, count, type, kNoOp, root, comm, stream))          \
  X(ncclScatter, (const void* in, void* out, size_t count, int type, int root, Comm comm, Stream stream),                \
    (in, out, count, type, root, comm, stream), collective(Op::scatter, count, type, kNoOp, root, comm, stream))

#define KEEPSTEP_NCCL_PLAIN(X)                                                                                           \
  X(ncclBcast, (void* buffer, size_t count, int type, int root, Comm comm, Stream stream),                               \
    (buffer, count, type, root, comm, stream), collective(Op::broadcast, count, type, kNoOp, root, comm, stream))        \
  X(ncclSend, (const void* in, size_t count, int type, int peer, Comm comm, Stream stream),                              \
    (in, count, type, peer, comm, stream), message(Op::send, count, type, peer, comm, stream))                           \
  X(ncclRecv, (void* out, size_t count, int type, int peer, Comm comm, Stream stream),                                   \
    (out, count, type, peer, comm, stream), message(Op::recv, count, type, peer, comm, stream))                          \
  X(ncclPutSignal, (const void* in, size_t count, int type, int peer, void* window, size_t offset, int index,            \
    int context, unsigned flags, Comm comm, Stream stream),                                                              \
    (in, count, type, peer, window, offset, index, context, flags, comm, stream),                                        \
    message(Op::put, count, type, peer, comm, stream))                                                                   \
  X(ncclSignal, (int peer, int index, int context, unsigned flags, Comm comm, Stream stream),                            \
    (peer, index, context, flags, comm, stream), message(Op::signal, 0, kNoType, peer, comm, stream))                    \
  X(ncclWaitSignal, (int count, void* signals, Comm comm, Stream stream), (count, signals, comm, stream),                \
    message(Op::wait_signal, 0, kNoType, kNobody, comm, stream))

#define KEEPSTEP_NCCL_LIST(...) __VA_ARGS__

// Communicators and groups: X(name, parameters, arguments).
#define KEEPSTEP_NCCL_LIFE(X)                                                                                            \
  X(ncclCommInitRank, (Comm* comm, int size, UniqueId id, int rank), (comm, size, id, rank))                             \
  X(ncclCommInitRankConfig, (Comm* comm, int size, UniqueId id, int rank, void* config), (comm, size, id, rank, config)) \
  X(ncclCommInitRankScalable, (Comm* comm, int size, int rank, int count, UniqueId* ids, void* config),                  \
    (comm, size, rank, count, ids, config))                                                                              \
  X(ncclCommInitAll, (Comm* comms, int count, const int* devices), (comms, count, devices))                              \
  X(ncclCommSplit, (Comm comm, int color, int key, Comm* made, void* config), (comm, color, key, made, config))          \
  X(ncclCommShrink, (Comm comm, int* without, int count, Comm* made, void* config, int flags),                           \
    (comm, without, count, made, config, flags))                                                                         \
  X(ncclCommGrow, (Comm comm, int size, const UniqueId* id, int rank, Comm* made, void* config),                         \
    (comm, size, id, rank, made, config))                                                                                \
  X(ncclCommRevoke, (Comm comm, int flags), (comm, flags))                                                               \
  X(ncclCommSuspend, (Comm comm, int flags), (comm, flags))                                                              \
  X(ncclCommResume, (Comm comm), (comm))                                                                                 \
  X(ncclCommFinalize, (Comm comm), (comm))                                                                               \
  X(ncclCommDestroy, (Comm comm), (comm))                                                                                \
  X(ncclCommAbort, (Comm comm), (comm))                                                                                  \
  X(ncclCommGetAsyncError, (Comm comm, Result* error), (comm, error))                                                    \
  X(ncclGroupStart, (), ())                                                                                              \
  X(ncclGroupEnd, (), ())                                                                                                \
  X(ncclGroupSimulateEnd, (void* information), (information))

// Of CUDA's runtime: X(name, parameters, arguments). Hooked where they bear the symbol versions of its libraries.
#define KEEPSTEP_CUDA(X)                                                                                     \
  X(cudaEventRecord, (Handle event, Stream stream), (event, stream))                                         \
  X(cudaEventRecordWithFlags, (Handle event, Stream stream, unsigned flags), (event, stream, flags))         \
  X(cudaStreamWaitEvent, (Stream stream, Handle event, unsigned flags), (stream, event, flags))              \
  X(cudaGraphLaunch, (Handle graph, Stream stream), (graph, stream))

// Called, not hooked.
#define KEEPSTEP_NCCL_ASKED(X)                   \
  X(ncclGetVersion, (int* version))              \
  X(ncclCommCount, (const Comm comm, int* size)) \
  X(ncclCommUserRank, (const Comm comm, int* rank))
