from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from keepstep.analyze import Analysis, analyze
from keepstep.cli import main
from keepstep.core.errors import TraceError


def megatron(
    numbers: range, seconds: float = 1.0, batch: int = 64, slow: range = range(0), ratio: float = 1.5
) -> str:
    """Iterations of a log; those in ``slow`` take ``ratio`` times as long."""
    chance = random.Random(numbers.start)

    def ms(n: int) -> float:
        return 1e3 * seconds * chance.uniform(0.99, 1.01) * (ratio if n in slow else 1)

    return "".join(
        f" [2025-05-08 14:41:02] iteration {n:8d}/   50000 | elapsed time per iteration (ms): "
        f"{ms(n):.1f} | global batch size: {batch:5d} |\n"
        for n in numbers
    )


def judged(tmp_path: Path, text: str) -> Analysis:
    (tmp_path / "train.log").write_text(text)
    return analyze(tmp_path / "train.log")


def found(analysis: Analysis) -> list[tuple[int | None, int | None]]:
    return [(one.onset_step, one.relief_step) for one in analysis.incidents]


def culprits(analysis: Analysis) -> list[int | None]:
    return [one.rank for one in analysis.incidents[-1].culprits]


def near(told: list[tuple[int | None, int | None]], true: list[tuple[int, int]]) -> bool:
    return len(told) == len(true) and all(
        abs((a or 0) - c) <= 3 and abs((b or 0) - d) <= 3 for (a, b), (c, d) in zip(told, true, strict=True)
    )


def test_a_restart_hides_no_slowdown(tmp_path: Path) -> None:
    episodes = [range(60 + 110 * n, 110 + 110 * n) for n in range(9)]
    slow = {n for one in episodes for n in one}
    text = "".join(
        megatron(range(n, n + 1), ratio=1.4, slow=range(n, n + 1) if n in slow else range(0))
        for n in range(1, 1031)
    )
    analysis = judged(tmp_path, text + megatron(range(1, 171), slow=range(100, 130)))
    assert near(found(analysis), [(one.start, one.stop) for one in [*episodes, range(100, 130)]])
    assert [one.incarnation for one in analysis.incidents] == [0] * 9 + [1]
    assert [one.number for one in analysis.incidents] == list(range(1, 11))


def test_another_batch_size_is_no_slowdown_and_hides_none(tmp_path: Path) -> None:
    text = (
        megatron(range(1, 80))
        + megatron(range(80, 200), 2.0, 128, range(140, 170))
        + megatron(range(200, 280))
    )
    assert near(found(judged(tmp_path, text)), [(140, 170)])


def test_a_run_that_is_slower_throughout_is_told(tmp_path: Path) -> None:
    one, slower = megatron(range(1, 120), slow=range(60, 90)), megatron(range(101, 200), 1.4)
    analysis = judged(tmp_path, one + slower + megatron(range(150, 260), 1.41))
    assert near(found(analysis), [(60, 90)])
    told = [line for line in analysis.missing if "slower" in line]
    assert len(told) == 1
    assert (
        "run 2 of 3 in train.log is slower throughout than run 1: iteration 1 s -> 1.4 s (×1.40)" in told[0]
    )


def test_runs_alike_or_with_other_work_are_not_slower(tmp_path: Path) -> None:
    one = megatron(range(1, 120))
    for other in (
        megatron(range(101, 200), 1.05),
        megatron(range(101, 200), 0.7),
        megatron(range(101, 200), 2.0, 128),
        megatron(range(101, 200), slow=range(110, 190)),
        megatron(range(101, 112), 1.5),
    ):
        assert not any("slower" in line for line in judged(tmp_path, one + other).missing)


def consumed(sizes: Sequence[int], slow: range = range(0)) -> str:
    """A log without batch sizes: iterations whose time grows with the size, and the samples consumed so far."""
    chance = random.Random(len(sizes))
    total = 0
    text = ""
    for n, size in enumerate(sizes, 1):
        total += size
        ms = (1000 + 5 * size) * chance.uniform(0.99, 1.01) * (1.5 if n in slow else 1)
        text += f" iteration {n:8d}/   50000 | consumed samples: {total:12d} | "
        text += f"elapsed time per iteration (ms): {ms:.1f} |\n"
    return text


