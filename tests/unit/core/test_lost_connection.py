"""Whose words an error has: sentences as torch, NCCL, Gloo, Python's libraries and storage services write them."""

from __future__ import annotations

import pytest

from keepstep.core.lost_connection import ranks_named, tells_of_a_timeout, tells_of_another

GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
LOST = (
    f"[{GLOO}/pair.cc:547] Connection closed by peer [10.0.0.7]:4711",
    f"RuntimeError: [{GLOO}/pair.cc:553] Read error [10.0.0.7]:4711: Connection reset by peer",
    f"RuntimeError: [{GLOO}/socket.cc:91] connect [10.0.0.7]:4711: No route to host",
    "RuntimeError: Connection closed by peer [127.0.0.1]:4711",
    "Connection reset by peer",
    "RuntimeError: Broken pipe",
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
    "c10d key-value store by key '0', but store->get('0') got error: Connection was reset by peer",
    "RuntimeError: recvValue failed on SocketImpl(fd=70, addr=[a]:1, remote=[b]:2): Failed to recv, got 0 bytes. "
    "Connection was likely closed. Did the remote server shutdown or crash?",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL 2.27",
    "c10::DistBackendError: [PG ID 0 PG GUID 0 Rank 3] Process group watchdog thread terminated with exception: "
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27.3",
    "DistBackendError: NCCL communicator was aborted on rank 5.",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3888, invalid argument (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.30.7\nncclInvalidArgument: Invalid value for an argument.\nLast error:\n"
    "comm argument is NULL",
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:410, unhandled system error, NCCL version 2.21.5",
    "node-2: NCCL WARN NET/IB : Got completion from peer 10.0.0.9<4711> with status=12 opcode=0 len=0 vendor err 129",
    "TrainingFailed: the step did not end: [gloo/gloo/transport/tcp/pair.cc:9] Connection closed by peer [::1]:5",
    f"RuntimeError: [enforce fail at {GLOO}/pair.cc:441] op.preamble.length <= op.nbytes. 96 vs 48",
    "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
    "rank 0. Please check rank 0 logs for faulty rank.",
)
TIMED_OUT = (
    f"RuntimeError: [{GLOO}/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
    f"RuntimeError: [{GLOO}/pair.cc:538] Application timeout caused pair closure",
    "RuntimeError: Operation timed out!",
    "[rank3]:[E ProcessGroupNCCL.cpp:688] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600022 milliseconds before timing out.",
    "c10::DistBackendError: [Rank 3] NCCL watchdog thread terminated with exception: [Rank 3] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "To avoid data inconsistency, we are taking the entire process down.",
    "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 6000 ms",
    "RuntimeError: Rank 0 timed out in monitoredBarrier after 6000 ms.",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
    "RuntimeError: Socket Timeout",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
    "(node-0, 29500).",
    "RuntimeError: Timed out initializing process group in store based barrier on rank: 6, for key: k (world_size=8)",
)
OWN = (
    "",
    "ValueError: boom",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "c10::DistBackendError: [PG ID 0 PG GUID 0 Rank 3] Process group watchdog thread terminated with exception: "
    "CUDA error: uncorrectable ECC error encountered",
    "[E ProcessGroupNCCL.cpp:915] [Rank 0] NCCL watchdog thread terminated with exception: CUDA error: an illegal "
    "memory access was encountered",
    "DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:957, invalid usage, NCCL version 2.21.5",
    "DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled system error, NCCL version 2.21.5; "
    "Error while creating shared memory segment /dev/shm/nccl-abc: No space left on device",
    "DistBackendError: NCCL error in: init.cc:9, internal error, NCCL version 2.21.5; no socket interface found",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:874, invalid argument, NCCL version 2.10.3",
    "NCCL communicator was aborted on rank 5. Original reason for failure was: CUDA error: assert triggered",
    "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "RuntimeError: ProcessGroupGloo::allreduce: invalid tensor layout",
    f"RuntimeError: [{GLOO}/device.cc:84] ifa != nullptr. Unable to find address for: eth7",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
    "29500, code: -98, name: EADDRINUSE, message: address already in use",
    "ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer')) while reading s3://b",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "[Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: cannot read gs://data/shard-7: connection reset",
    "RuntimeError: connection closed by peer while fetching https://example.org/tokens.bin",
    "urllib3.exceptions.ProtocolError: ('Connection broken', ConnectionResetError(104, 'Connection reset by peer'))",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='a', port=443): Max retries exceeded with url: /",
    "botocore.exceptions.ConnectionClosedError: Connection was closed before we received a valid response",
    "psycopg.OperationalError: consuming input failed: server closed the connection unexpectedly",
    "redis.exceptions.ConnectionError: Connection closed by server.",
    "RuntimeError: redis: connection refused",
    "etcd.EtcdConnectionFailed: Connection to etcd failed due to timed out waiting for a reply",
    "RuntimeError: grpc: socket closed",
    "kazoo.exceptions.ConnectionLoss: connection lost",
    "TimeoutError: timed out waiting for the lock of /data/cache",
    "OSError: [Errno 110] Connection timed out: '/nfs/data/shard-3'",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "ConnectionResetError: Caught ConnectionResetError in DataLoader worker process 0.",
    "sqlalchemy.exc.OperationalError: (psycopg2.OperationalError) connection refused",
    "signal 9 (SIGKILL) received by process 4711",
)


@pytest.mark.parametrize("message", [*LOST, *TIMED_OUT])
def test_words_of_ranks_among_each_other_tell_of_another(message: str) -> None:
    assert tells_of_another(message)


def test_a_refusal_that_another_rank_explains_tells_of_another_whatever_it_quotes() -> None:
    assert tells_of_another("keepstep.checkpoint.restore.resume.SaidByAnother: step 7: Permission denied")
    assert not tells_of_another("CheckpointError: nothing is restored: no snapshot is whole on every rank")


@pytest.mark.parametrize("message", OWN)
def test_what_went_wrong_in_a_rank_itself_is_its_own(message: str) -> None:
    assert not tells_of_another(message)


def test_who_did_not_come_in_time_is_told_from_who_is_gone() -> None:
    assert all(tells_of_a_timeout(message) for message in TIMED_OUT)
    assert not any(tells_of_a_timeout(message) for message in (*LOST, *OWN))


@pytest.mark.parametrize(
    ("message", "ranks"),
    [
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 6000 ms\n Original exception: \n timed out", (1,)),
        ("RuntimeError: [Rank 0]: Ranks 7, 1, 2 failed to pass monitoredBarrier in 6000 ms", (1, 2, 7)),
        ("DistStoreError: Timed out waiting on barrier on rank 0, for key prefix: a (world_size=4, "
         "missing_ranks=[3, 1], timeout=300)", (1, 3)),
        ("- [0, 2] joined but didn't finish collective #5 (count from 1)\n - [1] finished collective #4, but didn't "
         "join collective #5 (count from 1)", (1,)),
        ("Rank 0 timed out in monitoredBarrier after 6000 ms.\nNo ranks successfully processed", ()),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", ()),
        ("Rank 1 successfully reached monitoredBarrier, but received errors while waiting for rank 0", ()),
        (f"[{GLOO}/pair.cc:547] Connection closed by peer [10.0.0.7]:4711", ()),
        ("", ()),
    ],
)  # fmt: skip
def test_only_those_are_named_that_did_not_come(message: str, ranks: tuple[int, ...]) -> None:
    assert ranks_named(message) == ranks
