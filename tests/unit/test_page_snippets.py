"""What pages show to be copied is right as it is printed: manifests, settings and scripts of a batch job.

On a real Slurm the batch scripts run in ``tests/e2e``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.doc_fences import DOCS, fences

from keepstep.cli.slurm import main, split_flags
from keepstep.core.config import read_file, resolve
from keepstep.launch.command import job as jobs
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.run_settings import SETTINGS

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

from tests.unit.test_manifests import DEPLOY, FOLDER, JOBS_SINCE, VERSIONS, refused, training_job  # noqa: E402

KUBERNETES, OPERATOR = DOCS / "howto/kubernetes.md", DOCS / "howto/kubernetes-operator.md"
SLURM, EXIT_CODES = DOCS / "howto/slurm.md", DOCS / "reference/exit-codes.md"


def block(path: Path, language: str, number: int = 0) -> str:
    """A block of a page in a language."""
    return fences(path, language)[number][1]


def test_blocks_are_found_with_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n```yaml\na: 1\n```\n- b\n\n  ```yaml\n  b:\n    c: 2\n  ```\n```\nplain\n```\n")
    assert fences(page, "yaml") == [(4, "a: 1\n"), (9, "b:\n  c: 2\n")]
    assert fences(page, "") == [(13, "plain\n")]
    assert fences(page, "bash") == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_every_block_can_be_read(page: Path, tmp_path: Path) -> None:
    for line, text in fences(page, "yaml"):
        assert yaml.safe_load(text), f"{page}:{line}"
    for _, text in fences(page, "toml"):
        (tmp_path / "read.toml").write_text(text)
        assert read_file(tmp_path / "read.toml")
    for line, text in fences(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), f"{page}:{line}"
    for line, text in fences(page, "python"):
        compile(text, f"{page}:{line}", "exec", dont_inherit=True)


# --- Kubernetes -------------------------------------------------------------------------------------------------


def part_of(shown: Any, whole: Any) -> bool:
    """Whether all that is shown is in the whole, in lists in any place."""
    if isinstance(shown, dict):
        return all(key in whole and part_of(value, whole[key]) for key, value in shown.items())
    if isinstance(shown, list) and any(isinstance(one, dict) for one in shown):
        return all(any(part_of(one, other) for other in whole) for one in shown)
    return shown == whole


def job_manifest() -> dict[str, Any]:
    return list(yaml.safe_load_all((FOLDER / "job.yaml").read_text()))[1]


def test_the_shown_pod_template_is_that_of_the_manifest_and_fits_kubernetes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = yaml.safe_load(block(KUBERNETES, "yaml"))
    assert part_of(shown, job_manifest()["spec"]["template"])
    assert not part_of({"spec": {"containers": [{"name": "other"}]}}, job_manifest()["spec"]["template"])
    for version in VERSIONS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, **shown}
        kubernetes_validate.validate(pod, version, strict=True)
    (container,) = shown["spec"]["containers"]
    monkeypatch.setattr(jobs, "own_name_with_domain", lambda: "train-4.train.ml.svc.cluster.local")
    told = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "JOB_COMPLETION_INDEX": "4",
        container["env"][0]["name"]: "gpu-7",
    }
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["keepstep", "run"]
    made = job_from_command_line(words[2:], told)
    assert (made.node, made.rendezvous.node_rank, made.max_nodes) == ("gpu-7", 4, 4)
    assert str(made.rendezvous.endpoint) == "train-0.train.ml.svc.cluster.local:29400"


def test_the_shown_label_of_a_zone_is_a_failure_domain() -> None:
    (one,) = yaml.safe_load(block(KUBERNETES, "yaml", 1))["env"]
    spec = {"containers": [{"name": "train", "image": "train:1", "env": [one]}]}
    for version in VERSIONS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)
    assert job_from_command_line(["train.py"], {one["name"]: "zone-b"}).failure_domain == "zone-b"


def test_the_shown_training_job_fits_its_definition_and_its_pods_fit_kubernetes() -> None:
    import msgspec

    from keepstep.kubernetes.objects import TrainingJob
    from keepstep.kubernetes.pods import pod_of

    shown = yaml.safe_load(block(OPERATOR, "yaml"))
    assert refused(shown) == []
    whole = training_job()
    assert (shown["apiVersion"], shown["kind"]) == (whole["apiVersion"], whole["kind"])
    pod = pod_of(msgspec.convert(shown, TrainingJob), 4)
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_shown_labels_have_a_jobs_pods_watched() -> None:
    import msgspec

    from keepstep.kubernetes.objects import Pod
    from keepstep.kubernetes.watched import job_of, watched_jobs

    shown = yaml.safe_load(block(OPERATOR, "yaml", 1))["template"]
    job = job_manifest()
    job["spec"]["template"] = {**job["spec"]["template"], **shown}
    for version in VERSIONS[VERSIONS.index(JOBS_SINCE) :]:
        kubernetes_validate.validate(job, version, strict=True)
    pod = msgspec.convert({"metadata": {**shown["metadata"], "namespace": "ml", "name": "a"}}, Pod)
    ((key, pods),) = watched_jobs([pod]).items()
    assert key == ("ml", "train")
    spec = job_of(key, pods, {}).spec
    assert (spec.node_remedy, spec.secret_name) == ("auto", "keepstep")
    text = (FOLDER / "job.yaml").read_text()
    (label,) = shown["metadata"]["labels"].items()
    assert f"{label[0]}: {label[1]}" in text, "the manifests have the label in a comment"


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [SLURM, DOCS / "howto/run.md"], ids=lambda page: page.name)
def test_the_shown_settings_are_known(page: Path, tmp_path: Path) -> None:
    path = tmp_path / "keepstep.toml"
    path.write_text(block(page, "toml"))
    known = resolve(SETTINGS, environ={}, path=path)
    assert [name for name, one in known.items() if one.origin == str(path)] == [
        one.name for one in SETTINGS if one.name in read_file(path)["run"]
    ]


def test_the_shown_command_of_a_site_is_an_argument_list(tmp_path: Path) -> None:
    path = tmp_path / "keepstep.toml"
    path.write_text(block(SLURM, "toml"))
    settings = resolve(SETTINGS, environ={}, path=path)
    assert settings["node_remedy"].value == "auto"
    words = shlex.split(str(settings["drain_command"].value))
    assert words == ["/opt/site/bin/report-node", "--node", "{node}", "--reason", "{reason}"]


# --- scripts of a batch job ---------------------------------------------------------------------------------------


def test_the_shown_batch_script_asks_slurm_for_what_keepstep_itself_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *asked, command = block(SLURM, "bash").strip().splitlines()[1:]
    flags = [word for line in asked for word in shlex.split(line.removeprefix("#SBATCH "))]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("keepstep", "slurm")
    assert main(["--dry-run", *flags, *words]) == 0
    submitted = capsys.readouterr().out.splitlines()[0]
    assert {"--signal=TERM@60", "--no-kill"} <= set(flags)
    assert all(flag in shlex.split(submitted) for flag in flags)
    nodes = next(int(flag.partition("=")[2]) for flag in flags if flag.startswith("--nodes="))
    _, for_run = split_flags(words, {})
    made = job_from_command_line(for_run, {})
    assert (made.max_nodes, nodes) == (4, 5), "four train and the fifth is a spare"


@pytest.mark.parametrize(
    ("code", "array", "requeued"),
    [(0, "", ""), (1, "", ""), (2, "", ""), (75, "", "4712"), (75, "3", "4711_3"), (79, "3", "")],
)
def test_the_shown_rule_requeues_after_75_and_ends_with_the_jobs_code(
    tmp_path: Path, code: int, array: str, requeued: str
) -> None:
    for name, does in (
        ("keepstep", f'[ "$1" = slurm ] && exit {code}'),
        ("scontrol", f'echo "$@" > {tmp_path}/told; exit 3'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4712"}
    if array:
        environ |= {"SLURM_ARRAY_TASK_ID": array, "SLURM_ARRAY_JOB_ID": "4711"}
    done = subprocess.run(
        ["bash", "-c", block(EXIT_CODES, "bash")], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == (requeued and f"requeue {requeued}\n")


def test_ready_manifests_are_named_on_the_page() -> None:
    named = set(re.findall(r"`([\w/]+\.yaml)`", KUBERNETES.read_text()))
    there = {path.name for path in FOLDER.glob("*.yaml")}
    assert there <= named
    assert all((FOLDER / name).exists() or (DEPLOY.parent / name).exists() for name in named)
