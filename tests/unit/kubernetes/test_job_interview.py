"""Who the operator asks, by what id, with which secret and certificate: real controllers on this machine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.certificates import certificates

pytest.importorskip("lightkube")

from lightkube import ApiError
from lightkube.models.meta_v1 import Status

from keepstep import wire
from keepstep.kubernetes.job_interview import Interview
from keepstep.kubernetes.objects import Pod

SECRET = b"s" * 32
STANDS = wire.Overview("running", 3, 1, 7)


class Cluster:
    """Has one secret, and notes how often it was read. ``code``: with which reading it is refused."""

    def __init__(self, tls: wire.TlsPaths | None = None, **changes: str) -> None:
        self.reads, self.code = 0, 0
        files = {"tls.crt": tls.cert, "tls.key": tls.key, "ca.crt": tls.ca} if tls else {}
        texts = {"secret": SECRET.hex()} | {name: Path(path).read_text() for name, path in files.items()}
        self.texts = texts | changes

    async def get(self, kind: Any, name: str, namespace: str) -> dict[str, Any] | None:
        self.reads += 1
        if self.code:
            raise ApiError(status=Status(code=self.code, message="no"))
        if (namespace, name) != ("ml", "keepstep"):
            return None
        return {"data": {key: base64.b64encode(text.encode()).decode() for key, text in self.texts.items()}}


def pod(number: int, *words: str, address: str = "127.0.0.1", phase: str = "Running", nodes: int = 3) -> Pod:
    command = ["keepstep", "run", f"--nnodes={nodes}", *words, "train.py"]
    one = {
        "metadata": {"name": f"train-{number}", "namespace": "ml", "uid": f"pod-{number}"},
        "spec": {
            "containers": [{"command": command, "env": [{"name": "JOB_COMPLETION_INDEX", "value": "0"}]}]
        },
        "status": {"phase": phase, "podIP": address},
    }
    return msgspec.convert(one, Pod)


def asked(
    work: Callable[[int], list[Pod]],
    api: Cluster | None = None,
    *,
    run_id: str = "train",
    tls: wire.TlsPaths | None = None,
    host: str = "127.0.0.1",
    name: str = "keepstep",
) -> Interview:
    """After a job was asked whose controller is at this host; ``work``: a port to the job's pods."""
    interview = Interview()

    async def all_of_it() -> None:
        def message(connection: wire.Connection, said: wire.Message) -> None:
            if isinstance(said, wire.Look):
                connection.send(STANDS)

        callbacks = wire.ServerCallbacks(message=message, opened=lambda _: None, closed=lambda *_: None)
        context = wire.server_context(tls) if tls else None
        server = await wire.serve(host, 0, wire.RunKey(SECRET, run_id), callbacks, tls=context)
        try:
            await interview.ask(api or Cluster(), "ml", name, work(server.port))  # type: ignore[arg-type]
        finally:
            await server.close()

    asyncio.run(all_of_it())
    return interview


def at(port: int, *words: str) -> tuple[str, ...]:
    return (f"--rdzv-endpoint=train-0:{port}", *words)


TLS = ("--tls-cert=/etc/keepstep/tls.crt", "--tls-key=/etc/keepstep/tls.key", "--tls-ca=/etc/keepstep/ca.crt")


def test_a_job_with_an_endpoint_and_an_id_of_its_own_is_heard() -> None:
    def pods(port: int) -> list[Pod]:
        return [pod(0, *at(port, "--rdzv-id=mine")), pod(1, *at(port), phase="Pending")]

    interview = asked(pods, run_id="mine")
    assert (interview.told, interview.trouble) == (STANDS, ("", ""))


def test_the_pod_of_the_endpoint_is_asked_first_and_its_command_counts() -> None:
    def pods(port: int) -> list[Pod]:
        words = (f"--rdzv-endpoint=train-12:{port}", "--rdzv-id=mine")
        others = [pod(number, *words, address=f"127.0.1.{number}") for number in range(12)]
        return [*others, pod(12, *words, address="127.0.0.9")]

    assert asked(pods, run_id="mine", host="127.0.0.9").told == STANDS


def test_mutual_tls_with_the_certificate_of_the_secret(tmp_path: Path) -> None:
    tls = certificates(tmp_path)
    interview = asked(
        lambda port: [pod(0, *at(port, "--rdzv-id=a", *TLS))], Cluster(tls), run_id="a", tls=tls
    )
    assert (interview.told, interview.trouble) == (STANDS, ("", ""))


