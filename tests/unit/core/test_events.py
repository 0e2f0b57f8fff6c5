"""Phases in words."""

from __future__ import annotations

import pytest

from keepstep.core.events import Phase, phase_place, phase_title


@pytest.mark.parametrize(
    ("phase", "title", "place"),
    [
        (Phase.FORWARD, "forward", "in forward"),
        (Phase.MODEL, "forward", "in forward"),
        (Phase.DATA, "data", "in data"),
        (Phase.AFTER_STEP, "after its last step", "after its last step"),
        (Phase.AFTER_BACKWARD, "after backward", "after backward"),
        (-1, "", ""),
        (99, "", ""),
    ],
)
def test_phases_have_titles_and_places(phase: int, title: str, place: str) -> None:
    assert (phase_title(phase), phase_place(phase)) == (title, place)
