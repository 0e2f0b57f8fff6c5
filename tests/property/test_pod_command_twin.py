"""The operator makes of a pod's command line what the launcher in it makes of that, whatever it is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.effort import many

from keepstep.core.errors import UsageError
from keepstep.kubernetes.objects import Pod
from keepstep.kubernetes.pod_command import launch_of
from keepstep.launch.command import job as jobs

FQDN = "train-2.train.ml.svc"
SOME_FILE = str(Path(__file__))
# The last one of each is rare, as it is wrong.
FLAGS = {
    "nnodes": ["1", "3", "2:4", "4", "x"],
    "rdzv_id": ["mine", "7", "$(ID)", "a b", ""],
    "rdzv_endpoint": ["h:5000", "[::1]:80", "$(AT):$(PORT)", "", "h:0"],
    "rdzv_backend": ["static", "c10d", "etcd"],
    "rdzv_conf": ["is_host=1", "timeout=5", "bad"],
    "node_rank": ["0", "2", "x"],
    "master_addr": ["h", "[::1]", "10.0.0.1"],
    "master_port": ["5001", "x"],
    "max_restarts": ["3", "0", "-1"],
    "nproc_per_node": ["1", "8"],
}
OWN = {
    "tls_cert": [SOME_FILE],
    "controller_listen": ["0.0.0.0:7000", "h:9"],
}
MAKERS: list[dict[str, str]] = [
    {},
    {"JOB_COMPLETION_INDEX": "2"},
    {"JOB_COMPLETION_INDEX": "x"},
    {"MASTER_ADDR": "train-0.train", "RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "23456"},
    {"MASTER_ADDR": "train-0", "RANK": "5", "WORLD_SIZE": "4"},
    {"VC_TASK_INDEX": "2", "VC_NODE_HOSTS": "train-0.train,train-1.train,train-2.train,train-3.train"},
    {"PET_MASTER_ADDR": "train-0.train", "PET_MASTER_PORT": "29500", "PET_NNODES": "3", "PET_NODE_RANK": "2"},
    {"TORCHELASTIC_RUN_ID": "9", "JOB_COMPLETION_INDEX": "2"},
]


def drawn(rng: random.Random) -> tuple[list[str], dict[str, str]]:
    """The words after ``keepstep run``, and the container's variables in their order."""
    words: list[str] = []
    environ = {"ID": "fromenv", "AT": "host", "PORT": "6000", **rng.choice(MAKERS)}
    for name, values in FLAGS.items():
        chance = rng.random()
        if chance < 0.25:
            flag = f"--{name.replace('_', rng.choice('-_'))}"
            text = rng.choice([*values[:-1] * 5, values[-1]])
            words += rng.choice([[f"{flag}={text}"], [flag, text]])
        elif chance < 0.35:
            environ[f"PET_{name.upper()}"] = rng.choice(values[:-1])
    for name, values in OWN.items():
        chance = rng.random()
        names = [name, "tls_key", "tls_ca"] if name == "tls_cert" else [name]
        for each in names if chance < 0.4 else ():
            if chance < 0.2:
                words.append(f"--{each.replace('_', '-')}={rng.choice(values)}")
            else:
                environ[f"KEEPSTEP_{each.upper()}"] = rng.choice(values)
    if rng.random() < 0.1:
        words.append("--standalone")
    return [*words, "train.py", "--rdzv-id=no"], environ


def strange(rng: random.Random) -> str:
    """A text that nobody would write, or one of the usual ones."""
    parts = [
        "--",
        "-",
        "=",
        ":",
        "[",
        "]",
        "$(",
        ")",
        "$",
        "9" * 5000,
        "%s",
        "\0",
        "é",
        "1e999",
        "nan",
        "a" * 300,
        " ",
    ]
    usual = [f"--{name}" for name in FLAGS] + [one for values in FLAGS.values() for one in values]
    return "".join(rng.choice(rng.choice([parts, usual])) for _ in range(rng.randrange(4)))


@pytest.mark.parametrize("seed", range(many(5)))
def test_nothing_that_is_in_a_pod_stops_the_operator(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"PET_{name.upper()}" for name in FLAGS] + [name for one in MAKERS for name in one]
    names += ["KEEPSTEP_CONTROLLER_LISTEN", "KEEPSTEP_TLS_CERT", "SLURM_JOB_ID", "SLURM_STEP_ID"]
    for _ in range(300):
        environ = {rng.choice(names): strange(rng) for _ in range(rng.randrange(5))}
        launch = launch_of(pod_with([strange(rng) for _ in range(rng.randrange(8))], environ))
        assert 0 <= launch.port <= 65535


def expanded(text: str, environ: dict[str, str]) -> str:
    for name, value in environ.items():
        text = text.replace(f"$({name})", value)
    return text


def pod_with(words: list[str], environ: dict[str, str]) -> Pod:
    env = [{"name": name, "value": value} for name, value in environ.items()]
    main: dict[str, Any] = {"name": "train", "command": ["keepstep", "run"], "args": words, "env": env}
    host, domain, namespace, _ = FQDN.split(".")
    meta = {"name": "train-2-x7k2p", "namespace": namespace}
    return msgspec.convert(
        {"metadata": meta, "spec": {"hostname": host, "subdomain": domain, "containers": [main]}}, Pod
    )


def launcher_with(words: list[str], environ: dict[str, str], home: Path) -> jobs.Job | None:
    """What the launcher makes of it; None where it ends at once."""
    inside = {"KUBERNETES_SERVICE_HOST": "kubernetes", "HOME": str(home)}
    for name, value in environ.items():
        inside[name] = expanded(value, inside)
    try:
        return jobs.job_from_command_line([expanded(word, inside) for word in words], inside)
    except UsageError:
        return None


@pytest.mark.parametrize("seed", range(many(10)))
def test_as_the_launcher(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no configuration file is here
    monkeypatch.setattr(jobs, "own_name_with_domain", lambda: FQDN)
    rng, meet = random.Random(seed), 0
    for _ in range(100):
        words, environ = drawn(rng)
        job, launch = launcher_with(words, environ, tmp_path), launch_of(pod_with(words, environ))
        if job is None:
            continue  # whatever the operator makes of it
        assert launch.doubt == ""
        meeting = job.rendezvous.endpoint
        if meeting is None:
            assert launch.port == 0
            continue
        meet += 1
        listen = job.controller_listen or meeting
        assert (launch.run_id, launch.host, launch.port) == (job.run_id, meeting.host, listen.port)
        assert launch.has_tls == (job.tls is not None)
    assert meet > 10
