"""Who sent a signal, and what it means: an end by hand, a time limit, a preemption, or a warning for the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.launch.schedulers.slurm_preemption import Preemption
from keepstep.launch.signals import (
    Sender,
    caught,
    end_time,
    ending,
    pass_on,
    restart_is_vain,
)  # fmt: skip
from keepstep.launch.termination_log import MOST_BYTES, leave_message, message

SLURM = Sender(812, 0, "slurmstepd")
TERM, INT = signal.SIGTERM, signal.SIGINT


def test_the_sender_is_known_with_program_and_user_and_pythons_handler_runs() -> None:
    code = """
import os, signal, subprocess, sys, time
from keepstep.launch.signals import sender_of, watch
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
assert sender_of(signal.SIGUSR1) is None
watch([signal.SIGUSR1, signal.SIGUSR2])
watch([signal.SIGUSR1])
other = subprocess.Popen([sys.executable, "-c", f"import os, sys; os.kill({os.getpid()}, 10); sys.stdin.read()"],
                         stdin=subprocess.PIPE)
while not got: time.sleep(0.01)
found = sender_of(signal.SIGUSR1)
assert (found.pid, found.uid, found.by_kernel) == (other.pid, os.getuid(), False), found
assert found.name.startswith("python"), found
other.communicate()
assert str(sender_of(signal.SIGUSR1)) == f"pid {other.pid} (gone), uid {os.getuid()}"
assert len(got) == 1
os.kill(os.getpid(), signal.SIGUSR1)
assert (len(got), sender_of(signal.SIGUSR1).pid) == (2, os.getpid())
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-c", "import signal; assert signal.getsignal(10) == signal.SIG_DFL"])
assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("sender", "said"),
    [
        (SLURM, "pid 812 (slurmstepd), uid 0"),
        (Sender(0, 0), "a process outside this container, uid 0"),
        (Sender(0, 0, by_kernel=True), "the kernel (a key of the terminal, or its end)"),
    ],
)
def test_a_sender_in_words(sender: Sender, said: str) -> None:
    assert str(sender) == said


@pytest.mark.parametrize(
    ("sender", "now_s", "kind"),
    [
        (SLURM, 950.0, "time-limit"),
        (SLURM, 1003.0, "time-limit"),
        (Sender(0, 0), 1000.0, "time-limit"),
        (None, 990.0, "time-limit"),
        (SLURM, 100.0, ""),  # cancelled long before
        (SLURM, 9999.0, ""),  # the limit was raised since
        (Sender(77, 1000, "bash"), 990.0, ""),  # by hand
        (Sender(0, 0, by_kernel=True), 990.0, ""),  # Ctrl-C
    ],
)
def test_a_time_limit_is_one_by_its_time_and_sender(sender: Sender | None, now_s: float, kind: str) -> None:
    found = ending(TERM, sender, 1000.0, now_s)
    assert found.kind == kind
    assert found.exit_code == (75 if kind else 143)
    assert "SIGTERM" in found.text
    assert ending(TERM, sender, None, now_s).kind == ""
    assert ending(INT, None, 1000.0, 990.0).kind == ""


def test_a_preemption_is_announced_in_the_last_words_of_a_worker() -> None:
    line = "slurmstepd: error: *** STEP 1.0 ON n CANCELLED AT 2025-01-01T00:00:00 DUE TO PREEMPTION ***"
    found = ending(TERM, SLURM, None, 0.0, lambda: ["step 1\n", f"step 1\n{line}\nstep 2\n"])
    assert (found.kind, found.exit_code) == ("preempted", 75)
    assert line in found.text
    assert ending(TERM, SLURM, None, 0.0, lambda: [line + "\nstep\n" * 40]).kind == ""  # long ago
    assert ending(TERM, Sender(77, 1000, "bash"), None, 0.0, lambda: [line]).kind == ""


def test_a_preemption_is_told_by_the_scheduler_and_asked_for_only_then() -> None:
    told = Preemption("the job was preempted", 1060.0)
    found = ending(TERM, SLURM, None, 1000.0, preempted=lambda: told)
    assert (found.kind, found.exit_code, found.left_s(1000.0)) == ("preempted", 75, 55.0)
    assert found.left_s(1058.0) == 20.0
    asked: list[int] = []
    by_hand = Sender(77, 1000, "bash")
    ending(TERM, by_hand, None, 1000.0, preempted=lambda: asked.append(1))
    ending(TERM, SLURM, 1000.0, 1000.0, preempted=lambda: asked.append(1))
    assert asked == []
    assert ending(TERM, SLURM, None, 1000.0, preempted=lambda: None).left_s(1000.0) == 0.0


