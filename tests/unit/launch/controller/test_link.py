"""What a launcher makes of orders, whatever comes together, again, or late."""

from __future__ import annotations

import asyncio
import errno
import re
import secrets
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep import wire
from keepstep.core.errors import LostJobError, RunError
from keepstep.core.finding import Finding
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.controller import connection as linking
from keepstep.launch.controller.connection import Link
from keepstep.launch.controller.member import LEASE_S, Member

JOIN = wire.Join("gpu-1", "10.0.0.1", 2, 29500, -1, 2, 2, 3)


def placement(incarnation: int) -> wire.Placement:
    return wire.Placement(1, 2, 4, 2, "10.0.0.0", 29500, incarnation)


def member(*received: wire.Message) -> Member:
    made = Member(JOIN, 7, lambda: 4711)
    for message in received:
        made.received(message)
    return made


def running(incarnation: int = 0) -> Member:
    made = member(placement(incarnation))
    made.started()
    return made


def test_a_place_and_its_halt_read_together_start_nothing() -> None:
    made = running()
    made.failed(137, "rank 2 died")
    made.halted()
    assert made.received(placement(1)) == []
    assert made.received(wire.Halt(1)) == [wire.Halted(1, 4711)]
    assert made.to_run is None
    made.received(placement(2))
    assert made.to_run == placement(2)


def test_what_cannot_change_its_size_cannot_before_workers_have_run_again() -> None:
    made = running()
    made.halted(rigid="rank 0 alone saves it")
    made.received(placement(1))
    assert made.received(wire.Halt(1)) == [wire.Halted(1, 4711, rigid="rank 0 alone saves it")]
    made.received(placement(2))
    made.started()
    assert made.halted() == [wire.Halted(2, 4711)]


def test_a_new_controller_hears_that_an_operator_ended_the_job() -> None:
    made = running()
    made.received(wire.Stop(79, "stopped by an operator", by_operator=True))
    assert made.ended(79, "stopped") == [wire.Ended(1, 79, "stopped", by_operator=True)]
    assert made.greet()[-1] == wire.Ended(1, 79, "stopped", by_operator=True)
    assert running().ended(1, "rank 2 died") == [wire.Ended(1, 1, "rank 2 died")]


def test_a_halt_and_the_next_place_read_together_end_the_workers_first() -> None:
    made = running()
    assert made.received(wire.Halt(0)) == []  # answered when they have ended
    made.received(placement(1))
    assert made.must_halt
    made.halted()
    assert not made.must_halt
    assert made.to_run == placement(1)


def test_orders_of_an_incarnation_that_is_over_change_nothing() -> None:
    made = running(2)
    for late in (wire.Halt(1), placement(1), placement(2)):
        assert made.received(late) == []
    assert not made.must_halt
    assert made.to_run is None
    assert made.incarnation == 2


def test_a_halt_is_answered_again_each_time() -> None:
    made = running()
    made.received(wire.Halt(0))
    made.halted()
    assert made.received(wire.Halt(0)) == [wire.Halted(0, 4711)]
    assert made.greet()[-1] == wire.Halted(0, 4711)


def test_a_new_controller_hears_what_was_said_and_nothing_of_before() -> None:
    made = running()
    finding = Finding("crash", 2, "gpu-1", 1.0, -1, exit_code=137)
    made.found(finding)
    made.failed(137, "rank 2 died")
    hello, join, *rest = made.greet()
    assert isinstance(hello, wire.Hello)
    assert isinstance(join, wire.Join)
    assert (join.incarnation, join.node_rank) == (0, 1)
    assert rest == [wire.Found(finding), wire.Failed(0, 137, "rank 2 died")]
    made.halted()
    made.received(placement(1))
    again = made.greet()
    assert [type(one) for one in again] == [wire.Hello, wire.Join, wire.Failed]
    assert again[2] == wire.Failed(0, 137, "rank 2 died")  # for the budgets


def test_what_workers_import_is_told_a_new_controller_and_spares() -> None:
    imports = wire.Imports(("json",))
    made = running()
    assert made.imported(imports) == [imports]
    assert made.greet()[-1] == imports
    spare = member(wire.Spare(2), imports)
    assert spare.imports == imports


