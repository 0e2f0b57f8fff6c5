from dataclasses import replace

import pytest

from keepstep.core.errors import UsageError
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.placement import (
    GLOO_IN_BATCHES,
    MICROBATCHES,
    Place,
    keeping,
    worker_command,
    worker_environment,
    worker_plan,
)

PLACE = Place(node_rank=1, first_rank=2, world_size=6, node_count=3, master_addr="10.0.0.1", master_port=5000)


def job(*words: str):
    return job_from_command_line(
        [*words, "train.py", "--rank=${local_rank}", "$$x", "${other}"], {"HOME": "/nowhere"}
    )


def test_ranks_of_a_node_in_the_middle() -> None:
    env = worker_environment(
        job("--nproc-per-node", "2", "--role", "t"), replace(PLACE, incarnation=1), 1, {}
    )
    assert {
        name: env[name]
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    } == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
    }
    assert (env["ROLE_NAME"], env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) == ("t", "3", "6")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "5000")
    assert env["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_threads_are_limited_only_where_nobody_else_did() -> None:
    assert worker_environment(job("--nproc-per-node", "2"), PLACE, 0, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in worker_environment(
        job("--nproc-per-node", "2"), PLACE, 0, {"OMP_NUM_THREADS": "4"}
    )
    assert "OMP_NUM_THREADS" not in worker_environment(job(), PLACE, 0, {})


def test_shares_may_be_ordered_where_slowdowns_are_acted_on() -> None:
    assert worker_environment(job(), PLACE, 0, {})[MICROBATCHES] == "1"
    for words in (("--mitigate", "advise"), ("--mitigate", "off"), ("--no-watch",)):
        assert MICROBATCHES not in worker_environment(job(*words), PLACE, 0, {})
    with pytest.raises(UsageError, match=r"^--mitigate often: say auto, advise or off$"):
        job("--mitigate", "often")


def test_gloo_reads_addresses_in_batches_unless_told_otherwise() -> None:
    env = worker_environment(job(), PLACE, 0, {})
    assert [env[name] for name in GLOO_IN_BATCHES] == ["1", "1"]
    env = worker_environment(job(), PLACE, 0, {GLOO_IN_BATCHES[0]: "0"})
    assert [env[name] for name in GLOO_IN_BATCHES] == ["0", "1"]


def test_torchs_watchdog_ends_no_process_that_is_to_be_kept() -> None:
    handling, wait, dump = (
        f"TORCH_NCCL_{name}"
        for name in ("ASYNC_ERROR_HANDLING", "WAIT_TIMEOUT_DUMP_MILSEC", "DUMP_ON_TIMEOUT")
    )
    in_place = job("--in-place", "--max-restarts", "1")
    assert keeping(in_place, {}) == {handling: "2", wait: "1", dump: "0"}
    assert keeping(in_place, {handling: "2", dump: "1"}) == {wait: "1"}
    assert keeping(in_place, {handling: "3"}) == {}
    for flags in (("--in-place",), ("--max-restarts", "1")):
        assert keeping(job(*flags), {}) == {}
    assert worker_environment(in_place, PLACE, 0, {})[handling] == "3"  # where nobody sees what is aborted
    assert worker_environment(in_place, PLACE, 0, {handling: "1"})[handling] == "1"


def test_virtual_local_rank_shows_each_worker_its_device() -> None:
    virtual = job("--nproc-per-node", "2", "--virtual-local-rank")
    env = worker_environment(virtual, PLACE, 1, {"CUDA_VISIBLE_DEVICES": "4, 6"})
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["RANK"]) == ("0", "6", "3")
    assert worker_environment(virtual, PLACE, 1, {})["CUDA_VISIBLE_DEVICES"] == "1"


def test_commands() -> None:
    environ = {"PYTHON_EXEC": "/py"}
    tail = ("--rank=3", "$$x", "${other}")
    assert worker_command(job(), 3, environ) == ("/py", "-u", "train.py", *tail)
    assert worker_command(job("-m"), 3, environ) == ("/py", "-u", "-m", "train.py", *tail)
    assert worker_command(job("--no-python"), 3, environ) == ("train.py", *tail)


def test_a_plan_carries_what_its_worker_alone_is_given() -> None:
    plans = [
        worker_plan(job("--nproc-per-node", "2"), PLACE, local, {}, {"KEEPSTEP_RING": f"/proc/1/fd/{local}"})
        for local in range(2)
    ]
    assert [plan.rank for plan in plans] == [2, 3]
    assert [plan.environment["RANK"] for plan in plans] == ["2", "3"]
    assert plans[1].environment["KEEPSTEP_RING"] == "/proc/1/fd/1"
