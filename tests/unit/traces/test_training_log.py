from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from keepstep.core.errors import TraceError
from keepstep.traces.training_log import TrainingLog, looks_like_training_log, read_training_log


def line(number: int, ms: float = 1400.0) -> str:
    return (
        f" iteration {number:8d}/    1200 | consumed samples: 48 | elapsed time per iteration (ms): {ms} | "
        "learning rate: 0.000E+00 |\n"
    )


def log(path: Path, text: str, *, zipped: bool = False) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def numbers(read: TrainingLog) -> list[list[int]]:
    return [[one.number for one in run.iterations] for run in read.runs]


def titan(rank: int, step: int, tps: float) -> str:
    return (
        f"[rank{rank}]:[titan] 2026-05-12 17:07:23,237 - root - INFO - step: {step:5d}  loss:  3.63069  "
        f"memory: 92.49GiB(97.36%)  tps: {tps:,.0f}  tflops: 111.76  mfu: 11.30%\n"
    )


@pytest.mark.parametrize("zipped", [False, True])
def test_iterations_and_their_seconds(tmp_path: Path, zipped: bool) -> None:
    text = "loading\n" + line(1, 88966.1) + "a warning\n" + line(2) + line(3)
    path = log(tmp_path / "log", text, zipped=zipped)
    assert looks_like_training_log(path)
    read = read_training_log(path)
    assert numbers(read) == [[1, 2, 3]]
    assert [one.seconds for one in read.runs[0].iterations] == pytest.approx([88.9661, 1.4, 1.4])
    assert read.missing == ()


def test_a_log_every_ten_iterations_with_a_gap(tmp_path: Path) -> None:
    read = read_training_log(log(tmp_path / "log", "".join(line(n) for n in (10, 20, 30, 60, 70))))
    assert read.missing == ("log: 1 gaps between iterations",)


def test_a_log_with_a_restart_has_two_runs(tmp_path: Path) -> None:
    text = "".join(line(n) for n in (1, 2, 3, 4)) + "".join(line(n, 2000.0) for n in (3, 4, 5))
    read = read_training_log(log(tmp_path / "log", text))
    assert numbers(read) == [[1, 2, 3, 4], [3, 4, 5]]
    assert "began anew 1 times" in read.missing[0]


def test_a_job_that_went_on_where_it_ended_has_two_runs(tmp_path: Path) -> None:
    begin = "using world size: 16, data-parallel size: 16\n"
    text = begin + "".join(map(line, range(1, 5))) + begin + "".join(map(line, range(5, 9)))
    read = read_training_log(log(tmp_path / "log", text))
    assert numbers(read) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert read.world_size == 16


@pytest.mark.parametrize("twice", ["lines", "file"])
def test_what_is_there_twice_counts_once(tmp_path: Path, twice: str) -> None:
    lines = [line(n, 1400.0 + n) for n in range(1, 40)]
    text = "".join(one * 2 for one in lines) if twice == "lines" else "".join(lines) * 2
    assert numbers(read_training_log(log(tmp_path / "log", text))) == [list(range(1, 40))]


def test_lines_of_several_ranks_in_any_order_are_one_run(tmp_path: Path) -> None:
    chance = random.Random(3)
    lag = [chance.uniform(0, 2.5) for _ in range(4)]
    lines = [(step + lag[rank], rank, step) for rank in range(4) for step in range(1, 60)]
    text = "".join(titan(rank, step, 1000 + 10 * rank) for _, rank, step in sorted(lines))
    read = read_training_log(log(tmp_path / "log", text))
    assert numbers(read) == [list(range(1, 60))]
    assert read.speed == "tokens"
    assert read.runs[0].by_rank[7] == pytest.approx({r: 1 / (1000 + 10 * r) for r in range(4)})


def test_a_restart_of_several_ranks_is_one_restart(tmp_path: Path) -> None:
    def part(first: int, last: int, tps: int) -> str:
        return "".join(titan(rank, step, tps) for step in range(first, last) for rank in range(3))

    read = read_training_log(log(tmp_path / "log", part(1, 50, 900) + part(31, 60, 1000)))
    assert numbers(read) == [list(range(1, 50)), list(range(31, 60))]


def test_the_better_of_two_formats_is_taken(tmp_path: Path) -> None:
    text = "".join(
        f"[2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step={n}/global_step={n}, "
        f"RunningAvgSamplesPerSec=58.7, CurrSamplesPerSec=61.3, MemAllocated=6.01GB\n{line(n)}"
        for n in range(1, 30)
    )
    read = read_training_log(log(tmp_path / "log", text))
    assert read.speed == ""
    assert read.runs[0].iterations[5].seconds == pytest.approx(1.4)


