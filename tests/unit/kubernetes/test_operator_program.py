"""The operator as a program: an order to clear a node, and command lines that cannot be used."""

from __future__ import annotations

import asyncio
import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("lightkube")

from lightkube import ApiError
from lightkube.models.meta_v1 import Status

from keepstep.cli import main
from keepstep.core.errors import UsageError
from keepstep.kubernetes import operator_program
from keepstep.kubernetes.actions import Make
from keepstep.kubernetes.node_remedies import VALUE
from keepstep.kubernetes.objects import Fault, JobSpec, JobStatus, TrainingJob

OPERATOR = Path(__file__).parents[3] / "deploy/kubernetes/operator/operator.yaml"
NODE = {
    "metadata": {"name": "gpu-7", "resourceVersion": "5"},
    "spec": {
        "taints": [
            {"key": "keepstep.dev/fail-slow", "value": VALUE, "effect": "NoSchedule"},
            {"key": "example.com/gpu", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"},
        ]
    },
    "status": {
        "conditions": [{"type": "KeepstepFailSlow", "status": "True"}, {"type": "Ready", "status": "True"}]
    },
}


class Client:
    """Knows one node, and notes what is changed."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.changes: list[Any] = []

    async def get(self, kind: Any, name: str) -> dict[str, Any]:
        self.asked.append(name)
        if name != "gpu-7":
            raise ApiError(status=Status(code=404, message="not found"))
        return copy.deepcopy(NODE)

    async def patch(self, kind: Any, name: str, change: Any, *, patch_type: Any) -> None:
        self.changes.append((kind.__name__, name, change))


def cleared(name: str, *, dry_run: bool = False) -> tuple[int, Client]:
    client = Client()
    clearing = operator_program.clear(
        client,  # type: ignore[arg-type]
        name,
        dry_run=dry_run,
        speaker=operator_program.Speaker(),
    )
    code = asyncio.run(clearing)
    return code, client


def test_a_node_is_cleared_of_ours_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, client = cleared("gpu-7")
    assert code == 0
    assert client.changes == [
        (
            "NodeStatus",
            "gpu-7",
            {"status": {"conditions": [{"$patch": "delete", "type": "KeepstepFailSlow"}]}},
        ),
        ("Node", "gpu-7", {"spec": {"taints": NODE["spec"]["taints"][1:]}}),
    ]
    assert "condition KeepstepFailSlow removed" in capsys.readouterr().err


def test_taints_that_have_changed_since_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the condition is gone an operator removes the taint, and somebody may add one."""
    now = {**NODE, "spec": {"taints": [{"key": "example.com/new", "effect": "NoSchedule"}]}}
    before = Client.get

    async def get(self: Client, kind: Any, name: str) -> dict[str, Any]:
        return copy.deepcopy(now) if self.changes else await before(self, kind, name)

    monkeypatch.setattr(Client, "get", get)
    code, client = cleared("gpu-7")
    assert code == 0
    assert [kind for kind, _, _ in client.changes] == ["NodeStatus"]


def test_a_name_that_is_taken_is_tried_later_each_time_and_told_after_the_third() -> None:
    async def work() -> None:
        now_s, asked = [100.0], list[str]()

        class Taken(Client):
            async def create(self, what: Any, **where: Any) -> None:
                asked.append(what["metadata"]["name"])
                raise ApiError(status=Status(code=409, message='pods "train-0" already exists'))

        operator = operator_program.Operator(
            Taken(),  # type: ignore[arg-type]
            ["ml"],
            me="a",
            most="auto",
            dry_run=False,
            speaker=operator_program.Speaker(),
            clock=lambda: now_s[0],
        )
        lease: Any = {"metadata": {"resourceVersion": "1"}}
        known, make = operator_program._Known("job-1"), Make({"kind": "Pod", "metadata": {"name": "train-0"}})
        told: list[bool] = []
        for _ in range(20):
            operator._election.wrote(lease, now_s[0])
            operator._start([make], known)
            await asyncio.gather(*operator._tasks)
            told.append(bool(known.refused))
            now_s[0] += 0.5
        assert len(asked) == 4, "after 1, 2 and 4 seconds"
        assert told == [False] * 6 + [True] * 14

    asyncio.run(work())


def test_orders_of_all_jobs_that_are_not_done_yet_count_as_tainted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    operator = operator_program.Operator(
        Client(),  # type: ignore[arg-type]
        ["ml"],
        me="a",
        most="auto",
        dry_run=False,
        speaker=operator_program.Speaker(),
    )
    (jobs,) = operator._jobs
    orders = [("n1", "Ordered", True), ("n2", "Done", True), ("n3", "Ordered", False)]
    faults = [Fault(node=one, kind="slow", state=state, taint=taint) for one, state, taint in orders]  # type: ignore[arg-type]
    job = TrainingJob(spec=JobSpec(nodes=1, template={}), status=JobStatus(faults=faults))
    jobs.found, jobs.raw = {("ml", "train"): job}, {("ml", "train"): {}}
    for mirror in (jobs, *operator._pods, *operator._services):
        mirror.is_complete = True
    monkeypatch.setattr(operator, "_look_at", lambda *told: seen.append(told[-1]))
    operator._look()
    assert seen == [{"n1"}]


def test_a_dry_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, client = cleared("gpu-7", dry_run=True)
    assert (code, client.changes) == (0, [])
    assert capsys.readouterr().err.count("would do: ") == 2


@pytest.mark.parametrize("name", ["gpu-8", "../namespaces/default", "a;b", "a\nb", "\x1b[31m", "", "A"])
def test_a_name_that_no_node_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, client = cleared(name)
    assert (code, client.changes) == (1, [])
    assert client.asked == (["gpu-8"] if name == "gpu-8" else [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("there is no such node")
    assert line.isprintable()


def test_without_the_client_library_it_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.startswith(("keepstep.kubernetes.", "lightkube"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightkube", None)
    assert main(["operator"]) == 2
    assert capsys.readouterr().err == (
        "keepstep: operator: lightkube is not installed: pip install 'keepstep[kubernetes]'\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--node-remedy=drain"], "invalid choice"),
        (["--clear"], "expected one argument"),
        (["x"], "unrecognized"),
    ],
)
def test_command_lines_that_cannot_be_used(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["operator", *words]) == 2
    assert told in capsys.readouterr().err


def test_nothing_is_tainted_before_somebody_says_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[str] = []

    def operator(*_: Any, **given: Any) -> None:
        most.append(given["most"])
        raise UsageError("that is enough")

    client = SimpleNamespace(namespace="ml")
    monkeypatch.setattr("keepstep.kubernetes.cluster_api.client_from_environment", lambda: client)
    monkeypatch.setattr(operator_program, "Operator", operator)
    shipped = yaml.safe_load_all(OPERATOR.read_text())
    (deployment,) = [one for one in shipped if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [main(["operator"]), main([*container["command"][1:], *container["args"]])] == [2, 2]
    assert most == ["advise", "advise"]


def test_without_a_cluster_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent/config")
    assert main(["operator", "--dry-run"]) == 2
    assert "run this in a pod, or set KUBECONFIG" in capsys.readouterr().err


def test_the_same_line_is_printed_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    speaker = operator_program.Speaker()
    for _ in range(5):
        speaker.once("a\n\x1b[31m")
    assert capsys.readouterr().err == "keepstep: a\\n\\x1b[31m\n"
