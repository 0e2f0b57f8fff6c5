"""Where a campaign keeps its seeds: a line each, which is replaced, sorted and never torn."""

from __future__ import annotations

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign import running, seeds
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.seeds import NAME, convert, keep, kept


@pytest.fixture(autouse=True)
def _made_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "machine", dict)
    monkeypatch.setattr(seeds, "versions", lambda packages: {})


def result(case: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"case": case, "seed": seed, **more}


def order(folder: Path) -> list[tuple[str, int]]:
    rows = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    return [(row["case"], row["seed"]) for row in rows]


def test_seeds_are_kept_sorted_and_a_later_result_replaces_the_earlier_one(tmp_path: Path) -> None:
    for case, seed in (("b", 10), ("b", 9), ("a", 1), ("b", 0)):
        keep(tmp_path, result(case, seed, passed=False))
    keep(tmp_path, result("b", 9, passed=True))
    assert order(tmp_path) == [("a", 1), ("b", 0), ("b", 9), ("b", 10)]
    assert [(seed, one["passed"]) for seed, one in kept(tmp_path, "b").items()] == [
        (0, False),
        (9, True),
        (10, False),
    ]
    assert kept(tmp_path, "c") == {}


def test_threads_that_keep_seeds_at_once_lose_none(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: keep(tmp_path, result("a", seed, console="x" * 20_000)), range(40)))
    assert order(tmp_path) == [("a", seed) for seed in range(40)]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_characters_that_end_a_line_elsewhere_end_none_here(tmp_path: Path) -> None:
    keep(tmp_path, result("a", 0, console="one\u2028two\x85three\r\nfour"))
    keep(tmp_path, result("a", 1))
    assert kept(tmp_path, "a")[0]["console"] == "one\u2028two\x85three\r\nfour"


@pytest.mark.parametrize("nested", [False, True])
def test_folders_of_one_file_a_seed_are_converted_with_equal_content(nested: bool, tmp_path: Path) -> None:
    former, out = tmp_path / "former", tmp_path / "out"
    folder = former / "a" if nested else former
    folder.mkdir(parents=True)
    results = {seed: result("a", seed, passed=seed != 1, watched={"0": [0.1, 1e-9]}) for seed in range(3)}
    for seed, one in results.items():
        (folder / f"seed-{seed:03d}.json").write_text(json.dumps(one, indent=1))
    keep(out, result("z", 0))
    assert convert(former, out) == 3
    assert kept(out, "a") == results
    assert kept(out, "z")
    assert convert(tmp_path / "nothing", out) == 0


def test_a_campaign_runs_seeds_without_a_line_and_with_again_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def trial(plan: Any, folder: Path) -> Any:
        ran.append(int(folder.name.removeprefix("seed-")))
        raise RuntimeError("no job here")

    monkeypatch.setattr(running, "run_trial", trial)
    out, runs = tmp_path / "out", tmp_path / "runs"
    for count, again in ((2, False), (3, False), (2, True)):
        chosen = Namespace(out=out, runs=runs, keep_runs=False, again=again, parallel=1)
        running.run_case(CASES["healthy"], range(count), chosen)
    assert ran == [0, 1, 2, 0, 1]
    assert [one["why"] for one in kept(out, "healthy").values()] == [["RuntimeError: no job here"]] * 3
