"""Nodes that begin again together, under seeds: deaths, lost and cut-off nodes, spares, a controller that dies.

A failing seed prints how to replay it. See ``virtual_launchers.py`` and ``virtual_faults.py`` for what is virtual.
"""

from __future__ import annotations

import os

import pytest
from tests.effort import many
from tests.unit.control.virtual_faults import HARMLESS, World

SEEDS = many(100)
BLOCKS = 20
REPLAY = "KEEPSTEP_REFORMING_SEED={} pytest tests/property/test_reforming_simulation.py -k one_seed"


def play(seed: int, faults: frozenset[str] | None = None) -> World:
    world = World(seed, faults)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"{error}\nreplay: {REPLAY.format(seed)}") from error
    return world


@pytest.mark.parametrize("block", range(BLOCKS))
def test_all_nodes_begin_again_together(block: int) -> None:
    for seed in range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS):
        play(seed)


def test_silence_of_the_healthy_costs_nobody_its_place() -> None:
    for seed in range(SEEDS // 4):
        world = play(seed, HARMLESS)
        # but for those that came late to a job with fewer than it may have, or that left with a place just given
        assert world.newest <= len(world.seals) + world.disturbances


@pytest.mark.parametrize("seed", [38184, 62807, 69893, 71260])
def test_seeds_that_once_failed(seed: int) -> None:
    """Of 100,000 (benchmarks/control_seeds.py)."""
    play(seed)


def test_one_seed() -> None:
    seed = int(os.environ.get("KEEPSTEP_REFORMING_SEED", "0"))
    play(seed)


def test_the_seeds_reach_what_they_are_for() -> None:
    wanted = {
        "begin again",
        "replaced",
        "waits for the other nodes",
        "fewer nodes,",
        "more nodes",
        "does not go on with fewer",
    }
    newest = 0
    for seed in range(100):
        world = play(seed)
        newest = max(newest, world.newest)
        wanted = {words for words in wanted if not any(words in line for line in world.told)}
        if not wanted and newest >= 3:
            break
    assert (wanted, newest >= 3) == (set(), True)
