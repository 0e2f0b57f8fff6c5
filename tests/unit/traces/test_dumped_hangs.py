"""Hangs by their flight-recorder dumps: who is named, and how surely. Calls are numbered as torch numbers them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepstep.analyze import analyze
from keepstep.core.incident import Incident


@dataclass(frozen=True)
class Call:
    """One call of a rank, in the default group of all ranks unless said otherwise."""

    op: str = "all_reduce"
    done: bool = True
    peer: int = -1
    line: int = 50
    size: int = 64


def send(peer: int, done: bool = True, **more: Any) -> Call:
    return Call("send", done, peer, **more)


def recv(peer: int, done: bool = True, **more: Any) -> Call:
    return Call("recv", done, peer, **more)


def entries_of(rank: int, calls: Sequence[Call]) -> list[dict[str, Any]]:
    collectives = messages = 0
    found: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        is_message = call.peer >= 0
        messages += is_message
        collectives += not is_message
        arrow = "->" if call.op == "send" else "<-"
        found.append({
            "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
            "profiling_name": f"nccl:{call.op} {rank}{arrow}{call.peer}" if is_message else f"nccl:{call.op}",
            "collective_seq_id": collectives, "p2p_seq_id": messages, "is_p2p": is_message,
            "state": "completed" if call.done else "scheduled", "retired": call.done,
            "time_created_ns": 1_000_000_000 * (number + 1),
            "frames": [{"name": "<module>", "filename": "/home/me/train.py", "line": call.line}],
            "input_sizes": [[call.size]], "output_sizes": [[call.size]], "input_dtypes": ["BFloat16"],
        })  # fmt: skip
    return found


def write(folder: Path, job: Mapping[int, Sequence[Call]], world: int = 0) -> None:
    everybody = list(range(world or len(job)))
    for rank, calls in job.items():
        entries = entries_of(rank, calls)
        own = [one["collective_seq_id"] for one in entries if not one["is_p2p"]]
        done = [one["collective_seq_id"] for one in entries if not one["is_p2p"] and one["retired"]]
        counts = {
            "last_enqueued_collective": max(own, default=0),
            "last_completed_collective": max(done, default=0),
        }
        content = {
            "version": "2.9", "pg_config": {"0": {"desc": "default_pg", "ranks": str(everybody)}},
            "pg_status": {"0": counts}, "entries": entries,
        }  # fmt: skip
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))


def write_as_hooks(folder: Path, job: Mapping[int, Sequence[Call]]) -> None:
    """The dumps as torch's hooks record a group of nccl2: what is called is done, and no message has another end."""
    write(folder, job)
    for rank in job:
        path = folder / f"nccl_trace_rank_{rank}"
        content = pickle.loads(path.read_bytes())
        for one in content["entries"]:
            name = one["profiling_name"].removeprefix("nccl:").split()[0]
            one.update(profiling_name=f"c10d:{name}", state="scheduled", retired=True)
        content["pg_status"]["0"] = {"last_enqueued_collective": 1, "last_completed_collective": 1}
        path.write_bytes(pickle.dumps(content))


def incident_of(folder: Path, job: Mapping[int, Sequence[Call]], world: int = 0) -> Incident:
    write(folder, job, world)
    (incident,) = analyze(folder).incidents
    return incident


def named(incident: Incident) -> dict[int | None, str]:
    """The confidence by rank."""
    return {culprit.rank: culprit.confidence for culprit in incident.culprits}


def pipeline(stages: int, stuck: int, batches: int = 3, before: Sequence[Call] = ()) -> dict[int, list[Call]]:
    """A pipeline whose ``stuck`` stage has got ``batches`` micro-batches and is still busy with the last of them."""
    job: dict[int, list[Call]] = {}
    for rank in range(stages):
        ahead = stuck - rank if rank < stuck else 0  # a stage before it has sent as many more
        sent, got = (batches - 1 + ahead, batches + ahead) if rank <= stuck else (batches - 1, batches - 1)
        calls = list(before)
        for number in range(max(sent, got)):
            calls += [recv(rank - 1)] * (rank > 0 and number < got)
            calls += [send(rank + 1)] * (rank < stages - 1 and number < sent)
        if rank < stuck:
            calls.append(send(rank + 1, done=False))
        elif rank > stuck:
            calls.append(recv(rank - 1, done=False))
        job[rank] = calls
    return job


@pytest.mark.parametrize(("stages", "stuck"), [(4, 2), (4, 3), (8, 5), (8, 7)])
def test_in_a_pipeline_all_wait_for_the_stage_without_a_dump(tmp_path: Path, stages: int, stuck: int) -> None:
    job = pipeline(stages, stuck)
    del job[stuck]
    incident = incident_of(tmp_path, job, stages)
    assert named(incident) == {stuck: "low"}
    assert incident.culprits[0].cause == "silent"
    assert set(incident.victims) == set(range(stages)) - {stuck}


@pytest.mark.parametrize(("stuck", "lost"), [(3, 2), (0, 1)])
def test_an_idle_stage_is_as_suspect_as_the_lost_one_that_may_wait_for_it(
    tmp_path: Path, stuck: int, lost: int
) -> None:
    job = pipeline(4, stuck)
    del job[lost]
    assert named(incident_of(tmp_path, job, 4)) == {stuck: "low", lost: "low"}


