"""A validation as a line of evidence and as a table."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.validation import DeviceFigure, LinkFigure, RankFigures
from keepstep.report.validation import in_a_line, table
from keepstep.validate.judge import judge

NODES = {0: "gpu-0", 1: "gpu-0", 2: "gpu-1", 3: "gpu-1"}


def figures(slow_rank: int = -1, slow_link: tuple[int, int] = (-1, -1)) -> list[RankFigures]:
    return [
        RankFigures(
            rank,
            (DeviceFigure(rank, "bf16", 300.0 if rank == slow_rank else 600.0 + rank),),
            (
                LinkFigure(
                    (rank - 1) % 4, rank, "ring", 1 << 24, 2e8 if ((rank - 1) % 4, rank) == slow_link else 1e9
                ),
            ),
        )
        for rank in range(4)
    ]


def test_alike() -> None:
    outcome = judge(range(4), figures(), NODES, held_s=1.23)
    assert in_a_line(outcome) == "validation (ranks 0-3 held 1.2 s): 4 devices and 4 links over TCP are alike"
    assert "slow" not in table(outcome, NODES)


def test_who_stands_out_comes_first_and_is_marked() -> None:
    judged = judge(range(4), figures(2, (1, 2)), NODES, held_s=1.23)
    outcome = replace(judged, missing=("figures of rank 9: none",))
    assert in_a_line(outcome) == (
        "validation (ranks 0-3 held 1.2 s): rank 2 bf16 300 TFLOP/s against 601 of its peers; "
        "link 1 → 2 200 MB/s against 1000 of the others"
    )
    lines = table(outcome, NODES).splitlines()
    assert lines[3].split() == ["2", "gpu-1", "bf16", "300", "TFLOP/s", "slow"]
    assert lines[9].split() == ["1", "→", "2", "gpu-0", "→", "gpu-1", "TCP", "200.0", "slow"]
    assert sum(line.endswith("slow") for line in lines) == 2
    assert lines[-1] == "missing: figures of rank 9: none"


def test_a_link_over_which_nothing_came_is_told_as_such() -> None:
    found = [
        replace(one, links=tuple(replace(link, transport="nccl") for link in one.links)) for one in figures()
    ]
    dead = replace(found[2], links=tuple(replace(link, bytes_per_s=0.0) for link in found[2].links))
    outcome = judge(range(4), [*found[:2], dead, found[3]], dict.fromkeys(range(4), "gpu-0"), held_s=1.23)
    assert in_a_line(outcome) == (
        "validation (ranks 0-3 held 1.2 s): link 1 → 2 nothing came, 1000 MB/s over the others"
    )
    assert "NCCL  0.0         slow" in table(outcome, NODES)


def test_long_tables_are_cut() -> None:
    many = [RankFigures(rank, (DeviceFigure(rank, "fp32", 1.0),)) for rank in range(100)]
    text = table(judge(range(100), many, {}), {})
    assert "and 36 more; all of them with --json" in text
    assert len(text.splitlines()) < 75


def test_a_quota_is_told_with_the_figure() -> None:
    slow = RankFigures(2, (DeviceFigure(2, "fp32", 0.01, limited=0.96),))
    outcome = judge(range(3), [slow, *(RankFigures(n, (DeviceFigure(n, "fp32", 0.1),)) for n in (0, 1))], {})
    assert in_a_line(outcome).endswith(
        "rank 2 fp32 0.01 TFLOP/s against 0.1 of its peers, cpu quota: off its core 96% of its time"
    )