@pytest.mark.parametrize(
    ("number", "sender", "in_pod", "is_pods"),
    [
        (TERM, Sender(0, 0), True, True),
        (TERM, Sender(0, 0), False, False),  # docker stop
        (INT, Sender(0, 0), True, False),
        (TERM, Sender(77, 0, "sh"), True, False),  # kubectl exec
        (TERM, None, True, False),
    ],
)
def test_the_kubelet_ends_a_pod_from_outside(
    number: signal.Signals, sender: Sender | None, in_pod: bool, is_pods: bool
) -> None:
    found = ending(number, sender, None, 0.0, in_pod=in_pod)
    assert (found.of_pod, found.exit_code == 75) == (is_pods, is_pods)


@pytest.mark.parametrize("text", ["", "x", "-1", "12e9", "0", "9" * 12, "١٢"])
def test_an_odd_end_time_is_none(text: str) -> None:
    assert end_time({"SLURM_JOB_END_TIME": text}) is None


def test_the_end_of_the_jobs_time() -> None:
    assert end_time({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert end_time({"SLURM_JOB_END_TIME": "1700000000"}, 5.0) == 5.0
    assert end_time({}) is None
    moments = (0.0, 819.0, 821.0, 969.0, 971.0, 1100.0, 5000.0)
    assert [moment for moment in moments if restart_is_vain(1000.0, moment, 1)] == [971.0, 1100.0]
    for status in (-15, 143):
        assert [moment for moment in moments if restart_is_vain(1000.0, moment, status)] == [
            821.0, 969.0, 971.0, 1100.0,
        ]  # fmt: skip
    assert not restart_is_vain(None, 0.0, -15)


def test_warnings_go_to_those_that_handle_them() -> None:
    code = "import signal, sys; {}; print('ready', flush=True); sys.stdin.read()"
    handles = "signal.signal(10, lambda *_: print('told', flush=True))"
    with (
        subprocess.Popen([sys.executable, "-c", code.format(handles)], stdin=-1, stdout=-1, text=True) as one,
        subprocess.Popen([sys.executable, "-c", code.format("0")], stdin=-1, stdout=-1, text=True) as other,
    ):
        assert one.stdout is not None
        assert other.stdout is not None
        assert [worker.stdout.readline() for worker in (one, other) if worker.stdout] == ["ready\n"] * 2
        assert signal.SIGUSR1 in caught(one.pid)
        assert pass_on(signal.SIGUSR1, {5: other.pid, 3: one.pid}) == [3]
        assert one.stdout.readline() == "told\n"
        one.communicate()
        other.communicate()
        assert (one.returncode, other.returncode) == (0, 0)
    assert caught(one.pid) == frozenset()


def test_the_containers_last_message_is_left_where_there_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    assert not leave_message(str(path), "x")
    assert not path.exists()
    path.write_text("earlier" * 1000)
    assert leave_message(
        str(path), "exit code 1: rank 3: \x1b[2J token=hf_abcdefghijklmnopqrstuvwx " + "é" * 9000
    )
    data = path.read_bytes()
    assert data.startswith(b"exit code 1: rank 3: \\x1b[2J")
    assert b"hf_abc" not in data
    assert len(data) <= MOST_BYTES
    os.mkfifo(tmp_path / "fifo")
    assert not leave_message(str(tmp_path / "fifo"), "x")
    assert not leave_message("/dev/full", "x")


def test_the_last_message_is_the_verdict_in_one_line(tmp_path: Path) -> None:
    told = "keepstep: exit code 7 (training): rank 0: Connection closed by peer"
    assert message(7, "training", "rank 0: Connection closed by peer", tmp_path) == told
    (tmp_path / "incidents").mkdir()
    culprits = '[{"node": "gpu-3"}, {"node": "gpu-4"}]'
    (tmp_path / "incidents/0002.json").write_text(f'{{"culprits": {culprits}}}')
    (tmp_path / "incidents/0002.txt").write_text("CRASH     step 7  rank 3 died\ncause     node\n")
    assert message(7, "training", "rank 0: Connection closed by peer", tmp_path) == (
        f"{told}; nodes blamed: gpu-[3-4]; incident 0002: CRASH step 7 rank 3 died"
    )
