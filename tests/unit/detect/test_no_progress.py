from __future__ import annotations

import pytest

from keepstep.core.events import Phase
from keepstep.detect import HangDetector, NoProgress

POLL_S = 0.1


class Rank:
    """A rank seen every 100 ms; ``spend`` lets time go by, with or without progress."""

    def __init__(self, detector: HangDetector) -> None:
        self.detector = detector
        self.now_s = 1000.0
        self.progress = 0
        self.step = 0
        self.reports: list[NoProgress] = []

    def spend(self, seconds: float, phase: Phase, *, moving: bool = False, waiting: bool = False) -> None:
        self.progress += 1
        for _ in range(max(1, round(seconds / POLL_S))):
            self.now_s += POLL_S
            self.progress += moving
            report = self.detector.observe(self.now_s, self.progress, phase, step=self.step, waiting=waiting)
            if report is not None:
                self.reports.append(report)

    def stop(self, seconds: float, phase: Phase, *, moved: bool = True) -> None:
        self.progress += moved
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            self.now_s += POLL_S
            stopped_s = self.now_s - began_s
            report = self.detector.observe(
                self.now_s, self.progress, phase, step=self.step, stopped_s=stopped_s
            )
            if report is not None:
                self.reports.append(report)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.spend(0.1, Phase.DATA)
            self.spend(0.2, Phase.FORWARD)
            self.spend(0.4, Phase.BACKWARD)
            self.spend(0.1, Phase.OPTIMIZER)
            self.step += 1


def trained(steps: int = 40) -> Rank:
    rank = Rank(HangDetector())
    rank.train(steps)
    assert rank.reports == []
    return rank


def test_asleep_in_backward_is_reported_once_and_in_time() -> None:
    rank = trained()
    began_s, usual_s = rank.now_s, 0.5
    rank.spend(20.0, Phase.BACKWARD)
    (report,) = rank.reports
    assert report.phase == Phase.BACKWARD
    assert report.since_s == pytest.approx(began_s, abs=0.11)
    assert report.stuck_s > report.limit_s >= 2 * 0.4
    assert report.stuck_s <= 2 * usual_s + 1.0


def test_relief_withdraws_the_report() -> None:
    rank = trained()
    rank.spend(20.0, Phase.BACKWARD)
    assert rank.detector.stuck == rank.reports[0]
    rank.train(1)
    assert rank.detector.stuck is None
    rank.spend(20.0, Phase.BACKWARD)
    assert len(rank.reports) == 2


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.EVALUATION, Phase.DATA, Phase.BACKWARD])
def test_a_stopped_process_gets_no_patience_in_any_phase_and_teaches_none(phase: Phase) -> None:
    rank = trained()
    for times in (1, 2, 3):
        rank.stop(10.0, phase)
        assert len(rank.reports) == times
        assert rank.reports[-1].stuck_s <= 1.5
        rank.train(1)
        assert rank.detector.stuck is None


def test_a_stop_that_is_only_glimpsed_during_a_pause_is_no_hang() -> None:
    rank = trained()
    rank.spend(20.0, Phase.FORWARD)
    rank.stop(0.5, Phase.FORWARD, moved=False)
    rank.train(1)
    assert rank.reports == []


def test_a_hang_does_not_teach_patience_the_first_time() -> None:
    rank = trained()
    for times in (1, 2):
        rank.spend(8.0, Phase.BACKWARD)
        rank.train(2)
        assert len(rank.reports) == times
    rank.spend(8.0, Phase.BACKWARD)
    assert len(rank.reports) == 2


def test_a_first_step_of_a_minute() -> None:
    rank = Rank(HangDetector())
    rank.spend(20.0, Phase.STARTUP)
    rank.spend(3.0, Phase.FORWARD, moving=True)
    rank.spend(60.0, Phase.FORWARD)
    rank.train(30)
    assert rank.reports == []


def test_a_start_that_never_ends_is_reported_in_the_end() -> None:
    rank = Rank(HangDetector())
    rank.spend(610.0, Phase.STARTUP)
    (report,) = rank.reports
    assert report.limit_s == 600.0


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.FORWARD])
def test_evaluation_every_20_steps_marked_or_not(phase: Phase) -> None:
    rank = Rank(HangDetector())
    for _ in range(5):
        rank.train(20)
        rank.spend(6.0, phase)
    assert rank.reports == []


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.FORWARD])
def test_a_checkpoint_of_5_seconds_marked_or_not(phase: Phase) -> None:
    rank = trained(50)
    rank.spend(5.0, phase)
    rank.train(50)
    assert rank.reports == []


def test_waiting_for_a_rank_that_writes_a_checkpoint() -> None:
    rank = trained()
    rank.spend(5.0, Phase.BACKWARD, waiting=True)
    assert rank.reports == []


