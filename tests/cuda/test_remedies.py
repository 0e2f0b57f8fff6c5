"""What is done about slowness over NCCL: shares, an exchange of nodes, a replacement, on the devices' own times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in import remedies
from benchmarks.stand_in.ports import missing

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def actions(found: dict[str, Any]) -> list[str]:
    return [action["name"] for incident in found["incidents"] for action in incident["actions"]]


def test_shares_fit_a_slow_device_and_are_equal_again_once_it_is_fast(tmp_path: Path) -> None:
    found = remedies.shares(0, tmp_path)
    assert found["failed"] == ""
    assert found["ratio"] <= remedies.RATIO, found
    assert found["shares"][0][1] == found["shares"][-1][1] == [remedies.EACH] * remedies.RANKS
    assert "S2 is taken back" in actions(found)
    assert found["back_s"] == pytest.approx(found["before_s"], rel=0.01)


def test_nodes_leave_a_slow_link_and_go_back_once_it_is_fast(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    found = remedies.exchange(0, tmp_path)
    assert found["failed"] == ""
    assert {"S3, exchange of nodes", "S3 is taken back"} <= set(actions(found))


def test_a_spare_takes_the_ranks_of_a_slow_node(tmp_path: Path) -> None:
    found = remedies.replacement(0, tmp_path)
    assert found["failed"] == ""
    assert "S4, replacement of nodes" in actions(found)
