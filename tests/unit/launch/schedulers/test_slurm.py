"""What is read from Slurm's variables; those of real steps are in tests/e2e/test_slurm.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.errors import UsageError
from keepstep.launch.schedulers.slurm import OWN_NODES, allocation_of, expand_nodes, job_of, leaf_switch

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-[07,09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_JOB_NODELIST": "gpu-[07,09-11]",
    "SLURMD_NODENAME": "gpu-09",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_TOPOLOGY_ADDR": "core.leaf3.gpu-09",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,3],login", ["n08", "n09", "n10", "n11", "n3", "login"]),
        ("rack[1-2]n[08-09]", ["rack1n08", "rack1n09", "rack2n08", "rack2n09"]),
        ("n[1-2]-ib,m[5]", ["n1-ib", "n2-ib", "m5"]),
    ],
)
def test_lists_of_nodes_are_expanded_in_their_order(text: str, nodes: list[str]) -> None:
    assert list(expand_nodes(text)) == nodes


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "n[",
        "n]",
        "n[]",
        "n[1-]",
        "n[2-1]",
        "n[a-b]",
        "n[1-2",
        "a,a",
        "n[1-2],n2",
        "n[[1]]",
    ],
)
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"list|range"):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["n1;rm", "n1\n", "n1 State=DOWN", "\x1b[1]", "-x", "$n", "n[1-2]=x"])
def test_what_no_host_is_called_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no node's name"):
        expand_nodes(text)


@pytest.mark.parametrize(
    "text", ["n[1-999999999]", "n[1-1000]m[1-1000]", "n[1-600]m[1-600]", "n[1-150000],m[1-150000]"]
)
def test_a_list_that_is_too_long_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(ValueError, match="more than 200000 nodes"):
        expand_nodes(text)


@settings(max_examples=many(200), deadline=None)
@given(st.text(alphabet="ab0129-,[] \n;\x1b", max_size=30))
def test_any_text_is_a_list_of_names_or_refused(text: str) -> None:
    try:
        nodes = expand_nodes(text)
    except ValueError:
        return
    assert nodes
    assert not any(set(node) & set("[],") for node in nodes)


def test_a_step_says_everything() -> None:
    told = allocation_of(STEP)
    assert told is not None
    assert (told.name, told.nodes, told.node_rank, told.master) == ("Slurm job 1234567", 3, 1, "gpu-07")
    assert (told.port, told.run_id, told.node, told.workers) == (24567, "1234567", "gpu-09", 8)
    assert told.failure_domain == "core.leaf3"


def test_steps_of_one_node_each_are_one_job() -> None:
    told = allocation_of({**STEP, "SLURM_STEP_NODELIST": "gpu-09", OWN_NODES: "gpu-[07,09-11]"})
    assert told is not None
    assert (told.nodes, told.node_rank, told.master) == (4, 1, "gpu-07")


def test_outside_of_a_step_one_node_is_used_which_is_said() -> None:
    batch = {**STEP, "SLURM_JOB_NUM_NODES": "4"}
    del batch["SLURM_STEP_ID"]
    told = allocation_of(batch)
    assert told is not None
    assert (told.nodes, told.node, len(told.warnings)) == (0, "gpu-09", 1)
    assert "srun" in told.warnings[0]
    assert allocation_of({}) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"SLURM_JOB_ID": "12;rm"}, "SLURM_JOB_ID"),
        ({"SLURM_STEP_NODELIST": "gpu-[07"}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NODELIST": "gpu-[01-04]"}, "SLURMD_NODENAME"),
        ({"SLURMD_NODENAME": ""}, "SLURMD_NODENAME"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "--ntasks-per-node=1"),
        ({"SLURM_GPUS_ON_NODE": "many"}, "SLURM_GPUS_ON_NODE"),
    ],
)
def test_a_variable_of_another_form_is_named(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        allocation_of({**STEP, **wrong})


def test_the_switches_above_a_node_are_its_failure_domain() -> None:
    assert leaf_switch({"SLURM_TOPOLOGY_ADDR": "s0.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}) == "s0"
    assert leaf_switch({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ""
    assert leaf_switch({"SLURM_TOPOLOGY_ADDR": "s0.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}) == ""
    assert leaf_switch({}) == ""


def test_a_task_of_an_array_is_not_called_by_its_number() -> None:
    assert job_of({"SLURM_JOB_ID": "12"}) == "12"
    task = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
    assert job_of(task) == "10_3", "10 would be the whole array"
    with pytest.raises(UsageError, match="SLURM_JOB_ID='a;b'"):
        job_of({"SLURM_JOB_ID": "a;b"})
    with pytest.raises(UsageError, match="SLURM_ARRAY_JOB_ID is not set"):
        job_of({"SLURM_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"})