def test_a_hang_in_a_known_checkpoint_is_judged_by_its_usual_length() -> None:
    rank = Rank(HangDetector())
    for _ in range(4):
        rank.train(10)
        rank.spend(5.0, Phase.CHECKPOINT)
    rank.train(1)
    rank.spend(40.0, Phase.CHECKPOINT)
    (report,) = rank.reports
    assert report.limit_s == pytest.approx(10.0, abs=0.3)


def test_a_hang_outside_marked_phases_is_reported_after_the_pause_limit() -> None:
    rank = trained()
    rank.spend(40.0, Phase.FORWARD)
    (report,) = rank.reports
    assert report.limit_s == 30.0


def test_a_clock_that_steps_back_does_no_harm() -> None:
    rank = trained()
    rank.now_s -= 3600
    rank.train(5)
    assert rank.reports == []


def test_a_marked_forward_holds_no_pause_but_what_nothing_marks_may() -> None:
    rank = Rank(HangDetector())
    for _ in range(20):
        rank.spend(0.2, Phase.MODEL)
        rank.spend(0.4, Phase.BACKWARD)
        rank.step += 1
    rank.spend(2.0, Phase.MODEL)
    (report,) = rank.reports
    assert report.phase == Phase.MODEL
    assert report.stuck_s < 1.5
    rank.spend(20.0, Phase.FORWARD)
    assert len(rank.reports) == 1


def test_compilation_may_take_minutes_however_often() -> None:
    rank = trained()
    for seconds in (40.0, 300.0, 40.0, 40.0, 500.0):
        rank.spend(seconds, Phase.COMPILE)
        rank.train(1)
    assert rank.reports == []


def test_who_waits_for_others_is_overdue_before_it_is_reported() -> None:
    rank = Rank(HangDetector())
    for _ in range(20):
        rank.spend(0.2, Phase.FORWARD)
        rank.spend(0.4, Phase.BACKWARD, waiting=True)
        rank.step += 1
        assert rank.detector.overdue_s == 0
    rank.spend(1.5, Phase.BACKWARD, waiting=True)
    assert rank.detector.overdue_s == pytest.approx(1.4)
    assert rank.reports == []
    rank.spend(0.1, Phase.BACKWARD)
    assert rank.detector.overdue_s == 0


def test_a_wait_begins_with_the_last_progress_and_a_report_with_the_look_that_saw_it() -> None:
    detector = HangDetector()
    for step in range(20):
        detector.observe(0.2 * step, step, Phase.BACKWARD, step=step, moved_s=0.2 * step)
    detector.observe(4.0, 20, Phase.BACKWARD, step=20, moved_s=3.85)
    assert detector.observe(4.9, 20, Phase.BACKWARD, step=20, waiting=True, moved_s=3.85) is None
    assert detector.overdue_s == pytest.approx(1.05)
    report = detector.observe(5.1, 20, Phase.BACKWARD, step=20, moved_s=3.85)
    assert report is not None
    assert report.since_s == pytest.approx(4.0)


def test_who_looks_late_does_not_count_the_time_in_which_nobody_looked() -> None:
    detector = HangDetector()
    for step in range(20):
        detector.observe(0.2 * step, step, Phase.BACKWARD, step=step, moved_s=0.2 * step)
    detector.observe(60.0, 20, Phase.BACKWARD, step=20, moved_s=4.0)
    detector.observe(600.0, 20, Phase.BACKWARD, step=20, waiting=True, moved_s=4.0)
    assert detector.overdue_s == pytest.approx(540.25)


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.EVALUATION])
def test_the_many_gaps_of_one_pause_do_not_tell_how_long_such_pauses_are(phase: Phase) -> None:
    rank = trained()
    for _ in range(3):
        for _ in range(5):
            rank.spend(0.05, phase)
        rank.spend(20.0, phase)
        assert rank.reports == []
        rank.train(5)
    for _ in range(5):
        rank.spend(0.05, phase)
    rank.spend(60.0, phase)
    assert len(rank.reports) == 1


def test_phases_too_short_to_be_seen_are_known_by_how_long_they_lasted() -> None:
    rank = Rank(HangDetector())
    for _ in range(20):
        rank.spend(0.2, Phase.FORWARD)
        rank.spend(0.4, Phase.BACKWARD)
        rank.detector.lasted(Phase.OPTIMIZER, 0.01)
        rank.step += 1
    rank.spend(2.0, Phase.OPTIMIZER)
    (report,) = rank.reports
    assert report.stuck_s < 1.5


