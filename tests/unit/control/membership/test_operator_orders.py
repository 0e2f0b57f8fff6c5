"""What operators order by hand: who has to seal, halt and begin again, what is refused, and that it is no restart."""

from __future__ import annotations

from tests.unit.control.staged_job import OPERATOR, Stage, sent

from keepstep.wire import (
    Ended,
    Failed,
    Halt,
    Halted,
    Join,
    Operated,
    Placement,
    Seal,
    Sealed,
    Stop,
)


def test_a_job_is_suspended_when_all_have_sealed_and_goes_on_when_resumed() -> None:
    stage = Stage()
    assert sent(stage.order("suspend"), Seal) == [((0, 1), Seal(0))]
    assert stage.say(0, Sealed(0, 7)) == []
    assert sent(stage.say(1, Sealed(0, 8)), Halt) == [((0, 1), Halt(0, True))]
    assert stage.state == "checking"
    assert sent(stage.halt(0, suspended=True), Placement) == []
    assert stage.answer(stage.tick()).done.startswith("suspended after step 7:")
    assert stage.state == "suspended"
    assert stage.tick(5000.0) == []  # for as long as it takes
    placed = sent(stage.order("resume"), Placement)
    assert [(peers, one.incarnation, one.pauses) for peers, one in placed] == [((0,), 1, 1), ((1,), 1, 1)]  # type: ignore[attr-defined]
    assert stage.answer(stage.tick(5000.1)).done == "begins again, incarnation 1"
    assert stage.state == "recovering"
    assert stage.controller.reforming.restarts == 0


def test_now_waits_for_no_step() -> None:
    stage = Stage()
    assert sent(stage.order("suspend", now=True), Halt) == [((0, 1), Halt(0, True))]


def test_an_ordered_restart_is_none_that_counts() -> None:
    stage = Stage(restarts=1)
    for incarnation in range(3):
        assert sent(stage.order("restart", now=True), Halt) == [((0, 1), Halt(incarnation, fresh=True))]
        stage.say(1, Failed(incarnation, 1, "rank 1: Connection closed by peer"))  # ended by us, in a way
        assert len(sent(stage.halt(incarnation), Placement)) == 2
        assert stage.answer(stage.tick()).done == f"begins again, incarnation {incarnation + 1}"
    stage.say(1, Failed(3, 137, "rank 1: killed"))
    assert len(sent(stage.halt(3), Placement)) == 2
    stage.say(1, Failed(4, 137, "rank 1: killed"))
    ((_, stop),) = sent(stage.halt(4), Stop)
    assert isinstance(stop, Stop)
    assert "--max-restarts 1 are used up" in stop.reason


def test_one_node_without_restarts_is_suspended_too_whatever_incarnation_it_has_come_to() -> None:
    stage = Stage(1, restarts=0)
    stage.say(0, Join("gpu-0", "10.0.0.0", 1, 29500, 0, 1, 1, 0, incarnation=3))
    assert sent(stage.order("suspend", now=True), Halt) == [((0,), Halt(3, True))]
    stage.halt(3, suspended=True)
    assert stage.answer(stage.tick()).done
    ((_, placement),) = sent(stage.order("resume"), Placement)
    assert isinstance(placement, Placement)
    assert (placement.incarnation, placement.pauses, placement.master_port) == (4, 1, 4000)


def test_one_node_that_begins_again_by_itself_before_it_reads_the_order_gets_it_again() -> None:
    stage = Stage(1, restarts=0)
    stage.order("suspend", now=True)
    again = stage.say(0, Join("gpu-0", "10.0.0.0", 1, 29500, 0, 1, 1, 0, incarnation=1))
    assert sent(again, Halt) == [((0,), Halt(1, True))]
    stage.halt(1, suspended=True)
    assert stage.answer(stage.tick()).done


