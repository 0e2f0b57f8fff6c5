"""Which refusals every restart would meet again."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from keepstep.checkpoint.restore.resume import Elsewhere, resume
from keepstep.checkpoint.snapshot import talk
from keepstep.core.errors import CheckpointError, MisfitError

OTHER = "storage /ck: 00000012 is of 2 ranks, this job has 3: use that many ranks"
DAMAGED = "storage /ck: 00000012: its manifest is damaged"


@pytest.mark.parametrize(
    ("refused", "final"), [((OTHER,), True), ((DAMAGED,), False), ((OTHER, DAMAGED), False)]
)
def test_only_another_number_of_ranks_is_for_good(refused: tuple[str, ...], final: bool) -> None:
    elsewhere = Elsewhere(refused=refused)
    rank = Mock(own=frozenset, begun=lambda: True, doubted=lambda: None, elsewhere=lambda: elsewhere)
    with pytest.raises(CheckpointError, match="none that can be had") as raised:
        talk(resume(rank, 0), lambda row: [row])
    assert isinstance(raised.value, MisfitError) == final
