"""Hangs on groups of a device: what is not finished, by torch's flight recorder or by the ranks' own counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import (
    DeviceCalls,
    GroupInfo,
    How,
    OpEnded,
    OpInFlight,
    PathProbe,
    RankState,
    Stillness,
    StreamProgress,
)
from keepstep.locate import hidden_waits, locate_hang, waits_seen
from keepstep.locate._device_calls import device_groups

ALLREDUCE, SEND, RECV = int(Op.ALLREDUCE), int(Op.SEND), int(Op.RECV)


def state(rank: int, *streams: StreamProgress, device: DeviceCalls | None = None) -> RankState:
    return RankState(rank, True, 20, Phase.BACKWARD, 90.0, 400, 90.0, 95.0, (), streams, "S", device=device)


def called(count: int, group: str = "0", *, ended: tuple[OpEnded, ...] = ()) -> StreamProgress:
    """By its own count a rank has called that many collectives; on a device all of them have ended for the host."""
    return StreamProgress(group, ALLREDUCE, -1, count, count, ended)


def told(
    completed: int, entered: int, nbytes: int = 4096, *, begun: bool | None = None, group: str = "0"
) -> DeviceCalls:
    """What a flight recorder tells: the device has completed some and is in the next, or in none."""
    flight = OpInFlight(group, ALLREDUCE, -1, entered, 80.0, bytes=nbytes, element="float32", begun=begun)
    flights = (flight,) if entered > completed else ()
    return DeviceCalls(flights, (StreamProgress(group, ALLREDUCE, -1, entered, completed),))


def judged(*states: RankState, groups: tuple[str, ...] = ("0",)) -> Diagnosis:
    ranks = tuple(one.rank for one in states)
    known = {name: GroupInfo(name, ranks, "cuda:nccl") for name in groups}
    return locate_hang(Evidence(known, dict.fromkeys(ranks, "n"), states=states))


def named(found: Diagnosis) -> list[tuple[int | None, str, str]]:
    return [(one.rank, one.stage, one.confidence) for one in found.culprits]


def test_who_has_finished_all_it_called_while_others_wait_hangs_on_the_host():
    states = [state(rank, device=told(63, 63 if rank == 1 else 64)) for rank in range(4)]
    found = judged(*states)
    assert found.kind == "hang"
    assert named(found) == [(1, "backward", "high")]
    assert found.victims == (0, 2, 3)


def test_who_called_less_is_named_by_the_ranks_own_counts():
    found = judged(*(state(rank, called(63 if rank == 1 else 66)) for rank in range(4)))
    assert named(found) == [(1, "backward", "high")]
    assert "seq 64" in found.summary


def test_a_recorder_that_tells_no_ends_is_a_count():
    states = [
        state(rank, called(5), device=DeviceCalls((), (called(63 if rank == 1 else 66),), is_whole=False))
        for rank in range(4)
    ]
    found = judged(*states)
    assert [one.rank for one in found.culprits] == [1]
    assert "seq 64" in found.summary


def test_a_rank_that_skipped_runs_ahead_and_is_odd_by_what_it_calls():
    """Rank 1 has left out call 64: it is the only one with another size there, and has called more than the others."""
    states = [
        state(rank, called(81 if rank == 1 else 67), device=told(63, 64, 512 if rank == 1 else 4096))
        for rank in range(4)
    ]
    found = judged(*states)
    assert found.kind == "desync"
    assert named(found) == [(1, "backward", "high")]


def test_of_two_ranks_that_call_differently_nobody_is_odd_for_sure():
    found = judged(state(0, device=told(63, 64)), state(1, device=told(63, 64, 512)))
    assert found.kind == "desync"
    assert all(confidence == "low" for _, _, confidence in named(found))


def test_a_device_that_has_not_begun_what_the_others_have_stands_still():
    states = [state(rank, device=told(63, 64, begun=rank != 1)) for rank in range(4)]
    (culprit,) = judged(*states).culprits
    assert (culprit.rank, culprit.cause, culprit.stage) == (1, "its GPU stands still", "transfer")


def test_all_alike_is_the_network_only_where_all_devices_have_begun():
    unknown = judged(*(state(rank, device=told(63, 64)) for rank in range(2)))
    assert not unknown.culprits
    assert "have begun" in unknown.missing[0]
    (culprit,) = judged(*(state(rank, device=told(63, 64, begun=True)) for rank in range(2))).culprits
    assert culprit.link is not None
    assert culprit.link.ranks == (0, 1)


def test_a_network_that_carries_nothing_for_many_ranks_is_named_without_its_link():
    states = [state(rank, device=told(63, 64, begun=True)) for rank in range(4)]
    found = judged(*states)
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.link, culprit.cause) == (None, None, "network")
    assert culprit.confidence == "medium"
    assert "between which of ranks 0-3" in found.missing[0]
    ranks = range(4)
    nodes = {rank: f"n{rank // 2}" for rank in ranks}
    groups = {"0": GroupInfo("0", tuple(ranks), "cuda:nccl")}
    probes = [PathProbe("n0", "n1", "echo", 0.001), PathProbe("n1", "n0", "echo", 0.001)]
    (culprit,) = locate_hang(Evidence(groups, nodes, states=states, probes=probes)).culprits
    assert culprit.link is not None
    assert (culprit.link.nodes, culprit.confidence) == (("n0", "n1"), "low")


def test_a_member_that_has_called_it_and_is_in_something_else_is_no_sign_of_the_network():
    """Rank 3 has made the call, too, but its device is in a message with rank 2, who is in the collective."""
    message = OpInFlight("0", RECV, 2, 8, 80.0, begun=True)
    streams = (StreamProgress("0", ALLREDUCE, -1, 63, 63), StreamProgress("0", RECV, 2, 8, 7))
    others = [state(rank, device=told(63, 64, begun=True)) for rank in range(3)]
    sender = replace(others[2], streams=(StreamProgress("0", SEND, 3, 7, 7),))
    found = judged(*others[:2], sender, state(3, device=DeviceCalls((message,), streams)))
    assert [(one.rank, one.cause) for one in found.culprits] == [(3, "skipped an operation")]
    assert found.kind == "desync"


def test_a_device_that_has_not_begun_its_message_stands_still():
    """Ranks 2 and 3 wait for rank 1's message, directly or not; rank 1 is in a kernel before it."""
    own = OpInFlight("0", SEND, 2, 8, 80.0, begun=False)
    sender = state(1, device=DeviceCalls((own,), (StreamProgress("0", SEND, 2, 8, 7),)))
    other = OpInFlight("0", RECV, 1, 8, 80.0, begun=True)
    receiver = state(2, device=DeviceCalls((other,), (StreamProgress("0", RECV, 1, 8, 7),)))
    rest = [state(rank, device=told(3, 4, begun=True, group="1")) for rank in (0, 3)]
    (culprit,) = judged(sender, receiver, *rest, groups=("0", "1")).culprits
    assert (culprit.rank, culprit.cause, culprit.confidence) == (1, "its GPU stands still", "medium")