def test_a_stopped_job_ends_with_a_code_of_its_own_on_every_node() -> None:
    stage = Stage()
    effects = stage.order("stop")
    assert sent(effects, Stop) == [((0, 1), Stop(79, "stopped by an operator", by_operator=True))]
    assert stage.answer(effects).done == "the job ends"
    stage.say(0, Ended(0, 79, "stopped"))
    stage.say(1, Ended(1, 79, "stopped"))
    assert stage.state == "done"


def test_a_suspended_job_can_be_stopped() -> None:
    stage = Stage()
    stage.suspend()
    assert [stop for _, stop in sent(stage.order("stop"), Stop)] == [Stop(79, "stopped by an operator", True)]


def test_a_new_controller_keeps_it_suspended() -> None:
    stage = Stage()
    stage.suspend()
    stage.order("resume")
    stage.tick()
    stage.suspend()
    assert stage.stored is not None
    stage.controller = stage.fresh()
    stage.controller.restore((), stage.stored.placements)
    for number in range(2):
        stage.come(number, 1)
        stage.say(number, Halted(1, 4000 + number, suspended=True))
    assert stage.state == "suspended"
    placed = [placement for _, placement in sent(stage.order("resume"), Placement)]
    assert {(one.incarnation, one.pauses) for one in placed} == {(2, 2)}  # type: ignore[attr-defined]


def test_a_restart_is_refused_when_a_new_controller_hears_late_that_it_is_suspended() -> None:
    stage = Stage()
    stage.suspend()
    assert stage.stored is not None
    stage.controller = stage.fresh()
    stage.controller.restore((), stage.stored.placements)
    for number in range(2):
        stage.come(number, 0)
    stage.say(0, Halted(0, 4000, suspended=True))
    assert sent(stage.order("restart"), Operated) == []
    stage.say(1, Halted(0, 4001, suspended=True))
    assert stage.answer(stage.tick()).refused == "it is suspended; say resume"
    assert len(sent(stage.order("resume"), Placement)) == 2


def test_a_failure_that_is_faster_counts_and_the_job_is_suspended_all_the_same() -> None:
    stage = Stage()
    stage.order("suspend")
    stage.say(1, Failed(0, 137, "rank 1: killed"))
    assert sent(stage.tick(), Halt) == [((0, 1), Halt(0, True))]
    stage.halt(0, suspended=True)
    assert stage.answer(stage.tick()).done.startswith("suspended:")
    stage.order("resume")
    assert stage.controller.reforming.restarts == 1


def refused(stage: Stage, verb: str) -> str:
    return stage.answer(stage.order(verb)).refused


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    assert refused(Stage(missing=1), "suspend") == "no worker has been started yet"
    assert (
        refused(Stage(missing=1), "start") == "not all nodes are here yet; it begins by itself when they are"
    )
    assert refused(Stage(), "resume") == "it is not suspended"
    assert "--max-restarts" in refused(Stage(restarts=0), "suspend")
    stage = Stage()
    stage.order("suspend")
    assert refused(stage, "restart") == "suspend is under way already"
    stage = Stage()
    stage.suspend()
    assert refused(stage, "suspend") == "it is suspended already"
    assert refused(stage, "restart") == "it is suspended; say resume"
    stage.order("stop")
    assert refused(stage, "resume") == "the job is ending"


def test_nodes_that_seal_nothing_are_named() -> None:
    stage = Stage()
    stage.order("suspend")
    answer = stage.answer(stage.say(1, Sealed(0, -1)))
    assert answer.refused.startswith("node gpu-1 keeps no checkpoint in memory")
    stage.order("suspend")
    stage.say(1, Sealed(0, 7))
    answer = stage.answer(stage.tick(500.0))
    assert answer.refused == "gpu-0 sealed no step within 120 s; --now ends the workers at once"
    assert stage.state == "warming up"


def test_who_goes_before_anything_is_done_has_ordered_nothing() -> None:
    stage = Stage()
    stage.order("suspend")
    stage.controller.disconnected(OPERATOR, 1.5)
    stage.tick()
    assert stage.say(0, Sealed(0, 7)) + stage.say(1, Sealed(0, 7)) == []
