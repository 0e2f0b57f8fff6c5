"""What torch's flight recorder told on an H100, and on Gloo, through the way that a live job's dump takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.ranks.device_calls import device_calls
from keepstep.core.errors import TraceError
from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import DeviceCalls, GroupInfo, RankState, StreamProgress
from keepstep.locate import locate_hang
from keepstep.traces.flight_recorder import parse_newest
from keepstep.traces.plain_data import read_pickle

DATA = Path(__file__).parents[3] / "recorded" / "h100"
GROUPS = [GroupInfo("0", (0, 1), "cuda:nccl", "default_pg")]


def recorded(case: str, rank: int) -> bytes:
    """A dump as the process would have handed it to its agent: in JSON, without stacks."""
    content: dict[str, Any] = read_pickle((DATA / case / f"nccl_trace_rank_{rank}").read_bytes())
    entries = [{key: value for key, value in one.items() if key != "frames"} for one in content["entries"]]
    return json.dumps({**content, "entries": entries}).encode()


def live(case: str) -> Diagnosis:
    states: list[RankState] = []
    for rank in range(2):
        device = device_calls(parse_newest(recorded(case, rank), rank), rank, GROUPS, (), 0.0)
        assert device is not None
        states.append(
            RankState(rank, True, 30, Phase.BACKWARD, 90.0, 5, 90.0, 95.0, (), (), "S", device=device)
        )
    return locate_hang(Evidence({"0": GROUPS[0]}, {0: "n", 1: "n"}, states=states))


@pytest.mark.parametrize("case", ["asleep_before_backward", "asleep_host_waits"])
def test_who_never_came_is_named_as_from_the_files(case: str) -> None:
    found = live(case)
    (culprit,) = found.culprits
    assert (found.kind, culprit.rank, culprit.cause, culprit.stage, culprit.confidence) == (
        "hang",
        1,
        "asleep in backward",
        "backward",
        "high",
    )
    assert found.victims == (0,)


def test_a_barrier_of_one_rank_alone_names_nobody_for_sure() -> None:
    assert all(one.confidence != "high" for one in live("barrier_of_one_rank").culprits)


def entry(seq: int, **changes: Any) -> dict[str, Any]:
    """A call as torch writes it."""
    return {
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "pg_id": 0, "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce", "state": "completed", "time_created_ns": seq * 10**9, "is_p2p": False,
        "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"],
        "record_id": seq, "retired": True, **changes,
    }  # fmt: skip


def message(seq: int, **changes: Any) -> dict[str, Any]:
    words = {"profiling_name": "nccl:recv 0<-1", "is_p2p": True, "p2p_seq_id": seq, "collective_seq_id": 0}
    return entry(seq, **{**words, **changes})


def calls(
    *entries: dict[str, Any], streams: tuple[StreamProgress, ...] = (), groups: list[GroupInfo] = GROUPS
) -> DeviceCalls | None:
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}
    dump = {"version": "2.10", "entries": list(entries), "pg_config": config}
    return device_calls(parse_newest(json.dumps(dump).encode(), 0), 0, groups, streams, 0.0)


OPEN = {"state": "scheduled", "retired": False}


def test_a_call_that_is_not_finished_is_in_flight_with_its_content() -> None:
    found = calls(entry(1), entry(2, **OPEN), entry(3, **OPEN))
    assert found is not None
    (flight,) = found.in_flight
    assert (flight.group, flight.op, flight.seq, flight.bytes, flight.element) == (
        "0",
        Op.ALLREDUCE,
        2,
        32,
        "float32",
    )
    assert [(one.started, one.completed) for one in found.streams] == [(2, 1)]


def test_messages_have_the_rings_numbers() -> None:
    """The recorder numbers a rank's messages with all peers together, and has forgotten the first ones."""
    streams = (StreamProgress("0", Op.RECV, 1, 9, 9),)
    found = calls(message(40), message(41, **OPEN), message(42, **OPEN), streams=streams)
    assert found is not None
    assert found.is_whole
    assert [(one.op, one.peer, one.seq) for one in found.in_flight] == [(Op.RECV, 1, 8)]
    assert [(one.op, one.started, one.completed) for one in found.streams if one.peer >= 0] == [
        (Op.RECV, 8, 7)
    ]


def test_a_message_behind_what_the_device_is_in_is_not_entered() -> None:
    """Else its peer would be seen to wait for nobody, and whoever holds this device up would not be its culprit."""
    streams = (StreamProgress("0", Op.RECV, 1, 9, 9),)
    found = calls(entry(1, **OPEN), message(42, **OPEN), streams=streams)
    assert found is not None
    assert [(one.op, one.seq) for one in found.in_flight] == [(Op.ALLREDUCE, 1)]
    assert [(one.started, one.completed) for one in found.streams if one.peer >= 0] == [(8, 8)]


def test_a_recorder_that_keeps_no_messages_is_not_whole() -> None:
    found = calls(entry(1), streams=(StreamProgress("0", Op.RECV, 1, 9, 9),))
    assert found is not None
    assert not found.is_whole


