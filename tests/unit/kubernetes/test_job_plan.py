"""What the operator does about a training job, from its first pod to its end."""

from __future__ import annotations

import pytest
from tests.unit.kubernetes.virtual_cluster import VirtualCluster, training_job

from keepstep.kubernetes.actions import EndPod, Make, Report
from keepstep.kubernetes.job_plan import LATE_S, OUT_OF_SERVICE, reconcile

SILENT = ("NoAnswer", "10.0.0.1:29400: refused")
LOST = "keepstep: exit code 75 (infrastructure): a node was lost; nodes blamed: n[1-2]; incident 0003: CRASH"


def running(**spec: object) -> VirtualCluster:
    cluster = VirtualCluster(training_job(**spec))  # type: ignore[arg-type]
    cluster.settle(5)
    assert cluster.status["phase"] == "Running"
    return cluster


def test_a_service_and_pods_are_made_once_each() -> None:
    cluster = VirtualCluster()
    cluster.settle(3)
    assert cluster.has_service
    assert sorted(cluster.made) == ["train-0", "train-1", "train-2", "train-3"]
    assert cluster.status["running"] == "4/4"
    assert cluster.status["nodes"] == ["n0", "n1", "n2", "n3"]
    assert cluster.status["observedGeneration"] == 1
    assert cluster.look() == []


def test_without_enough_nodes_it_is_pending_until_all_that_train_run() -> None:
    cluster = VirtualCluster(training_job(nodes=9, spares=2))
    cluster.settle(5)
    assert (cluster.status["phase"], cluster.status["running"]) == ("Pending", "8/11")


def test_a_job_that_has_finished_is_never_run_again() -> None:
    cluster = running()
    cluster.end("train-1", 0)
    cluster.look()
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Running", "Finishing")
    cluster.end("train-2", 137)
    cluster.end_all(0)
    cluster.settle(2)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Succeeded", "Finished")
    cluster.pods.clear()
    cluster.settle(5)
    assert cluster.pods == {}
    assert [event.reason for event in cluster.events] == ["Finished"]


def test_pods_that_do_not_end_with_the_job_are_ended() -> None:
    cluster = running()
    cluster.end("train-0", 0)
    cluster.settle(115)
    assert cluster.status["phase"] == "Running"
    cluster.settle(10)
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.running() == ["train-1", "train-2", "train-3"]
    cluster.settle(125)
    assert cluster.running() == []


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (
            1,
            "keepstep: exit code 1 (training): rank 3 failed: ValueError; nodes blamed: n2",
            "TrainingFailed",
        ),
        (2, "keepstep: exit code 2 (unusable): no such script", "UnusableFailed"),
        (79, "keepstep: exit code 79 (stopped): stopped by hand", "Stopped"),
        (137, "keepstep: exit code 137 (training): rank 1 was killed", "TrainingFailed"),
        (127, "python: not found\nmore", "ContainerFailed"),
    ],
)
def test_a_job_that_has_failed_is_not_run_again(code: int, message: str, reason: str) -> None:
    cluster = running()
    cluster.end("train-2", code, message)
    cluster.settle(3)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", reason)
    text = message if message.startswith("keepstep") else f"exit code {code}"
    assert cluster.status["message"] == text
    made = len(cluster.made)
    cluster.end_all(code, message)
    cluster.settle(200)
    assert len(cluster.made) == made
    failed = {one["type"]: one["status"] for one in cluster.status["conditions"]}
    assert (failed["Failed"], failed["Complete"]) == ("True", "False")


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (1, "keepstep: exit code 1 (training): rank 1 failed: ValueError", "TrainingFailed"),
        (79, "keepstep: exit code 79 (stopped): stopped by hand", "Stopped"),
        (143, "keepstep: exit code 143 (signal): ended by SIGTERM", "SignalFailed"),
    ],
)
def test_the_end_of_a_spare_that_was_not_used_is_not_that_of_the_job(
    code: int, message: str, reason: str
) -> None:
    cluster = running()
    cluster.end("train-3", 0)
    cluster.settle(2)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Running", "Finishing")
    cluster.end_all(code, message)
    cluster.settle(5)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", reason)