def test_held_time_is_no_standstill_and_nothing_to_learn_from() -> None:
    plain, held = HangDetector(), HangDetector()
    now_s, progress = 0.0, 0
    for step in range(10):
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            now_s, progress = now_s + 0.1, progress + 1
            for detector in (plain, held):
                detector.observe(now_s, progress, phase, step=step)
    for _ in range(1000):
        now_s += 0.1
        assert held.observe(now_s, progress, Phase.EVALUATION, step=9, held=True) is None
    assert held.observe(now_s + 20, progress, Phase.EVALUATION, step=9) is None
    held.observe(now_s + 21, progress + 1, Phase.EVALUATION, step=9)
    for phase in Phase:
        assert held.limit_s(phase) == plain.limit_s(phase)
    assert held.observe(now_s + 100, progress + 1, Phase.EVALUATION, step=9) is not None
    assert held.observe(now_s + 101, progress + 1, Phase.EVALUATION, step=9, held=True) is None
    assert held.stuck is not None  # what was stuck before stays so


@pytest.mark.parametrize(
    ("still_s", "waiting", "reported_s"),
    [
        (0.0, False, 600.0),  # it imports, downloads or compiles
        (29.0, False, 600.0),
        (31.0, False, 30.0),
        (31.0, True, 600.0),  # those that wait for it are not to blame
    ],
)
def test_a_process_that_does_nothing_is_missed_early_in_the_start_up(
    still_s: float, waiting: bool, reported_s: float
) -> None:
    for step in (-1, 0):  # before the ring is opened, and in the first steps
        detector, first_s = HangDetector(), None
        for tenth in range(7000):
            now_s = tenth / 10
            still_now_s = now_s if still_s > 30 else min(now_s, still_s)
            found = detector.observe(now_s, 0, Phase.STARTUP, step=step, waiting=waiting, still_s=still_now_s)
            if found is not None and first_s is None:
                first_s = found.stuck_s
        assert first_s == pytest.approx(reported_s, abs=0.2)


def test_who_may_wait_unseen_has_the_patience_of_one_that_waits_until_that_is_known() -> None:
    rank = trained()
    observe, began_s = rank.detector.observe, rank.now_s

    def look(seconds: float, *, unseen: bool = False, waiting: bool = False) -> NoProgress | None:
        now_s, phase = began_s + seconds, Phase.BACKWARD
        return observe(now_s, rank.progress + 1, phase, step=rank.step, unseen=unseen, waiting=waiting)

    assert look(0.0, unseen=True) is None
    assert look(0.5, unseen=True) is None
    assert not rank.detector.unsure
    assert look(6.0, unseen=True) is None  # others may be writing a checkpoint
    assert rank.detector.unsure
    assert rank.detector.overdue_s == 0
    assert look(6.1, waiting=True) is None
    assert rank.detector.overdue_s > 0
    assert not rank.detector.unsure
    found = look(6.2)
    assert found is not None
    assert found.limit_s < 2


def test_who_may_wait_unseen_for_ever_is_reported_in_the_end() -> None:
    rank = trained()
    observe = rank.detector.observe
    reports = [
        observe(rank.now_s + second, rank.progress + 1, Phase.BACKWARD, step=rank.step, unseen=True)
        for second in range(40)
    ]
    (report,) = [one for one in reports if one is not None]
    assert report.limit_s == 30


def test_a_host_stands_still_for_as_long_as_its_device_does() -> None:
    """A host that has enqueued many steps waits for its device for longer than it ever did: that is no hang."""
    rank = trained()

    def look(seconds: float, device_still_s: float) -> NoProgress | None:
        return rank.detector.observe(
            rank.now_s + seconds,
            rank.progress + 1,
            Phase.BACKWARD,
            step=rank.step,
            waiting=True,
            device_still_s=device_still_s,
        )

    assert not any(look(float(second), 0.3) for second in range(100))
    assert rank.detector.overdue_s == 0
    assert look(101.0, 20.0) is None
    assert rank.detector.overdue_s == 20.0
    found = look(102.0, 31.0)
    assert found is not None
    assert (found.stuck_s, found.since_s) == pytest.approx((31.0, rank.now_s + 71.0))


def test_a_rank_that_winds_up_has_ten_minutes_however_short_that_was_before() -> None:
    rank = trained()
    for _ in range(4):
        rank.spend(2.0, Phase.TEARDOWN)
        rank.train(2)
    rank.spend(650.0, Phase.TEARDOWN)
    assert [(report.phase, report.limit_s) for report in rank.reports] == [(Phase.TEARDOWN, 600.0)]


def test_a_job_of_one_step_that_winds_up_is_not_taken_for_one_that_never_began() -> None:
    detector, reports = HangDetector(), []
    for look in range(1200):
        still_s = look * POLL_S
        reports.append(detector.observe(1000.0 + still_s, 5, Phase.TEARDOWN, step=0, still_s=still_s))
    assert not any(reports)


def test_a_collection_on_a_starved_machine_is_no_hang() -> None:
    rank = trained()
    for _ in range(5):
        rank.spend(0.3, Phase.GC)
        rank.train(2)
    rank.spend(20.0, Phase.GC)
    rank.train(1)
    assert rank.reports == []
    rank.spend(50.0, Phase.GC)
    assert [report.phase for report in rank.reports] == [Phase.GC]
