"""Nodes that do not fit each other are refused, in one line that says what to do; unfit ones give place to spares."""

from __future__ import annotations

from tests.unit.control.staged_job import Stage, sent

from keepstep.control.effects import Tell
from keepstep.control.membership.peers import Admission
from keepstep.core.budgets import Limits
from keepstep.wire import Failed, Halted, Imports, Join, Placement, Stop

VERSIONS = ("keepstep 0.1.0", "Python 3.11", "torch 2.13.0")


def join(
    node: str,
    versions: tuple[str, ...] = VERSIONS,
    unix_s: float = 0.0,
    incarnation: int = -1,
    alike: tuple[str, ...] = (),
) -> Join:
    return Join(
        node, "10.0.0.1", 1, 29500, incarnation=incarnation, versions=versions, unix_s=unix_s, alike=alike
    )


def test_versions_are_those_of_the_first() -> None:
    admission = Admission(None)
    assert admission.objection(join("gpu-0")) == ""
    assert admission.objection(join("gpu-1")) == ""
    assert admission.objection(join("gpu-2", (*VERSIONS[:2], "torch 2.12.1"))) == (
        "node gpu-2 has torch 2.12.1, gpu-0 has torch 2.13.0; install the same on all nodes (--no-check joins anyway)"
    )
    assert admission.objection(join("gpu-3", ())) == ""  # --no-check
    assert admission.objection(join("gpu-4", ("other",), incarnation=2)) == ""  # it plays already


def test_other_software_is_told_when_all_are_there_and_refuses_nobody() -> None:
    admission = Admission(None)
    names = [f"gpu-{number}" for number in range(4)]
    for name in names:
        driver = "580.65" if name == "gpu-2" else "570.86"
        assert admission.objection(join(name, alike=(f"driver {driver}", "NCCL 2.27.3"))) == ""
    line = "driver is not the same on all nodes: 580.65 on gpu-2, 570.86 on the 3 others"
    assert admission.differences(names) == [line]
    assert admission.found == {"gpu-0": (), "gpu-1": (), "gpu-2": (line,), "gpu-3": ()}
    assert admission.differences(names) == []  # told once
    assert admission.differences(["gpu-1", "gpu-2"]) == [
        "driver is not the same on all nodes: 570.86 on gpu-1, 580.65 on gpu-2"
    ]
    assert admission.objection(join("gpu-9")) == ""  # --no-check
    assert admission.differences(["gpu-1", "gpu-9"]) == []


def test_a_job_says_so_when_its_table_is_made() -> None:
    stage = Stage(2, missing=2)
    told: list[str] = []
    for number, driver in ((0, "570.86"), (1, "580.65")):
        told += [
            effect.text
            for effect in stage.come(number, alike=(f"driver {driver}",))
            if isinstance(effect, Tell)
        ]
    assert told == ["driver is not the same on all nodes: 570.86 on gpu-0, 580.65 on gpu-1"]


def test_clocks_are_compared_with_the_controllers() -> None:
    now = [1000.0]
    admission = Admission(lambda: now[0])
    assert admission.objection(join("gpu-0", unix_s=1009.0)) == ""
    assert admission.objection(join("gpu-1", unix_s=1037.0)) == (
        "the clock of node gpu-1 is 37 s ahead of the controller's, at most 10 are allowed; set both by NTP "
        "(--no-check joins anyway)"
    )
    now[0] = 1005.0
    assert "20 s behind" in admission.objection(join("gpu-1", unix_s=985.0))
    now[0] = 9000.0  # all clocks were set
    assert admission.objection(join("gpu-2", unix_s=9001.0)) == ""


def with_spare(*, hosts: int = 0) -> Stage:
    stage = Stage(2, missing=2)
    for number in range(3):
        stage.come(number, hosts_controller=number == hosts)
    return stage


def test_spares_are_told_what_workers_import_whenever_they_come() -> None:
    stage, imports = with_spare(), Imports(("json", "torch"))
    assert sent(stage.say(0, imports), Imports) == [((2,), imports)]
    assert sent(stage.come(3), Imports) == [((3,), imports)]


def recover(stage: Stage, *, unfit: int = -1) -> list[str]:
    """Node 1 fails; who plays the next incarnation."""
    incarnation = stage.controller.reforming.incarnation
    stage.say(1, Failed(incarnation, 137, "rank 1: killed", 1, incarnation, 1.0))
    effects = [
        effect
        for number in (2, 0, 1)
        for effect in stage.say(
            number, Halted(incarnation, 4000, unfit="disk full" if number == unfit else "")
        )
    ]
    assert len(sent(effects, Placement)) == 2
    stage.stopped = [peers for peers, _ in sent(effects, Stop)]
    return sorted(launcher.node for launcher in stage.controller.rendezvous.placements)


def test_a_spare_takes_the_place_of_an_unfit_node() -> None:
    stage = with_spare()
    assert recover(stage, unfit=1) == ["gpu-0", "gpu-2"]
    assert stage.stopped == [(1,)]
    assert stage.controller.rendezvous.spares == []


def test_the_controllers_host_stays() -> None:
    stage = with_spare(hosts=1)
    assert recover(stage, unfit=1) == ["gpu-0", "gpu-1"]
    assert stage.stopped == []


def test_without_a_spare_an_unfit_node_is_better_than_none() -> None:
    stage = with_spare()
    stage.controller.disconnected(2, 1.0)
    assert recover(stage, unfit=1) == ["gpu-0", "gpu-1"]


def test_a_node_that_has_used_up_its_budget_gives_place_to_a_spare() -> None:
    stage = with_spare()
    stage.controller.reforming.spending._limits = Limits(node=1)
    assert recover(stage) == ["gpu-0", "gpu-1"]
    assert recover(stage) == ["gpu-0", "gpu-2"]
    assert stage.stopped == [(1,)]
