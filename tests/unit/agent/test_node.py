"""The node's agent over real rings: what it says, to whom again, and what it does with rings that are none."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from keepstep.agent.arguments import parse
from keepstep.agent.node import NodeAgent
from keepstep.agent.sensors.activity import Suspect
from keepstep.agent.sensors.processes import ProcessId
from keepstep.agent.sensors.sockets import SocketSensor, connections
from keepstep.core.errors import UsageError
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.core.summary import Stillness
from keepstep.ring import RingReader, RingWriter, create, orders
from keepstep.wire import Found, Groups, Message, ProfileRequest, StateRequest


class Node:
    """Two rings of this process, an agent, and what it sent."""

    def __init__(self, tmp_path: Path) -> None:
        self.descriptors = [create(256), create(256)]
        self.paths = {
            rank: f"/proc/{os.getpid()}/fd/{number}" for rank, number in enumerate(self.descriptors)
        }
        self.writers = [
            RingWriter(number, rank=rank, world_size=4) for rank, number in enumerate(self.descriptors)
        ]
        for writer in self.writers:
            writer.group("world", (0, 1, 2, 3), "gloo", "default")
        self.sent: list[Message] = []
        self.run_dir = tmp_path
        self.agent = self.attach()

    def attach(self) -> NodeAgent:
        return NodeAgent(self.paths, "here", 0, self.run_dir, self.sent.append)

    def step(self) -> None:
        for writer in self.writers:
            backward = writer.start(Kind.PHASE, Phase.BACKWARD)
            writer.start(Kind.COLLECTIVE, Op.ALLREDUCE, 0, -1, 64, Flag.SYNC_KNOWN)()
            backward()
            writer.start(Kind.PHASE, Phase.OPTIMIZER)()

    def poll(self, later_s: float = 0.0) -> bool:
        return self.agent.poll(time.monotonic_ns() + int(later_s * 1e9))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.agent.close()
    for number in made.descriptors:
        os.close(number)


def test_steps_are_counted_from_where_the_training_goes_on(node: Node) -> None:
    for writer in node.writers:
        writer.begins_at(40)
    for _ in range(12):
        node.step()
        node.poll(0.1)
    beat = node.agent.heartbeat(time.monotonic_ns())
    assert [one.step for one in beat.ranks] == [51, 51]
    assert [one.step for one in node.agent.profile(ProfileRequest(9, 44, 45)).iterations] == [44, 44, 45, 45]


def test_steps_are_counted_logged_and_profiled(node: Node) -> None:
    for _ in range(12):
        node.step()
        node.poll(0.1)
    assert not node.poll(0.1)
    beat = node.agent.heartbeat(time.monotonic_ns())
    assert [(one.rank, one.step, one.phase, one.alive) for one in beat.ranks] == [
        (0, 11, Phase.AFTER_STEP, True),
        (1, 11, Phase.AFTER_STEP, True),
    ]
    assert all(one.iteration_s > 0 and one.progress == 12 * 3 * 2 for one in beat.ranks)
    log = [json.loads(line) for line in (node.run_dir / "nodes/0/iterations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(12))
    assert abs(log[-1]["ranks"]["0"]["t"] - time.time()) < 60
    profile = node.agent.profile(ProfileRequest(9, 4, 6))
    assert (profile.request, [(one.step, one.rank) for one in profile.iterations]) == (
        9,
        [(4, 0), (4, 1), (5, 0), (5, 1), (6, 0), (6, 1)],
    )
    assert profile.iterations[0].streams[0].group == "world"


def test_steps_taken_together_are_profiled_one_by_one_and_logged_once(node: Node) -> None:
    for _ in range(12):
        node.step()
        node.poll(0.1)
    node.agent.take_together()
    node.agent.take_together()
    for _ in range(12):
        node.step()
        node.poll(0.1)
    assert [one.step for one in node.agent.heartbeat(time.monotonic_ns()).ranks] == [23, 23]
    log = [json.loads(line) for line in (node.run_dir / "nodes/0/iterations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [*range(12), 15, 19, 23]
    assert [line["ranks"]["1"].get("n") for line in log[-4:]] == [None, 4, 4, 4]
    profile = node.agent.profile(ProfileRequest(9, 10, 14))
    assert [one.step for one in profile.iterations] == [
        number for step in range(10, 15) for number in (step, step)
    ]
    assert all(one.streams[0].count == profile.iterations[0].streams[0].count for one in profile.iterations)


def test_a_profile_lets_the_gpus_times_be_taken_for_a_while(node: Node) -> None:
    descriptor = orders.create()
    agent = NodeAgent(
        node.paths,
        "here",
        0,
        node.run_dir,
        node.sent.append,
        {0: f"/proc/{os.getpid()}/fd/{descriptor}", 1: "/no"},
    )
    agent.profile(ProfileRequest(9, 4, 6))
    page = orders.OrdersPage(descriptor)
    assert 0 < page.words[orders.Word.TIMES_NS] - time.monotonic_ns() <= 30e9
    page.close()
    agent.close()
    os.close(descriptor)


def test_groups_are_told_once_and_again_to_the_next_controller(node: Node) -> None:
    node.step()
    node.poll()
    told = [message for message in node.sent if isinstance(message, Groups)]
    assert [(message.rank, [group.members for group in message.groups]) for message in told] == [
        (0, [(0, 1, 2, 3)])
    ]
    assert [type(message) for message in node.agent.again()] == [Groups]


def test_states_show_what_is_in_flight(node: Node) -> None:
    node.step()
    node.writers[1].start(Kind.PHASE, Phase.BACKWARD)
    node.writers[1].start(Kind.COLLECTIVE, Op.BARRIER, 0, -1, 0, Flag.SYNC_KNOWN)
    states = asyncio.run(node.agent.states(StateRequest(5))).states
    assert states[0].in_flight == ()
    assert [(op.group, op.op, op.seq) for op in states[1].in_flight] == [("world", Op.BARRIER, 2)]
    assert [(one.started, one.completed) for one in states[1].streams] == [(2, 1)]
    assert all(state.alive and state.process_state in "RSD" for state in states)


ALLREDUCE = int(Kind.COLLECTIVE), int(Op.ALLREDUCE), 0, -1, 64, int(Flag.SYNC_KNOWN)
BARRIER = int(Kind.COLLECTIVE), int(Op.BARRIER), 0, -1, 0, int(Flag.SYNC_KNOWN)


def test_states_show_in_what_a_rank_has_failed(node: Node) -> None:
    writer = node.writers[0]
    barrier = writer.site("train.py:15 save")
    for _ in range(12):
        node.step()
        node.poll(0.1)
    writer.start(*ALLREDUCE).fail()
    writer.start(*BARRIER, barrier).fail()  # in a finally
    failed, well = asyncio.run(node.agent.states(StateRequest(5))).states
    assert well.failed == ()
    assert failed.in_flight == ()
    assert [(one.op, one.seq, one.repeats) for one in failed.failed] == [(Op.ALLREDUCE, 13, True)]
    assert failed.failed[0].failed_s > failed.failed[0].since_s
    assert failed.incarnation == 0


def test_operations_that_fail_together_are_told_together(node: Node) -> None:
    writer = node.writers[0]
    buckets = [writer.start(*ALLREDUCE) for _ in range(3)]
    buckets[0].fail()
    buckets[1].fail()
    state = asyncio.run(node.agent.states(StateRequest(5))).states[0]
    assert [one.seq for one in state.failed] == [1, 2]
    assert [one.seq for one in state.in_flight] == [3]


def test_a_rank_that_has_gone_on_has_failed_in_nothing(node: Node) -> None:
    writer = node.writers[0]
    writer.start(*ALLREDUCE).fail()
    again = writer.start(*ALLREDUCE)
    state = asyncio.run(node.agent.states(StateRequest(5))).states[0]
    assert (state.failed, [one.seq for one in state.in_flight]) == ((), [2])
    again()
    writer.start(*BARRIER, writer.site("train.py:15 save"))
    state = asyncio.run(node.agent.states(StateRequest(6))).states[0]
    assert state.failed == ()
    assert [(one.op, one.repeats) for one in state.in_flight] == [(Op.BARRIER, False)]


FAILS = """
import os, signal, sys
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.ring import RingWriter
writer = RingWriter(int(sys.argv[1]), rank=0, world_size=2)
writer.group("world", (0, 1), "gloo", "default")
for _ in range(12):
    writer.start(Kind.PHASE, Phase.BACKWARD)()
    writer.start(Kind.COLLECTIVE, Op.ALLREDUCE, 0, -1, 64, Flag.SYNC_KNOWN)()
    writer.start(Kind.PHASE, Phase.OPTIMIZER)()
