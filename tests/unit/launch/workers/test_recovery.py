"""The phases of a restart: what was measured ends its own, what was not counts to the next."""

import asyncio
import os

from keepstep.core.incident import FreedMemory
from keepstep.launch.command.placement import INCARNATION, MILESTONES
from keepstep.launch.workers.recovery_times import Milestones, Restart, sentence
from keepstep.launch.workers.root_cause import Failure
from keepstep.report.wording import freed_memory

RANKS = frozenset({0, 1})


def restart(standbys: int = 2, status: int = -9) -> Restart:
    failure = Failure(1, 1, 77, status, 0.0, "", "", None)
    made = Restart(failure, failed_s=100.0, ended_s=100.07, incarnation=3)
    made.started(RANKS, standbys, 0, 100.08)
    return made


def test_every_phase_ends_with_its_last_rank() -> None:
    made = restart()
    for name, rank, at_s in (
        ("groups", 0, 100.1),
        ("groups", 1, 100.11),
        ("state", 1, 100.15),
        ("state", 0, 100.19),
        ("step", 0, 100.25),
    ):
        assert made.reached(name, rank, at_s) is None
    told = made.reached("step", 1, 100.24)
    assert told is not None
    assert (told.incarnation, told.rank, told.what, told.seconds) == (3, 1, "was killed", 0.25)
    assert dict(told.phases) == {
        "ended": 0.07,
        "standbys": 0.01,
        "groups": 0.03,
        "state": 0.08,
        "first step": 0.06,
    }
    assert sentence(told) == (
        "training again 0.25 s after rank 1 was killed "
        "(ended 0.07, standbys 0.01, groups 0.03, state 0.08, first step 0.06)"
    )


def test_what_not_all_ranks_have_told_counts_to_the_next_phase() -> None:
    made = restart(standbys=1, status=1)
    made.reached("groups", 0, 100.2)
    made.reached("step", 0, 100.4)
    told = made.reached("step", 1, 100.5)
    assert told is not None
    assert told.what == "failed"
    assert told.standbys == 1
    assert dict(told.phases) == {"ended": 0.07, "started": 0.01, "first step": 0.42}


def test_the_memory_of_the_rank_that_failed_is_told_in_words() -> None:
    memory = (FreedMemory(2, 0, 40 * 10**9, 79 * 10**9), FreedMemory(3, 1, 41 * 10**9, 79_600_000_000))
    made = Restart(Failure(1, 1, 77, -9, 0.0, "", "", None), 100.0, 100.07, 3, memory)
    made.started(RANKS, 2, 0, 100.08)
    made.reached("step", 0, 100.4)
    told = made.reached("step", 1, 100.5)
    assert told is not None
    assert told.gpu_memory == memory
    assert freed_memory(told) == "GPU 3: rank 1 had 41.0 GB, 79.6 GB were free for its successor"


def test_a_restart_after_a_rank_had_left_says_so() -> None:
    made = restart(status=0)
    made.reached("step", 0, 100.4)
    told = made.reached("step", 1, 100.5)
    assert told is not None
    assert sentence(told).startswith("training again 0.50 s after rank 1 left early (")


def test_told_once_and_only_of_ranks_that_were_started() -> None:
    made = restart()
    assert made.reached("step", 7, 100.1) is None
    assert made.reached("step", 0, 100.2) is None
    assert made.reached("step", 0, 100.2) is None
    assert made.reached("step", 1, 100.3) is not None
    assert made.reached("step", 1, 100.4) is None


def test_the_pipe_takes_lines_and_leaves_out_what_is_none() -> None:
    async def main() -> list[tuple[str, int, int, float, int]]:
        heard: list[tuple[str, int, int, float, int]] = []
        milestones = Milestones(lambda *told: heard.append(told))
        environment = milestones.environment(4)
        assert environment[INCARNATION] == "4"
        for text in (b"groups 1 4 2000000000 0\nnonsense\n", b"step x 4 1 0\nstep 0 4 3000000000 17\n"):
            pipe = os.open(environment[MILESTONES], os.O_WRONLY)
            os.write(pipe, text)
            os.close(pipe)
        while len(heard) < 2:
            await asyncio.sleep(0)
        milestones.close()
        return heard

    assert asyncio.run(main()) == [("groups", 1, 4, 2.0, 0), ("step", 0, 4, 3.0, 17)]


def test_ranks_whose_process_went_on_are_counted() -> None:
    failure = Failure(1, 1, 77, -9, 0.0, "", "", None)
    made = Restart(failure, failed_s=100.0, ended_s=100.07, incarnation=3)
    made.started(RANKS, 1, 1, 100.08)
    made.reached("step", 0, 100.2)
    told = made.reached("step", 1, 100.3)
    assert told is not None
    assert (told.standbys, told.survived, told.ranks) == (1, 1, 2)
    assert [title for title, _ in told.phases] == ["ended", "standbys", "first step"]
