"""The ready manifests: their schemas, what keepstep relies on, and that their command lines mean what they say."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from keepstep.launch.command import job as jobs
from keepstep.launch.command.job import Job, job_from_command_line

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
models = pytest.importorskip("kubeflow_trainer_api.models")

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
FILES = ("job", "jobset", "trainjob", "pytorchjob", "volcano")
VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
JOBS_SINCE = (
    "1.29"  # 1.28 is the first with podReplacementPolicy, and its schema wants onPodConditions in each rule
)
NODES, PODS, RANKS = 4, 5, 8


def documents(name: str, *, watched: bool = False) -> list[dict[str, Any]]:
    """The objects of a manifest; with the line, a comment there, that has the operator watch the pods."""
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.count("# metadata: {") == 1
    return list(yaml.safe_load_all(text.replace("# metadata: {", "metadata: {") if watched else text))


def found(here: Any, key: str) -> Iterator[Any]:
    """All values of a key, wherever they are."""
    if isinstance(here, dict):
        for one, value in here.items():
            if one == key:
                yield value
            yield from found(value, key)
    elif isinstance(here, list):
        for one in here:
            yield from found(one, key)


def pod_specs(name: str) -> list[dict[str, Any]]:
    return [spec for spec in found(documents(name), "spec") if "containers" in spec]


def job_specs(name: str) -> list[dict[str, Any]]:
    return [spec for spec in found(documents(name), "spec") if "podFailurePolicy" in spec]


def test_there_are_no_others() -> None:
    assert {path.stem for path in FOLDER.glob("*")} == {*FILES, "operator"}


def test_all_versions_are_checked() -> None:
    known = {kubernetes_validate.utils.major_minor(one) for one in kubernetes_validate.utils.all_versions()}
    assert set(VERSIONS) == known


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_kubernetes_own_objects_and_all_pods_fit_their_schemas(name: str, version: str) -> None:
    own = [one for one in documents(name, watched=True) if one["apiVersion"] in ("v1", "batch/v1")]
    pods = [{"apiVersion": "v1", "kind": "Pod", "spec": spec} for spec in pod_specs(name)]
    batch = [{"apiVersion": "batch/v1", "kind": "Job", "spec": spec} for spec in job_specs(name)]
    assert pods
    for one in (*own, *pods, *batch):
        one.setdefault("metadata", {"name": "train"})
        fits = one["kind"] != "Job" or VERSIONS.index(version) >= VERSIONS.index(JOBS_SINCE)
        with nullcontext() if fits else pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_kubeflow_and_jobset_know_every_field(name: str, watched: bool) -> None:
    for one in documents(name, watched=watched):
        prefix = "JobsetV1alpha2" if one["kind"] == "JobSet" else "TrainerV1alpha1"
        assert getattr(models, prefix + one["kind"]).from_dict(one).to_dict() == one


@pytest.mark.parametrize("name", FILES)
def test_every_pod_can_read_its_secret_and_has_a_run_folder_of_its_own(name: str) -> None:
    for spec in pod_specs(name):
        (container,) = spec["containers"]
        flags = dict(word.split("=") for word in command_of(container) if word.startswith("--"))
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounted[str(Path(flags["--secret-file"]).parent)]["secret"]["defaultMode"] == 0o440
        assert spec["securityContext"]["fsGroup"]
        assert mounted[str(Path(flags["--run-dir"]).parent)]["emptyDir"] == {}
        assert "terminationMessagePath" not in container


@pytest.mark.parametrize("name", ["job", "jobset", "trainjob"])
def test_an_end_is_told_from_a_pod_that_is_to_come_again(name: str) -> None:
    from tests.e2e.stand_in_job import action_on

    (spec,) = job_specs(name)
    (pod,) = pod_specs(name)
    policy = spec["podFailurePolicy"]
    evicted, *by_code = policy["rules"]
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert {rule["onExitCodes"]["containerName"] for rule in by_code} == {pod["containers"][0]["name"]}
    expected = {code: {75: "Ignore", 137: "Count"}.get(code, "FailJob") for code in range(1, 256)}
    assert {code: action_on(policy, code) for code in expected} == expected
    assert (pod["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed")


# --- the command lines ------------------------------------------------------------------------------------------


def command_of(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container.get("args", [])]


def environment(name: str, index: int) -> tuple[dict[str, str], str]:
    """What the controller of this kind sets in a pod, as its source has it; and the pod's name with its subdomain."""
    domain = "train.ml.svc.cluster.local"
    if name == "job":
        return {"JOB_COMPLETION_INDEX": str(index)}, f"train-{index}.{domain}"
    if name == "jobset":
        return {"JOB_COMPLETION_INDEX": str(index)}, f"train-node-0-{index}.{domain}"
    if name == "trainjob":  # pkg/runtime/framework/plugins/torch
        job = documents(name)[1]["spec"]["trainer"]
        torchs = {
            "PET_NNODES": str(job["numNodes"]),
            "PET_NPROC_PER_NODE": str(job["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "train-node-0-0.train",
            "PET_MASTER_PORT": "29500",
        }
        return {**torchs, "JOB_COMPLETION_INDEX": str(index)}, f"train-node-0-{index}.{domain}"
    if name == "pytorchjob":  # pkg/controller.v1/pytorch/envvar.go and master.go
        spec = documents(name)[0]["spec"]
        pods = sum(one["replicas"] for one in spec["pytorchReplicaSpecs"].values())
        per_node = spec["nprocPerNode"]
        torchs = {
            "MASTER_ADDR": "train-master-0",
            "MASTER_PORT": "23456",
            "PET_MASTER_ADDR": "train-master-0",
            "PET_MASTER_PORT": "23456",
            "WORLD_SIZE": str(pods * int(per_node)),
            "RANK": str(index),
            "PET_NPROC_PER_NODE": per_node,
            "PET_NODE_RANK": str(index),
            "PET_NNODES": str(pods),
        }
        return torchs, f"train-worker-{index - 1}" if index else "train-master-0"
    (task,) = documents(name)[0]["spec"]["tasks"]  # pkg/controllers/job/plugins/{env,svc}
    hosts = [f"train-node-{pod}.train" for pod in range(task["replicas"])]
    listed = {"VC_NODE_HOSTS": ",".join(hosts), "VC_NODE_NUM": str(len(hosts))}
    return {"VC_TASK_INDEX": str(index), "VK_TASK_INDEX": str(index), **listed}, hosts[index]


def made(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> Job:
    container = pod_specs(name)[0]["containers"][0]
    told, fqdn = environment(name, index)
    given = {
        one["name"]: one["value"] if "value" in one else {"spec.nodeName": "gpu-7"}[fields(one)]
        for one in container["env"]
    }
    monkeypatch.setattr(jobs, "own_name_with_domain", lambda: fqdn)
    program, verb, *rest = command_of(container)
    assert (program, verb) == ("keepstep", "run")
    return job_from_command_line(rest, {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **told, **given})


def fields(one: dict[str, Any]) -> str:
    return one["valueFrom"]["fieldRef"]["fieldPath"]


MEETINGS = {
    "job": ("train-0.train.ml.svc.cluster.local:29400", "train"),
    "jobset": ("train-node-0-0.train.ml.svc.cluster.local:29400", "train-node-0"),
    "trainjob": ("train-node-0-0.train:29500", "train-node-0"),
    "pytorchjob": ("train-master-0:23456", "train-master"),
    "volcano": ("train-node-0.train:29400", "train-node"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_pods_of_one_job_meet_at_the_first_and_the_last_is_a_spare(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(PODS):
        job = made(name, index, monkeypatch)
        assert (str(job.rendezvous.endpoint), job.run_id) == MEETINGS[name]
        assert (job.min_nodes, job.max_nodes, job.nproc) == (NODES, NODES, RANKS)
        assert job.rendezvous.node_rank == index
        assert (job.node, job.max_restarts, job.rendezvous.join_timeout_s) == ("gpu-7", 10, 3600)
        assert job.elects


@pytest.mark.parametrize("name", FILES)
def test_the_operator_asks_the_pods_of_each_maker_where_and_by_the_id_that_they_have(name: str) -> None:
    import msgspec

    from keepstep.kubernetes.objects import Pod
    from keepstep.kubernetes.pod_command import launch_of
    from keepstep.kubernetes.watched import watched_jobs

    metas = found(documents(name, watched=True), "metadata")
    meta = next(one for one in metas if "keepstep.dev/watch" in one.get("labels", ()))
    for index in range(PODS):
        pod = msgspec.convert(pod_of_maker(name, index, meta), Pod)
        assert list(watched_jobs([pod])) == [("ml", "train")]
        launch = launch_of(pod)
        endpoint, run_id = MEETINGS[name]
        assert (launch.run_id, launch.port) == (run_id, int(endpoint.rpartition(":")[2]))
        assert (launch.host.partition(".")[0], launch.has_tls) == (
            endpoint.partition(".")[0].partition(":")[0],
            False,
        )
        assert not launch.doubt or name == "volcano"


def pod_of_maker(name: str, index: int, meta: dict[str, Any]) -> dict[str, Any]:
    """A pod as its maker's controller makes it from the template, as far as the operator looks at it."""
    told, fqdn = environment(name, index)
    spec = pod_specs(name)[0]
    (container,) = spec["containers"]
    env: list[dict[str, Any]] = [{"name": key, "value": text} for key, text in told.items()]
    for one in env:
        if one["name"] == "JOB_COMPLETION_INDEX":
            path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            one |= {"value": "", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        elif one["name"].startswith("VC_NODE_"):
            one |= {"value": "", "valueFrom": {"configMapKeyRef": {"name": "train-svc", "key": one["name"]}}}
    host, _, domain = fqdn.partition(".")
    ours = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "metadata": {**meta, "namespace": "ml", "name": f"{host}-x7k2p", "annotations": ours},
        "spec": {
            "hostname": host,
            "subdomain": domain.partition(".")[0],
            "containers": [{**container, "env": [*container["env"], *env]}],
        },
    }


def test_skypilot_starts_the_same_job_on_every_node(tmp_path: Path) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    env = {
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "4",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "sky-managed-2026-train_1-0",
        "KEEPSTEP_SECRET": "ab" * 32,
    }
    stand_in = tmp_path / "keepstep"  # tells its arguments, and whether the secret is in its environment
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "${KEEPSTEP_SECRET-none}" "$@"\n')
    stand_in.chmod(0o755)
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True, check=True)
    secret, verb, *rest = done.stdout.splitlines()
    assert (secret, verb) == ("none", "run")
    job = job_from_command_line(rest, env)
    assert job.secret_file is not None
    assert job.secret_file.read_text().strip() == env["KEEPSTEP_SECRET"]
    assert stat.S_IMODE(job.secret_file.stat().st_mode) == 0o600
    assert (str(job.rendezvous.endpoint), job.run_id) == ("10.0.0.1:29400", env["SKYPILOT_TASK_ID"])
    assert (job.max_nodes, job.nproc, job.rendezvous.node_rank) == (NODES, RANKS, 4)


# --- the operator -----------------------------------------------------------------------------------------------

OPERATOR = FOLDER / "operator"
PARTS = ("crd", "namespace", "operator", "jobs/role")


def parts(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((OPERATOR / f"{name}.yaml").read_text()))


def training_job() -> dict[str, Any]:
    (job,) = parts("trainingjob")
    return job


def schema() -> dict[str, Any]:
    (crd,) = parts("crd")
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def closed(part: dict[str, Any]) -> dict[str, Any]:
    """The schema as strict as an API server with field validation, which knows no other fields."""
    made = {key: closed(value) if isinstance(value, dict) else value for key, value in part.items()}
    if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def refused(job: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    strict = closed(schema())
    strict["properties"]["metadata"].pop("additionalProperties", None)
    return [error.message for error in jsonschema.Draft7Validator(strict).iter_errors(job)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", PARTS)
def test_the_operators_parts_fit_their_schemas(name: str, version: str) -> None:
    for one in parts(name):
        kubernetes_validate.validate(one, version, strict=True)


def test_kustomizations_name_what_is_there() -> None:
    for folder in (OPERATOR, OPERATOR / "jobs"):
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert all((folder / name).exists() for name in listed)
        examples = {"trainingjob.yaml", "kustomization.yaml"}
        assert {path.name for path in folder.glob("*.yaml")} - examples == set(listed)


def test_the_example_fits_the_definition_and_its_pods_fit_kubernetes() -> None:
    import msgspec

    from keepstep.kubernetes.objects import TrainingJob
    from keepstep.kubernetes.pods import pod_of

    assert refused(training_job()) == []
    pod = pod_of(msgspec.convert(training_job(), TrainingJob), 1)
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)
    assert pod["spec"]["containers"][0]["env"][2] == {"name": "TRAINING_JOB_NODES", "value": "4"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", "4"),
        ("nodes", 20000),
        ("spares", -1),
        ("nodeRemedy", "drain"),
        ("secretName", "a;b"),
        ("secretName", "a\nb"),
        ("excludedNodes", [""]),
        ("excludedNodes", "n1"),
        ("restartLimit", -1),
        ("template", {"spec": {"containers": []}}),
        ("template", {}),
        ("template", {"spec": {"containers": [{}]}, "metadata": {"labels": {"a": 1}}}),
        ("tempalte", {}),
    ],
)
def test_the_definition_refuses(field: str, value: object) -> None:
    job = training_job()
    job["spec"][field] = value
    assert refused(job)


@pytest.mark.parametrize("name", ["Train", "1train", "a.b", "a" * 51, "train-", "a;b", "a\nb"])
def test_a_name_that_is_no_name_of_a_host_is_refused(name: str) -> None:
    job = training_job()
    job["metadata"]["name"] = name
    assert refused(job)


def test_the_status_that_the_operator_writes_fits_the_definition() -> None:
    import msgspec
    from tests.unit.kubernetes.virtual_cluster import VirtualCluster
    from tests.unit.kubernetes.virtual_cluster import training_job as virtual

    cluster = VirtualCluster(virtual(nodeRemedy="auto"))
    cluster.settle(5)
    cluster.tells(("n1", "slow", 1))
    cluster.end("train-0", 137)
    cluster.settle(5)
    cluster.end_all(75, "keepstep: exit code 75 (infrastructure): lost; nodes blamed: n2")
    cluster.settle(5)
    status = msgspec.to_builtins(cluster.status)
    assert status.keys() >= {
        "phase",
        "attempt",
        "faults",
        "conditions",
        "verdict",
        "avoidedNodes",
        "excludedNodes",
    }
    assert refused({**training_job(), "status": status}) == []
    known = schema()["properties"]["status"]["properties"]
    from keepstep.kubernetes.objects import JobStatus

    assert {field.encode_name for field in msgspec.structs.fields(JobStatus)} == known.keys()


def test_the_operator_has_no_right_to_more() -> None:
    rules = [rule for name in PARTS for one in parts(name) for rule in one.get("rules", ())]
    given = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert not any("*" in right for right in given)
    assert {verb for resource, verb in given if resource == "secrets"} == {"get"}
    assert all(rule.get("resourceNames") == ["keepstep"] for rule in rules if "secrets" in rule["resources"])
    assert {verb for resource, verb in given if resource in ("nodes", "nodes/status")} == {
        *("get", "list", "watch", "patch"),
    }
    assert not {resource for resource, _ in given} & {"pods/exec", "serviceaccounts", "roles", "rolebindings"}
    cluster_wide = [one for name in PARTS for one in parts(name) if one["kind"] == "ClusterRole"]
    assert {resource for one in cluster_wide for rule in one["rules"] for resource in rule["resources"]} == {
        *("nodes", "nodes/status"),
    }
