"""A pod's name that is known late, or first with the address of an earlier pod."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.unit.launch.controller.test_link import JOIN, placement
from tests.unit.launch.local_runs import ToldRun

from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.launch.command import addresses
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.controller import connection, late_names
from keepstep.launch.controller.connection import Link

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
HOST = "train-0.train"


class Names:
    """A name server that answers one query after the other; the last answer stays."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def resolve(self, host: str) -> list[str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            raise RunError(f"{host}: Name or service not known; correct the host or use its address")
        return [answer]


def given(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    monkeypatch.setattr(addresses, "resolve", Names(*answers).resolve)
    monkeypatch.setattr(late_names, "_AGAIN_S", 0.01)


def test_in_a_pod_the_name_is_waited_for_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    given(monkeypatch, "", "", "10.0.0.7")
    assert asyncio.run(late_names.address_in_time(HOST, POD, 600.0, said.append)) == "10.0.0.7"
    assert said == ["train-0.train is not known yet: its pod is waited for, 600 s at most"]


def test_not_longer_than_for_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "")
    with pytest.raises(RunError, match=r"not known; .*; waited 0\.05 s for its pod"):
        asyncio.run(late_names.address_in_time(HOST, POD, 0.05, lambda text: None))


def test_elsewhere_an_unknown_name_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    given(monkeypatch, "", "10.0.0.7")
    with pytest.raises(RunError, match="correct the host"):
        asyncio.run(late_names.address_in_time(HOST, {}, 600.0, said.append))
    assert said == []


@pytest.mark.parametrize("known", ["", "192.0.2.7"])
def test_the_first_pod_listens_although_its_own_name_is_late_or_that_of_another(
    monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    own = os.uname().nodename
    answers = {f"{own}.train": known, own: "127.0.0.9", "train-0.train": known}
    monkeypatch.setattr(addresses, "resolve", lambda host: Names(answers[host]).resolve(host))
    monkeypatch.setattr(addresses, "is_loopback", lambda address: False)
    assert addresses.listen_address(Endpoint(f"{own}.train", 1)) == "127.0.0.9"
    if not known:
        with pytest.raises(RunError):
            addresses.listen_address(Endpoint("train-0.train", 1))


def test_who_waits_for_a_place_follows_the_first_pod_to_its_new_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = wire.write_secret(tmp_path / "secret")
    given(monkeypatch, "127.0.0.2")
    monkeypatch.setattr(connection, "_TRY_S", 0.01)

    async def main() -> None:
        def answer(link: wire.Connection, message: wire.Message) -> None:
            if isinstance(message, wire.Join):
                link.send(placement(0))

        callbacks = wire.ServerCallbacks(answer, lambda _: None, lambda _, __: None)
        server = await wire.serve("127.0.0.2", 0, wire.RunKey(secret, "none"), callbacks)
        flags = ["--nnodes=2", "--node-rank=1", f"--master-addr={HOST}", f"--master-port={server.port}"]
        run = ToldRun(tmp_path, job_from_command_line([*flags, "train.py"], {}), children=False)
        link = Link(run, Endpoint("127.0.0.1", server.port), JOIN, ordered=lambda: None)
        assert (await link.join(60.0)).node_rank == 1
        await link.close()
        await server.close()

    asyncio.run(main())