def test_a_message_that_was_sent_and_not_taken_hides_no_gpu_that_stands_still():
    """Rank 2 waits for a message that rank 3 has not sent, by their counts alone, which tell nothing of its device."""
    sent, taken = StreamProgress("0", SEND, 1, 6, 5), StreamProgress("0", RECV, 0, 5, 4)
    others = [
        state(2, StreamProgress("0", RECV, 3, 7, 7), device=told(63, 64, begun=True)),
        state(3, StreamProgress("0", SEND, 2, 6, 6), device=told(63, 64, begun=True)),
    ]
    is_in = OpInFlight("0", SEND, 1, 6, 80.0, begun=True)
    behind = OpInFlight("0", RECV, 0, 5, 80.0, begun=False)
    states = [
        state(0, sent, device=DeviceCalls((is_in,), (StreamProgress("0", ALLREDUCE, -1, 63, 63), sent))),
        state(1, taken, device=DeviceCalls((behind,), (StreamProgress("0", ALLREDUCE, -1, 63, 63), taken))),
        *others,
    ]
    (culprit,) = judged(*states).culprits
    assert (culprit.rank, culprit.cause, culprit.confidence) == (1, "its GPU stands still", "medium")


def test_a_device_that_may_be_in_a_call_that_was_not_looked_at_is_not_blamed():
    """Rank 1's device has not begun one call; whether it is in another, the recorder does not tell."""
    streams = (StreamProgress("0", ALLREDUCE, -1, 63, 63), StreamProgress("0", RECV, 0, 5, 4))
    behind = OpInFlight("0", ALLREDUCE, -1, 64, 80.0, begun=False)
    unknown = OpInFlight("0", RECV, 0, 5, 80.0)
    states = [state(rank, device=told(63, 64, begun=True)) for rank in (0, 2, 3)]
    found = judged(states[0], state(1, device=DeviceCalls((behind, unknown), streams)), *states[1:])
    assert "its GPU stands still" not in [one.cause for one in found.culprits]


