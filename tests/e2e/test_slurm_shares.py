"""Each node's launcher has what the job was given there: GPUs, CPUs and memory, however they were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e import slurm_bed
from tests.e2e.slurm_bed import until
from tests.e2e.test_slurm import end, ended, exit_code, keepstep, submitted

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)),
    pytest.mark.skipif(bool(slurm_bed.missing()), reason=slurm_bed.missing()),
]

ASKED = str(Path(__file__).with_name("slurm_asked.py"))
CONF = {"SelectTypeParameters": "CR_Core_Memory", "DefMemPerNode": "100"}
FLAGS = {
    "--gpus-per-node=2 --cpus-per-task=4 --mem=500": {"gpus": "2", "cpu": "4", "mem": "500M"},
    "--gres=gpu:3 --cpus-per-task=2 --mem-per-cpu=50": {"gpus": "3", "cpu": "2", "mem": "100M"},
    "--gpus=2 --ntasks-per-gpu=1": {"gpus": "1"},
    "--gpus=2 --cpus-per-gpu=3": {"gpus": "1", "cpu": "3"},
    "--gpus-per-task=2 --ntasks-per-node=1": {"gpus": "2"},
    "--gpus-per-socket=1 --sockets-per-node=1": {"gpus": "1"},
    "--gpus-per-node=1 --ntasks-per-node=3 --cpus-per-task=2": {"gpus": "1"},
    "--gpus-per-node=4 --exclusive": {"gpus": "4"},
    "--gpus-per-node=1 --gpu-bind=none --hint=nomultithread --distribution=cyclic": {"gpus": "1"},
}


def test_each_step_has_what_the_job_has_on_its_node(tmp_path: Path) -> None:
    with slurm_bed.slurm(tmp_path, gres=True, conf=CONF) as bed:
        words = {flags: (*flags.split(), "--nodes=2", "--", ASKED, str(tmp_path), "0") for flags in FLAGS}
        jobs = {submitted(bed, *all_words): flags for flags, all_words in words.items()}
        until(lambda: all(ended(bed, job) for job in jobs), "all jobs have ended")
        found: dict[str, list[dict[str, str]]] = {}
        for job, flags in jobs.items():
            assert exit_code(bed, job) == "0:0", (flags, (tmp_path / f"slurm-{job}.out").read_text())
            found[flags] = [json.loads(path.read_text()) for path in tmp_path.glob(f"{job}-n*")]
        for flags, given in FLAGS.items():
            for node in found[flags]:
                assert {name: node.get(name) for name in given} == given, (flags, found[flags])
                assert (node["LOCAL_WORLD_SIZE"], node["WORLD_SIZE"]) == (
                    given["gpus"],
                    str(2 * int(given["gpus"])),
                )
            assert len(found[flags]) == 2, flags


def test_under_salloc_the_job_runs_there_and_uneven_shares_are_told(tmp_path: Path) -> None:
    with slurm_bed.slurm(tmp_path, 2, gres=True, conf=CONF) as bed:
        own = ("salloc", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--mem=200")
        done = bed.run(*own, *keepstep("slurm", "--", ASKED, str(tmp_path), "0"))
        assert done.returncode == 0, done.stderr
        given = [json.loads(path.read_text()) for path in tmp_path.glob("*-n[01]")]
        assert [(one["gpus"], one["cpu"], one["mem"]) for one in given] == [("2", "2", "200M")] * 2
        done = bed.run(*own, *keepstep("slurm", "--", ASKED, str(tmp_path), "7"))
        assert done.returncode == 7, done.stderr
        codes = sorted((end(run)["exit_code"], end(run)["category"]) for run in (tmp_path / "runs").iterdir())
        assert codes == [(0, "finished"), (7, "training")]
        job = submitted(bed, "--nodes=2", "--gpus=3", "--", ASKED, str(tmp_path), "0")
        until(lambda: ended(bed, job), "the job has ended")
        assert exit_code(bed, job) == "2:0"
        out = (tmp_path / f"slurm-{job}.out").read_text()
        assert "--gpus=3: Slurm spreads them unevenly over 2 nodes" in out