def test_a_spare_that_was_sent_a_signal_does_not_undo_a_job_that_has_finished() -> None:
    cluster = running()
    cluster.end("train-3", 143, "keepstep: exit code 143 (signal): ended by SIGTERM")
    cluster.end_all(0)
    cluster.settle(2)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Succeeded", "Finished")


def test_an_evicted_pod_is_made_again_and_costs_nothing() -> None:
    cluster = running()
    cluster.evict("train-2")
    cluster.settle(2)
    assert cluster.made.count("train-2") == 2
    assert cluster.status.get("killed", 0) == 0
    cluster.end("train-1", 137, reason="Evicted")
    cluster.settle(5)
    assert cluster.made.count("train-1") == 2
    assert (cluster.status.get("killed", 0), cluster.status["phase"]) == (0, "Running")


def test_killed_launchers_are_counted() -> None:
    cluster = running(podRestartLimit=2)
    for time in range(3):
        assert cluster.status["phase"] == "Running"
        cluster.end("train-1", 137)
        cluster.settle(30)
        assert cluster.status["killed"] == time + 1
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "PodRestartLimit")


def test_killed_launchers_are_counted_within_an_hour() -> None:
    cluster = running(podRestartLimit=2)
    for _ in range(6):
        cluster.end("train-1", 137)
        cluster.settle(400, step_s=5)
        cluster.now_s += 1500
    assert cluster.status["phase"] == "Running"
    assert cluster.status["killed"] <= 2


@pytest.mark.parametrize("state", ["running", "recovering", ""])
def test_at_the_limit_a_job_that_goes_on_is_not_ended_and_its_pod_not_made_again(state: str) -> None:
    cluster = running(podRestartLimit=2)
    cluster.tells()
    for _ in range(3):
        cluster.end("train-1", 137)
        cluster.settle(20)
    cluster.trouble = SILENT
    cluster.tells(state=state)
    if not state:
        cluster.told = None
    cluster.settle(50)
    assert cluster.status["phase"] == "Running"
    assert cluster.made.count("train-1") == 3
    cluster.tells()
    cluster.now_s += 3600
    cluster.settle(310)
    assert cluster.made.count("train-1") == 4
    assert cluster.status["phase"] == "Running"