@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.parametrize(("stages", "stuck"), [(3, 1), (4, 1), (4, 2), (4, 3)])
def test_ends_of_messages_are_matched_by_order(tmp_path: Path, stages: int, stuck: int, before: int) -> None:
    incident = incident_of(tmp_path, pipeline(stages, stuck, before=[Call()] * before))
    assert named(incident) == {stuck: "high"}
    assert set(incident.victims) == set(range(stages)) - {stuck}


def test_a_message_that_nobody_sends_has_not_been_entered(tmp_path: Path) -> None:
    job = {rank: [*[Call()] * 10, Call(done=False)] for rank in range(4)}
    job[3][-1] = recv(2, done=False)
    incident = incident_of(tmp_path, job)
    assert named(incident).keys() <= {2, 3}
    assert "members entered" not in str(incident)


def test_a_message_that_its_sender_has_left_is_in_transfer(tmp_path: Path) -> None:
    """A small one is done for its sender before it has arrived."""
    job = {0: [send(1), send(1)], 1: [recv(0), recv(0, done=False)]}
    (culprit,) = incident_of(tmp_path, job).culprits
    assert culprit.link is not None
    assert culprit.link.ranks in ((0, 1), (1, 0))


def batched(folder: Path, size: int) -> None:
    """Make the dumps in a folder as if all calls were in batches of ``size`` alike ones."""
    for path in folder.iterdir():
        content = pickle.loads(path.read_bytes())
        entries: list[dict[str, Any]] = []
        for one in content["entries"]:
            name = one["profiling_name"]
            part = one | {"state": "scheduled", "retired": False}
            entries += [part] * size + [one | {"profiling_name": "nccl:coalesced", "input_sizes": []}]
            assert name != "nccl:coalesced"
        path.write_bytes(pickle.dumps(content | {"entries": entries}))


@pytest.mark.parametrize("stuck", [1, 2])
def test_batched_messages_have_the_state_of_their_batch(tmp_path: Path, stuck: int) -> None:
    write(tmp_path, pipeline(4, stuck))
    batched(tmp_path, 1)
    (incident,) = analyze(tmp_path).incidents
    assert named(incident) == {stuck: "high"}


def test_batched_collectives_are_one(tmp_path: Path) -> None:
    job = {rank: [*[Call("_all_gather_base")] * 5, Call("_all_gather_base", done=False)] for rank in range(4)}
    job[2].pop()
    write(tmp_path, job)
    batched(tmp_path, 3)
    (incident,) = analyze(tmp_path).incidents
    assert named(incident) == {2: "high"}


@pytest.mark.parametrize("size", [1, 3])
def test_batches_that_are_done_are_no_hang(tmp_path: Path, size: int) -> None:
    messages = {0: [send(1)] * 3, 1: [recv(0)] * 3}
    for job in (messages, {rank: [Call()] * 3 for rank in range(2)}):
        write(tmp_path, job)
        batched(tmp_path, size)
        assert analyze(tmp_path).incidents == ()


