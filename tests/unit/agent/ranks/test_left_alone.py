"""While watching is off a standstill is none: when it is on again, only what comes then counts."""

from __future__ import annotations

from keepstep.agent.ranks.track import RankTrack
from keepstep.agent.ranks.watch import RankWatch
from keepstep.core.events import Phase
from keepstep.core.finding import Finding


def looks(watch: RankWatch, begin_s: float, end_s: float, *, held: bool = False) -> list[Finding]:
    """Looks every quarter of a second at a rank that does nothing in backward."""
    times = [begin_s + 0.25 * at for at in range(int((end_s - begin_s) * 4))]
    found = [watch.progress(now_s, 400, int(Phase.BACKWARD), 40, False, held=held) for now_s in times]
    return [one for one in found if one is not None]


def trained() -> RankWatch:
    watch = RankWatch(0, "n")
    for step in range(40):
        for at in range(10):
            watch.progress(step + at / 10, 10 * step + at, int(Phase.BACKWARD), step, False)
    return watch


def test_a_standstill_is_told_and_not_while_the_rank_is_left_alone() -> None:
    assert [one.kind for one in looks(trained(), 40.0, 50.0)] == ["hang"]
    watch = trained()
    assert looks(watch, 40.0, 140.0, held=True) == []
    (found,) = looks(watch, 140.0, 150.0)
    assert found.stuck_s < 3.0


def test_what_was_told_before_is_forgotten() -> None:
    track = RankTrack(0, "n", {0})
    track.watch = trained()
    (found,) = looks(track.watch, 40.0, 50.0)
    track.standing["hang"] = found
    track.standing["slow"] = slow = Finding("slow", 0, "n", 0.0, 40, onset_step=30)
    track.forget_standstill()
    assert track.standing == {"slow": slow}
    assert looks(track.watch, 50.0, 90.0, held=True) == []
    (again,) = looks(track.watch, 90.0, 100.0)
    assert (again.kind, again.stuck_s < 3.0) == ("hang", True)
