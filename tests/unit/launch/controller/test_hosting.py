"""Whether the controller can run on this node, said before anything is started."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep import wire
from keepstep.core import descriptors
from keepstep.core.errors import RunError
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.controller.hosting import Hosting


def said_beside(key: wire.RunKey, folder: Path) -> str:
    """What a host of job-b says when a controller that has this key is where its own was to be."""

    async def play() -> str:
        callbacks = wire.ServerCallbacks(lambda _, __: None, lambda _: None, lambda _, __: None)
        server = await wire.serve("127.0.0.1", 0, key, callbacks)
        try:
            return await said(folder, 2, server.port)
        finally:
            await server.close()

    return asyncio.run(play())


async def said(folder: Path, nodes: int, port: int) -> str:
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job-b"]
    job = job_from_command_line(["--nnodes", str(nodes), *meet, "train.py"], {})
    run = ToldRun(folder, job, children=False)
    hosting = Hosting(run, ready=lambda: None, gave_up=lambda: None, moved=lambda: None)
    try:
        await hosting.can_begin()
    except RunError as error:
        return str(error).replace(f":{port}", ":PORT")
    return ""


@pytest.fixture
def secret(tmp_path: Path) -> bytes:
    return wire.write_secret(tmp_path / "secret")


def test_the_controller_of_another_job_is_named(tmp_path: Path, secret: bytes) -> None:
    assert said_beside(wire.RunKey(secret, "job-a"), tmp_path) == (
        "the controller at 127.0.0.1:PORT runs job 'job-a', this node was started for job 'job-b': "
        "give this job its own --rdzv-endpoint, or the same --rdzv-id on all its nodes"
    )


def test_a_second_host_of_one_job_is_told_so(tmp_path: Path, secret: bytes) -> None:
    told = said_beside(wire.RunKey(secret, "job-b"), tmp_path)
    assert told.startswith("a controller of this job is at 127.0.0.1:PORT already: ")


def test_a_job_with_another_secret_and_other_programs_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    end = ", the nodes cannot meet there: give another --rdzv-endpoint, or end what uses it"
    told = said_beside(wire.RunKey(b"x" * 32, "job-a"), tmp_path)
    assert told == f"127.0.0.1:PORT is in use by the controller of a job with another secret{end}"
    monkeypatch.setattr("keepstep.launch.controller.hosting._ASK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        told = asyncio.run(said(tmp_path, 2, mute.getsockname()[1]))
        assert told == f"127.0.0.1:PORT is in use by another program{end}"
        (tmp_path / "secret").unlink()
        assert asyncio.run(said(tmp_path, 2, mute.getsockname()[1])) == told


def test_nodes_that_cannot_all_have_a_connection_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(descriptors, "hard_limit", lambda: 1024)
    assert asyncio.run(said(tmp_path, 480, port)) == ""
    assert asyncio.run(said(tmp_path, 2000, port)) == (
        "2,000 nodes need 4,064 descriptors; the hard limit of this process is 1,024: "
        "raise it with ulimit -Hn or LimitNOFILE="
    )


@pytest.mark.parametrize(
    ("words", "in_pod", "is_kept"),
    [
        (["--rdzv-backend=c10d"], True, True),
        (["--rdzv-backend=c10d"], False, False),
        (["--node-rank=1"], True, True),
        (["--node-rank=1"], False, False),
        (["--node-rank=0"], False, True),
    ],
)
def test_a_controller_that_comes_to_a_pod_keeps_the_port_by_which_it_is_known(
    words: list[str], in_pod: bool, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of pods other jobs' launchers may run beside it, and the port be another controller's in a moment."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meet = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", *words]
    run = ToldRun(tmp_path, job_from_command_line([*meet, "train.py"], {}), children=False)
    hosting = Hosting(run, ready=lambda: None, gave_up=lambda: None, moved=lambda: None)
    assert (hosting._port_at("127.0.0.1") == port) == is_kept
