"""What the operator makes of a pod's command line, against what the launcher makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.kubernetes.objects import Pod
from keepstep.kubernetes.pod_command import Launch, launch_of

RUN = ["keepstep", "run", "--nnodes=3"]
INDEX = {
    "name": "JOB_COMPLETION_INDEX",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['index']"}},
}


def pod(
    command: list[str], *env: dict[str, Any], host: str = "train-1", containers: Any = None, **container: Any
) -> Pod:
    one = {"name": "train", "command": command, "env": list(env), **container}
    meta = {"name": f"{host}-x7k2p", "namespace": "ml", "labels": {}, "annotations": {"index": host[-1]}}
    spec = {"hostname": host, "subdomain": "train", "nodeName": "n1", "containers": containers or [one]}
    return msgspec.convert({"metadata": meta, "spec": spec, "status": {"podIP": "10.0.0.7"}}, Pod)


def heard(launch: Launch) -> tuple[str, str, int, bool]:
    return launch.run_id, launch.host, launch.port, launch.has_tls


def value(name: str, text: str) -> dict[str, str]:
    return {"name": name, "value": text}


USUAL = ("train", "train-0.train.ml.svc", 29400, False)
OWN = ("mine", "train-0.train", 5000, False)


@pytest.mark.parametrize(
    ("command", "env", "told"),
    [
        (RUN, [INDEX], USUAL),
        ([*RUN, "--rdzv-id=mine", "--rdzv-endpoint=train-0.train:5000"], [], OWN),
        ([*RUN, "--rdzv_id", "mine", "--rdzv_endpoint", "train-0.train:5000"], [], OWN),
        (RUN, [value("PET_RDZV_ID", "mine"), value("PET_RDZV_ENDPOINT", "train-0.train:5000")], OWN),
        (
            [*RUN, "--rdzv-id=$(ID)", "--rdzv-endpoint=$(AT):5000"],
            [value("ID", "mine"), value("HOST", "train-0"), value("AT", "$(HOST).train")],
            OWN,
        ),
        ([*RUN, "--rdzv-id=mine"], [INDEX], ("mine", *USUAL[1:])),
        ([*RUN, "--rdzv-id=a$$(ID)"], [INDEX, value("ID", "b")], ("a$(ID)", *USUAL[1:])),
        ([*RUN, "--tls-cert=a", "--tls-key=b", "--tls-ca=c"], [INDEX], (*USUAL[:3], True)),
        (
            RUN,
            [INDEX, *(value(f"KEEPSTEP_TLS_{one}", "/etc/keepstep/x") for one in ("CERT", "KEY", "CA"))],
            (*USUAL[:3], True),
        ),
        ([*RUN, "--controller-listen=0.0.0.0:7000"], [INDEX], (*USUAL[:2], 7000, False)),
        (
            [*RUN, "--rdzv-backend=c10d", "--rdzv-endpoint=h", "--rdzv-id=7"],
            [INDEX],
            ("7", "h", 29400, False),
        ),
        (["python", "-m", "keepstep.cli", "run", "--nnodes=3"], [INDEX], USUAL),
        (["numactl", "-N0", "/opt/bin/keepstep", "run", "--nnodes=3"], [INDEX], USUAL),
    ],
)
def test_flags_and_environment_say_where_the_nodes_meet(
    command: list[str], env: list[dict[str, Any]], told: tuple[str, str, int, bool]
) -> None:
    launch = launch_of(pod(command, *env, args=["train.py", "keepstep", "run", "--rdzv-id=no"]))
    assert (heard(launch), launch.doubt) == (told, "")


@pytest.mark.parametrize("words", [[], ["--standalone"], ["--nnodes=1", "--rdzv-endpoint=a:1"]])
def test_a_job_of_one_node_listens_nowhere(words: list[str]) -> None:
    launch = launch_of(pod(["keepstep", "run", *words, "train.py"], INDEX))
    assert (launch.port, launch.doubt) == (0, "")


@pytest.mark.parametrize(
    ("command", "doubt"),
    [
        (["sh", "-c", "keepstep run --nnodes=3 train.py"], "no container's command is `keepstep run`"),
        (["keepstep", "run", "--help"], "run: "),
        (["keepstep", "run", "-h", "--nnodes=3", "t.py"], "-h"),
        (["keepstep", "run", "--nnodes=x", "t.py"], "--nnodes x"),
        ([*RUN, "--rdzv-endpoint=a:0", "t.py"], "--rdzv-endpoint a:0"),
        ([*RUN, "--controller-listen=a", "t.py"], "any free port"),
        ([*RUN, "x" * 70000], "more than 65536 characters"),
        ([*RUN, *["-q"] * 1000, "t.py"], "more than 1000 words"),
        ([*RUN, f"--rdzv-endpoint=h:{'9' * 5000}", "t.py"], ""),
    ],
)
def test_what_cannot_be_understood_is_asked_as_usual(command: list[str], doubt: str) -> None:
    launch = launch_of(pod(command, INDEX))
    assert heard(launch) == ("train", "", 29400, False)
    assert launch.doubt
    assert doubt in launch.doubt


def test_variables_whose_values_are_elsewhere_are_named() -> None:
    elsewhere = {"name": "PET_NNODES", "valueFrom": {"configMapKeyRef": {"name": "sizes", "key": "nodes"}}}
    launch = launch_of(
        pod(["keepstep", "run", "t.py"], INDEX, elsewhere, envFrom=[{"secretRef": {"name": "s"}}])
    )
    assert heard(launch) == ("train", "", 29400, False), "it may have more than one node"
    assert launch.doubt == "not in the pod: all of s, PET_NNODES"


def test_values_that_grow_without_bounds_are_not_expanded() -> None:
    env = [value("A0", "x" * 100), *(value(f"A{at}", f"$(A{at - 1})" * 100) for at in range(1, 9))]
    assert "more than 65536 characters" in launch_of(pod(RUN, *env)).doubt
    long = launch_of(pod([*RUN, "$(A)" * 70], value("A", "x" * 1000)))
    assert "more than 65536 characters" in long.doubt


def test_the_container_that_runs_the_launcher_is_looked_at() -> None:
    beside = {"name": "proxy", "command": ["proxy", "run"], "env": [value("PET_RDZV_ID", "no")]}
    main = {"name": "train", "args": [*RUN, "t.py"], "env": [INDEX]}
    assert heard(launch_of(pod([], containers=[beside, main]))) == USUAL
    assert heard(launch_of(pod([], containers=[beside]))) == ("train", "", 29400, False)
    assert launch_of(msgspec.convert({"metadata": {"name": "a-0"}}, Pod)).run_id == "a"
