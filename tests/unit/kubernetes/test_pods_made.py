"""The Service and pods of a job, from any template; and how a pod has ended."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from tests.unit.kubernetes.virtual_cluster import training_job

from keepstep.core.ranges import fold_nodes
from keepstep.kubernetes.ends import blamed, end_of
from keepstep.kubernetes.job_plan import _unfolded
from keepstep.kubernetes.objects import Pod, TrainingJob
from keepstep.kubernetes.pods import pod_of, service_of

kubernetes_validate = pytest.importorskip("kubernetes_validate")


def made(template: dict[str, Any], status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    job = training_job(template=template, **spec)
    before = copy.deepcopy(job)
    pod = pod_of(msgspec.convert({**job, "status": status or {}}, TrainingJob), 2)
    assert job == before, "the template is not changed"
    image = pod["spec"]["containers"][0].setdefault("image", "x")
    assert image
    for version in ("1.25", "1.37"):
        kubernetes_validate.validate(pod, version, strict=True)
    return pod


def template(**spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "train", "image": "x"}], **spec}}


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {
        one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in pod["spec"]["containers"][0]["env"]
    }


def test_a_pod_has_what_keepstep_reads() -> None:
    pod = made(template())
    assert pod["metadata"]["name"] == pod["spec"]["hostname"] == "train-2"
    assert (pod["spec"]["subdomain"], pod["spec"]["restartPolicy"]) == ("train", "Never")
    assert environment(pod) == {
        "JOB_COMPLETION_INDEX": "2",
        "KEEPSTEP_NODE_NAME": "spec.nodeName",
        "TRAINING_JOB_NODES": "3",
        "KEEPSTEP_JOIN_TIMEOUT_S": "3600",
        "KEEPSTEP_SECRET_FILE": "/etc/keepstep/secret",
    }
    assert pod["spec"]["volumes"][0]["secret"] == {"secretName": "keepstep", "defaultMode": 0o440}
    assert pod["metadata"]["labels"] == {
        "keepstep.dev/job": "train",
        "keepstep.dev/index": "2",
        "keepstep.dev/attempt": "0",
    }
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("job-1", True)


def test_what_the_template_says_stays() -> None:
    mine = {"labels": {"team": "a", "keepstep.dev/index": "9"}, "annotations": {"x": "y"}}
    own = {
        "name": "train",
        "image": "x",
        "env": [
            {"name": "A", "value": "$(JOB_COMPLETION_INDEX)"},
            {"name": "KEEPSTEP_JOIN_TIMEOUT_S", "value": "9"},
        ],
        "volumeMounts": [{"name": "s", "mountPath": "/etc/keepstep"}],
    }
    volumes = [{"name": "s", "secret": {"secretName": "keepstep", "defaultMode": 0o400}}]
    pod = made({"metadata": mine, **template(containers=[own], volumes=volumes)})
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["keepstep.dev/index"] == "2"
    assert pod["metadata"]["annotations"] == {"x": "y"}
    assert environment(pod)["KEEPSTEP_JOIN_TIMEOUT_S"] == "9"
    assert next(iter(environment(pod))) == "JOB_COMPLETION_INDEX", "others may refer to it"
    assert pod["spec"]["volumes"] == volumes


def test_excluded_nodes_are_kept_from_besides_what_the_template_wants() -> None:
    wants = {"key": "gpu", "operator": "Exists"}
    terms = [
        {"matchExpressions": [wants]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]},
    ]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    status = {"excludedNodes": ["n7"], "avoidedNodes": ["n9"]}
    pod = made(template(affinity=affinity), status, excludedNodes=["n1"])
    made_terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for term in made_terms["nodeSelectorTerms"]:
        names = [one["values"] for one in term["matchFields"] if one["operator"] == "NotIn"]
        assert names == [["n1"], ["n7"]]
    assert made_terms["nodeSelectorTerms"][0]["matchExpressions"] == [wants]
    anti = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert anti[-1]["labelSelector"] == {"matchLabels": {"keepstep.dev/job": "train"}}


@pytest.mark.parametrize(
    "spec", [{"volumes": None, "affinity": None}, {"affinity": {"podAntiAffinity": None}}]
)
def test_nothing_in_the_template_may_be_null(spec: dict[str, Any]) -> None:
    own = {"name": "train", "image": "x", "env": None, "volumeMounts": None}
    made({"metadata": None, **template(containers=[own], **spec)}, {"excludedNodes": ["n1"]})


def test_the_service_is_headless_and_knows_pods_early() -> None:
    service = service_of(msgspec.convert(training_job(), TrainingJob))
    kubernetes_validate.validate(service, "1.37", strict=True)
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


# --- ends -------------------------------------------------------------------------------------------------------


def ended(code: int | None, message: str = "", **status: Any) -> Pod:
    state = {"terminated": {"exitCode": code, "message": message}} if code is not None else {}
    own = {"name": "train", "state": state}
    other = {"name": "side", "state": {"terminated": {"exitCode": 9}}}
    spec = {"containers": [{"name": "train"}, {"name": "side"}]}
    phase = "Failed" if code else "Succeeded"
    return msgspec.convert(
        {"spec": spec, "status": {"phase": phase, "containerStatuses": [other, own], **status}}, Pod
    )


@pytest.mark.parametrize(
    ("pod", "kind"),
    [
        (ended(0), "finished"),
        (ended(75, "keepstep: exit code 75 (scheduler): the time is over"), "again"),
        (ended(137), "killed"),
        (ended(137, "keepstep: exit code 137 (training): killed"), "failed"),
        (ended(143, "keepstep: exit code 143 (signal): SIGTERM"), "killed"),
        (ended(1, "Traceback\n  ValueError"), "failed"),
        (ended(137, reason="Evicted", message="The node was low on resource"), "gone"),
        (ended(None, phase="Failed"), "gone"),
        (ended(1, reason="DeadlineExceeded"), "failed"),
    ],
)
def test_how_a_pod_has_ended(pod: Pod, kind: str) -> None:
    end = end_of(pod)
    assert end is not None
    assert end.kind == kind


def test_a_pod_that_runs_has_not_ended() -> None:
    assert end_of(ended(None, phase="Running")) is None


@pytest.mark.parametrize(
    "nodes",
    [
        ["gpu-1"],
        ["gpu-01", "gpu-02", "gpu-10", "login"],
        ["ip-10-0-3-9.ec2.internal", "ip-10-0-3-10.ec2.internal"],
    ],
)
def test_blamed_nodes_are_read_as_they_are_written(nodes: list[str]) -> None:
    text = f"keepstep: exit code 75 (infrastructure): lost; nodes blamed: {fold_nodes(nodes)}; incident 0001: CRASH"
    assert sorted(_unfolded(blamed(text))) == sorted(nodes)
    assert _unfolded(blamed("nothing")) == ()
    assert _unfolded("a[1-9999999]; rm") == ()
