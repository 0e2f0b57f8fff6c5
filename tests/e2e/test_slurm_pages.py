"""The batch scripts and commands of the pages do what the pages say, as they are printed there.

Only counts of nodes, times and names of this machine are others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doc_fences import DOCS, fences
from tests.e2e import slurm_bed
from tests.e2e.slurm_bed import SlurmBed, until
from tests.e2e.test_slurm import CHECKPOINTS, end, ended, exit_code, keepstep, reasons, submitted

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)),
    pytest.mark.skipif(bool(slurm_bed.missing()), reason=slurm_bed.missing()),
]

FEWER = {"--nodes=5": "--nodes=3", "--nnodes 4": "--nnodes 2", "--time=24:00:00": "--time=10"}
TRAIN = """
import os, pathlib, sys, time
begun = pathlib.Path("begun")
begun.mkdir(exist_ok=True)
(begun / os.environ["RANK"]).write_text(" ".join(sys.argv[1:]))
while not os.path.exists("hurry"):
    time.sleep(0.1)
"""


def fence(page: str, language: str, holds: str) -> str:
    """The only block of a page in a language that holds a text."""
    (found,) = (text for _, text in fences(DOCS / page, language) if holds in text)
    return fewer(found)


def command(page: str, holds: str) -> str:
    """The only command of a page, indented there, that holds a text."""
    blocks = re.findall(r"(?:^    .*\n)+", (DOCS / page).read_text(), re.MULTILINE)
    (found,) = (one for one in blocks if holds in one)
    return fewer("\n".join(line[4:] for line in found.splitlines()))


def fewer(text: str) -> str:
    for printed, here in FEWER.items():
        text = text.replace(printed, here)
    return text


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[SlurmBed]:
    with slurm_bed.slurm(tmp_path, gres=True) as made:
        (tmp_path / "train.py").write_text(TRAIN)
        yield made


def batch(bed: SlurmBed, script: str) -> str:
    """Submit a batch script as it is; returns the job."""
    (bed.folder / "job.sh").write_text(script)
    done = bed.run("sbatch", "--parsable", "job.sh")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def begun(bed: SlurmBed) -> dict[int, str]:
    """The arguments of each rank that runs, or has run."""
    return {int(path.name): path.read_text() for path in (bed.folder / "begun").glob("*")}


def finished(bed: SlurmBed, job: str, ranks: int) -> None:
    until(lambda: len(begun(bed)) == ranks, "all ranks run")
    assert set(begun(bed).values()) == {"--lr 3e-4"}
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "0:0", (bed.folder / f"slurm-{job}.out").read_text()
    assert end(bed.folder / "runs" / job)["category"] == "finished"


def test_the_batch_script_of_the_page(bed: SlurmBed) -> None:
    finished(bed, batch(bed, fence("howto/slurm.md", "bash", "#SBATCH")), 16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "holds"),
    [
        ("howto/slurm.md", "8 --time"),
        ("howto/run.md", "keepstep slurm"),
    ],
)
def test_the_command_that_submits(bed: SlurmBed, page: str, holds: str) -> None:
    done = bed.run("sh", "-c", command(page, holds))
    assert done.returncode == 0, done.stderr
    finished(bed, done.stdout.split()[-1], 16)


@pytest.mark.long
def test_the_rule_at_the_end_of_a_batch_script_starts_the_job_again(bed: SlurmBed) -> None:
    header = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=8 --time=1 --signal=TERM@10 --requeue --open-mode=append\n"
    job = batch(bed, header + fence("reference/exit-codes.md", "bash", "scontrol requeue"))
    until(lambda: bed.told(job, "Restarts") == "1", "it is started again")
    assert end(bed.folder / "runs" / job)["cause"]["kind"] == "time-limit"
    assert bed.told(job, "JobState") in ("PENDING", "COMPLETING", "RUNNING")
    bed.run("scancel", job)


@pytest.mark.long
def test_the_settings_of_a_site_name_its_own_way_to_drain(bed: SlurmBed) -> None:
    site = bed.folder / "report-node"
    site.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > reported\n')
    site.chmod(0o755)
    settings = fence("howto/slurm.md", "toml", "drain_command")
    (bed.folder / "keepstep.toml").write_text(settings.replace("/opt/site/bin/report-node", str(site)))
    words = ("--nnodes", "2", "--max-restarts", "1", CHECKPOINTS, str(bed.folder), "2000", "")
    job = submitted(bed, "--nodes=3", "--", *words, STEP_S="0.1")
    log = bed.folder / "losses-1"
    until(lambda: log.exists() and log.read_text().count("\n") > 8, "all ranks train")
    drained = bed.run(*keepstep("ctl", f"runs/{job}", "drain", "n1", "--reason", "fan; loud"))
    assert drained.returncode == 0, drained.stderr
    until((bed.folder / "reported").exists, "the site is told")
    told_site = ["--node", "n1", "--reason", f"[node_problem] keepstep run={job} by hand: fan; loud"]
    assert (bed.folder / "reported").read_text().splitlines() == told_site
    assert reasons(bed) == {}
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "0:0"
