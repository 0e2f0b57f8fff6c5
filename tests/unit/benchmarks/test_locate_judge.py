from __future__ import annotations

import subprocess
import sys

from benchmarks.locate.judge import Meant, Score, judge

from keepstep.core.incident import Culprit, Diagnosis, Link

NOBODY = frozenset()
RANK = Meant(frozenset({3}), stage="forward")
PAIR = Meant(nodes=frozenset({"a", "b"}), members=frozenset({1, 9}), stage="transfer")
GROUP = Meant(nodes=frozenset({"a"}), group="tp_0", members=frozenset(range(4)), stage="transfer")


def said(*culprits: Culprit, summary: str = "") -> Diagnosis:
    return Diagnosis("slow", culprits, (), (), (), summary)


def link(ranks: tuple[int, int], nodes: tuple[str, str]) -> Culprit:
    return Culprit(link=Link(ranks, nodes), stage="transfer")


def test_a_rank_and_its_stage():
    assert judge(said(Culprit(3, stage="forward")), [RANK], NOBODY).stage_right
    other = judge(said(Culprit(3, stage="backward")), [RANK], NOBODY)
    assert (other.right, other.stage_right) == (True, False)
    assert not judge(said(Culprit(4, stage="forward")), [RANK], NOBODY).right
    assert not judge(said(Culprit(3), Culprit(4)), [RANK], NOBODY).right
    assert not judge(said(), [RANK], NOBODY).right


def test_links_either_way_round_and_groups_by_their_name():
    assert judge(said(link((9, 1), ("b", "a"))), [PAIR], NOBODY).stage_right
    assert not judge(said(link((9, 1), ("b", "c"))), [PAIR], NOBODY).right
    assert judge(said(link((0, 2), ("a", "a"))), [GROUP], NOBODY).right
    assert judge(said(summary="transfers on tp_0 ALLREDUCE are slow"), [GROUP], NOBODY).stage_right
    assert judge(said(summary="group tp_0 ALLREDUCE seq 4 stuck 3 s"), [GROUP], NOBODY).how == "group"
    assert not judge(said(summary="transfers on tp_1 ALLREDUCE are slow"), [GROUP], NOBODY).right


def test_absorbed_small_and_hidden_causes():
    absorbed, small = Meant(frozenset({3}), felt=False), Meant(frozenset({3}), felt=None)
    assert judge(said(), [absorbed], NOBODY).right
    assert not judge(said(Culprit(3)), [absorbed], NOBODY).right
    assert judge(said(Culprit(3)), [small], NOBODY).right
    assert judge(said(), [small], NOBODY).right
    assert not judge(said(Culprit(4)), [small], NOBODY).right
    hidden = Meant(frozenset({3}), hidden=True)
    quiet = frozenset({3, 4})
    assert judge(said(Culprit(4, cause="silent"), Culprit(3, cause="silent")), [hidden], quiet).right
    assert not judge(said(Culprit(5, cause="silent")), [hidden], quiet).right
    assert not judge(said(Culprit(5)), [hidden], quiet).right


def test_scores():
    total = Score()
    for culprits in ([Culprit(3, stage="forward")], [Culprit(4)], []):
        total.add(judge(said(*culprits), [RANK], NOBODY))
    total.add(judge(said(), [Meant(frozenset({3}), felt=False)], NOBODY))
    assert (total.true, total.missed, total.false_named, total.quiet) == (1, 2, 1, 1)
    assert (total.precision, total.recall) == (0.5, 1 / 3)
    assert (total.stages, total.stages_right) == (3, 1)


def test_what_draws_and_simulates_knows_no_locator():
    code = (
        "import benchmarks.locate.cases, benchmarks.simulate, sys; sys.exit('keepstep.locate' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
