"""Two jobs with one secret at one endpoint: they never become one world, and neither harms the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from tests.e2e.test_run_watched import Nodes, free_port, nodes, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]
__all__ = ["nodes"]

TELL = "print(os.environ['WORLD_SIZE'], os.environ['TORCHELASTIC_RUN_ID'])\n"
WAIT = """
open(os.environ["TORCHELASTIC_RUN_ID"] + str(rank), "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
"""

Start = Callable[..., None]


@pytest.fixture
def start(nodes: Nodes) -> Start:
    """Starts a launcher: the script, its job, its number in that, and whether it hosts the controller."""
    endpoint = f"127.0.0.1:{free_port()}"

    def begin(script: str, job: str, number: int, *flags: str, hosts: bool) -> None:
        conf = ",".join(["join_timeout=60", f"is_host={int(hosts)}"])
        meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf]
        one_secret = ["--rdzv-id", job, "--secret-file", str(nodes.secret)]
        nodes.start(script, *meet, *one_secret, *flags, node=f"{job}-{number}")

    return begin


def controllers(nodes: Nodes) -> list[int]:
    return nodes.program("keepstep.control")


@pytest.mark.parametrize("stranger_first", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_jobs_at_one_endpoint_never_become_one_world(
    nodes: Nodes, start: Start, stranger_first: bool
) -> None:
    hosts, stranger = (1, 0) if stranger_first else (0, 1)
    for number in (0, 1):
        if number == hosts:
            start(TELL, "job-a", 0, hosts=True)
            until(lambda: controllers(nodes))
        else:
            start(TELL, "job-b", 0, "-q", hosts=False)
    _, err = nodes.launchers[stranger].communicate(timeout=60)
    assert nodes.launchers[stranger].returncode == 2, err
    assert (
        nodes.launchers[hosts].poll() is None
    )  # it waits for its other node, and did not take that one for it
    (told,) = err.splitlines()
    assert "runs job 'job-a', this node was started for job 'job-b'" in told
    assert told.endswith("give this job its own --rdzv-endpoint, or the same --rdzv-id on all its nodes")
    start(TELL, "job-a", 1, hosts=False)
    for number in (hosts, 2):
        out, err = nodes.launchers[number].communicate(timeout=60)
        assert (nodes.launchers[number].returncode, out) == (0, "2 job-a\n"), err


def test_a_job_that_is_to_host_where_another_one_does_says_so_in_one_line(nodes: Nodes, start: Start) -> None:
    start(TELL, "job-a", 0, hosts=True)
    until(lambda: (nodes.folder / "job-a-0" / "run.json").exists())
    start(TELL, "job-b", 0, "-q", "--no-check", hosts=True)
    out, err = nodes.launchers[1].communicate(timeout=60)
    assert (nodes.launchers[1].returncode, out) == (2, ""), err
    (told,) = err.splitlines()
    assert "runs job 'job-a', this node was started for job 'job-b'" in told
    assert controllers(nodes) != []
    nodes.launchers[0].send_signal(signal.SIGINT)
    assert nodes.launchers[0].wait(60) == 130


def test_workers_train_on_when_another_jobs_controller_is_where_theirs_was(
    nodes: Nodes, start: Start
) -> None:
    """The launcher that hosts the controller stands still, the controller dies, and another job takes its port."""
    start(WAIT, "job-a", 0, hosts=True)
    start(WAIT, "job-a", 1, hosts=False)
    until(lambda: all((nodes.folder / f"job-a{rank}").exists() for rank in (0, 1)))
    (first,) = controllers(nodes)
    os.kill(nodes.launchers[0].pid, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    start(WAIT, "job-b", 0, hosts=True)  # which waits for its other node
    member = nodes.launchers[1]
    assert member.stderr is not None
    said = [member.stderr.readline() for _ in range(2)]
    assert "rank" in said[0], said
    assert "runs job 'job-b', this node was started for job 'job-a'" in said[1]
    assert said[1].endswith("the workers of this node train on without it\n")
    assert member.poll() is None
    nodes.launchers[2].send_signal(signal.SIGINT)
    _, err = nodes.launchers[2].communicate(timeout=60)
    assert nodes.launchers[2].returncode == 130, err
    os.kill(nodes.launchers[0].pid, signal.SIGCONT)
    until(lambda: controllers(nodes) not in ([], [first]))
    (nodes.folder / "go").touch()
    for launcher in nodes.launchers[:2]:
        _, err = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, err
