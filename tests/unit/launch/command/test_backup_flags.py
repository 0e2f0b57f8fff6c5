"""How many backups, and how fast: from the command line to the programs that make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.agent.arguments import parse
from keepstep.core.errors import UsageError
from keepstep.launch.command.job import Job, job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.node.programs import agent_command, controller_command

MEETING = Endpoint("10.0.0.1", 29400)
TWO_NODES = ("--nnodes", "2", "--master-addr", "10.0.0.1")


def job_of(*words: str) -> Job:
    return job_from_command_line([*words, "train.py"], {})


def agent_of(job: Job, cache: str = "keepstep-cache-1") -> list[str]:
    place = Place(0, 0, world_size=2, node_count=2, master_addr="10.0.0.1", master_port=0)
    return agent_command(
        job, Path("run"), Path("secret"), MEETING, place, {"ring": {0: "/proc/1/fd/9"}}, cache
    )


def test_on_two_nodes_each_rank_is_backed_up_once_unless_told_otherwise() -> None:
    job = job_of(*TWO_NODES)
    assert "--backups 1" in " ".join(controller_command(job, Path("run"), Path("secret"), MEETING))
    arguments = parse(agent_of(job)[3:])
    assert (arguments.cache, arguments.backups, arguments.backup_rate) == ("keepstep-cache-1", 1, 0.0)
    more = job_of(*TWO_NODES, "--checkpoint-backups", "2", "--checkpoint-backup-rate", "5e8")
    arguments = parse(agent_of(more)[3:])
    assert (arguments.backups, arguments.backup_rate) == (2, 5e8)


@pytest.mark.parametrize("words", [("--standalone",), (*TWO_NODES, "--checkpoint-backups", "0")])
def test_one_node_or_none_wanted(words: tuple[str, ...]) -> None:
    job = job_of(*words)
    assert "--backups" not in controller_command(job, Path("run"), Path("secret"), MEETING)
    assert parse(agent_of(job)[3:]).backups == 0


def test_the_kernels_log_comes_from_the_environment_to_the_agent() -> None:
    assert parse(agent_of(job_of("--standalone"))[3:]).kernel_log == "/dev/kmsg"
    job = job_from_command_line(["--standalone", "train.py"], {"KEEPSTEP_KERNEL_LOG": "/var/log/k"})
    assert parse(agent_of(job)[3:]).kernel_log == "/var/log/k"


def test_without_a_cache_there_is_nothing_to_back_up() -> None:
    assert parse(agent_of(job_of(*TWO_NODES), "")[3:]).backups == 0


def test_the_failure_domain_comes_from_flag_or_environment_to_the_agent() -> None:
    assert parse(agent_of(job_of(*TWO_NODES))[3:]).failure_domain == ""
    flagged = job_of(*TWO_NODES, "--failure-domain", "rack-7")
    assert parse(agent_of(flagged)[3:]).failure_domain == "rack-7"
    job = job_from_command_line([*TWO_NODES, "train.py"], {"KEEPSTEP_FAILURE_DOMAIN": "rack-8"})
    assert parse(agent_of(job)[3:]).failure_domain == "rack-8"
    with pytest.raises(UsageError, match=r"--failure-domain 'aaa.*give at most 100 printable characters"):
        job_of(*TWO_NODES, "--failure-domain", "a" * 101)


@pytest.mark.parametrize("words", [("--checkpoint-backups", "-1"), ("--checkpoint-backup-rate", "inf")])
def test_numbers_that_mean_nothing(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=rf"{words[0]} .*: give 0 or more"):
        job_of(*TWO_NODES, *words)