operation = writer.start(Kind.COLLECTIVE, Op.ALLREDUCE, 0, -1, 64, Flag.SYNC_KNOWN)
operation.fail() if sys.argv[2] == "fails" else None
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["fails", "waits"])
def test_a_ring_tells_what_its_dead_process_was_in(tmp_path: Path, how: str) -> None:
    descriptor = create(256)
    agent = NodeAgent({0: f"/proc/{os.getpid()}/fd/{descriptor}"}, "here", 0, tmp_path, lambda message: None)
    agent.poll(time.monotonic_ns())
    words = [sys.executable, "-c", FAILS, str(descriptor), how]
    subprocess.run(words, pass_fds=(descriptor,), check=False, timeout=60)
    (state,) = asyncio.run(agent.states(StateRequest(5))).states
    inside = state.failed if how == "fails" else state.in_flight
    assert not state.alive
    assert (state.step, [(one.op, one.seq) for one in inside]) == (11, [(Op.ALLREDUCE, 13)])
    assert (how == "fails") == bool(state.failed)
    agent.close()
    os.close(descriptor)


def test_sockets_are_looked_at_once_when_all_ranks_wait_and_when_states_are_asked_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def look(sensor: SocketSensor, now_s: float, processes: Iterable[ProcessId]) -> None:
        looks.append(now_s)
        sensor_look(sensor, now_s, processes)

    try:
        next(connections(), None)
    except OSError as error:
        pytest.skip(f"this kernel tells nothing of its sockets: {error}")
    sensor_look = SocketSensor.look
    monkeypatch.setattr(SocketSensor, "look", look)
    node.step()
    node.writers[0].start(Kind.COLLECTIVE, Op.BARRIER, 0, -1, 0, Flag.SYNC_KNOWN)
    for later_s in (0.0, 0.4, 0.8):
        node.poll(later_s)
    assert looks == []  # one rank waits, the other computes
    node.writers[1].start(Kind.COLLECTIVE, Op.BARRIER, 0, -1, 0, Flag.SYNC_KNOWN)
    for later_s in (0.0, 0.4, 0.8, 1.2):
        node.poll(later_s)
    assert len(looks) == 1
    monkeypatch.setattr(time, "monotonic_ns", lambda: int((looks[0] + 1) * 1e9))
    for _ in range(2):
        asyncio.run(node.agent.states(StateRequest(5)))
    assert len(looks) == 2