@pytest.mark.parametrize(
    ("code", "message"), [(137, ""), (75, LOST), (1, "keepstep: exit code 1 (training): rank 1 failed")]
)
def test_a_pod_that_ends_because_it_is_deleted_says_nothing(code: int, message: str) -> None:
    cluster = running()
    cluster.pods["train-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.end("train-1", code, message)
    cluster.settle(2)
    del cluster.pods["train-1"]
    cluster.settle(5)
    assert (cluster.status["phase"], cluster.status.get("killed", 0)) == ("Running", 0)
    assert cluster.status.get("attempt", 0) == 0


def test_a_pod_that_ends_alone_with_75_begins_again_later_each_time() -> None:
    cluster = running()
    cluster.tells()
    waits: list[float] = []
    for _ in range(4):
        cluster.end("train-3", 75, "keepstep: exit code 75 (infrastructure): this node leaves the job")
        began_s, made = cluster.now_s, len(cluster.made)
        while len(cluster.made) == made:
            cluster.settle(1)
        waits.append(cluster.now_s - began_s)
        cluster.settle(2)
    assert cluster.status.get("attempt", 0) == 0
    assert cluster.status["avoidedNodes"] == ["n3"], "where it ended, if another one is free"
    assert waits == sorted(waits)
    assert waits[0] <= 8
    assert waits[-1] >= 40


def test_a_job_that_ends_with_75_begins_again_elsewhere() -> None:
    cluster = running()
    cluster.end_all(75, LOST)
    cluster.settle(5)
    assert cluster.status["attempt"] == 1
    assert cluster.status["avoidedNodes"] == ["n1", "n2"]
    assert {cluster.attempt_of(name) for name in cluster.pods} == {(index, 1) for index in range(4)}
    preferred = cluster.pods["train-0"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = preferred["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [one["values"] for one in term["preference"]["matchFields"]] == [["n1"], ["n2"]]
    assert cluster.status["phase"] == "Running"
    assert cluster.events[-1].reason == "BeginsAgain"


def test_it_begins_again_so_often_and_fails_then() -> None:
    cluster = running(restartLimit=2)
    for _ in range(3):
        cluster.end_all(75, LOST)
        cluster.settle(5)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "RestartLimit")
    assert cluster.status["attempt"] == 2
    assert cluster.status["message"].startswith("begun again 2 times; keepstep: exit code 75")


def test_a_pod_that_ends_when_the_controller_falls_silent_waits_for_the_others() -> None:
    cluster = running()
    cluster.tells()
    cluster.settle(2)
    cluster.told, cluster.trouble = None, SILENT
    cluster.end("train-0", 75, LOST)
    cluster.settle(30)
    assert cluster.made.count("train-0") == 1
    for index in (1, 2, 3):
        cluster.end(f"train-{index}", 75, LOST)
    cluster.settle(3)
    assert cluster.status["attempt"] == 1


def test_a_straggler_that_has_begun_again_does_not_hide_the_end() -> None:
    cluster = running()
    cluster.tells()
    cluster.end("train-0", 75, LOST)
    cluster.settle(9)
    assert cluster.made.count("train-0") == 2
    cluster.told, cluster.trouble = None, SILENT
    for index in (1, 2, 3):
        cluster.end(f"train-{index}", 75, LOST)
    cluster.settle(70)
    assert cluster.status["attempt"] == 1
    assert {cluster.attempt_of(name)[1] for name in cluster.pods} == {1}


@pytest.mark.parametrize("trouble", [SILENT, ("SecretForbidden", "")])
def test_a_job_that_goes_on_is_not_begun_again_for_one_pod(trouble: tuple[str, str]) -> None:
    """Not even if each of its pods has begun again at some time, and its controller was never heard."""
    cluster = running()
    cluster.trouble = trouble
    for index in range(4):
        cluster.end(f"train-{index}", 137)
        cluster.settle(5)
    cluster.end("train-0", 75, LOST)
    cluster.settle(300)
    assert (cluster.status.get("attempt", 0), cluster.status["phase"]) == (0, "Running")


@pytest.mark.parametrize("state", ["", "created"])
def test_pods_that_have_begun_again_long_ago_do_not_wait_to_begin(state: str) -> None:
    """A controller that is not heard, or a new one that waits at the old address, says nothing against them."""
    cluster = running()
    cluster.tells()
    for index in range(4):
        cluster.end(f"train-{index}", 137)
        cluster.settle(5)
    cluster.now_s += 3600
    cluster.told, cluster.trouble = None, SILENT
    if state:
        cluster.tells(state=state)
    cluster.end("train-0", 75, LOST)
    cluster.settle(120)
    assert (cluster.status.get("attempt", 0), cluster.made.count("train-1")) == (0, 2)


def test_all_killed_at_once_begins_again_and_signals_from_somebody_do_not() -> None:
    cluster = running()
    cluster.end_all(137)
    cluster.settle(5)
    assert cluster.status["attempt"] == 1
    cluster.end_all(143, "keepstep: exit code 143 (signal): ended by SIGTERM")
    cluster.settle(5)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "SignalFailed")


def test_a_pod_on_a_node_without_power_is_forgotten_after_a_while() -> None:
    cluster = running()
    cluster.lose("n2")
    cluster.settle(100)
    assert cluster.made.count("train-2") == 1, "the pod may run"
    cluster.evict("train-2")
    cluster.settle(20)
    assert cluster.made.count("train-2") == 1
    cluster.settle(20)
    assert cluster.made.count("train-2") == 2
    assert cluster.node_of(2) == "n4"
    assert cluster.status["formerNodes"] == ["n2"]


def test_a_node_that_the_job_calls_lost_too_is_not_waited_for() -> None:
    cluster = running()
    cluster.lose("n2")
    cluster.tells(("n2", "lost", 1), state="running")
    cluster.settle(3)
    assert cluster.made.count("train-2") == 2


def test_a_pod_is_not_forgotten_while_its_job_says_that_it_runs() -> None:
    cluster = running()
    cluster.tells()
    cluster.lose("n2")
    cluster.evict("train-2")
    cluster.settle(100)
    assert cluster.made.count("train-2") == 1
    cluster.tells(state="checking")
    cluster.settle(3)
    assert cluster.made.count("train-2") == 2


def test_the_only_pod_of_a_job_is_not_forgotten_before_its_node_is_out_of_service() -> None:
    cluster = running(nodes=1, spares=0)
    cluster.lose("n0")
    cluster.evict("train-0")
    cluster.trouble = SILENT
    cluster.settle(200)
    assert cluster.made == ["train-0"]
    cluster.nodes["n0"]["spec"]["taints"] = [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]
    cluster.settle(3)
    assert cluster.made == ["train-0", "train-0"]


def test_pods_of_many_silent_nodes_are_left_alone() -> None:
    cluster = running()
    for name in ("n1", "n2"):
        cluster.lose(name)
        cluster.evict(f"train-{name[1]}")
    cluster.tells(("n1", "lost", 1), ("n2", "lost", 1))
    cluster.settle(200)
    assert len(cluster.made) == 4


def test_a_deleted_job_is_left_to_kubernetes_even_with_somebodys_finalizer() -> None:
    cluster = running()
    cluster.job["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/x"]}
    del cluster.pods["train-1"]
    cluster.end_all(75)
    assert cluster.look() == []


