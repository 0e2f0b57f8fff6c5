"""Whom the words around a cause name: launchers, schedulers, drivers and file systems in their own forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.told import Failure
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.detect.listener import Listener
from keepstep.locate.culprits_in_words import path_in
from keepstep.locate.failure import explain

MATCHER = RowMatcher(shipped_rows())


def why(log: str) -> Failure:
    listener = Listener(MATCHER, "job.log")
    listener.take(log.encode())
    return explain([listener.words()])


ENDED = """\
E0101 10:00:00.000000 77 torch/elastic/api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 9) of binary: /bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2025-01-01_10:00:00
  host      : c-17
  rank      : 11 (local_rank: 3)
  exitcode  : -9 (pid: 9)
"""
RECV = "NCCL WARN Net : Call to recv from {}<4> failed : Connection timed out\n"
LOST = "RuntimeError: Connection closed by peer [10.1.2.3]:40000\n"
EIO = "OSError: [Errno 5] Input/output error: '{}'\n"
STALL = "{}_0 [missing ranks: {}]\n"
RAY_GONE = """\
ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tpid: 64
\tip: {}
The actor is dead because its node has died. Node Id: 67
"""


GLOO = (
    "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:14] {}\n"
)
CLIENT = "[E socket.cpp:7] [c10d] The client socket has {}).\n"
TRIED = "c-1:8:9 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying ({}/20) after 9 msec\n"
DIFFERS = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: "
    "CollectiveFingerPrint(SequenceNumber={}, OpType=ALLREDUCE), but Rank {} is running collective: "
    "CollectiveFingerPrint(SequenceNumber={}, OpType=GATHER).\n"
)
WRITER = (
    "RuntimeError: [enforce fail at inline_container.cc:4] . PytorchStreamWriter failed writing file data/3\n"
)
SSH = "subprocess.CalledProcessError: Command '{}' returned non-zero exit status 255.\n"
GRADIENT = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.\n"
)
INDICES = "Parameter indices which did not receive grad for rank {}: 149 150\n"
OOM_KILL = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"


@pytest.mark.parametrize(
    ("log", "named"),
    [
        # torchrun's line has the local rank, its table the rank and host
        (ENDED, "rank 11 on c-17"),
        # Slurm's daemon tells what, srun of whom; who is cancelled is a victim
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
            "srun: error: c-17: task 4: Out Of Memory\n"
            "slurmstepd: error: *** STEP 7.0 ON c-1 CANCELLED AT 2025-01-01T00:00:00 ***\n",
            "rank 4 on c-17",
        ),
        (
            "srun: error: c-17: tasks 4-5: Killed\nsrun: error: c-1: tasks 0-3,6-7: Terminated\n",
            "rank 4; rank 5",
        ),
        # most of those that the launcher speaks of ended alike: the program
        ("srun: error: c-2: task 1: Segmentation fault\nsrun: error: c-1: task 0: Segmentation fault\n", ""),
        ("srun: error: c-17: tasks 0-3: Segmentation fault (core dumped)\n", ""),
        # Ray tells where in a line of its own
        (RAY_GONE.format("10.1.2.3"), "node 10.1.2.3"),
        (RAY_GONE.format("127.0.0.1"), ""),
        (
            "(raylet) node_manager.cc:3084: 4 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
            "crashed due to other reasons at node (ID: b287, IP: 10.1.2.3) over the last time period.\n",
            "node 10.1.2.3",
        ),
        ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.\n", "rank 2"),
        (
            "[rank: 2] Child process with PID 77 terminated with code -9. Forcefully terminating all\n",
            "rank 2",
        ),
        ("Process 3 exit with status code 137.\n", "process 3"),
        # DeepSpeed shows the command of the process it started last, whoever died
        (
            "[launch.py:3:sigkill_handler] ['python', '--local_rank=0', 'a'] exits with return code = -9\n",
            "local rank 0",
        ),
        ("[launch.py:3:sigkill_handler] ['python', '--local_rank=7', 'a'] exits with return code = -9\n", ""),
        ("[1,12]<stderr>:[c-17:17086] Signal: Segmentation fault (11)\n", "rank 12 on c-17"),
        (
            "Name:         train-worker-3\n  Last State:  Terminated\n    Exit Code:    137\n",
            "pod train-worker-3",
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGSEGV\n",
            "process 3",
        ),
        # a cause that speaks of a rank, at a place that no row knows; who says it knows better
        ("ERROR:train:loss is nan, global_rank=7, step 12\n", "rank 7"),
        ("[rank1]: ERROR:train:loss is nan, global_rank=7, step 12\n", "rank 1"),
        ("ERROR:train:loss is nan on rank 7\nERROR:train:loss is nan on rank 8\n", ""),
        (
            "Rank 7, node c-17, device 7, iteration -1: Unexpected result nan (message='found NaN')\n",
            "rank 7 on c-17",
        ),
        # who reports a lost transfer may be its victim
        ("[rank3]: NET/OFI Request 0x7f14 completed with error. RC: 113. Error: 2 (UNDELIVERABLE).\n", ""),
        # links
        ("[5]c-1:8:9 [0] " + RECV.format("10.1.2.3"), "link c-1 - 10.1.2.3"),
        ("c-1:8:9 [0] " + RECV.format("127.0.0.1"), ""),
        ("".join(f"c-{n}:8:9 [0] " + RECV.format("10.1.2.3") for n in range(4)), "peer 10.1.2.3"),
        ("".join("c-1:8:9 [0] " + RECV.format(f"10.1.2.{n}") for n in range(4)), "node c-1"),
        (
            "".join(f"c-1:8{n}:9 [{n}] NCCL WARN NET/IB : Got async event : port error\n" for n in range(8)),
            "node c-1",
        ),
        (
            "".join(f"c-{n}:8:9 [0] NCCL WARN NET/IB : Got async event : port error\n" for n in range(8)),
            "",
        ),
        (
            "A process or daemon was unable to complete a TCP connection\nto another process:\n"
            "  Local host:    c-1\n  Remote host:   c-17\n",
            "link c-1 - c-17",
        ),
        # who could not connect, to whom it does not say, is not to blame for that
        ("c-1:8:9 [0] NCCL WARN Call to connect failed : Connection timed out\n", ""),
        ("c-1:8:9 [0] misc/socket.cc:5 NCCL WARN socketStartConnect: exceeded retries (20000)\n", ""),
        ("[pod/w-3/torch] OSError: [Errno 113] No route to host\n", ""),
        ("OSError: [Errno 113] No route to host: connect to 10.1.2.3 failed\n", "peer 10.1.2.3"),
        ("OSError: [Errno 113] No route to host\n", ""),
        # Gloo tells of the other end, by its address or as none
        (GLOO.format("Connect timeout [10.1.2.3]:27023"), "peer 10.1.2.3"),
        (
            GLOO.format("timed out connecting: SO_ERROR: Connection refused, remote=[10.1.2.3]:9"),
            "peer 10.1.2.3",
        ),
        (GLOO.format("Connection refused, remote=[127.0.1.1]:20901"), ""),
        (GLOO.format("Connect timeout [none]"), ""),
        (GLOO.format("connect [10.1.2.3]:27023: Connection refused"), "peer 10.1.2.3"),
        (GLOO.format("connect [10.1.2.3]:27023: No route to host"), "peer 10.1.2.3"),
        (GLOO.format("Read timeout [10.1.2.3]:27023"), ""),
        # an adapter without a host is the one of which another host tells
        (
            "...-48:81:9 [0] NCCL WARN NET/IB : Got async event : port error\n"
            "c-1:8:9 [4] NCCL WARN NET/IB : Got completion from peer c-48<379> with error 12, opcode 2, len 1\n",
            "peer c-48",
        ),
        ("NET/IB : Got completion from peer with error 12, opcode 0, len 5384, vendor err 129 (Send)\n", ""),
        # a library's name is no host; an address in brackets, a name that is taken for an address
        (CLIENT.format("failed to connect to [::ffff:10.1.2.3]:500 (errno: 111"), "peer 10.1.2.3"),
        (
            CLIENT.format("failed to connect to 10.1.2.3:500 (errno: 110")
            + CLIENT.format("failed to connect to any network address of (6841, 500"),
            "peer 10.1.2.3",
        ),
        (CLIENT.format("failed to connect to any network address of (head-0, 500"), "peer head-0"),
        (CLIENT.format("timed out after 60s while trying to connect to (head-0, 500"), "peer head-0"),
        # NCCL tells tries at level INFO; after the last one none is left
        ("".join(TRIED.format(n) for n in range(1, 21)), ""),
        ("".join(TRIED.format(n) for n in range(1, 20)), ""),
        (TRIED.replace("returned", "to 10.1.2.3<40> returned").format(20), "link c-1 - 10.1.2.3"),
        # AMD's driver; the other GPU dumps its registers
        (
            "[13.5] amdgpu 0000:0b:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!\n"
            "[13.6] amdgpu 0000:0c:00.0: {1}[Hardware Error]: aca entry[00].ADDR=0x0000000000000000\n",
            "GPU 0000:0b:00.0",
        ),
        ("[13.5] amdgpu 0000:0b:00.0: amdgpu: RAS poison consumption, unmap queue\n", "GPU 0000:0b:00.0"),
        # two ranks at different collectives, and the one that differs from all
        (DIFFERS.format(4, 7, 5, 3), "rank 4; rank 5"),
        (DIFFERS.format(4, 7, 5, 7), ""),
        (DIFFERS.format(0, 7, 2, 3) + DIFFERS.format(1, 7, 2, 3) + DIFFERS.format(2, 3, 0, 7), "rank 2"),
        (DIFFERS.format(0, 7, 1, 3) + DIFFERS.format(2, 7, 3, 3), ""),
        # a launcher that tells who ended first, where others say nothing of it
        (
            "ERROR:composer.cli.launcher:Rank 1 crashed with exit code 1.\n"
            "Global rank 0 (PID 7) exited with code -15\n",
            "rank 1",
        ),
        ("Rank 1 crashed with exit code 1.\n" + STALL.format("a", "3"), "rank 3"),
        (
            "[rank: 2] Child process with PID 77 terminated with code 1. Forcefully terminating all\n",
            "rank 2",
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with exit code 5\n",
            "process 3",
        ),
        # a GPU by its number, where nothing tells its address
        (
            "[ 24.3] NVRM: GPU6 _kgspIsHeartbeatTimedOut: Heartbeat timed out, diff 6070 timeout 5200\n",
            "GPU6",
        ),
        (
            "c-17: kern: NVRM: GPU2 nvAssertFailedNoLog: GSP RPC timeout detected! GPU marked for reset\n"
            "c-17: kern: NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed\n",
            "GPU 0000:0b:00 (GPU2) on c-17",
        ),
        (
            "c-17: kern: NVRM: Back to back GSP RPC timeout detected! GPU marked for reset\n"
            "c-17: kern: NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed\n"
            "c-17: kern: NVRM: Xid (PCI:0000:0c:00): 154, GPU recovery action changed\n",
            "node c-17",
        ),
        ("GPU 5 has uncorrectable memory errors and row remappings are pending.\n", "GPU 5"),
        ("Jan  3 10:00:00 c-17 kernel: NVRM: GPU1 RmInitAdapter failed! (0x62:0x55:2477)\n", "GPU1 on c-17"),
        ("[ 1.5] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Fatal, Link 33\n", "device 0000:05:00.0"),
        # NCCL's own prefix tells host and GPU, where one process alone says it
        ("c-1:33:66 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n", "GPU 3 on c-1"),
        (
            "".join(f"c-1:{n}:66 [{n}] NCCL WARN Cuda failure 2 'out of memory'\n" for n in range(2)),
            "",
        ),
        ("c-1:33:66 [3] NCCL WARN Cuda failure 802 'system not yet initialized'\n", "node c-1"),
        # who alone has an error, while others speak or are ended
        (
            "[rank3]: FileNotFoundError: [Errno 2] No such file or directory: 'a.npy'\n"
            "[rank0]: RuntimeError: Connection closed by peer [10.1.2.3]:40000\n",
            "rank 3",
        ),
        (
            "[rank1]: FileNotFoundError: [Errno 2] No such file or directory: 'a.npy'\n"
            "W0101 10:00:00.000000 1 api.py:897] Sending process 11 closing signal SIGTERM\n",
            "rank 1",
        ),
        ("[rank1]: FileNotFoundError: [Errno 2] No such file or directory: 'a.npy'\n", ""),
        (
            "".join(
                f"[rank{n}]: FileNotFoundError: [Errno 2] No such file or directory: 'a'\n" for n in "012"
            ),
            "",
        ),
        ("[rank8]: FileExistsError: [Errno 17] File exists\n", "rank 8"),
        # DDP names the rank itself; mostly all of them miss the same gradients
        (GRADIENT + INDICES.format(3), ""),
        (GRADIENT + INDICES.format(3) + "[rank2]: " + LOST, "rank 3"),
        (GRADIENT + INDICES.format(3) + GRADIENT + INDICES.format(4) + "[rank2]: " + LOST, ""),
        (
            f"[rank3]: {GRADIENT}[rank3]: {INDICES.format(3)}[rank2]: " + LOST,
            "rank 3",
        ),
        # a node alone has an error, unless others had one, too
        ("c-1: FileNotFoundError: [Errno 2] No such file or directory: 'a'\nc-2: " + LOST, "node c-1"),
        (
            "c-1: FileNotFoundError: [Errno 2] No such file or directory: 'a'\n"
            "c-2: Traceback (most recent call last):\nc-2:   File 'a.py', line 3, in f\n",
            "",
        ),
        (
            "[pod/w-3/torch] RuntimeError: CUDA error: an illegal memory access was encountered\n"
            "[pod/w-0/torch] RuntimeError: NCCL communicator was aborted on rank 0\n",
            "node w-3",
        ),
        ("(Trainer pid=8, ip=10.1.2.3) torch.OutOfMemoryError: CUDA out of memory.\n", "node 10.1.2.3"),
        ('{"rank": 5, "message": "CUDA error: uncorrectable ECC error encountered"}\n', "rank 5"),
        # Slurm tells that a memory was full, and then of the task
        (OOM_KILL + "srun: error: c-17: task\n", "node c-17"),
        (
            OOM_KILL + "srun: error: c-17: task 4: Killed\nsrun: error: c-1: tasks 0-3: Terminated\n",
            "rank 4 on c-17",
        ),
        (OOM_KILL + "srun: error: c-17: task 4: Exited with exit code 1\n", "node c-17"),
        (
            OOM_KILL
            + "srun: error: c-17: task 4: Exited with exit code 1\nsrun: error: c-1: task 0: Terminated\n",
            "",
        ),
        # other launchers
        (
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 3 PID 20763 RUNNING AT c-17\n"
            "=   KILLED BY SIGNAL: 9 (Killed)\n",
            "rank 3 on c-17",
        ),
        ("E UNAVAILABLE: Task /job:jax_worker/replica:0/task:3 heartbeat timeout.\n", "rank 3"),
        # the host that a launcher cannot reach by ssh, or log in on
        ("RuntimeError: Using hostfile but host=c-17 was not reachable via ssh.\n", "node c-17"),
        (SSH.format("ssh -o PasswordAuthentication=no c-17 hostname"), "node c-17"),
        (SSH.format("['ssh 10.1.2.3 hostname -I']"), "node 10.1.2.3"),
        ("c-17: ssh: connect to host c-17 port 22: Connection timed out\n", "node c-17"),
        ("ssh: Could not resolve hostname w-5.job: Name or service not known\n", "node w-5.job"),
        ("pdsh@c-1: c-17: ssh exited with exit code 255\n", "node c-17"),
        ("pdsh@c-1: c-17: connect: No route to host\n", "node c-17"),
        (
            "kex_exchange_identification: Connection closed by remote host\n"
            "Connection closed by 10.1.2.3 port 22\n",
            "node 10.1.2.3",
        ),
        ("ssh not successful for host c-17:\nroot@c-17: Permission denied (publickey).\n", "node c-17"),
        ("root@c-17: Permission denied (publickey,password).\n", "node c-17"),
        ("Host key verification failed.\n", ""),
        # the printed error of a process that then was killed is not why it ended
        (
            "[0]<stderr>:RuntimeError: odd batch\n[0]<stderr>:Killed\nProcess 0 exit with status code 137.\n",
            "process 0",
        ),
        # file systems and object stores
        (
            "Unavailable: Unexpected response code 410\n\t when resuming upload gs://bucket-7/run/a.ckpt-1\n",
            "path gs://bucket-7/run/a.ckpt-1",
        ),
        (
            "DEBUG:fsspec.local:open file: /content/drive/a/last.ckpt\nTraceback (most recent call last):\n"
            '  File "/usr/lib/python3.10/dist-packages/fsspec/local.py", line 382, in write\n'
            "OSError: [Errno 107] Transport endpoint is not connected\n",
            "path /content/drive/a/last.ckpt",
        ),
        (
            "[Torch] Saving ./out/a.pt...\n[Torch] Saved ./out/a.pt.\n[Torch] Saving ./out/b.pt...\n"
            + WRITER,
            "path ./out/b.pt",
        ),
        ("[Torch] Saving /out/run/a.pt...\n[Torch] Saved /out/run/a.pt.\n" + WRITER, ""),
        (
            "OSError: Unable to open file (unable to open file: name = '/data/e/part_3.h5', errno = 2, x)\n",
            "path /data/e/part_3.h5",
        ),
        (
            "Saved checkpoint to /ckpt/step-1.pt\nLoading config from /home/u/job.yaml\n"
            "reading /data/shard-7.bin\nOSError: [Errno 28] No space left on device\n",
            "",
        ),
        (
            "Loading shard from /data/shard-7.bin\nOSError: [Errno 5] Input/output error\n",
            "path /data/shard-7.bin",
        ),
        (
            "[rank1]: saving checkpoint to /ckpt/1\n[rank0]: OSError: [Errno 122] Disk quota exceeded\n",
            "rank 0",
        ),
        (
            "ReadTimeoutError: HTTPSConnectionPool(host='b.s3.amazonaws.com', port=443): Read timed out.\n",
            "store b.s3.amazonaws.com",
        ),
        (
            'Read timeout on endpoint URL: "None": When getting a/b.json from the bucket my-data\n',
            "store my-data",
        ),
        (EIO.format("/data/set/7.bin"), "path /data/set/7.bin"),
        ("botocore.errorfactory.NoSuchBucket: The specified bucket does not exist\n", ""),
        (
            "google.cloud.exceptions.NotFound: 404 GET https://s.example.org/b/o\n",
            "path https://s.example.org/b/o",
        ),
        # of one host's mount: the rank tells of which
        ("[rank3]: " + EIO.format("/data/set/7.bin"), "path /data/set/7.bin; rank 3"),
        ("".join(f"[rank{n}]: " + EIO.format("/data/set/7.bin") for n in "01"), "path /data/set/7.bin"),
        ("[rank3]: OSError: [Errno 28] No space left on device: '/data/set/7.bin'\n", "path /data/set/7.bin"),
        (
            EIO.format("/data/set/7.bin") + "[rank1]: Traceback (most recent call last):\n",
            "path /data/set/7.bin",
        ),
        ("".join(map(EIO.format, ("/data/set/7.bin", "/data/set/8.bin"))), "path /data/set"),
        (EIO.format("set/7.bin"), ""),
        ("[rank3]: OSError: [Errno 28] No space left on device\n", "rank 3"),
        (
            "RuntimeError: [enforce fail at /src/serialize/inline_container.cc:3] . unexpected pos 5 vs 4\n",
            "",
        ),
        (
            "RuntimeError: Failed to download s3://bucket-7/train/3.mds -> /tmp/3.mds. Got errors:\n"
            "[ClientError('An error occurred (404) when calling the HeadObject operation: Not Found')]\n",
            "path s3://bucket-7/train/3.mds",
        ),
        # an object that is not there, under an error that says less
        (
            "RuntimeError: Failed to download s3://bucket-7/a.json -> /tmp/a.json. Got errors:\n"
            "[ClientError('Object s3://bucket-7/a.json not found! Either check the path or its rights.')]\n",
            "path s3://bucket-7/a.json",
        ),
        ("FileNotFoundError: Object gs://bucket-7/ep1.pt not found\n", "path gs://bucket-7/ep1.pt"),
        ("FileNotFoundError: gs://bucket-7/ep1.pt\n", "path gs://bucket-7/ep1.pt"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 's3://b/x.pt'\n", "path s3://b/x.pt"),
        (
            "ValueError: NOT_FOUND: Error opening driver: Metadata at gs://b/run/.zarray does not exist\n",
            "path gs://b/run/.zarray",
        ),
        (
            "errors_impl.NotFoundError: Error executing an HTTP request: HTTP response code 404 with body x\n"
            "\t when reading gs://bucket-7/run/checkpoint\n",
            "path gs://bucket-7/run/checkpoint",
        ),
        # a connection that broke off is about no object
        ("Saving checkpoints into s3://b/model.ckpt.\naws_logging.cc:60] Curl returned error code 55\n", ""),
        (
            'EndpointConnectionError: Could not connect to the endpoint URL: "https://b.s3.example.org/x"\n',
            "store b.s3.example.org",
        ),
        # who waited in vain names the one that did not come, where all agree
        ("".join(STALL.format(name, "3") for name in "ab"), "rank 3"),
        (STALL.format("a", "3, 5") + STALL.format("b", "5"), "rank 5"),
        (STALL.format("a", "3") + STALL.format("b", "5"), ""),
        ("RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 2000 ms\n", "rank 4; rank 5"),
        (
            "[rank5]:[E901 05:20:03.1 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 5] Received a "
            "dump signal due to a collective timeout from  rank 34 and we will try our best to dump the debug info.\n",
            "",
        ),
    ],
)
def test_who_is_named(log: str, named: str) -> None:
    assert "; ".join(map(str, why(log).culprits)) == named


@pytest.mark.parametrize(
    "log",
    [
        "[E ProcessGroupGloo.cpp:138] Rank 3 successfully reached monitoredBarrier, but received errors while waiting "
        "for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n",
        "Exception: process 0 terminated with exit code 1\n",
        "Global rank 0 (PID 147193) exited with code 1\n",
        "mpirun detected that one or more processes exited with non-zero status, thus causing\n",
    ],
)
def test_a_launchers_echo_is_no_cause_and_names_nobody(log: str) -> None:
    found = why(log)
    assert (found.cause_class, found.root, found.culprits) == ("other", None, ())


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("Input/output error: '/data/set/7.bin'", "/data/set/7.bin"),
        ("cannot write /ckpt/run/step-9.", "/ckpt/run/step-9"),
        ("at /pytorch/aten/x.cpp:92, disk full", ""),
        ("read and/or write failed, 3/4 done", ""),
        ("[Errno 28] No space left on device: '/ckpt'", ""),
        ('on endpoint URL: "https://b.s3.example.org/x/y"', "https://b.s3.example.org/x/y"),
        ("gs://b/x.tar: timed out", "gs://b/x.tar"),
    ],
)
def test_the_path_of_a_message(text: str, path: str) -> None:
    assert path_in(text) == path


@given(st.text(alphabet="ab/. :'\"()", max_size=200))
def test_a_path_of_a_message_stands_in_it_and_is_absolute(text: str) -> None:
    found = path_in(text)
    assert found == "" or (found in text and found.startswith("/") and found.count("/") > 1)


@given(
    st.lists(st.sampled_from([*ENDED.splitlines(), *RAY_GONE.splitlines(), RECV, EIO, STALL]), max_size=12)
)
def test_lines_in_any_order_name_nobody_whom_they_do_not_tell(lines: list[str]) -> None:
    log = "\n".join(lines) + "\n"
    for one in why(log).culprits:
        assert all(
            str(told) in log
            for told in (one.rank, one.local_rank, one.process, one.node, one.peer, one.path)
            if told is not None
        )