def test_a_spare_goes_without_a_failure() -> None:
    spare = member(wire.Spare(2))
    assert spare.is_spare
    assert spare.ended(130, "signal SIGINT") == [wire.Bye("signal SIGINT")]
    assert spare.received(wire.Halt(0)) == [wire.Halted(0, 4711)]
    spare.received(placement(1))
    assert spare.to_run == placement(1)
    assert not spare.is_spare


@pytest.mark.parametrize(
    ("halt", "fresh"),
    [(wire.Halt(0), False), (wire.Halt(0, suspend=True), True), (wire.Halt(0, fresh=True), True)],
)
def test_processes_go_on_after_a_failure_and_not_after_an_operator_s_order(
    halt: wire.Halt, fresh: bool
) -> None:
    made = running()
    made.received(halt)
    assert (made.must_halt, made.begins_fresh) == (True, fresh)
    made.halted()
    made.received(placement(1))
    assert not made.begins_fresh


def test_a_controller_that_is_away_ends_no_worker_but_a_dead_network_does() -> None:
    refused, silent = (
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        OSError(errno.ETIMEDOUT, "timed out"),
    )
    made = running()
    made.disconnected(100.0)
    for at_s in range(101, 1000):
        made.trouble(refused, float(at_s))
        assert not made.is_cut_off(float(at_s))
    made.trouble(silent, 1000.0)
    assert not made.is_cut_off(999.0 + LEASE_S - 0.1)
    assert made.is_cut_off(999.0 + LEASE_S)
    made.connected()
    assert not made.is_cut_off(5000.0)


def test_a_job_that_never_begins_again_has_no_lease() -> None:
    made = Member(wire.Join("gpu-1", "10.0.0.1", 2, 29500), 7, lambda: 4711)
    made.received(placement(0))
    made.started()
    made.disconnected(0.0)
    assert not made.is_cut_off(1e6)
    assert not made.is_alone(LEASE_S - 0.1)
    assert made.is_alone(LEASE_S)


def linked(folder: Path, run_id: str, port: int, *, warned: list[str]) -> Link:
    """One that looks for its controller at this port."""
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    job = job_from_command_line([*meet, "--rdzv-id", run_id, "train.py"], {})
    at = Endpoint("127.0.0.1", port)
    run = ToldRun(folder, job, children=False)
    run.said = warned
    return Link(run, at, JOIN, ordered=lambda: None)


async def controller_of(
    run_id: str, secret: bytes, opened: list[wire.Connection], port: int = 0
) -> wire.Server:
    callbacks = wire.ServerCallbacks(lambda _, __: None, opened.append, lambda _, __: None)
    return await wire.serve("127.0.0.1", port, wire.RunKey(secret, run_id), callbacks)


@pytest.mark.parametrize("patience_s", [60.0, 0.5])
def test_a_launcher_gives_up_where_the_controller_of_another_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(linking, "_STRANGER_S", 0.2 if patience_s > 1 else 60.0)
    secret, opened, warned = wire.write_secret(tmp_path / "secret"), list[wire.Connection](), list[str]()

    async def main() -> str:
        server = await controller_of("job-a", secret, opened)
        link = linked(tmp_path, "job-b", server.port, warned=warned)
        with pytest.raises(RunError) as caught:
            await link.join(patience_s)
        await link.close()
        assert server.counters.refused["another-job"] >= 1
        await server.close()
        return str(caught.value)

    told = asyncio.run(main())
    assert re.fullmatch(
        r"the controller at 127\.0\.0\.1:[0-9]+ runs job 'job-a', this node was started for job 'job-b': "
        "give this job its own --rdzv-endpoint, or the same --rdzv-id on all its nodes",
        told,
    )
    assert opened == []
    assert warned == []