def test_progress_bars_on_one_line_of_carriage_returns(tmp_path: Path) -> None:
    bars = [
        f"  {n}%|██▏  | {n}/900 [{n // 30:02d}:{n * 2 % 60:02d}<30:00,  {2 + n % 3 / 100:.2f}s/it]"
        for n in range(1, 800)
    ]
    evaluations = [f"Evaluating: {n}%|█ | {n}/9 [00:01<00:02,  5.00it/s]" for n in range(10)]
    text = "\r".join(bars[:400] + evaluations + bars[400:])
    read = read_training_log(log(tmp_path / "log", text))
    assert numbers(read) == [list(range(1, 800))]
    assert read.runs[0].iterations[3].seconds == pytest.approx(2.01)


def test_bars_of_epochs_count_on(tmp_path: Path) -> None:
    text = "\n".join(
        f"Epoch {epoch}: {n}%|█ | {n}/20 [00:{n:02d}<00:10, {1 + n % 2 / 10:.2f}it/s, v_num=0, train_loss=2.1]"
        for epoch in range(3)
        for n in range(1, 21)
    )
    assert numbers(read_training_log(log(tmp_path / "log", text))) == [list(range(1, 61))]


def test_timers_of_ranks_are_their_own_times(tmp_path: Path) -> None:
    block = (
        "times across ranks (ms):\n  forward-backward:\n     rank  0: 900.00\n     rank  1: 900.00\n"
        "  forward-compute:\n     rank  0: 300.00\n     rank  1: 700.00\n"
        "  backward-compute:\n     rank  0: 100.00\n     rank  1: 100.00\n"
    )
    read = read_training_log(log(tmp_path / "log", "".join(line(n) + block * 2 for n in (1, 2, 3))))
    assert read.runs[0].by_rank[2] == pytest.approx({0: 0.4, 1: 0.8})


def test_the_slowest_rank_of_the_straggler_detector(tmp_path: Path) -> None:
    told = " 0: INFO:megatron.core.utils:[2024-03-14 23:07:56] | MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 4468.20ms/0 |\n"
    read = read_training_log(log(tmp_path / "log", line(1) + told))
    assert read.runs[0].by_rank[1] == pytest.approx({8: 3.45308, 0: 4.4682})


def test_a_line_of_any_length_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(
        line(1).encode() + b"iteration 7/ 9 | \x1b[" * 200_000 + b"\n\xff\x00" + line(2).encode()
    )
    assert numbers(read_training_log(path)) == [[1, 2]]


def test_a_gzip_that_was_cut_short_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = log(tmp_path / "log.gz", "".join(line(n, 1400 + n) for n in range(1, 9000)), zipped=True)
    path.write_bytes(path.read_bytes()[:-2000])
    read = read_training_log(path)
    assert len(read.runs[0].iterations) > 100
    assert "ends early" in read.missing[0]


@pytest.mark.parametrize("text", ["", "nothing here\n", "\x00\xff\n"])
def test_no_iteration_in_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="elapsed time per iteration"):
        read_training_log(log(tmp_path / "log", text))


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_training_log(tmp_path / "none")


def test_a_log_is_known_by_its_end(tmp_path: Path) -> None:
    words = (
        "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception "
        "(either an error or timeout) detected by watchdog at work: 8, last enqueued NCCL work: 9, "
        "last completed NCCL work: 7.\n"
    )
    path = log(tmp_path / "log", ("chatter of another framework" * 40 + "\n") * 18_000 + words)
    assert looks_like_training_log(path)
    (run,) = read_training_log(path).runs
    assert run.timeouts is not None


def test_unlabelled_lines_of_two_ranks_out_of_order_are_one_run(tmp_path: Path) -> None:
    order = [1, 2, 1, 2, 3, 3, 4, 4, *(n + at for n in range(5, 60, 2) for at in (0, 1, 0, 1))]
    text = "".join(line(n, 1400.0 + place) for place, n in enumerate(order))
    assert numbers(read_training_log(log(tmp_path / "log", text))) == [list(range(1, 61))]


def test_bars_of_two_nodes_that_begin_again_in_every_epoch_are_one_run(tmp_path: Path) -> None:
    steps = [n for epoch in range(3) for n in range(1, 21)]
    lines = sorted((place + lag, n) for lag in (0.0, 1.5) for place, n in enumerate(steps))
    text = "\r".join(f" {5 * n}%|█ | {n}/20 [00:{n:02d}<00:10, {1 + n % 2 / 10:.2f}it/s]" for _, n in lines)
    read = read_training_log(log(tmp_path / "log", text))
    assert (numbers(read), read.missing) == ([list(range(1, 61))], ())


def test_a_bar_that_begins_again_before_its_end_is_another_run(tmp_path: Path) -> None:
    text = "\r".join(f"{n}/90 [00:{n:02d}<00:10, 1.00it/s]" for n in (*range(1, 50), *range(1, 40)))
    read = read_training_log(log(tmp_path / "log", text))
    assert numbers(read) == [list(range(1, 50)), list(range(1, 40))]