def test_a_ring_of_batches_waits_for_the_rank_that_has_not_come(tmp_path: Path) -> None:
    """Each rank sends to the next and receives from the one before, both in one batch."""
    job = {rank: [send((rank + 1) % 4), recv((rank - 1) % 4)] * 3 for rank in range(4)}
    for rank in (0, 1, 3):
        job[rank] += [send((rank + 1) % 4, done=False), recv((rank - 1) % 4, done=False)]
    write(tmp_path, job)
    for path in tmp_path.iterdir():
        content = pickle.loads(path.read_bytes())
        entries: list[dict[str, Any]] = []
        for number, one in enumerate(content["entries"]):
            same = one | {"p2p_seq_id": number // 2 + 1}
            entries.append(same | {"state": "scheduled", "retired": False})
            if number % 2:
                entries.append(same | {"profiling_name": "nccl:coalesced"})
        path.write_bytes(pickle.dumps(content | {"entries": entries}))
    (incident,) = analyze(tmp_path).incidents
    assert named(incident) == {2: "high"}
    assert incident.victims == (0, 1, 3)


def test_a_call_is_done_once_a_later_one_of_its_group_is(tmp_path: Path) -> None:
    stale = [Call(), Call(done=False), Call()]
    write(tmp_path, dict.fromkeys(range(3), stale))
    assert analyze(tmp_path).incidents == ()


def test_a_message_of_another_size_than_its_receive_is_told_with_both_lines(tmp_path: Path) -> None:
    job = pipeline(4, 2)
    job[1][-1] = send(2, done=False, size=64, line=88)
    job[2].append(recv(1, done=False, size=128, line=70))
    incident = incident_of(tmp_path, job)
    assert (incident.kind, named(incident)) == ("desync", {1: "low", 2: "low"})
    assert "rank 1 in SEND of 128 B (64 bfloat16) at /home/me/train.py:88" in incident.evidence[2]
    assert "rank 2 in RECV of 256 B (128 bfloat16) at /home/me/train.py:70" in incident.evidence[2]


@pytest.mark.parametrize(("ranks", "odd"), [(3, 1), (4, 0), (8, 5)])
def test_a_call_too_many_in_mid_run_is_found_by_its_line(tmp_path: Path, ranks: int, odd: int) -> None:
    """The rank waits alone in the last call, which is like all others; the one before which it was ahead is not."""
    job = {rank: [Call()] * 12 for rank in range(ranks)}
    job[odd] = [*[Call()] * 6, Call(line=212), *[Call()] * 5, Call(done=False)]
    incident = incident_of(tmp_path, job)
    assert named(incident) == {odd: "medium"}
    assert "ALLREDUCE seq 7 at /home/me/train.py:212" in incident.culprits[0].detail


def test_two_ranks_alone_in_a_new_call_are_named_together(tmp_path: Path) -> None:
    job = {rank: [Call()] * 10 + [Call(line=203, done=False)] * (rank > 5) for rank in range(8)}
    assert named(incident_of(tmp_path, job)) == {6: "medium", 7: "medium"}


def test_many_are_never_sure_to_be_at_fault_for_a_few_that_wait(tmp_path: Path) -> None:
    job = {rank: [Call()] * 10 + [Call(done=False)] * (rank == 0) for rank in range(4)}
    assert set(named(incident_of(tmp_path, job)).values()) == {"low"}


@pytest.mark.parametrize("past", [5, 12])
def test_of_two_ranks_either_may_have_made_a_call_too_many_or_one_too_few(tmp_path: Path, past: int) -> None:
    job = {0: [*[Call()] * past, Call(line=212, done=False)], 1: [Call()] * past}
    incident = incident_of(tmp_path, job)
    assert named(incident) == {0: "low", 1: "low"}
    assert all(f"/home/me/train.py:{line}" in str(incident.evidence) for line in (50, 212))
    job[0][-1] = Call(done=False)  # a call as all before: rank 1 has yet to come
    assert named(incident_of(tmp_path, job)) == {1: "high"}


@pytest.mark.parametrize("keeps_times", [True, False])
def test_a_device_that_has_not_begun_what_all_others_have_is_named(tmp_path: Path, keeps_times: bool) -> None:
    write(tmp_path, {rank: [*[Call()] * 5, *[Call(done=False)] * 3] for rank in range(4)})
    for rank in range(4):
        path = tmp_path / f"nccl_trace_rank_{rank}"
        content = pickle.loads(path.read_bytes())
        for one in content["entries"][: 5 + (rank != 1)] if keeps_times else ():
            one["time_discovered_started_ns"] = one["time_created_ns"] + 1
        for one in content["entries"][5 : 5 + (rank != 1)]:
            one["state"] = "started"
        path.write_bytes(pickle.dumps(content))
    (incident,) = analyze(tmp_path).incidents
    assert named(incident) == ({1: "medium"} if keeps_times else {})


@pytest.mark.parametrize("is_over", [True, False])
def test_a_rank_that_sends_to_another_than_waits_for_it_is_named(tmp_path: Path, is_over: bool) -> None:
    job = pipeline(4, 2)
    job[2].append(send(0, done=False, line=88))
    if is_over:
        job[0].pop()
    incident = incident_of(tmp_path, job)
    assert named(incident) == {2: "medium"}
    assert "SEND to rank 0 at /home/me/train.py:88" in incident.culprits[0].detail


def test_the_first_message_between_two_ranks_is_not_amiss_by_itself(tmp_path: Path) -> None:
    job = {0: [Call(), send(1, done=False)], 1: [Call()], 2: [Call()]}
    assert "another peer" not in str(incident_of(tmp_path, job))


def test_calls_that_hooks_record_are_not_taken_for_done(tmp_path: Path) -> None:
    """Rank 2 has called less: that holds the others up, though their calls are recorded as done."""
    write_as_hooks(tmp_path, {rank: [Call()] * (5 if rank == 2 else 7) for rank in range(4)})
    found = analyze(tmp_path)
    (incident,) = found.incidents
    assert (incident.kind, named(incident)) == ("hang", {2: "low"})
    assert set(incident.victims) == {0, 1, 3}
    assert any("torch's hooks record neither" in line for line in found.missing)


def test_calls_that_hooks_record_are_compared(tmp_path: Path) -> None:
    job = {rank: [Call()] * 5 + [Call(line=60)] * 2 for rank in range(3)}
    job[1] = [Call()] * 5 + [Call("broadcast", line=70), *[Call()] * 4]
    write_as_hooks(tmp_path, job)
    (incident,) = analyze(tmp_path).incidents
    assert incident.kind == "desync"
    assert set(named(incident)) == {1}


def test_of_as_many_calls_that_hooks_record_nothing_is_concluded(tmp_path: Path) -> None:
    write_as_hooks(tmp_path, {rank: [Call(), send(1 - rank), Call()] for rank in range(2)})
    found = analyze(tmp_path)
    assert found.incidents == ()
    assert found.missing[-1] == "an operation in flight: all ranks have called as many"
