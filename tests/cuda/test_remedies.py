"""What is done about slowness over NCCL: shares, an exchange of nodes, a replacement, on the devices' own times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in.launch import is_installed
from benchmarks.stand_in.ports import missing
from benchmarks.stand_in.remedies import RATIO
from benchmarks.stand_in.remedy_trials import DDP, MEGATRON, SharesCase, exchange, replacement, shares

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def actions(found: dict[str, Any]) -> list[str]:
    return [action["name"] for incident in found["incidents"] for action in incident["actions"]]


@pytest.mark.parametrize("case", [DDP, MEGATRON], ids=lambda case: case.layout)
def test_shares_fit_a_slow_device_and_are_equal_again_once_it_is_fast(
    tmp_path: Path, case: SharesCase
) -> None:
    if case is MEGATRON and not is_installed("megatron.core"):
        pytest.skip("megatron-core is not installed (make frameworks)")
    found = shares(case, 0, tmp_path)
    assert found["failed"] == ""
    assert found["ratio"] <= RATIO, found
    assert found["shares"][0][1] == found["shares"][-1][1]
    assert "S2 is taken back" in actions(found)
    assert found["back_s"] == pytest.approx(found["before_s"], rel=0.01)


def test_nodes_leave_a_slow_link_and_go_back_once_it_is_fast(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    found = exchange(0, tmp_path)
    assert found["failed"] == ""
    assert {"S3, exchange of nodes", "S3 is taken back"} <= set(actions(found))


def test_a_spare_takes_the_ranks_of_a_slow_node(tmp_path: Path) -> None:
    found = replacement(0, tmp_path)
    assert found["failed"] == ""
    assert "S4, replacement of nodes" in actions(found)
