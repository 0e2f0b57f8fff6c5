"""How long a save may wait for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch

from keepstep.checkpoint.pace import LEAST_S, PATIENCE_S, Pace


def pace(counts: Sequence[int | None], interval_s: float = 2.0) -> Pace:
    """A save every ``interval_s``."""
    it = iter(counts)
    found = Pace(lambda: next(it))
    for number in range(len(counts)):
        found.note(number * interval_s)
    return found


def test_others_are_waited_for_as_long_as_a_step_takes() -> None:
    assert pace([3, 5]).patience_s() == 2.0
    assert pace([3]).patience_s() == LEAST_S
    assert pace([3, 5], 1e-3).patience_s() == LEAST_S
    assert pace([3, 5], 1e3).patience_s() == PATIENCE_S
    assert pace([3, 5], 1e3).patience_s(known_late=True) == 1e3


@pytest.mark.parametrize("over", [True, False])
def test_on_a_gpu_others_are_known_to_have_met_once_it_has_done_what_was_begun(
    monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    event = Mock(query=Mock(return_value=over))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    found = pace([3, 5])
    assert event.record.call_count == 2
    assert (found.collectives, found.in_step) == (5, over)


def test_collectives_tell_saves_apart_only_where_all_ranks_have_met_between_them() -> None:
    assert pace([3, 5, 7]).collectives == 7
    for counts in ([3], [5, 5], [None, None], [None, 4], [0, 4], [7, 3]):
        assert not pace(counts).collectives, counts
        assert not pace(counts).in_step, counts
