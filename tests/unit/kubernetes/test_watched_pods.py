"""Pods of other makers: who is one job, who is believed, and what is done about a node, noted on it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.kubernetes.virtual_cluster import node, stamp
from tests.unit.kubernetes.virtual_pods import BY_NAME, VirtualPods, pod, read

from keepstep.kubernetes.actions import Note, SetTaints
from keepstep.kubernetes.node_remedies import LOST_S, VALUE
from keepstep.kubernetes.objects import FAULTS
from keepstep.kubernetes.watched import doubt_of, job_of, told_about, watched_jobs

EVERYTHING = {"operator": "Exists"}
HARDWARE = (["KeepstepHardware"], ["keepstep.dev/hardware"])


def running(remedy: str = "auto", count: int = 4, **given: Any) -> VirtualPods:
    return VirtualPods([pod(f"train-{at}", f"n{at}", remedy=remedy, **given) for at in range(count)])


def test_pods_of_one_name_are_one_job() -> None:
    pods = read(
        pod("b-0", "n1", job="b", now_s=1003.0),
        pod("a-10", "n2", job="a", now_s=1001.0),
        pod("a-2", "n3", job="a", now_s=1001.0),
        pod("c-0", "n4", job=""),
        pod("d-0", "n5", job="d", labels={"keepstep.dev/job": "d"}),
    )
    found = watched_jobs(pods)
    assert {key: [one.metadata.name for one in own] for key, own in found.items()} == {
        ("ml", "a"): ["a-2", "a-10"],
        ("ml", "b"): ["b-0"],
    }
    assert list(found) == [("ml", "a"), ("ml", "b")]
    many = read(*(pod(f"p-{at}", job=f"j{at}", now_s=1000.0 + at) for at in range(600)))
    assert len(watched_jobs(many)) == 500
    assert ("ml", "j0") in watched_jobs(many)


def test_a_job_has_the_least_remedy_of_its_pods_and_the_oldest_ones_secret() -> None:
    pods = read(
        pod("a-0", "n1", secret="own", now_s=7.0),
        pod("a-1", "n2", remedy="advise"),
        pod("a-2", remedy="auto"),
    )
    job = job_of(("ml", "train"), pods, {})
    assert (job.spec.node_remedy, job.spec.secret_name, job.spec.pods) == ("advise", "own", 2)
    assert job.metadata.created_unix_s == pods[0].metadata.created_unix_s
    plain = pod("a-0", "n1")
    del plain["metadata"]["annotations"]
    job = job_of(("ml", "train"), read(plain), {})
    assert (job.spec.node_remedy, job.spec.secret_name) == ("advise", "keepstep")


def test_auto_marks_and_taints_and_leaves_the_pods_alone() -> None:
    pods = running()
    pods.tells("n1", "hardware", 7, text="rank=3 GPU memory error")
    first = pods.look()
    assert [type(one) for one in first] == [Note], "first the note"
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE}
    told = pods.conditions("n1")["KeepstepHardware"]
    assert told == "keepstep job=ml/train incident=0007 rank=3 GPU memory error"
    (taint,) = pods.nodes["n1"]["spec"]["taints"]
    assert (taint["value"], taint["effect"]) == (VALUE, "NoSchedule")
    assert len(pods.pods) == 4
    assert pods.look() == [], "nothing is done twice"


def test_advise_only_tells_and_no_job_gets_more_than_the_operator_may() -> None:
    pods = running("advise")
    pods.tells("n1", "slow", 1)
    pods.settle()
    assert pods.shown() == {"n1": (["KeepstepFailSlow"], [])}
    pods = running("auto")
    pods.most = "advise"
    pods.tells("n1", "slow", 1)
    pods.settle()
    assert pods.shown() == {"n1": (["KeepstepFailSlow"], [])}
    pods = running("off")
    pods.tells("n1", "slow", 1)
    pods.settle()
    assert pods.shown() == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"managed": BY_NAME}, "ChoosesNode"),
        ({"managed": []}, "ChoosesNode"),
        ({"managed": None}, "ChoosesNode"),
        ({"managed": [{}, *BY_NAME]}, "ChoosesNode"),
        ({"tolerations": [EVERYTHING]}, "ToleratesTaint"),
        ({"tolerations": [{**EVERYTHING, "effect": "NoSchedule"}]}, "ToleratesTaint"),
        ({"tolerations": [{"key": "keepstep.dev/hardware", "operator": "Exists"}]}, "ToleratesTaint"),
        ({"tolerations": [{"key": "keepstep.dev/lost", "value": VALUE}]}, "ToleratesTaint"),
        ({"remedy": "drain"}, "RemedyUnknown"),
    ],
)
def test_a_job_with_such_a_pod_is_not_believed(change: dict[str, Any], reason: str) -> None:
    pods = running()
    pods.pods.append(pod("train-4", "n4", **change))
    doubt = doubt_of(read(*pods.pods))
    assert doubt is not None
    assert doubt[0] == reason
    pods.tells("n4", "hardware", 1)
    pods.tells("n1", "hardware", 2)
    pods.settle()
    assert pods.shown() == {}
    pods.pods.pop()
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE}, "but not n4, where only that pod was"


@pytest.mark.parametrize(
    "toleration",
    [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {**EVERYTHING, "effect": "NoExecute"},
        {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
    ],
)
def test_other_tolerations_are_nobodys_business(toleration: dict[str, Any]) -> None:
    assert doubt_of(read(pod("train-0", "n1", tolerations=[toleration]))) is None


def test_a_pod_that_waits_for_a_node_chooses_none() -> None:
    assert doubt_of(read(pod("train-0", managed=None))) is None


def test_only_nodes_are_believed_on_which_a_pod_has_run() -> None:
    pods = running()
    pods.pods.append(pod("train-4", "n4", phase="Pending"))
    for incident, name in enumerate(("n4", "n7", "nowhere", "; rm"), 1):
        pods.tells(name, "hardware", incident)
    pods.settle()
    assert pods.shown() == {}
    pods.pods = [one for one in pods.pods if one["spec"]["nodeName"] != "n2"]
    pods.tells("n2", "hardware", 9)
    pods.settle()
    assert pods.shown() == {"n2": HARDWARE}, "its pod has gone meanwhile"


def test_pods_that_do_not_run_make_no_job_larger() -> None:
    """Else many pods that need nothing would have many nodes tainted."""
    pods = running()
    pods.nodes = {f"n{at}": node(f"n{at}") for at in range(60)}
    pods.pods += [pod(f"train-{at}") for at in range(4, 100)]
    pods.pods += [pod(f"ended-{at}", f"n{at % 4}", phase="Succeeded") for at in range(100)]
    for at in range(4):
        pods.tells(f"n{at}", "hardware", at)
    pods.settle(10)
    assert sum(bool(pods.taints(name)) for name in pods.nodes) == 1
    assert sum(bool(pods.conditions(name)) for name in pods.nodes) == 4


def test_the_budget_of_an_hour_holds_over_operators() -> None:
    """All that is remembered is on the nodes, so that another operator goes on."""
    pods = running()
    pods.nodes = {f"n{at}": node(f"n{at}") for at in range(40)}
    pods.tells("n1", "hardware", 1)
    pods.settle()
    pods.take_over()
    pods.tells("n2", "hardware", 2)
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE, "n2": (["KeepstepHardware"], [])}
    (noted,) = msgspec.json.decode(pods.nodes["n2"]["metadata"]["annotations"][FAULTS])
    assert noted["job"] == "ml/train"
    assert noted["fault"]["why"] == "other nodes of the job were tainted within the hour"
    pods.now_s += 3600
    pods.tells("n3", "hardware", 3)
    pods.settle()
    assert pods.shown()["n3"] == HARDWARE


def test_a_note_counts_before_it_is_seen() -> None:
    pods = running()
    pods.nodes = {f"n{at}": node(f"n{at}") for at in range(40)}
    pods.tells("n1", "hardware", 1)
    view = pods.view()
    pods.look(view)
    pods.tells("n2", "hardware", 2)
    assert pods.look(view) == []
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE, "n2": (["KeepstepHardware"], [])}


def test_a_note_that_was_refused_is_not_waited_for() -> None:
    pods = running()
    view = pods.view()
    pods.uncondition("n1", "none")
    pods.tells("n1", "hardware", 1)
    assert [type(one) for one in pods.look(view)] == [Note]
    assert [type(one) for one in pods.look(view)] == [Note]
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE}


def test_whoever_calls_his_pods_many_jobs_has_no_more_nodes_tainted() -> None:
    pods = VirtualPods([pod(f"j{at}-0", f"n{at}", job=f"j{at}") for at in range(9)])
    pods.nodes = {f"n{at}": node(f"n{at}") for at in range(100)}
    for at in range(9):
        pods.tells(f"n{at}", "hardware", 1, job=f"j{at}")
    pods.settle()
    assert [name for name in pods.nodes if pods.taints(name)] == ["n0"]
    assert sum(bool(pods.conditions(name)) for name in pods.nodes) == 9
    pods.take_over()
    pods.pods.append(pod("j9-0", "n9", job="j9"))
    pods.tells("n9", "hardware", 1, job="j9")
    pods.settle()
    (noted,) = msgspec.json.decode(pods.nodes["n9"]["metadata"]["annotations"][FAULTS])
    assert noted["fault"]["why"] == "other nodes of the namespace's jobs were tainted within the hour"


def test_a_tenth_of_the_cluster_by_the_orders_of_all_jobs() -> None:
    pods = VirtualPods([pod(f"{job}-0", f"n{at}", job=job) for at, job in enumerate("abcd")])
    for at, job in enumerate("abcd"):
        pods.tells(f"n{at}", "hardware", 1, job=job)
    pods.settle()
    assert [name for name in pods.nodes if pods.taints(name)] == ["n0"]


def test_who_gives_a_node_back_is_not_gainsaid() -> None:
    pods = running()
    pods.tells("n1", "hardware", 1)
    pods.settle()
    pods.uncondition("n1", "KeepstepHardware")
    pods.settle()
    assert pods.shown() == {}
    pods.take_over()
    pods.settle(20)
    assert pods.shown() == {}, "nor by another operator"
    pods.now_s += 3600
    pods.settle()
    assert pods.shown() == {}
    pods.tells("n1", "hardware", 2)
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE}


def test_who_removes_the_taint_is_not_gainsaid() -> None:
    pods = running()
    pods.tells("n1", "hardware", 1)
    pods.settle()
    pods.nodes["n1"]["spec"]["taints"] = []
    pods.settle(10)
    assert pods.shown() == {"n1": (["KeepstepHardware"], [])}


def test_an_order_that_was_not_carried_out_for_an_hour_is_none() -> None:
    pods = running()
    pods.tells("n1", "hardware", 1)
    pods.look()
    pods.now_s += 3601
    pods.settle()
    assert pods.shown() == {}


def test_what_is_of_before_the_pods_or_the_node_is_not_news() -> None:
    pods = running(now_s=2000.0)
    pods.tells("n1", "hardware", 1)
    pods.settle()
    assert pods.shown() == {}
    pods.now_s = 3000.0
    pods.tells("n2", "hardware", 2)
    pods.nodes["n2"]["metadata"]["creationTimestamp"] = stamp(3500.0)
    pods.settle()
    assert pods.shown() == {}, "another machine has its name by now"


def test_a_lost_node_only_where_its_kubelet_is_silent_too() -> None:
    pods = running(now_s=990.0)
    pods.tells("n1", "lost", 1)
    pods.settle()
    assert pods.shown() == {}
    pods.nodes["n1"]["status"]["conditions"][0]["status"] = "Unknown"
    pods.settle()
    assert pods.shown() == {"n1": (["KeepstepLost"], ["keepstep.dev/lost"])}
    late = running(now_s=990.0)
    late.tells("n1", "lost", 1)
    late.now_s += LOST_S
    late.nodes["n1"]["status"]["conditions"][0]["status"] = "Unknown"
    late.settle()
    assert late.shown() == {}


def test_jobs_on_one_node_note_beside_each_other_and_old_notes_go() -> None:
    pods = running("advise")
    pods.pods += [pod(f"other-{at}", "n1", job="other", remedy="advise") for at in range(2)]
    for incident in range(1, 30):
        pods.tells("n1", "hardware", incident)
        pods.tells("n1", "slow", incident, job="other")
        pods.settle(3)
    pods.settle()
    noted = msgspec.json.decode(pods.nodes["n1"]["metadata"]["annotations"][FAULTS])
    assert [(one["job"], one["fault"]["kind"], one["fault"]["incident"]) for one in noted] == [
        ("ml/other", "slow", 29),
        ("ml/train", "hardware", 29),
    ]
    assert pods.look() == []


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"job":7}]', "[" * 9000, '[{"job":"ml/train","fault":{}}]']
)
def test_a_note_that_is_none_is_written_anew(text: str) -> None:
    pods = running()
    pods.nodes["n1"]["metadata"]["annotations"] = {FAULTS: text, "own": "x"}
    pods.settle(2)
    pods.tells("n1", "hardware", 1)
    pods.settle()
    assert pods.shown() == {"n1": HARDWARE}
    assert pods.nodes["n1"]["metadata"]["annotations"]["own"] == "x"


def test_foreign_text_is_one_line_of_bounded_length() -> None:
    pods = running()
    pods.tells("n1", "hardware", 1, text='a\n\x1b[31m"' + "x" * 5000)
    for _ in range(4):
        for action in pods.look():
            assert str(action).isprintable()
            assert len(str(action)) < 1500
    (shown,) = pods.conditions("n1").values()
    assert shown.isprintable()
    assert '"' not in shown
    assert len(shown) <= 500


def test_notes_and_taints_are_for_the_node_as_it_was_seen() -> None:
    pods = running()
    pods.tells("n1", "hardware", 1)
    view = pods.view()
    pods.uncondition("n1", "none")
    pods.look(view)
    assert FAULTS not in pods.nodes["n1"]["metadata"].get("annotations", {})
    assert not [one for one in pods.actions if isinstance(one, SetTaints)]


def test_an_event_about_the_oldest_pod_says_whether_it_is_heard() -> None:
    (own,) = read(pod("train-0", "n0"))
    bad = told_about([own], "TlsUnusable", "put\nit there")
    assert (bad.about["name"], bad.about["namespace"], bad.is_warning) == ("train-0", "ml", True)
    assert str(bad).isprintable()
    assert not told_about([own], "Watched", "its controller answers").is_warning
