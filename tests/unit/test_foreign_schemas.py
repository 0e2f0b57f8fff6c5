"""The manifests of other people's kinds, by what these know: models and schemas of their packages, and their rules."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("kubernetes_validate")

from tests.unit.test_manifests import DEPLOY, closed, documents  # noqa: E402

SAMPLES = Path(os.environ.get("KEEPSTEP_SAMPLES", "/nonexistent")) / "scheduler_schemas"
DEFINITIONS = sorted(SAMPLES.glob("*.yaml"))
MANIFESTS = {"PyTorchJob": "pytorchjob", "Job": "volcano"}


# --- PyTorchJob -------------------------------------------------------------------------------------------------


def unknown(kind: str, value: Any, where: str) -> Iterator[str]:
    """The fields of a value that a model of ``kubeflow-training`` or of Kubernetes' client does not have."""
    training = pytest.importorskip("kubeflow.training")
    client = pytest.importorskip("kubernetes.client")
    if inside := re.fullmatch(r"dict\((?:str, )?(.+)\)|dict\[str, (.+)\]", kind):
        for key, one in value.items():
            yield from unknown(inside[1] or inside[2], one, f"{where}.{key}")
    elif inside := re.fullmatch(r"list\[(.+)\]", kind):
        for one in value:
            yield from unknown(inside[1], one, where)
    elif model := getattr(training, kind, None) or getattr(client, kind, None):
        known = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
        for key, one in value.items():
            if key in known:
                yield from unknown(known[key], one, f"{where}.{key}")
            else:
                yield f"{where}.{key}"


@pytest.mark.parametrize("watched", [False, True])
def test_the_training_operator_knows_every_field_of_a_pytorchjob(watched: bool) -> None:
    (job,) = json.loads(json.dumps(documents("pytorchjob", watched=watched)))  # no template is there twice
    assert list(unknown("KubeflowOrgV1PyTorchJob", job, "")) == []
    job["spec"]["replicas"] = 4
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["comand"] = []
    assert list(unknown("KubeflowOrgV1PyTorchJob", job, "")) == [
        ".spec.pytorchReplicaSpecs.Worker.template.spec.containers.comand",
        ".spec.replicas",
    ]


# --- Volcano ----------------------------------------------------------------------------------------------------

# What it knows and allows, as of 1.15: config/crd and pkg/webhooks/admission/jobs/validate of its repository.
OF_A_JOB = {
    *("maxRetry", "minAvailable", "minSuccess", "networkTopology", "plugins", "policies", "queue"),
    *("priorityClassName", "runningEstimate", "schedulerName", "tasks", "ttlSecondsAfterFinished", "volumes"),
}
OF_A_TASK = {
    *("dependsOn", "maxRetry", "minAvailable", "name", "partitionPolicy", "policies", "replicas", "template"),
    "topologyPolicy",
}
PLUGINS = {"env", "svc", "ssh", "mpi", "pytorch", "tensorflow", "ray"}


def test_volcano_allows_the_fields_and_values_of_its_job() -> None:
    (job,) = documents("volcano")
    assert job["spec"].keys() <= OF_A_JOB
    assert job["spec"]["plugins"].keys() <= PLUGINS
    (task,) = job["spec"]["tasks"]
    assert task.keys() <= OF_A_TASK
    assert job["spec"]["minAvailable"] <= task["replicas"]
    # A policy has an event or a code, never 0; and no two have the same.
    assert task["policies"] == [
        {"event": "PodEvicted", "action": "RestartPod"},
        {"exitCode": 75, "action": "RestartPod"},
        {"exitCode": 137, "action": "RestartPod"},
    ]


# --- their own definitions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DEFINITIONS or [None], ids=lambda path: path.stem if path else "none")
def test_the_definitions_of_their_kinds_have_every_field(path: Path | None) -> None:
    """PyTorchJob's and Volcano's as their repositories have them, which are no part of this one."""
    if path is None:
        pytest.skip("KEEPSTEP_SAMPLES names no folder with definitions of PyTorchJob and Volcano's Job")
    definition = yaml.safe_load(path.read_text())
    (version,) = definition["spec"]["versions"]
    validator = jsonschema.Draft7Validator(closed(version["schema"]["openAPIV3Schema"]))
    for watched in (False, True):
        (job,) = documents(MANIFESTS[definition["spec"]["names"]["kind"]], watched=watched)
        assert job["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
        assert [error.message for error in validator.iter_errors(job)] == []
    job["spec"]["podFailurePolicy"] = {}
    assert len(list(validator.iter_errors(job))) == 1


# --- SkyPilot ---------------------------------------------------------------------------------------------------


def test_skypilot_knows_every_field_of_its_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schemas.get_task_schema())
    assert [error.message for error in validator.iter_errors(task)] == []
    resources = jsonschema.Draft202012Validator(schemas.get_resources_schema())
    assert [error.message for error in resources.iter_errors(task["resources"])] == []
    task["resources"]["job_recovery"]["recover_on_exit_codes"] = [1024]
    assert list(resources.iter_errors(task["resources"]))
