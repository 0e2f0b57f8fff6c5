"""What a scheduler is told of the end of real jobs: exit codes, and `end.json` beside them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_reforming import STEPS, TRAIN, Nodes, nodes, until
from tests.e2e.test_run_life import Run, run

from keepstep.core.incident import Incident
from keepstep.launch.schedulers.node_faults import faults_of

__all__ = ["nodes", "run"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

XID = "NVRM: Xid (PCI:0000:3b:00): 48, pid=77, name=python, An uncorrectable double bit error (DBE)"
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize("kernel_tells", [True, False])
def test_a_job_on_broken_hardware_is_to_begin_elsewhere_by_the_kernels_word_alone(
    run: Run, kernel_tells: bool
) -> None:
    log = run.folder / "kmsg"
    log.touch()
    script = f"""
if rank == 1:
    at = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    if {kernel_tells}:
        open({str(log)!r}, "a").write(f"3,{{at}},{{at}},-;{XID}\\n")
    raise RuntimeError({ECC!r})
time.sleep(60)
"""
    code, _, err = run.finish(script, "--nproc-per-node", "2", KEEPSTEP_KERNEL_LOG=str(log))
    told = json.loads((run.folder / "run/end.json").read_text())
    assert code == told["exit_code"] == (75 if kernel_tells else 1), err
    assert told["category"] == ("infrastructure" if kernel_tells else "training")
    assert told.get("cause") == ({"class": "node", "kind": "hardware"} if kernel_tells else None)
    assert told["incident"] == "0001"
    incident = json.loads((run.folder / "run/incidents/0001.json").read_text())
    assert told["nodes"] == sorted({one["node"] for one in incident["culprits"] if one["node"]})
    assert told["nodes"] == [os.uname().nodename]


def broken_on_node_1(nodes: Nodes) -> Path:
    """A script whose rank on node 1 meets broken hardware, of which the kernel tells once."""
    script = nodes.folder / "job.py"
    script.write_text(f"""
import os, sys, time
node, folder = os.environ["KEEPSTEP_NODE_NAME"], sys.argv[1]
open(f"{{folder}}/start-{{node}}", "w").close()
while not os.path.exists(f"{{folder}}/go"): time.sleep(0.01)
if node == "node-1":
    at = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    log = f"{{folder}}/kmsg-1"
    if not os.path.getsize(log): open(log, "a").write(f"3,{{at}},{{at}},-;{XID}\\n")
    raise RuntimeError({ECC!r})
while not os.path.exists(f"{{folder}}/start-node-2"): time.sleep(0.01)
""")
    return script


@pytest.mark.parametrize("flags", [(), ("--no-watch",)], ids=["watched", "not watched"])
def test_a_broken_node_that_a_spare_replaces_is_named_by_its_kernels_words(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    script = broken_on_node_1(nodes)
    for number in range(3):
        log = nodes.folder / f"kmsg-{number}"
        log.touch()
        monkeypatch.setenv("KEEPSTEP_KERNEL_LOG", str(log))
        nodes.start(str(script), str(nodes.folder), flags=flags)
        if number == 1:
            until(lambda: all((nodes.folder / f"start-node-{one}").exists() for one in range(2)))
    until(lambda: "node-2 is a spare" in nodes.said())
    (nodes.folder / "go").touch()
    assert nodes.codes() == [0, 75, 0], nodes.said()
    told = (nodes.folder / "run/incidents/0001.json").read_bytes()
    incident = msgspec.json.decode(told, type=Incident)
    faults = list(faults_of(incident, ["node-0", "node-2"]))
    assert [(one.node, one.kind) for one in faults] == [("node-1", "hardware")], incident.cause


def test_a_job_that_fails_again_on_a_broken_node_is_to_begin_elsewhere(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = broken_on_node_1(nodes)
    (nodes.folder / "go").touch()
    for number in range(2):
        log = nodes.folder / f"kmsg-{number}"
        log.touch()
        monkeypatch.setenv("KEEPSTEP_KERNEL_LOG", str(log))
        nodes.start(str(script), str(nodes.folder))
    assert nodes.codes() == [75, 75], nodes.said()
    told = json.loads((nodes.folder / "run/end.json").read_text())
    assert (told["category"], told["cause"]) == ("infrastructure", {"class": "node", "kind": "hardware"})
    assert "restart 1 of 1" in nodes.said()


def test_a_spare_that_is_sent_a_signal_ends_alone(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAUSE_AT", "8")
    for _ in range(2):
        nodes.start(str(TRAIN), str(nodes.folder), str(STEPS))
    until((nodes.folder / "start-1-0").exists)
    spare = nodes.start(str(TRAIN), str(nodes.folder), str(STEPS))
    until(lambda: "node-2 is a spare" in nodes.said())
    spare.send_signal(signal.SIGTERM)
    assert spare.wait(60) == 128 + signal.SIGTERM
    (nodes.folder / "go").touch()
    assert nodes.codes() == [0, 0, 143], nodes.said()
    assert json.loads(Path(nodes.folder / "run/end.json").read_text())["category"] == "finished"
