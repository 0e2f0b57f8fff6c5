"""The operator's page names each right that its roles give, and each reason that it tells."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
from tests.doc_fences import DOCS, ROOT

from keepstep.kubernetes import job_interview, job_plan, watched

yaml = pytest.importorskip("yaml")

PAGE = (DOCS / "howto/kubernetes-operator.md").read_text()
DEPLOY = ROOT / "deploy/kubernetes/operator"
Right = tuple[str, str, str, frozenset[str]]
"""Where, of what, of which name, to do what."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that begins with this line, without its head."""
    lines = PAGE[PAGE.index(f"\n{heading}\n") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def told() -> Iterator[Right]:
    for may, of, where, why in rows("| it may | of | where | for |"):
        resource, *name = re.findall("`([^`]+)`", of)
        assert why
        yield where.replace("`", ""), resource, "".join(name), frozenset(may.split(", "))


def given() -> Iterator[Right]:
    for path in (DEPLOY / "operator.yaml", DEPLOY / "jobs/role.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            for rule in one.get("rules", ()):
                where = f"namespace {one['metadata'].get('namespace', '')}"
                if path.parent.name == "jobs":
                    where = "namespaces of jobs"
                elif one["kind"] == "ClusterRole":
                    where = "cluster"
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames", [""]):
                        yield where, resource, name, frozenset(rule["verbs"])


def test_the_rights_on_the_page_are_those_of_the_roles() -> None:
    assert sorted(told(), key=str) == sorted(given(), key=str)


def test_the_page_says_what_to_do_about_each_reason_why_a_job_is_not_heard() -> None:
    sources = inspect.getsource(job_interview) + inspect.getsource(watched.doubt_of)
    reasons = set(re.findall(r'"((?:[A-Z][a-z]+){2,})"', sources)) | {job_plan.NO_ANSWER}
    shown = {name for reason, _ in rows("| reason | what to do |") for name in re.findall("`(.+?)`", reason)}
    assert shown == reasons
