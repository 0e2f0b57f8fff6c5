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
EIO = "OSError: [Errno 5] Input/output error: '{}'\n"
STALL = "{}_0 [missing ranks: {}]\n"
RAY_GONE = """\
ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tpid: 64
\tip: {}
The actor is dead because its node has died. Node Id: 67
"""


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
        ("c-1:8:9 [0] NCCL WARN Call to connect failed : Connection timed out\n", "node c-1"),
        ("OSError: [Errno 113] No route to host: connect to 10.1.2.3 failed\n", "peer 10.1.2.3"),
        ("OSError: [Errno 113] No route to host\n", ""),
        # file systems and object stores
        (
            "ReadTimeoutError: HTTPSConnectionPool(host='b.s3.amazonaws.com', port=443): Read timed out.\n",
            "store b.s3.amazonaws.com",
        ),
        (
            'Read timeout on endpoint URL: "None": When getting a/b.json from the bucket my-data\n',
            "store my-data",
        ),
        (EIO.format("/data/set/7.bin"), "path /data/set/7.bin"),
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
