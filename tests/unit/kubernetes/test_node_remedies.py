"""What is done about a bad node: by whose word, how many, and only what is ours is undone."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.kubernetes.virtual_cluster import EPOCH_S, TEMPLATE, VirtualCluster, node, training_job

from keepstep.kubernetes import node_remedies
from keepstep.kubernetes.actions import EndPod
from keepstep.kubernetes.objects import Node

FOREIGN = {"key": "example.com/gpu", "value": "x", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}


def running(remedy: str = "auto", nodes: int = 3, machines: int = 8) -> VirtualCluster:
    cluster = VirtualCluster(training_job(nodes=nodes, nodeRemedy=remedy))
    cluster.nodes = {f"n{index}": node(f"n{index}") for index in range(machines)}
    cluster.settle(5)
    return cluster


@pytest.mark.parametrize(
    ("kind", "condition", "key"),
    [
        ("slow", "KeepstepFailSlow", "keepstep.dev/fail-slow"),
        ("hardware", "KeepstepHardware", "keepstep.dev/hardware"),
    ],
)
def test_auto_taints_and_the_pod_comes_elsewhere(kind: str, condition: str, key: str) -> None:
    cluster = running()
    cluster.nodes["n1"]["spec"]["taints"] = [FOREIGN]
    cluster.tells(("n1", kind, 1))
    cluster.settle(4)
    assert cluster.conditions("n1") == {condition}
    assert cluster.taints("n1") == {"example.com/gpu": "NoExecute", key: "NoSchedule"}
    assert cluster.nodes["n1"]["spec"]["taints"][0] == FOREIGN, "with the time at which it was added"
    assert cluster.status["excludedNodes"] == ["n1"]
    assert cluster.node_of(1) == "n4"
    (fault,) = cluster.status["faults"]
    assert (fault["state"], fault["taint"], fault["incident"]) == ("Done", True, 1)
    assert [(one.about["name"], one.is_warning) for one in cluster.events] == [("n1", True)]
    assert cluster.events[0].message == "keepstep job=ml/train incident=0001 it is bad"
    assert "n1" not in cluster.status["nodes"]
    assert cluster.status["verdict"] == "incident 0001: SLOW rank 5"


@pytest.mark.parametrize(
    ("kind", "state", "leaves"),
    [
        ("hardware", "checking", True),
        ("hardware", "recovering", True),
        ("hardware", "running", False),
        ("slow", "checking", False),
    ],
)
def test_without_a_spare_a_pod_leaves_only_a_broken_node_and_only_while_the_job_is_down(
    kind: str, state: str, leaves: bool
) -> None:
    cluster = running()
    cluster.tells(("n1", kind, 1), state=state, spares=0)
    cluster.settle(4)
    assert cluster.status["excludedNodes"] == ["n1"]
    assert cluster.node_of(1) == ("n4" if leaves else "n1")


def test_advise_tells_and_taints_nothing() -> None:
    cluster = running("advise")
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    assert cluster.conditions("n1") == {"KeepstepFailSlow"}
    assert cluster.taints("n1") == {}
    assert cluster.status.get("excludedNodes", []) == []
    assert cluster.node_of(1) == "n1"


def test_off_does_nothing_and_the_operator_may_be_bound_to_less() -> None:
    cluster = running("off")
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    assert (cluster.conditions("n1"), cluster.taints("n1"), cluster.status.get("faults", [])) == (
        set(),
        {},
        [],
    )
    job = cluster.seen().job
    assert node_remedies.remedy_of(job, "auto") == "off"
    auto = running().seen().job
    assert [node_remedies.remedy_of(auto, most) for most in ("off", "advise", "auto")] == [
        "off",
        "advise",
        "auto",
    ]


def test_a_lost_node_is_one_only_if_its_kubelet_is_not_heard_either() -> None:
    cluster = running()
    cluster.tells(("n1", "lost", 1))
    cluster.settle(60)
    assert cluster.status.get("faults", []) == []
    cluster.lose("n1")
    cluster.settle(4)
    assert cluster.conditions("n1") == {"KeepstepLost"}
    assert cluster.taints("n1") == {"keepstep.dev/lost": "NoSchedule"}


def test_a_node_that_was_lost_long_ago_is_not_lost_because_its_kubelet_is_silent_for_a_moment() -> None:
    cluster = running()
    cluster.tells(("n1", "lost", 1))
    cluster.settle(4)
    cluster.now_s += node_remedies.LOST_S
    cluster.lose("n1")
    cluster.settle(20)
    assert cluster.status.get("faults", []) == []
    assert cluster.made.count("train-1") == 1


def test_a_node_to_which_a_pod_has_come_since_is_not_lost() -> None:
    cluster = running()
    cluster.tells(("n1", "lost", 1))
    cluster.now_s += 5
    cluster.evict("train-1")
    cluster.settle(4)
    assert cluster.node_of(1) == "n1"
    cluster.lose("n1")
    cluster.settle(20)
    assert cluster.status.get("faults", []) == []
    assert cluster.made.count("train-1") == 2


def test_what_an_earlier_run_in_the_same_folder_has_found_is_not_new() -> None:
    cluster = running()
    cluster.detected[1] = EPOCH_S + 999.0
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    assert cluster.status.get("faults", []) == []


@pytest.mark.parametrize("unix_s", [float("inf"), float("nan"), float("-inf"), 1e300, -1.0])
def test_a_time_that_is_none_is_not_believed(unix_s: float) -> None:
    cluster = running()
    cluster.detected[1] = unix_s
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    assert cluster.status.get("faults", []) == []


def test_nobody_is_lost_when_much_of_the_cluster_is_silent() -> None:
    cluster = running()
    for name in ("n1", "n6"):
        cluster.lose(name)
    cluster.tells(("n1", "lost", 1))
    cluster.settle(60)
    assert cluster.status.get("faults", []) == []


def test_many_at_once_are_nobodys_fault() -> None:
    cluster = running()
    cluster.tells(("n1", "slow", 1), ("n2", "slow", 1))
    cluster.settle(4)
    assert cluster.status.get("faults", []) == []


def test_only_nodes_of_the_job_are_believed() -> None:
    cluster = running()
    cluster.tells(("n7", "hardware", 1), ("n9", "hardware", 2), ("; kubectl delete node n1", "hardware", 3))
    cluster.settle(4)
    assert cluster.status.get("faults", []) == []


def test_a_node_that_the_job_has_left_is_believed() -> None:
    cluster = running()
    cluster.evict("train-1")
    cluster.nodes["n1"]["spec"]["taints"] = [FOREIGN]
    cluster.settle(4)
    assert "n1" not in cluster.status["nodes"]
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    assert "keepstep.dev/fail-slow" in cluster.taints("n1")


def test_the_budget_of_an_hour() -> None:
    cluster = running(machines=40)
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    cluster.tells(("n1", "hardware", 1), ("n2", "hardware", 2))
    cluster.settle(4)
    assert cluster.taints("n2") == {}
    assert cluster.conditions("n2") == {"KeepstepHardware"}
    assert cluster.status["faults"][1]["why"] == "other nodes of the job were tainted within the hour"
    cluster.now_s += 3600
    cluster.tells(("n3", "hardware", 3))
    cluster.settle(4)
    assert cluster.taints("n3") == {"keepstep.dev/hardware": "NoSchedule"}


def test_no_more_than_a_tenth_of_the_cluster_is_tainted() -> None:
    cluster = running()
    cluster.nodes["n7"]["spec"]["taints"] = [
        {"key": "keepstep.dev/lost", "value": node_remedies.VALUE, "effect": "NoExecute"}
    ]
    cluster.nodes["n7"]["status"]["conditions"].append({"type": "KeepstepLost", "status": "True"})
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    assert cluster.taints("n1") == {}
    assert cluster.status["faults"][0]["why"] == "a tenth of the cluster's nodes are tainted already"


@pytest.mark.parametrize("label", node_remedies.CONTROL_PLANE)
def test_a_node_of_the_control_plane_gets_no_taint(label: str) -> None:
    cluster = running()
    cluster.nodes["n1"]["metadata"]["labels"] = {label: ""}
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    assert cluster.taints("n1") == {}
    assert cluster.status["faults"][0]["why"] == "the node is one of the control plane's"


def test_a_job_that_chooses_its_node_by_name_is_not_believed() -> None:
    cluster = running()
    cluster.job["spec"]["template"] = {"spec": {**TEMPLATE["spec"], "nodeName": "n1"}}
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    assert (cluster.conditions("n1"), cluster.status.get("faults", [])) == (set(), [])


def test_a_pod_on_a_bad_node_is_ended_only_where_a_spare_waits_and_one_for_each() -> None:
    cluster = running(nodes=20, machines=60)
    cluster.tells(("n1", "hardware", 1), ("n2", "hardware", 2), spares=0)
    cluster.settle(10)
    assert set(cluster.taints("n1")) == set(cluster.taints("n2")) == {"keepstep.dev/hardware"}
    assert (cluster.node_of(1), cluster.node_of(2)) == ("n1", "n2")
    cluster.tells(("n1", "hardware", 1), ("n2", "hardware", 2), spares=1)
    assert [one.name for one in cluster.look() if isinstance(one, EndPod)] == ["train-1"]


def test_a_cordoned_node_is_left_as_it_is() -> None:
    cluster = running()
    cluster.nodes["n1"]["spec"]["unschedulable"] = True
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    assert cluster.taints("n1") == {}
    assert cluster.status["faults"][0]["why"] == "the node is cordoned already"


def test_who_removes_the_condition_takes_the_taint_with_it() -> None:
    cluster = running()
    cluster.nodes["n1"]["spec"]["taints"] = [FOREIGN]
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    cluster.nodes["n1"]["status"]["conditions"].pop()
    cluster.settle(4)
    assert cluster.taints("n1") == {"example.com/gpu": "NoExecute"}
    assert cluster.status.get("excludedNodes", []) == []
    assert cluster.status["faults"][0]["state"] == "Cleared"
    cluster.settle(60)
    assert cluster.conditions("n1") == set(), "the same incident is not acted upon again"
    cluster.tells(("n1", "slow", 9))
    cluster.settle(4)
    assert cluster.status["faults"][-1]["incident"] == 9


def test_who_removes_the_taint_is_not_gainsaid() -> None:
    cluster = running()
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    cluster.nodes["n1"]["spec"]["taints"] = []
    cluster.settle(20)
    assert cluster.taints("n1") == {}
    assert cluster.status.get("excludedNodes", []) == []


def test_somebody_elses_taint_with_our_key_is_left_alone() -> None:
    cluster = running()
    theirs = {"key": "keepstep.dev/fail-slow", "value": "by-hand", "effect": "NoSchedule"}
    cluster.nodes["n1"]["spec"]["taints"] = [theirs]
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    assert cluster.nodes["n1"]["spec"]["taints"] == [theirs]
    cluster.nodes["n1"]["status"]["conditions"].pop()
    cluster.settle(10)
    assert cluster.nodes["n1"]["spec"]["taints"] == [theirs]
    found = msgspec.convert(cluster.nodes["n1"], Node)
    assert list(node_remedies.cleared(found)) == []


def test_an_order_to_clear_removes_all_of_ours_and_nothing_else() -> None:
    cluster = running()
    cluster.nodes["n1"]["spec"]["taints"] = [FOREIGN]
    cluster.tells(("n1", "slow", 1))
    cluster.settle(4)
    for action in node_remedies.cleared(msgspec.convert(cluster.nodes["n1"], Node)):
        cluster.do(action)
    assert cluster.conditions("n1") == set()
    assert cluster.nodes["n1"]["spec"]["taints"] == [FOREIGN]
    cluster.settle(10)
    assert cluster.taints("n1") == {"example.com/gpu": "NoExecute"}


def test_a_node_that_comes_anew_under_its_name_is_another_machine() -> None:
    cluster = running()
    cluster.tells(("n1", "hardware", 1))
    cluster.settle(4)
    del cluster.nodes["n1"]
    cluster.settle(4)
    cluster.nodes["n1"] = node("n1")
    cluster.settle(4)
    assert (cluster.conditions("n1"), cluster.taints("n1")) == (set(), {})
    assert cluster.status.get("excludedNodes", []) == []


def test_nothing_is_done_before_it_is_written_down() -> None:
    """An operator that dies between the two does not exceed the budget, and its successor goes on."""
    cluster = running()
    cluster.tells(("n1", "hardware", 1))
    cluster.refuses = lambda action: "trainingjob" in str(action)
    cluster.settle(20)
    assert (cluster.conditions("n1"), cluster.taints("n1")) == (set(), {})
    cluster.refuses = lambda action: "taint" in str(action)
    cluster.settle(20)
    assert cluster.conditions("n1") == {"KeepstepHardware"}
    cluster.refuses = lambda _: False
    cluster.told = None
    cluster.settle(3)
    assert cluster.taints("n1") == {"keepstep.dev/hardware": "NoSchedule"}