def test_an_agent_that_comes_later_counts_and_logs_on(node: Node) -> None:
    for _ in range(10):
        node.step()
        node.poll(0.1)
    node.agent.close()
    node.step()
    node.agent = node.attach()
    node.poll(0.1)
    beat = node.agent.heartbeat(time.monotonic_ns())
    assert [one.step for one in beat.ranks] == [10, 10]
    log = [json.loads(line) for line in (node.run_dir / "nodes/0/iterations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(11))


def test_many_steps_that_come_at_once_are_logged_once_each_with_all_ranks(node: Node) -> None:
    for _ in range(40):
        node.step()
    node.poll(0.1)
    node.agent.close()
    log = [json.loads(line) for line in (node.run_dir / "nodes/0/iterations.jsonl").read_text().splitlines()]
    assert [(line["step"], list(line["ranks"])) for line in log] == [(step, ["0", "1"]) for step in range(40)]


def test_a_new_process_in_the_same_ring_begins_anew(node: Node) -> None:
    for _ in range(6):
        node.step()
    node.poll(0.1)
    node.writers[0].close()
    del node.writers[0]
    node.writers.insert(0, RingWriter(node.descriptors[0], rank=0, world_size=4, incarnation=1))
    node.writers[0].group("world", (0, 1, 2, 3), "gloo", "default")
    node.step()
    node.poll(0.1)
    assert [one.step for one in node.agent.heartbeat(time.monotonic_ns()).ranks] == [0, 6]


def test_a_ring_that_is_none_is_said_once_and_the_others_go_on(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"no ring at all" * 1000)
    node.agent.close()
    node.paths = {**node.paths, 2: str(foreign), 3: str(tmp_path / "gone")}
    node.agent = node.attach()
    node.step()
    with caplog.at_level(logging.WARNING):
        for second in range(8):
            node.poll(second)
    ranks = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert sorted(ranks, key=str) == [2, 3]
    assert [one.step for one in node.agent.heartbeat(time.monotonic_ns()).ranks] == [0, 0, -1, -1]
    assert len(asyncio.run(node.agent.states(StateRequest(1))).states) == 2


def test_an_unclaimed_ring_is_a_rank_on_its_way(tmp_path: Path) -> None:
    descriptor = create(64)
    agent = NodeAgent({0: f"/proc/{os.getpid()}/fd/{descriptor}"}, "here", 0, tmp_path, lambda message: None)
    for second in range(5):
        agent.poll(time.monotonic_ns() + second * 10**9)
    beat = agent.heartbeat(time.monotonic_ns()).ranks[0]
    assert (beat.step, beat.phase, beat.alive, beat.progress) == (-1, Phase.STARTUP, True, 0)
    assert agent.save_rings() == 0
    agent.close()
    os.close(descriptor)


def test_a_process_that_is_still_before_it_opens_its_ring_is_missed_and_told_again(tmp_path: Path) -> None:
    """The process itself is this test's, the time is not, and what it is seen to do is given."""
    descriptor, sent = create(256), list[Message]()
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    agent = NodeAgent({0: path}, "here", 0, tmp_path, sent.append, workers={0: os.getpid()})

    class Still:
        def look(self, now_s: float, suspects: Mapping[int, Suspect]) -> None:
            assert suspects[0].process.pid == os.getpid()

        def stillness(self, rank: int) -> Stillness:
            return Stillness("still", begun_s)

    agent._activity = Still()  # type: ignore[assignment]
    begun_ns = time.monotonic_ns()
    begun_s = begun_ns * 1e-9
    for tenth in range(750):
        agent.poll(begun_ns + tenth * 100_000_000)
    found = [message.finding for message in sent if isinstance(message, Found)]
    assert [(one.kind, one.rank, one.step) for one in found] == [("hang", 0, -1)] * 2
    (state,) = asyncio.run(agent.states(StateRequest(1))).states
    assert state.alive
    assert state.stillness is not None
    sent.clear()
    writer = RingWriter(descriptor, rank=0, world_size=1)
    agent.poll(begun_ns + 76_000_000_000)
    assert [message.finding.kind for message in sent if isinstance(message, Found)] == ["resumed"]
    writer.close()
    agent.close()
    os.close(descriptor)


def test_how_much_of_a_ring_was_written_since_the_last_poll_is_known(node: Node) -> None:
    node.poll()
    for _ in range(64):
        node.writers[1].start(Kind.COLLECTIVE, Op.ALLREDUCE, 0, -1, 64)()
    node.poll()
    assert node.agent.filled == 64 / RingReader(node.paths[1]).header.records
    node.poll()
    assert node.agent.filled == 0


def test_rings_are_saved_where_reports_look_for_them(node: Node) -> None:
    node.step()
    node.poll()
    assert node.agent.save_rings() == 2
    saved = RingReader(node.run_dir / "rings" / "rank-00001.ring")
    assert (saved.header.rank, len(saved.snapshot())) == (1, 3)


def test_the_command_line_is_checked() -> None:
    words = ["--run-dir", "r", "--controller", "h:1", "--secret-file", "s", "--node", "n", "--node-rank", "2"]
    given = parse([*words, "--ring", "0=/proc/1/fd/3", "--ring", "7=/x"])
    assert (given.controller, given.node_rank, given.rings) == (("h", 1), 2, {0: "/proc/1/fd/3", 7: "/x"})
    assert given.run_dir.is_absolute()
    for wrong in (["--ring", "x=/y"], ["--ring", "3"], ["--ring", "1=/a", "--ring", "1=/b"]):
        with pytest.raises(UsageError, match="--ring"):
            parse([*words, *wrong])
    words += ["--ring", "0=/x", "--words", "0=stderr:0:/proc/1/fd/7"]
    given = parse([*words, "--words", "0=stdout:12:/a:b=c", "--kernel-log", "/k"])
    assert given.words == {0: (("stderr", 0, "/proc/1/fd/7"), ("stdout", 12, "/a:b=c"))}
    assert given.kernel_log == "/k"
    for wrong in ("/x", "0=/x", "0=stderr:/x", "a=stderr:0:/x", "0=stderr:-1:/x", "0=stderr:0:"):
        with pytest.raises(UsageError, match="--words"):
            parse([*words, "--words", wrong])