def test_a_launcher_follows_another_job_at_its_endpoint(tmp_path: Path) -> None:
    """The controller of the job before is still there when the next one begins."""
    secret, opened = wire.write_secret(tmp_path / "secret"), list[wire.Connection]()

    async def main() -> None:
        before = await controller_of("job-a", secret, opened)
        link = linked(tmp_path, "job-b", before.port, warned=[])
        joining = asyncio.create_task(link.join(60.0))
        while not link.stranger:
            await asyncio.sleep(0.01)
        await before.close()

        def answer(connection: wire.Connection, message: wire.Message) -> None:
            if isinstance(message, wire.Join):
                connection.send(placement(0))

        callbacks = wire.ServerCallbacks(answer, opened.append, lambda _, __: None)
        server = await wire.serve("127.0.0.1", link.controller.port, wire.RunKey(secret, "job-b"), callbacks)
        assert (await joining).node_rank == 1
        assert link.stranger == ""
        await link.close()
        await server.close()

    asyncio.run(main())


def test_workers_do_not_mind_another_jobs_controller_and_it_is_said_once(tmp_path: Path) -> None:
    secret, opened, warned = wire.write_secret(tmp_path / "secret"), list[wire.Connection](), list[str]()

    async def main() -> None:
        server = await controller_of("job-a", secret, opened)
        link = linked(tmp_path, "job-b", server.port, warned=warned)
        link.member.received(placement(0))
        link.member.started()
        link.member.disconnected(0.0)
        link.open()
        while server.counters.refused["another-job"] < 3:
            await asyncio.sleep(0.01)
        assert not link.member.is_cut_off(asyncio.get_running_loop().time())
        assert link.member.runs
        await link.close()
        await server.close()

    asyncio.run(main())
    assert opened == []
    (told,) = warned
    assert "runs job 'job-a', this node was started for job 'job-b'" in told
    assert told.endswith("; the workers of this node train on without it")


def test_a_node_without_workers_waits_in_vain_for_the_controller_of_a_run_that_began_anew(
    tmp_path: Path,
) -> None:
    """The first launcher was killed and started again: its run has a secret of its own, and no place for this node."""
    secret, opened = wire.write_secret(tmp_path / "secret"), list[wire.Connection]()

    async def main() -> None:
        before = await controller_of("job", secret, opened)
        link = linked(tmp_path, "job", before.port, warned=[])
        link.member.received(placement(0))
        link.member.started()
        link.open()
        while not opened:
            await asyncio.sleep(0.01)
        await before.close()
        after = await controller_of("job", secrets.token_bytes(32), opened, link.controller.port)
        assert await asyncio.wait_for(link.next_place(), 60) is None
        assert link.stranger == f"another run has begun at {link.controller}, with another secret"
        await link.close()
        await after.close()

    asyncio.run(main())


def test_a_spare_that_hears_of_its_job_no_more_is_no_wrong_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends so that a scheduler starts it again: one that fails a job for code 2 would end what goes on."""
    monkeypatch.setattr(linking, "PATIENCE_S", 0.2)
    secret = wire.write_secret(tmp_path / "secret")

    async def main() -> None:
        opened: list[wire.Connection] = []
        server = await controller_of("job", secret, opened)
        link = linked(tmp_path, "job", server.port, warned=[])
        joining = asyncio.create_task(link.join(60.0))
        while not link.connected.is_set():
            await asyncio.sleep(0.01)
        link.member.received(wire.Spare(2))
        await server.close()
        with pytest.raises(LostJobError, match="the job is gone, or out of reach"):
            await joining
        await link.close()

    asyncio.run(main())


@pytest.mark.parametrize("spare", [False, True])
def test_a_stop_that_ends_the_wait_for_a_place_is_not_lost(tmp_path: Path, spare: bool) -> None:
    """The order wakes the wait in the moment in which whoever waits gives it up."""

    async def main() -> None:
        job = job_from_command_line(["--run-dir", str(tmp_path), "train.py"], {})
        stopped = asyncio.Event()
        run = ToldRun(tmp_path, job, children=False)
        link = Link(run, Endpoint("127.0.0.1", 1), JOIN, ordered=stopped.set)
        if spare:
            link.member.received(wire.Spare(2))
        waiting = asyncio.create_task(link.next_place())
        await asyncio.sleep(0)
        link._received(wire.Stop(137, "over"))
        await stopped.wait()
        waiting.cancel()
        done, _ = await asyncio.wait([waiting], timeout=30)
        assert done
        assert waiting.cancelled()

    asyncio.run(main())
