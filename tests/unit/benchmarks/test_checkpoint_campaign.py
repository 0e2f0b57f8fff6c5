"""Which seeds a campaign runs, and what it keeps of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign.seeds import kept
from benchmarks.checkpoint_faults import campaign as module
from benchmarks.checkpoint_faults.campaign import NOT_OVER, Campaign, Judged


@dataclass(frozen=True)
class Plan:
    number: float


def campaign(wrong: Sequence[list[str]], ran: list[int]) -> Campaign:
    """Of one case; ``wrong``: with each of its seeds. Which ran is told to ``ran``."""
    numbers = [random.Random(f"case:{seed}").random() for seed in range(len(wrong))]

    def carry_out(plan: Plan, folder: Path) -> Judged:
        ran.append(numbers.index(plan.number))
        return Judged(list(wrong[ran[-1]]))

    cases = {"case": lambda chances: Plan(chances.random())}
    return Campaign("name", "", cases, carry_out, lambda: None, "summary.json", "", seeds=len(wrong))


def results(folder: Path) -> list[Mapping[str, Any]]:
    return list(kept(folder, "case").values())


def test_seeds_without_a_verdict_run_once_more_and_both_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)  # folders of failed seeds go there
    out = tmp_path / "results"
    words = ["--case", "all", "--out", str(out)]
    late, broken, wrong = [f"{NOT_OVER} 9 s"], ["CalledProcessError: Command 'ip'"], ["rank 0: wrong bytes"]
    ran: list[int] = []
    campaign([[], broken, wrong, late], ran).main(words)
    assert ran == [0, 1, 2, 3]
    campaign([[], [], [], late], ran).main(words)
    assert ran == [0, 1, 2, 3]  # there is a result of each
    campaign([[], [], [], late], ran).main([*words, "--again"])
    assert ran[4:] == [1, 3]  # what came out wrong is not asked again
    assert [one["why"] for one in results(out)] == [[], [], wrong, late]
    assert [one["earlier"]["why"] for one in results(out) if "earlier" in one] == [broken, late]
    campaign([[], [], [], []], ran).main([*words, "--again"])
    assert ran[6:] == []  # once
    (line,) = json.loads((out / "summary.json").read_text())["lines"]
    assert (line["value"], line["met"]) == ("2/4", False)
    assert "2 of them run again" in line["limit"]