def test_samples_consumed_tell_the_batch_size(tmp_path: Path) -> None:
    ramp = [32 * (1 + n // 60) for n in range(300)]
    assert found(judged(tmp_path, consumed(ramp))) == []
    assert near(found(judged(tmp_path, consumed(ramp, range(140, 165)))), [(140, 165)])


def test_samples_that_differ_each_time_are_no_batch_sizes(tmp_path: Path) -> None:
    packed = [60 + n * 7 % 13 for n in range(200)]
    assert near(found(judged(tmp_path, consumed(packed, range(100, 150)))), [(100, 150)])


def test_single_stalls_are_told_and_are_no_slowdown(tmp_path: Path) -> None:
    text = megatron(range(1, 120), slow=range(61, 62), ratio=2.9)
    analysis = judged(tmp_path, text)
    assert analysis.incidents == ()
    assert any("one stalled iteration" in line and "iteration 61 (×2.9)" in line for line in analysis.missing)


def test_a_first_iteration_is_no_stall(tmp_path: Path) -> None:
    assert judged(tmp_path, megatron(range(1, 2), 80.0) + megatron(range(2, 60))).missing == ()


def test_a_rank_whose_timers_grew_is_named(tmp_path: Path) -> None:
    text = ""
    for n in range(1, 121):
        slow = 60 <= n < 90
        text += megatron(range(n, n + 1), slow=range(60, 90))
        text += "times across ranks (ms):\n  forward-compute:\n"
        text += "".join(
            f"     rank {r:2d}: {300 + r + (500 if slow and r == 3 else 0)}.00\n" for r in range(8)
        )
    analysis = judged(tmp_path, text)
    assert near(found(analysis), [(60, 90)])
    assert culprits(analysis) == [3]


def test_a_rank_whose_own_iterations_grew_is_named(tmp_path: Path) -> None:
    text = "".join(
        f"{rank}: iteration {n}/ 900 | elapsed time per iteration (s): "
        f"{1 + n % 3 / 100 + (rank == 2 and 60 <= n < 90)} |\n"
        for n in range(1, 121)
        for rank in range(4)
    )
    assert culprits(judged(tmp_path, text)) == [2]


def test_ranks_that_grew_alike_are_not_named(tmp_path: Path) -> None:
    text = "".join(
        f"[rank{rank}]:[titan] - root - INFO - step: {n:3d}  loss:  3.63  "
        f"tps: {(600 if 60 <= n < 90 else 1000) + n % 3}\n"
        for n in range(1, 121)
        for rank in range(4)
    )
    analysis = judged(tmp_path, text)
    assert near(found(analysis), [(60, 90)])
    assert culprits(analysis) == []
    assert any("tokens a second: 1,00" in line for line in analysis.incidents[0].evidence)


GROUP = "PG ID 0 PG GUID 0(default_pg)"


def timed_out(rank: int, at: int, enqueued: int = 0, group: str = GROUP) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={at}, OpType=ALLREDUCE, NumelIn=1) ran for 600020 milliseconds before timing out.\n"
        f"[rank{rank}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [{group} Rank {rank}] Exception (either an error or "
        f"timeout) detected by watchdog at work: {at}, last enqueued NCCL work: {enqueued or at + 3}, "
        f"last completed NCCL work: {at - 1}.\n"
    )


def dumps(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:45 ProcessGroupNCCL.cpp:1700] [{GROUP} Rank {rank}] Received a dump signal due to a "
        f"collective timeout from rank 1. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
    )


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_brings_another_number_of_elements_is_named(tmp_path: Path, odd: int) -> None:
    text = "".join(
        timed_out(r, 501).replace("NumelIn=1", f"NumelIn={7 if r == odd else 1}, NumelOut=1")
        for r in range(4)
    )
    analysis = judged(tmp_path, text)
    assert culprits(analysis) == [odd]
    incident = analysis.incidents[0]
    assert incident.kind == "desync"
    assert (incident.culprits[0].cause, incident.culprits[0].confidence) == ("another size", "high")
    others = "0-1,3" if odd == 2 else "1-3"
    assert incident.culprits[0].detail.startswith(
        f"rank {odd} in ALLREDUCE of 7 elements, ranks {others} of 1 elements"
    )


