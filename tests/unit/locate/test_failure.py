"""Who caused a failure: whole logs as text, and what they tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.told import Failure
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.detect.listener import Listener
from keepstep.locate.failure import HEALTHY, explain

MATCHER = RowMatcher(shipped_rows())
KNOWN = [
    line.split("|", 2)
    for line in Path(__file__).with_name("known_failures.txt").read_text().splitlines()
    if not line.startswith("#")
]


def why(*logs: str) -> Failure:
    words = []
    for number, log in enumerate(logs):
        listener = Listener(MATCHER, f"log-{number}")
        listener.take(log.encode())
        words.append(listener.words())
    return explain(words)


def named(found: Failure) -> tuple[str, ...]:
    return tuple(map(str, found.culprits))


def root(failure: Failure) -> str:
    return failure.root.line if failure.root else ""


TRACE = """\
[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "train.py", line 10, in <module>
[rank{0}]:     raise OSError("No space left on device")
[rank{0}]: {1}
"""
LOST = "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote process exited or there was a network error"
OOM = "torch.OutOfMemoryError: CUDA out of memory."
ENDED = (
    "E0101 10:00:00.000000 77 torch/distributed/elastic/multiprocessing/api.py:869] "
    "failed (exitcode: {}) local_rank: 2 (pid: 9) of binary: /usr/bin/python\n"
)


def test_who_has_a_cause_of_its_own_is_named_and_who_follows_is_not() -> None:
    found = why(TRACE.format(0, LOST) + TRACE.format(1, OOM) + TRACE.format(2, LOST))
    assert (found.cause_class, found.kind, named(found)) == ("user", "gpu-oom", ("rank 1",))
    assert root(found) == "[rank1]: torch.OutOfMemoryError: CUDA out of memory."
    assert {one.speaker.rank for one in found.followers} == {0, 2}


def test_an_error_that_no_row_knows_is_the_programs() -> None:
    found = why(TRACE.format(0, LOST) + TRACE.format(1, "my.own.Failure: odd thing"))
    assert (found.cause_class, found.kind, named(found)) == ("user", "exception", ("rank 1",))


def test_one_error_of_all_ranks_is_the_program() -> None:
    found = why("".join(TRACE.format(rank, "ValueError: batch is empty") for rank in range(4)))
    assert (found.cause_class, named(found)) == ("user", ())


def test_code_in_a_traceback_never_counts() -> None:
    found = why(TRACE.format(0, "ValueError: odd"))
    assert found.kind == "exception"


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        (TRACE.format(0, LOST), "echo-only"),
        (
            "[rank1]:[E ProcessGroupNCCL.cpp:5] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(x)",
            "timeout-only",
        ),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.1]:2",
            "echo-only",
        ),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "echo-only"),
    ],
)
def test_where_only_consequences_are_told_the_cause_is_unknown(log: str, kind: str) -> None:
    found = why(log + "\n")
    assert (found.cause_class, found.kind, found.root, named(found)) == ("other", kind, None, ())
    assert found.missing


@pytest.mark.parametrize(
    "log",
    [
        "step 1 loss 2.0\nstep 2 loss 1.9\n",
        "2024-01-01 10:00:00,123 - root - INFO - no error: CUDA out of memory is not met\n",
        "h:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying\n",
        "[W socket.cpp:4] [c10d] cannot connect to [h]:2 (errno: 97 - Address family not supported by protocol).\n",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1.\n",
        "Exception ignored in: <function f at 0x1>\n"
        + TRACE.format(0, "TypeError: odd").replace("[rank0]: ", ""),
        "wandb: Network error (ConnectionError), entering retry loop.\n",
        "/a/b.py:3: UserWarning: the file could not be found, error ignored\n",
        "",
    ],
)
def test_healthy_logs_are_silent(log: str) -> None:
    assert why(log) is HEALTHY


def test_an_error_after_which_the_job_went_on_is_none() -> None:
    log = TRACE.format(0, "ValueError: odd") + "".join(f"[rank0]: step {n} loss 1.5\n" for n in range(50))
    assert why(log) is HEALTHY
    assert why(log + TRACE.format(0, "KeyError: 'x'")).kind == "exception"


STEPS = "".join(f"step {n} loss 1.5\n" for n in range(50))
SKIPPED = "OSError: [Errno 5] Input/output error: '/data/{}.bin'\n"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        # an error that was survived is no cause of what came later, unless only consequences came
        (SKIPPED.format(1) + STEPS + ECC, "gpu-ecc"),
        (SKIPPED.format(1) + STEPS + LOST, "io-error"),
        # the same error twice: survived, then not
        (ECC + STEPS + SKIPPED.format(1) + STEPS + ECC, "gpu-ecc"),
        # what the job survives again and again is no cause, nor a failure, while it comes no more often
        ("".join(SKIPPED.format(n) + STEPS for n in range(4)) + SKIPPED.format(9) + LOST, "echo-only"),
        ("".join(SKIPPED.format(7) + STEPS for _ in range(4)) + SKIPPED.format(7) + LOST, "echo-only"),
        ("".join(SKIPPED.format(n) + STEPS for n in range(4)) + SKIPPED.format(9), ""),
        ("".join(SKIPPED.format(n) + STEPS for n in range(4)), ""),
        # met by many at one moment it was survived once
        ("".join(SKIPPED.format(n) for n in range(4)) + STEPS + SKIPPED.format(9) + LOST, "io-error"),
        # a burst of it is one
        ("".join(SKIPPED.format(n) + STEPS for n in range(4)) + SKIPPED.format(9) * 5 + LOST, "io-error"),
    ],
)
def test_errors_count_against_their_own_usual_rate(log: str, kind: str) -> None:
    assert why(log).kind == kind or (not kind and why(log) is HEALTHY)


def test_the_last_line_of_the_last_episode_is_told() -> None:
    found = why(ECC + STEPS + SKIPPED.format(1) + STEPS + ECC)
    assert found.root is not None
    assert (found.root.number, found.root.count, found.root.survived) == (103, 2, 1)


def test_the_cause_of_a_chain_is_what_was_raised_first() -> None:
    chain = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
        "ConnectionRefusedError: [Errno 111] Connection refused\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "b.py", line 1, in g\nRuntimeError: cannot load\n'
    )
    found = why(chain)
    assert (found.cause_class, found.kind) == ("network", "connection-refused")
    assert found.root is not None
    assert found.root.begins == 1


def test_nccls_last_error_goes_before_its_result() -> None:
    log = (
        "[rank3]: torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled cuda error\n"
        "[rank3]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank3]: Last error:\n"
        "[rank3]: Cuda failure 'out of memory'\n"
    )
    found = why(log)
    assert (found.kind, named(found)) == ("gpu-oom", ("rank 3",))
    assert root(found).endswith("'out of memory'")


def test_a_device_is_named_by_its_address_and_a_link_by_its_ends() -> None:
    kernel = (
        "Aug 30 11:43:09 gpu-7 kernel: NVRM: Xid (PCI:0000:9B:00): 79, pid=1, GPU has fallen off the bus.\n"
    )
    assert named(why(kernel)) == ("GPU 0000:9b:00 on gpu-7",)
    warn = "h-3:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.4<5> with status=12 opcode=0\n"
    assert named(why(warn)) == ("link h-3 - 10.0.0.4",)


def test_a_fault_under_many_processes_of_one_gpu_is_the_gpus() -> None:
    line = "NVRM: Xid (PCI:0000:{}:00): 31, pid={}, Ch 00000008, MMU Fault\n"
    assert why(line.format("db", 10)).cause_class == "user"
    found = why("".join(line.format("db", pid) for pid in (10, 20, 30)))
    assert (found.cause_class, found.kind, named(found)) == ("node", "gpu-faulty", ("GPU 0000:db:00",))
    assert why("".join(line.format(f"d{pid}", pid) for pid in (1, 2, 3))).cause_class == "user"


def test_logs_of_several_ranks_are_put_in_order_by_time() -> None:
    late = "2024-01-01 10:00:09 RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    early = "2024-01-01 10:00:01 OSError: [Errno 5] Input/output error: '/data/x'\n"
    found = why(late, early)
    assert (found.cause_class, found.kind) == ("storage", "io-error")


def test_how_a_process_ended_is_told_where_nothing_better_is() -> None:
    found = why(ENDED.format(-9))
    assert (found.cause_class, found.kind, named(found)) == ("other", "sigkill", ("local rank 2",))
    assert why(ENDED.format(-11)).kind == "segv"
    assert why(ENDED.format(1)).kind == "echo-only"
    assert named(why("[1]:\n  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 9)\n")) == ("rank 5",)


def test_a_wrapped_word_is_no_error() -> None:
    found = why(
        'Traceback (most recent call last):\n  File "/a/b.py", line 3, in \nload_weights\n    x = open(y)\n'
        "FileNotFoundError: No such file or directory: \n/data/a.safetensors\n"
    )
    assert found.root is not None
    assert found.root.line == "FileNotFoundError: No such file or directory:"


@pytest.mark.parametrize(("cause_class", "kind", "lines"), KNOWN)
def test_known_failures(cause_class: str, kind: str, lines: str) -> None:
    found = why(lines.replace("\\n", "\n") + "\n")
    assert (found.cause_class or "none", found.kind) == (cause_class, kind)