def test_pods_of_others_are_not_touched() -> None:
    """The program hands over only pods that this job owns; one too many of its own is ended."""
    cluster = running()
    cluster.job["spec"]["spares"] = 0
    ends = [one for one in cluster.look() if isinstance(one, EndPod)]
    assert [(one.name, one.now) for one in ends] == [("train-3", False)]


def test_foreign_words_stay_in_one_line() -> None:
    cluster = running()
    hostile = "keepstep: exit code 1 (training): a\x1b[31m\n; rm -rf / \u202e" + "x" * 5000
    cluster.end("train-0", 1, hostile)
    (report, tell) = cluster.look()[:2]
    for text in (str(report), str(tell), cluster.status["message"]):
        assert "\n" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert len(cluster.status["message"]) <= 1000


def test_a_stale_view_makes_no_second_attempt() -> None:
    cluster = running()
    cluster.end_all(75, LOST)
    stale = cluster.view()
    cluster.look()
    for _ in range(5):
        cluster.look(stale)
    assert cluster.status["attempt"] == 1


def test_a_definition_that_drops_the_status_stops_and_does_not_loop() -> None:
    """The CRD is of an older version, which does not know `attempt`."""
    cluster = running()
    cluster.end_all(75, LOST)
    for _ in range(50):
        cluster.now_s += 1
        cluster.look()
        cluster.job["status"].pop("attempt", None)
        cluster.job["status"].pop("again", None)
    assert len(cluster.made) == 4
    assert not any(isinstance(one, Make) for one in cluster.actions[-10:])


def test_a_category_of_any_length_does_not_get_into_the_reason() -> None:
    cluster = running()
    cluster.end("train-0", 1, f"keepstep: exit code 1 ({'x' * 5000}): failed")
    cluster.settle(2)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "ContainerFailed")


def test_what_the_api_server_refuses_is_in_the_status() -> None:
    cluster = VirtualCluster()
    seen = cluster.seen()
    seen.refused = 'Pod "train-0" is invalid: spec.containers[0].image: Required value'
    (report,) = [one for one in reconcile(seen) if isinstance(one, Report)]
    assert (report.status.phase, report.status.reason) == ("Pending", "Refused")
    assert report.status.message == seen.refused


def test_who_came_too_late_to_be_told_of_the_end_is_not_waited_for_long() -> None:
    cluster = running()
    for name in ("train-0", "train-1", "train-2"):
        cluster.end(name, 0)
    cluster.settle(2)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Running", "Finishing")
    cluster.settle(LATE_S + 1)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Succeeded", "Finished")