@pytest.mark.parametrize("culprit", [0, 3, 7])
def test_the_rank_that_enqueued_less_is_behind(tmp_path: Path, culprit: int) -> None:
    text = "".join(dumps(r, 807, 807) if r == culprit else timed_out(r, 808) for r in range(8))
    analysis = judged(tmp_path, megatron(range(1, 40)) + text)
    assert culprits(analysis) == [culprit]
    assert analysis.incidents[-1].culprits[0].confidence == "high"
    assert "808" in analysis.incidents[-1].summary


def test_a_rank_that_timed_out_earlier_in_the_order_is_behind(tmp_path: Path) -> None:
    text = "".join(timed_out(r, 700 if r == 2 else 808, 811) for r in range(4))
    assert culprits(judged(tmp_path, text)) == [2]


def test_a_rank_that_is_not_heard_of_is_suspected(tmp_path: Path) -> None:
    text = "[rank5]: ValueError: no such shard\n" + "".join(timed_out(r, 808) for r in range(8) if r != 5)
    analysis = judged(tmp_path, text)
    assert culprits(analysis) == [5]
    assert analysis.incidents[0].culprits[0].confidence != "high"
    assert "no such shard" in analysis.incidents[0].culprits[0].detail


def test_a_rank_of_which_there_is_no_word_is_suspected(tmp_path: Path) -> None:
    analysis = judged(tmp_path, "".join(timed_out(r, 808) for r in range(8) if r != 5))
    assert culprits(analysis) == [5]
    assert analysis.incidents[0].culprits[0].cause == "not heard of"


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2, 3]])
def test_nobody_is_named_when_all_that_spoke_wait_alike(tmp_path: Path, ranks: list[int]) -> None:
    (tmp_path / "train.log").write_text("using world size: 64\n" + "".join(timed_out(r, 44) for r in ranks))
    analysis = analyze(tmp_path / "train.log")
    assert culprits(analysis) == []
    assert main(["analyze", str(tmp_path / "train.log")]) == 1


def test_a_rank_that_waits_for_another_group_is_no_culprit(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait in the group of all for 2, which waits in a small one for 3."""
    text = timed_out(0, 808) + timed_out(1, 808) + timed_out(2, 31, group="PG ID 1 PG GUID 5(tp)")
    text += dumps(2, 807, 807) + dumps(3, 807, 807)
    text += dumps(3, 30, 30).replace(GROUP, "PG ID 1 PG GUID 5(tp)")
    assert culprits(judged(tmp_path, text)) == [3]


def test_a_rank_that_waits_for_a_message_is_no_culprit(tmp_path: Path) -> None:
    """Rank 3 is behind in the group of all, but waits for a message itself; of rank 2 there is no word."""
    text = timed_out(0, 808) + timed_out(1, 808) + dumps(3, 807, 807)
    text += timed_out(3, 9, group="PG ID 2 PG GUID 7(pp)").replace("ALLREDUCE", "RECV")
    (incident,) = judged(tmp_path, text).incidents
    assert [(one.rank, one.confidence) for one in incident.culprits] == [(2, "low")]


def test_a_file_that_tells_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text("hello\n")
    assert main(["analyze", str(tmp_path / "train.log")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE", "UTF-16BE"])
def test_a_log_in_utf16_is_refused_with_the_command_that_converts_it(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "train.log").write_bytes(megatron(range(1, 40)).encode(encoding))
    with pytest.raises(TraceError, match=f"train.log: is text in UTF-16; .* iconv -f {encoding} -t UTF-8"):
        analyze(tmp_path / "train.log")


def test_a_log_of_a_framework_that_is_not_known_says_which_lines_are(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("Übung 1: loss 2.3, took 1.0 s\nÜbung 2: loss 2.2, took 1.1 s\n")
    with pytest.raises(TraceError, match=r"train.log: is no trace .*elapsed time per iteration \(ms\): T'"):
        analyze(tmp_path / "train.log")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 8)
    with pytest.raises(TraceError, match=r"answer of NCCL's RAS$"):
        analyze(tmp_path / "noise")
