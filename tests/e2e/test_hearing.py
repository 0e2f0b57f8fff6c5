"""What ranks and kernel say of a failure reaches the controller: a real run, whose agent has a twin that we hear."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.e2e.test_agent_job import Controller
from tests.e2e.test_run_watched import WAIT, Nodes, nodes, until

from keepstep import wire

pytestmark = pytest.mark.e2e
__all__ = ["nodes"]

SCRIPT = f"""
print("iteration 1 loss 2.0", file=sys.stderr, flush=True)
{WAIT}
if rank == 1:
    try:
        raise OSError(28, "No space left on device", "/data/a?token=hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaa")
    except OSError:
        import traceback
        traceback.print_exc()
while not os.path.exists("end"): time.sleep(0.01)
if rank == 0:
    sys.stderr.write("RuntimeError: CUDA error: an illegal memory access was encountered")
"""
WANTED = (
    "--run-id",
    "--node",
    "--node-rank",
    "--ring",
    "--words",
    "--worker",
    "--kernel-log",
    "--secret-file",
)


class Twin:
    """An agent beside the run's own, with the same ears, that tells our controller what it hears."""

    def __init__(self, nodes: Nodes, *extra: str) -> None:
        (agent,) = until(lambda: nodes.program("keepstep.agent"))
        python, dash, module, *words = Path(f"/proc/{agent}/cmdline").read_bytes().decode().split("\0")[:-1]
        pairs = [word for word in words if word.startswith("--run-id=")]
        for flag, value in pairwise(words):
            pairs += [flag, value] if flag in WANTED else []
        self.streams = [value.partition(":")[0] for flag, value in pairwise(words) if flag == "--words"]
        workers = dict(value.split("=") for flag, value in pairwise(words) if flag == "--worker")
        self.worker = int(workers["0"])
        (run_id,) = (word.partition("=")[2] for word in pairs if word.startswith("--run-id="))
        secret = Path(words[words.index("--secret-file") + 1])
        self.controller = Controller(wire.read_secret(secret), run_id)
        self.folder = nodes.folder / "twin"
        command = [python, dash, module, "--run-dir", str(self.folder), *pairs]
        self.process = subprocess.Popen([*command, "--controller", f"127.0.0.1:{self.controller.port}"])
        until(lambda: self.controller.of(wire.Heartbeat))

    def said(self) -> list[tuple[int, str, str]]:
        messages = self.controller.of(wire.Words)
        return [(one.rank, one.row, one.line) for message in messages for one in message.lines]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.controller.close()


@pytest.fixture
def kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kmsg"
    path.touch()
    monkeypatch.setenv("KEEPSTEP_KERNEL_LOG", str(path))
    return path


@pytest.fixture
def twins() -> Iterator[list[Twin]]:
    made: list[Twin] = []
    yield made
    for twin in made:
        twin.close()


def rows(twin: Twin, rank: int) -> set[str]:
    return {row for speaker, row, _ in twin.said() if speaker == rank}


@pytest.mark.parametrize("flags", [(), ("--redirects", "3")], ids=["memory", "files"])
def test_the_controller_hears_what_ranks_and_kernel_say(
    nodes: Nodes, twins: list[Twin], kernel_log: Path, flags: tuple[str, ...]
) -> None:
    launcher = nodes.start(SCRIPT, "--nproc-per-node", "2", *flags)
    twin = Twin(nodes)
    twins.append(twin)
    streams = ("stdout", "stderr") if flags else ("stderr",)
    assert twin.streams == [f"{rank}={name}" for rank in (0, 1) for name in streams]
    (nodes.folder / "go").touch()
    until(lambda: any(rank == 1 and "No space left on device" in line for rank, _, line in twin.said()))
    assert "hf_" not in str(twin.controller.heard)

    with kernel_log.open("a") as log:
        log.write(
            f"3,2,3000000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid={twin.worker}, name=python3, Ch 00000008\n"
        )
        log.write("3,3,3000000,-;mlx5_core 0000:5e:00.0 ens1f0: Link down\n SUBSYSTEM=net\n")
    until(lambda: "xid-31" in rows(twin, 0) and "nic-down" in rows(twin, -1))

    before = sorted(twin.said())
    twin.controller.hang_up()
    until(lambda: len(twin.controller.of(wire.Hello)) == 2)
    until(lambda: sorted(twin.said()) == sorted(2 * before))

    (nodes.folder / "end").touch()
    launcher.wait(60)
    until(lambda: not os.path.exists(f"/proc/{twin.worker}"))
    time.sleep(0.2)
    assert not any("illegal memory" in line for _, _, line in twin.said()), "its line has no end"
    twin.end()
    assert any(rank == 0 and "illegal memory" in line for rank, _, line in twin.said())
    kinds = [type(one) for one in twin.controller.heard if isinstance(one, wire.Words | wire.Bye)]
    assert kinds[-2:] == [wire.Words, wire.Bye]
    own = (nodes.folder / "node0" / "nodes" / "0" / "agent.log").read_text()
    assert own.count("connected to the controller") == 1, "the run's own controller has taken it, too"
    assert "Traceback" not in own
