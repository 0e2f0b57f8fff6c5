from __future__ import annotations

import pytest

from keepstep.core.errors import LayoutError
from keepstep.core.layout import ParallelLayout


def test_first_dimension_of_the_order_varies_fastest():
    layout = ParallelLayout(tp=2, dp=2, pp=4)
    assert layout.world_size == 16
    assert layout.groups("tp").tolist()[:3] == [[0, 1], [2, 3], [4, 5]]
    assert layout.groups("dp").tolist()[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.groups("pp").tolist()[0] == [0, 4, 8, 12]
    assert layout.coordinates(13) == {"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 3}


def test_another_order_deals_ranks_otherwise():
    layout = ParallelLayout(tp=2, dp=2, pp=4, order="tp-pp-dp")
    assert layout.groups("pp").tolist()[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("dp").tolist()[0] == [0, 8]


def test_text_form():
    assert ParallelLayout.declared("tp2-pp4-dp8") == ParallelLayout(tp=2, pp=4, dp=8, order="tp-pp-dp")
    assert str(ParallelLayout(tp=2, pp=4, dp=8)) == "tp2-dp8-pp4"
    assert str(ParallelLayout()) == "dp1"


@pytest.mark.parametrize("text", ["", "tp", "xp2", "tp2-tp2", "tp-2", "tp2_pp4"])
def test_text_that_is_no_layout(text):
    with pytest.raises(LayoutError):
        ParallelLayout.declared(text)


def test_errors_name_the_sizes():
    with pytest.raises(LayoutError, match="tp=0"):
        ParallelLayout(tp=0)
    with pytest.raises(LayoutError, match="does not place pp"):
        ParallelLayout(pp=2, order="tp-dp")
    with pytest.raises(LayoutError, match="at most once"):
        ParallelLayout(order="tp-tp")
    with pytest.raises(LayoutError, match=r"tp=2 .* dp=3 .* makes 6 ranks, but the job has 8"):
        ParallelLayout(tp=2, dp=3).check_world(8)
    with pytest.raises(LayoutError, match="rank 6 is outside"):
        ParallelLayout(tp=2, dp=3).coordinates(6)
    with pytest.raises(LayoutError, match="no dimension"):
        ParallelLayout().groups("xp")


def test_the_largest_jobs():
    layout = ParallelLayout(tp=8, dp=1024, pp=16)
    assert layout.world_size == 131_072
    assert layout.groups("dp").shape == (128, 1024)
    assert layout.all_coordinates()["pp"][-1] == 15