def tls_trouble(api: Cluster, tls: wire.TlsPaths) -> str:
    interview = asked(lambda port: [pod(0, *at(port, *TLS))], api, run_id="none", tls=tls)
    reason, message = interview.trouble
    assert (interview.told, reason) == (None, "TlsUnusable")
    assert "put tls.crt, tls.key and ca.crt into the secret ml/keepstep" in message
    return message


def test_without_a_certificate_that_the_job_takes_it_says_what_to_do(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    tls, other = certificates(tmp_path / "own"), certificates(tmp_path / "other")
    assert tls_trouble(Cluster(), tls).endswith("it has no tls.crt, tls.key, ca.crt")
    assert "[SSL" in tls_trouble(Cluster(other), tls)
    assert "[SSL" in tls_trouble(Cluster(tls, **{"ca.crt": Path(other.ca).read_text()}), tls)
    mixed = wire.TlsPaths(other.cert, other.key, tls.ca)
    assert "[SSL" in tls_trouble(Cluster(mixed), tls), "the job refuses it"
    assert "mismatch" in tls_trouble(Cluster(tls, **{"tls.key": Path(other.key).read_text()}), tls)
    for text, told in (
        ("x", ""),
        ("-----BEGIN ENCRYPTED PRIVATE KEY-----\n", "it has an encrypted tls.key"),
    ):
        assert tls_trouble(Cluster(tls, **{"tls.key": text}), tls).endswith(told)


def test_a_job_of_one_node_is_not_asked() -> None:
    interview = asked(lambda port: [pod(0, nodes=1)])
    assert (interview.told, interview.trouble[0]) == (None, "OneNode")


def test_of_what_could_not_be_understood_it_tells_where_nobody_answers() -> None:
    def odd(port: int) -> list[Pod]:
        return [pod(0, f"--rdzv-endpoint=train-0:{port}", "--rdzv-id=$(ID)")]

    one = msgspec.to_builtins(odd(1)[0])
    one["spec"]["containers"][0]["env"].append({"name": "ID", "valueFrom": {"secretKeyRef": {"name": "s"}}})
    reason, message = asked(lambda port: [msgspec.convert(one, Pod)]).trouble
    assert reason == "NoAnswer"
    assert "127.0.0.1:1: " in message
    assert message.endswith("; of its command: not in the pod: ID")


@pytest.mark.parametrize(
    ("code", "name", "changes", "reason"),
    [
        (403, "keepstep", {}, "SecretForbidden"),
        (500, "keepstep", {}, "SecretUnknown"),
        (0, "other", {}, "SecretMissing"),
        (0, "keepstep", {"secret": "abc"}, "SecretUnusable"),
    ],
)
def test_without_a_secret_nobody_is_asked(code: int, name: str, changes: dict[str, str], reason: str) -> None:
    api = Cluster(None, **changes)
    api.code = code
    assert asked(lambda port: [pod(0, *at(port))], api, name=name).trouble[0] == reason


def test_a_secret_is_read_once_a_minute_and_kept_while_the_api_server_is_away() -> None:
    now_s = [0.0]
    api, interview = Cluster(), Interview(lambda: now_s[0])

    def ask(name: str = "keepstep") -> tuple[int, str]:
        asking: Awaitable[None] = interview.ask(api, "ml", name, [])  # type: ignore[arg-type]
        asyncio.run(asking)  # type: ignore[arg-type]
        return api.reads, interview.trouble[0]

    assert [ask(), ask()] == [(1, "NotRunning")] * 2
    now_s[0] = 61.0
    api.code = 500
    assert ask() == (2, "NotRunning")
    api.code = 0
    assert ask() == (3, "NotRunning")
    assert ask("other") == (4, "SecretMissing"), "it is another one"


def test_of_a_job_that_is_not_believed_nobody_is_asked() -> None:
    api, interview = Cluster(), Interview()
    asyncio.run(interview.ask(api, "ml", "keepstep", [pod(0)], ("ChoosesNode", "x")))  # type: ignore[arg-type]
    assert (api.reads, interview.told, interview.trouble) == (0, None, ("ChoosesNode", "x"))
