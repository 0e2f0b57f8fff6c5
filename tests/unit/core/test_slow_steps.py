"""When a rank is the slow one for long enough to be named, and to have its node moved."""

from __future__ import annotations

import pytest

from keepstep.core.slow_steps import SlowSteps


def seen(pattern: str, times: float = 5.0) -> SlowSteps:
    """``x``: an iteration in which the rank is the slow one; ``.``: one in which another is."""
    return SlowSteps({step: one == "x" for step, one in enumerate(pattern)}, times)


@pytest.mark.parametrize(
    ("pattern", "times", "steadiness", "may_be_moved", "must_stay"),
    [
        ("xxx", 5.0, "steady", False, False),
        ("xxx", 2.0, "unsure", False, False),
        ("x.x", 5.0, "unsteady", False, False),
        ("xxx.", 5.0, "unsteady", False, False),
        ("x.xxxx", 2.0, "steady", False, False),
        ("x.xxxxxx", 2.0, "steady", True, False),
        ("x.xxxxxx", 1.0, "unsure", False, False),
        ("x.xxxxxx" * 2, 1.0, "unsure", True, False),
        ("x.x.xxxx", 5.0, "unsteady", False, True),
        ("xxxxxxxxxxxxxx..", 5.0, "unsteady", False, True),
        ("", 5.0, "steady", False, False),
    ],
)
def test_how_often_it_is_the_slow_one(
    pattern: str, times: float, steadiness: str, may_be_moved: bool, must_stay: bool
) -> None:
    one = seen(pattern, times)
    assert (one.steadiness, one.may_be_moved, one.must_stay) == (steadiness, may_be_moved, must_stay)


def test_old_iterations_are_forgotten_one_by_one() -> None:
    one = seen("." * 8)
    for step in range(8, 60, 4):
        one = one.then(SlowSteps(dict.fromkeys(range(step, step + 4), True)))
        assert one.may_be_moved == (one.slow >= len(one.by_step) - len(one.by_step) // 6)
    assert len(one.by_step) == 32
    assert one.may_be_moved