def test_messages_are_counted_for_each_sender_and_receiver():
    """Rank 1 owes rank 2 its fifth message; what it has from rank 0 is complete."""
    states = [
        state(0, StreamProgress("0", SEND, 1, 5, 5), StreamProgress("0", RECV, 1, 5, 5)),
        state(
            1,
            StreamProgress("0", RECV, 0, 5, 5),
            StreamProgress("0", SEND, 0, 4, 4),
            StreamProgress("0", SEND, 2, 4, 4),
        ),
        state(2, StreamProgress("0", RECV, 1, 5, 5)),
    ]
    found = judged(*states)
    assert named(found) == [(1, "backward", "high")]
    assert found.victims == (0, 2)


def test_a_process_that_does_not_answer_while_all_others_wait_for_it_is_held_up():
    states = [state(rank, device=told(63, 64)) for rank in range(4)]
    states[2] = replace(states[2], device=DeviceCalls(answered=False))
    (culprit,) = judged(*states).culprits
    assert (culprit.rank, culprit.confidence) == (2, "medium")
    assert "holds it up" in culprit.detail


def test_beside_a_process_that_is_mute_the_one_that_has_finished_all_still_hangs():
    states = [state(rank, device=told(63, 63 if rank == 1 else 64)) for rank in range(4)]
    states[2] = state(2, device=DeviceCalls(answered=False))
    found = judged(*states)
    assert 1 not in found.victims
    assert [one.rank for one in found.culprits if one.confidence != "low"] in ([1], [])


def test_a_rank_of_which_nothing_is_told_is_no_culprit_by_its_own_count():
    """The recorder and the probe number collectives differently: the two are never laid side by side."""
    states = [state(rank, called(5), device=told(63, 64)) for rank in range(3)]
    states[2] = replace(states[2], device=None)
    found = judged(*states)
    assert not found.culprits
    assert found.missing == ("what rank 2 called on a device: torch's flight recorder does not tell",)


@pytest.mark.parametrize("how", ["spins", "moves"])
def test_without_a_recorder_who_is_still_while_all_others_spin_is_named_unsurely(how: How):
    states = [replace(state(rank), stillness=Stillness(how, 85.0)) for rank in range(4)]
    assert not judged(*states).culprits
    states[1] = replace(states[1], stillness=Stillness("still", 85.0))
    assert named(judged(*states)) == [(1, "backward", "low")]
    states[2] = replace(states[2], stillness=Stillness("still", 85.0))
    assert not judged(*states).culprits


def test_waits_are_seen_where_the_device_has_something_to_finish():
    groups = {"0": GroupInfo("0", (0, 1), "cuda:nccl")}
    ahead = Evidence(groups, {}, states=[state(0, called(5)), state(1, called(4))])
    assert waits_seen(ahead)
    assert hidden_waits(ahead) == {0, 1}
    dumped = Evidence(
        groups, {}, states=[state(0, called(5), device=told(4, 5)), state(1, called(4), device=told(4, 4))]
    )
    assert waits_seen(dumped)
    assert not hidden_waits(dumped)
    even = Evidence(groups, {}, states=[state(0, called(5)), state(1, called(5))])
    assert not waits_seen(even)


RANKS = 5
counts = st.dictionaries(
    st.integers(0, RANKS - 1), st.integers(0, 4), min_size=1, max_size=RANKS
)  # by rank; who is missing did not report
messages = st.dictionaries(
    st.tuples(st.sampled_from((SEND, RECV)), st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)),
    st.integers(1, 4),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(counts=counts, messages=messages)
def test_counts_tell_what_a_dumb_twin_tells(
    counts: dict[int, int], messages: dict[tuple[int, int, int], int]
) -> None:
    """The twin lets every call happen, one at a time, as soon as all whom it needs have called it, too."""
    messages = {key: n for key, n in messages.items() if key[1] != key[2] and key[1] in counts}
    states = [
        state(
            rank,
            *([called(count)] if count else []),
            *(StreamProgress("0", op, peer, n, n) for (op, own, peer), n in messages.items() if own == rank),
        )
        for rank, count in counts.items()
    ]
    groups = {"0": GroupInfo("0", tuple(range(RANKS)), "nccl")}
    found = {
        (rank.rank, one.op if one.peer >= 0 else 0, one.peer, one.seq)
        for rank in device_groups(states, groups).states
        for one in rank.in_flight
    }
    expected: set[tuple[int, int, int, int]] = set()
    for rank, count in counts.items():
        done = 0
        while done < count and all(other > done for other in counts.values()):
            done += 1
        if done < count:
            expected.add((rank, 0, -1, done + 1))
    for (op, rank, peer), count in messages.items():
        theirs = messages.get((RECV if op == SEND else SEND, peer, rank), 0)
        done = 0
        while done < count and (theirs > done or peer not in counts):
            done += 1
        if done < count:
            expected.add((rank, op, peer, done + 1))
    assert found == expected
