"""`keepstep operator` under the role that is shipped, on a real control plane of Kubernetes with stand-in nodes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import certificates
from tests.e2e import kube_bed
from tests.e2e.kube_api import MERGE
from tests.e2e.kube_bed import until
from tests.e2e.operated_jobs import JOBS, PODS, Operated
from tests.warm.warm_fork import ROOM

TLS_FILES = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.keepstep.dev"
pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Operated]:
    if reason := kube_bed.missing():
        pytest.skip(reason)
    pytest.importorskip("lightkube")
    warm = {name: os.environ[name] for name in (ROOM, "PYTHONPATH")}
    with kube_bed.kubernetes(tmp_path, environ=warm) as bed:
        made = Operated(bed)
        try:
            yield made
        finally:
            made.stop()
            print(made.said()[-8000:])


def test_a_job_trains_and_is_not_run_again_once_it_has_finished(cluster: Operated) -> None:
    cluster.start()
    cluster.train(20)
    until(lambda: cluster.status().get("phase") == "Running", "the job runs", 60)
    until(lambda: cluster.status().get("phase") == "Succeeded", "the job has finished", 90)
    assert sorted(cluster.pods()) == ["train-0", "train-1", "train-2", "train-3"]
    nodes = {one["spec"]["nodeName"] for one in cluster.pods().values()}
    assert len(nodes) == 4, "no two pods share a node"
    cluster.api.delete("/api/v1/namespaces/default/pods/train-2")
    until(lambda: "train-2" not in cluster.pods(), "the pod is gone", 30)
    cluster.api.delete("/apis/keepstep.dev/v1alpha1/namespaces/default/trainingjobs/train")
    until(lambda: not cluster.pods(), "Kubernetes has cleaned up", 60)
    assert "cannot" not in cluster.said()


def test_a_broken_node_is_told_and_tainted_and_its_pod_comes_elsewhere(cluster: Operated) -> None:
    """While the API server refuses what was read too long ago, and cuts watches."""
    faulty = cluster.faulty
    faulty.refuse("PUT", "trainingjobs/train/status", 409, 3)
    faulty.refuse("POST", "namespaces/default/pods", 500, 2)
    cluster.start("--node-remedy=auto")
    cluster.train(2000, nodeRemedy="auto")
    cluster.trains()
    (broken,) = cluster.rank_nodes(1)
    cluster.api.patch(
        f"/api/v1/nodes/{broken}",
        {"spec": {"taints": [{"key": "example.com/gpu", "value": "x", "effect": "PreferNoSchedule"}]}},
    )
    until(lambda: cluster.watched() == "True", "the operator has asked the job")
    until(cluster.is_backed_up, "states are on other nodes, too")
    faulty.refuse("PATCH", "nodes", 409, 2)
    assert faulty.end_watches(expired=True) > 0
    cluster.break_gpu(broken)
    until(lambda: "KeepstepHardware" in cluster.conditions(broken), "the node's condition")
    until(lambda: len(cluster.taints(broken)) == 2, "the node's taint")
    assert cluster.taints(broken) == {
        "example.com/gpu": "PreferNoSchedule",
        "keepstep.dev/hardware": "NoSchedule",
    }
    until(
        lambda: len(cluster.nodes_of_pods()) == 4 and broken not in cluster.nodes_of_pods().values(),
        "4 pods",
    )
    cluster.trains()
    status = cluster.status()
    assert status["excludedNodes"] == [broken]
    assert (status["phase"], status["faults"][0]["state"]) == ("Running", "Done")
    assert "incident=0001" in cluster.conditions(broken)["KeepstepHardware"]
    events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    told = {one["involvedObject"]["name"] for one in events if one["reason"] == "Hardware"}
    assert told == {broken}
    assert faulty.pending == 0
    assert "would do" in cluster.run("--clear", broken, "--dry-run")
    assert len(cluster.taints(broken)) == 2
    cluster.run("--clear", broken)
    assert (cluster.conditions(broken), list(cluster.taints(broken))) == ({}, ["example.com/gpu"])
    until(lambda: not cluster.status().get("excludedNodes"), "it is not excluded any more")


def test_pods_of_another_maker_are_watched_and_left_alone(cluster: Operated, tmp_path: Path) -> None:
    """An indexed Job with a certificate, an endpoint and an id of its own."""
    (tmp_path / "job").mkdir()
    tls = certificates(tmp_path / "job")
    cluster.put_into_secret({"tls.crt": tls.cert, "tls.key": tls.key, "ca.crt": tls.ca})
    cluster.start("--node-remedy=auto")
    flags = [f"--tls-{flag}=/etc/keepstep/{key}" for flag, key in TLS_FILES.items()]
    flags += ["--rdzv-endpoint=train-0.train:29411", "--rdzv-id=own", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    job = cluster.train_indexed(2000, *flags, node_remedy="auto")
    cluster.trains()
    (broken,) = cluster.rank_nodes(1)
    until(lambda: "Watched" in cluster.events("train-"), "the operator has asked the job")
    first = job.pod(0)["metadata"]["name"]
    until(lambda: cluster.is_backed_up(first), "states are on other nodes, too")
    made = {name: one["metadata"]["uid"] for name, one in cluster.pods().items()}
    cluster.break_gpu(broken)
    until(lambda: cluster.taints(broken) == {"keepstep.dev/hardware": "NoSchedule"}, "the node's taint")
    told = cluster.conditions(broken)["KeepstepHardware"]
    assert told.startswith("keepstep job=default/train incident=0001 ")
    cluster.trains()
    assert cluster.rank_nodes(1)[-1] != broken
    pods = cluster.pods()
    assert {name: one["metadata"]["uid"] for name, one in pods.items()} == made
    assert not [name for name, one in pods.items() if "deletionTimestamp" in one["metadata"]]
    until(lambda: '"state":"Done"' in cluster.notes(broken), "it is noted that all is done")
    cluster.run("--clear", broken)
    cluster.trains(steps=50)
    assert (cluster.conditions(broken), cluster.taints(broken)) == ({}, {}), "the same incident is no news"
    assert "end pod" not in cluster.said()
    assert "cannot" not in cluster.said()


def test_pods_that_choose_their_nodes_by_name_have_no_say(cluster: Operated) -> None:
    """Nor those that tolerate our taints, or that are in a namespace which the operator is not told to serve."""
    cluster.start("--node-remedy=auto")
    cluster.make_namespace("other")
    cluster.make_false("elsewhere-0", namespace="other")
    cluster.make_false("named-0", spec={"nodeName": "n1"})
    cluster.make_false("mixed-0", "n2", spec={"nodeSelector": {"kubernetes.io/hostname": "n3"}})
    cluster.make_false("mixed-1", job="mixed-0", spec={"nodeName": "n2"})
    everything = {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"kubernetes.io/hostname": "n4"}}
    cluster.make_false("tolerant-0", spec=everything)
    until(lambda: len(cluster.nodes_of_pods()) == 4, "they run")
    for name, reason in {
        "named": "ChoosesNode",
        "mixed-0": "ChoosesNode",
        "tolerant": "ToleratesTaint",
    }.items():
        until(lambda name=name, reason=reason: reason in cluster.events(name), f"{name} is told so")
    assert all(not cluster.conditions(node) for node in cluster.bed.nodes)
    # One that the scheduler has placed is believed, of its own node alone.
    cluster.make_false("placed-0", "n0", "n9", spec={"nodeSelector": {"kubernetes.io/hostname": "n5"}})
    until(lambda: cluster.taints("n5") == {"keepstep.dev/hardware": "NoSchedule"}, "its node's taint")
    assert [node for node in cluster.bed.nodes if cluster.conditions(node) or cluster.taints(node)] == ["n5"]
    assert "cannot" not in cluster.said()


@pytest.mark.long
def test_training_does_not_need_the_api_server_and_one_of_two_operators_is_enough(cluster: Operated) -> None:
    first = cluster.start()
    until(lambda: "acts now" in cluster.said(), "the first acts", 30)
    cluster.start()
    cluster.train(3000)
    cluster.trains()
    gone = cluster.pods()["train-2"]["metadata"]["uid"]
    cluster.bed.stop_api()
    first.kill()
    cluster.trains(steps=50)
    cluster.bed.start_api()
    cluster.api.delete("/api/v1/namespaces/default/pods/train-2")
    until(lambda: cluster.uid("train-2") not in ("", gone), "the other one has made the pod again", 60)
    cluster.trains()
    assert cluster.said().count("acts now") == 2
    lease = cluster.api.get("/apis/coordination.k8s.io/v1/namespaces/keepstep/leases/keepstep-operator")
    assert lease["spec"]["leaseTransitions"] == 1


@pytest.mark.long
def test_a_dry_run_only_says_what_it_would_do(cluster: Operated) -> None:
    cluster.start("--dry-run")
    cluster.make(["0"], command=["sleep"])
    until(lambda: "would do: make pod default/train-3" in cluster.said(), "it says so", 30)
    assert cluster.pods() == {}
    assert cluster.job().get("status") is None


@pytest.mark.long
def test_a_lost_nodes_pod_is_forgotten_and_comes_elsewhere_at_once(cluster: Operated) -> None:
    """Kubernetes itself would wait for five minutes."""
    cluster.start("--node-remedy=auto")
    cluster.train(2000, nodeRemedy="auto")
    cluster.trains()
    until(lambda: cluster.watched() == "True", "the operator has asked the job", 60)
    until(cluster.is_backed_up, "states are on other nodes, too", 60)
    (lost,) = cluster.rank_nodes(1)
    (name,) = [one for one, node in cluster.nodes_of_pods().items() if node == lost]
    gone = cluster.uid(name)
    cluster.bed.kubelets.lose(lost)
    until(lambda: cluster.uid(name) not in ("", gone), "its pod is made again", 90)
    until(lambda: len(cluster.nodes_of_pods()) == 4, "4 pods run", 60)
    assert lost not in cluster.nodes_of_pods().values()
    until(lambda: cluster.taints(lost) == {"keepstep.dev/lost": "NoSchedule"}, "the node's taint", 30)
    assert "KeepstepLost" in cluster.conditions(lost)
    cluster.trains()
    status = cluster.status()
    assert (status["phase"], status.get("attempt", 0), status["excludedNodes"]) == ("Running", 0, [lost])
    assert lost in status["formerNodes"]


@pytest.mark.long
def test_an_old_definition_a_stuck_deletion_and_no_definition_at_all(cluster: Operated) -> None:
    """Each is told, and ended by whoever mends it; the operator goes on."""
    versions = cluster.api.get(DEFINITION)["spec"]["versions"]
    older = copy.deepcopy(versions)
    del older[0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["running"]
    cluster.api.patch(DEFINITION, {"spec": {"versions": older}}, MERGE)
    cluster.start()
    cluster.make(["-c", "sleep 1000"], command=["sh"], nodes=2, spares=0)
    until(lambda: cluster.status().get("phase") == "Running", "the job runs", 60)
    until(
        lambda: "TrainingJob is older than this operator, and drops running" in cluster.said(), "that is told"
    )
    cluster.api.patch(DEFINITION, {"spec": {"versions": versions}}, MERGE)

    cluster.change({"metadata": {"finalizers": ["example.com/stuck"]}})
    cluster.api.delete(f"{JOBS}/train")
    until(lambda: "deletionTimestamp" in cluster.job()["metadata"], "it is to be deleted")
    cluster.api.delete(f"{PODS}/train-1")
    until(lambda: "train-1" not in cluster.pods(), "the pod is gone", 60)
    cluster.let_operator_look(3)
    assert cluster.said().count("make pod default/train-1") == 1
    cluster.change({"metadata": {"finalizers": None}})
    until(lambda: not cluster.pods(), "Kubernetes has cleaned up", 180)  # it looks for new kinds every 30 s

    cluster.api.delete(DEFINITION)
    until(lambda: "is the CRD installed?" in cluster.said(), "that is told", 60)
    cluster.define_jobs()
    cluster.make(["-c", "sleep 1000"], command=["sh"], nodes=2, spares=0)
    until(lambda: cluster.status().get("phase") == "Running", "another job runs", 90)
