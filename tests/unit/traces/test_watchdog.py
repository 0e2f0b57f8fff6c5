from __future__ import annotations

from collections.abc import Sequence

from keepstep.traces.watchdog import Timeouts, WatchdogWords

DEFAULT = "PG ID 0 PG GUID 0(default_pg)"


def timeout(rank: int, seq: int, op: str = "ALLREDUCE", label: bool = True, elements: str = "1") -> str:
    return (
        f"{f'[rank{rank}]:' if label else ''}[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={elements}, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
    )


def status(
    rank: int, at: int, enqueued: int, completed: int, group: str = DEFAULT, own: int | None = None
) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [{group} Rank {rank if own is None else own}] "
        f"Exception (either an error or timeout) detected by watchdog at work: {at}, last enqueued NCCL work: "
        f"{enqueued}, last completed NCCL work: {completed}."
    )


def dump_signal(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E626 06:24:45.1 ProcessGroupNCCL.cpp:1700] [{DEFAULT} Rank {rank}] Received a dump signal due "
        "to a collective timeout from rank 1 and we will try our best to dump the debug info. Last enqueued NCCL "
        f"work: {enqueued}, last completed NCCL work: {completed}.This is most likely"
    )


def words(lines: Sequence[str]) -> Timeouts | None:
    heard = WatchdogWords()
    for line in lines:
        heard.take(line)
    return heard.found()


def progress(told: Timeouts | None) -> dict[int, dict[str, tuple[int, int]]]:
    """By rank and group, the operations started and completed."""
    assert told is not None
    return {
        state.rank: {stream.group: (stream.started, stream.completed) for stream in state.streams}
        for state in told.states
    }


def test_how_far_each_rank_was() -> None:
    told = words([timeout(0, 808), status(0, 808, 811, 807), dump_signal(5, 807, 807)])
    assert progress(told) == {0: {"0 (default_pg)": (808, 807)}, 5: {"0 (default_pg)": (807, 807)}}
    assert told is not None
    assert told.waiting == {0}


def test_a_rank_is_told_by_its_label_not_by_its_place_in_a_group() -> None:
    told = words([status(6, 31, 58, 30, "PG ID 2 PG GUID 3", own=1)])
    assert progress(told) == {6: {"3": (31, 30)}}


def test_words_of_old_versions_without_status_are_of_the_group_of_all() -> None:
    told = words([timeout(1, 44, label=False), timeout(3, 44, label=False)])
    assert progress(told) == {1: {"0": (44, 43)}, 3: {"0": (44, 43)}}


def test_a_number_that_was_never_set_is_not_taken() -> None:
    line = "[rank7]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 7] Timeout at NCCL work: 1, last enqueued NCCL work: 1, "
    told = words([line + "last completed NCCL work: 3452013982."])
    assert progress(told) == {7: {"0": (1, 0)}}


def test_the_report_of_a_desync_names_who_did_not_join() -> None:
    told = words(
        [
            status(0, 808, 811, 807),
            "\t - [5] finished collective #807, but didn't join collective #808 (count from 1)",
        ]
    )
    assert progress(told)[5] == {"0 (default_pg)": (807, 807)}


def test_a_message_is_no_collective() -> None:
    told = words([timeout(2, 9, "RECV"), status(2, 9, 9, 8)])
    assert told is not None
    assert told.states[0].in_flight == ()
    assert told.waiting == {2}


def test_every_line_twice_is_the_same() -> None:
    lines = [timeout(0, 808), status(0, 808, 811, 807), dump_signal(5, 807, 807)]
    assert words(lines) == words([line for line in lines for _ in range(2)])


def test_without_a_timeout_there_is_nothing() -> None:
    assert words([dump_signal(5, 62, 62), "[rank1]: ValueError: no such file"]) is None


def test_the_first_of_several_timeouts_of_a_rank_counts() -> None:
    told = words([timeout(0, seq, label=False) for seq in (96120, 96117, 96125)])
    assert progress(told) == {0: {"0": (96117, 96116)}}


def test_ranks_that_wait_in_different_operations_of_unnamed_groups_are_not_compared() -> None:
    told = words([timeout(0, 808, label=False), timeout(1, 5000, "ALLGATHER", label=False)])
    assert told is not None
    assert (told.states, told.waiting) == ((), {0, 1})
    assert progress(words([timeout(0, 808, label=False), timeout(1, 5000, label=False)])) == {}


def test_the_rank_counts_before_the_task_of_a_launcher() -> None:
    assert progress(words(["3: " + timeout(24, 808)])) == {24: {"0": (808, 807)}}
    assert progress(words(["[default1]:" + timeout(9, 808)])) == {9: {"0": (808, 807)}}


def sizes(told: Timeouts | None) -> dict[int, list[tuple[int, str]]]:
    assert told is not None
    return {state.rank: [(one.bytes, one.element) for one in state.in_flight] for state in told.states}


def test_elements_count_where_members_must_bring_as_many() -> None:
    def told(op: str, elements: str = "7", group: str = DEFAULT) -> dict[int, list[tuple[int, str]]]:
        return sizes(words([timeout(2, 501, op, elements=elements), status(2, 501, 501, 500, group)]))

    counted = {2: [(7, "elements")]}
    assert told("ALLREDUCE") == told("_ALLGATHER_BASE") == told("BROADCAST") == counted
    assert told("ALLREDUCE", group="PG ID 3 PG GUID 9(DATA_PARALLEL_GROUP)") == counted
    assert told("ALLREDUCE", group="PG 0") == counted
    untold = {2: [(0, "")]}
    for op in ("ALLTOALL_BASE", "GATHER", "SCATTER", "_ALLREDUCE_SPARSE", "BARRIER"):
        assert told(op) == untold
    # A group's number without its name may be that of several groups; what was never counted has a number, too.
    assert told("ALLREDUCE", group="PG 3") == untold
    assert told("COALESCED", "18446744073709551615") == untold