def test_of_a_long_dump_the_newest_calls_are_read_and_the_last_of_each_group() -> None:
    other = entry(7, process_group=["1", "one"], pg_id=1)
    many = [other, *(entry(seq) for seq in range(1, 500)), entry(500, **OPEN)]
    config = {name: {"desc": desc, "ranks": "[0, 1]"} for name, desc in (("0", "default_pg"), ("1", "one"))}
    data = json.dumps({"version": "2.10", "entries": many, "pg_config": config}).encode()
    found = parse_newest(data, 0)
    assert len(found.entries) < 100
    groups = [*GROUPS, GroupInfo("1", (0, 1), "cuda:nccl", "one")]
    known = device_calls(found, 0, groups, (), 0.0)
    assert known is not None
    assert {one.group: (one.started, one.completed) for one in known.streams} == {
        "0": (500, 499),
        "1": (7, 7),
    }


def test_when_the_device_moved_last_is_known_though_torch_has_put_little_away() -> None:
    """Torch puts calls away about once a second; what it has not, has the time of the dump."""
    ended = {"time_discovered_completed_ns": 5}
    done = [entry(seq, **ended) for seq in range(1, 200)]
    not_away = [entry(seq, state="completed", retired=False) for seq in range(200, 300)]
    open_calls = [entry(seq, **OPEN) for seq in range(300, 400)]
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}
    dump = {"version": "2.10", "entries": [*done, *not_away, *open_calls], "pg_config": config}
    assert parse_newest(json.dumps(dump).encode(), 0).moved_ns == 5


LOOKED = {"time_discovered_started_ns": 1, "time_discovered_completed_ns": 2}


def test_a_begin_is_known_from_the_first_call_on_at_which_torch_looked() -> None:
    timed = [entry(seq, **LOOKED) for seq in range(10, 100)]
    behind = [entry(seq, **OPEN) for seq in range(100, 300)]
    for before, begun in ((timed, False), ([entry(seq) for seq in range(10, 100)], None)):
        found = calls(*before, *behind)
        assert found is not None
        assert [(one.seq, one.begun) for one in found.in_flight] == [(100, begun)]


def test_what_a_device_has_not_begun_as_it_is_in_something_before_it_is_not_entered() -> None:
    """In a message: neither the collective nor the message to come is begun."""
    words = {"profiling_name": "nccl:send 0->1"}
    entries = [
        entry(5, **LOOKED),
        message(41, **{**OPEN, "state": "started"}),
        entry(6, **OPEN, time_created_ns=50 * 10**9),
        message(42, **OPEN, **words, time_created_ns=51 * 10**9),
    ]
    streams = (StreamProgress("0", Op.RECV, 1, 9, 9), StreamProgress("0", Op.SEND, 1, 4, 4))
    found = calls(*entries, streams=streams)
    assert found is not None
    assert [(one.op, one.seq, one.begun) for one in found.in_flight] == [(Op.RECV, 9, True)]
    assert [(one.op, one.started, one.completed) for one in found.streams] == [
        (Op.ALLREDUCE, 5, 5),
        (Op.RECV, 9, 8),
        (Op.SEND, 3, 3),
    ]


def test_a_device_has_moved_when_the_watchdog_saw_it_end_a_call() -> None:
    """What torch finds out for a dump has the time of that dump, and a device in one call for long begins none."""
    is_in = entry(2, **{**OPEN, "state": "started", "time_discovered_started_ns": 900})
    later = entry(3, retired=False, time_discovered_completed_ns=901)
    dump = {"version": "2.10", "entries": [entry(1, **LOOKED), is_in, later], "pg_config": {}}
    assert parse_newest(json.dumps(dump).encode(), 0).moved_ns == 2


def test_an_event_that_was_never_recorded_is_no_end() -> None:
    """CUDA says that it is over, while the host is about to enqueue the call."""
    found = calls(entry(1), entry(2, **OPEN), entry(3, retired=False))
    assert found is not None
    assert [(one.started, one.completed) for one in found.streams] == [(2, 1)]


def test_what_hooks_record_tells_no_ends() -> None:
    """A call that torch's hook has recorded, as on nccl2, is done as soon as it is enqueued."""
    found = calls(*(entry(seq, profiling_name="c10d:allreduce", state="scheduled") for seq in (1, 2, 3)))
    assert found is not None
    assert not found.is_whole
    assert not found.in_flight
    assert [(one.started, one.completed) for one in found.streams] == [(3, 3)]


def test_a_group_whose_name_was_given_again_is_not_told() -> None:
    again = [*GROUPS, GroupInfo("0#2", (0, 1), "cuda:nccl", "default_pg")]
    assert calls(entry(1), groups=again) is None


def test_groups_that_move_data_on_the_host_are_left_out() -> None:
    assert calls(entry(1), groups=[GroupInfo("0", (0, 1), "cpu:gloo", "default_pg")]) is None


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"entries": 5}', b'{"version": "9", "entries": []}', b"{", b"\xff"]
)
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(TraceError):
        parse_newest(data, 0)
