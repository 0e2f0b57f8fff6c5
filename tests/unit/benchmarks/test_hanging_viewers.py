"""What the bench of viewers that hang makes of step times."""

from __future__ import annotations

import pytest
from benchmarks.operate.hanging_viewers import Block, means_ms, noise, ratios

BLOCKS = [
    Block("nobody", 0, 10),
    Block("hanging", 20, 30),
    Block("nobody", 40, 50),
    Block("answering", 60, 70),
]
STEPS = [(1, 0.1), (9.9, 0.3), (15, 9.0), (20, 0.4), (29, 0.2), (41, 0.4), (60, 0.6)]


def test_steps_belong_to_the_block_in_which_they_began() -> None:
    assert means_ms(STEPS, BLOCKS) == pytest.approx([200, 300, 400, 600])


def test_each_block_is_compared_with_those_beside_it() -> None:
    means = [200.0, 300.0, 400.0, 600.0]
    assert ratios(BLOCKS, means, "hanging") == pytest.approx([1.0])
    assert ratios(BLOCKS, means, "answering") == pytest.approx([1.5])
    assert noise(BLOCKS, means) == pytest.approx([0.5])
