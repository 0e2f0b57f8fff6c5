from __future__ import annotations

import dataclasses

import pytest
from tests.unit.locate.synthetic_jobs import MB, Job, ddp, dp_pp, dp_tp, fsdp

from keepstep.core.events import Op
from keepstep.core.layout import ParallelLayout
from keepstep.core.summary import GroupInfo
from keepstep.locate import declared_layout, infer_layout


def inferred(job):
    return infer_layout(job.infos, job.run(2)[0])


@pytest.mark.parametrize(("dp", "pp", "micro"), [(2, 2, 4), (4, 4, 4), (2, 8, 16), (1, 4, 8)])
@pytest.mark.parametrize("own_groups", [False, True])
def test_pipelines_and_their_stages(dp, pp, micro, own_groups):
    found = inferred(dp_pp(dp, pp, micro=micro, own_groups=own_groups))
    assert [found.stages[rank] for rank in range(dp * pp)] == [rank // dp for rank in range(dp * pp)]
    assert found.stage_count == pp
    pipes = found.groups_with("pp")
    assert set(pipes) == ({f"p{d}" for d in range(dp)} if own_groups else {"world"})
    if dp > 1:
        assert set(found.groups_with("dp")) == {f"g{stage}" for stage in range(pp)}


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 4), (8, 4)])
def test_tensor_and_data_parallel(dp, tp):
    found = inferred(dp_tp(dp, tp))
    assert set(found.groups_with("tp")) == {f"t{d}" for d in range(dp)}
    assert set(found.groups_with("dp")) == {f"d{t}" for t in range(tp)}
    assert found.roles["world"][0] == "world"
    assert found.stages.get(0) is None


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_data_parallel_over_the_world(make):
    found = inferred(make(4))
    assert found.roles["world"][0] == "dp"


def test_unsure_is_unknown():
    program = [
        ("compute", "forward", 0.01),
        ("coll", "world", Op.ALLREDUCE, MB),
        ("compute", "backward", 0.01),
    ]
    job = Job([list(program)] * 4, {"world": (0, 1, 2, 3), "idle": (0, 1)})
    found = inferred(job)
    assert found.roles["world"][0] == "unknown"
    assert found.roles["idle"][0] == "unknown"
    called = {**job.infos, "world": GroupInfo("world", (0, 1, 2, 3), desc="mesh_dp")}
    assert infer_layout(called, job.run(1)[0]).roles["world"][0] == "dp"


def test_a_ring_that_only_sends_one_way_is_no_pipeline():
    programs = [
        [("compute", "forward", 0.01), ("send", "world", (r + 1) % 4, MB), ("recv", "world", (r - 1) % 4, MB)]
        for r in range(4)
    ]
    found = inferred(Job(programs, {"world": (0, 1, 2, 3)}))
    assert found.roles["world"][0] == "cp"
    assert found.stages == {}


def test_messages_all_over_are_no_pipeline():
    programs = [
        [("compute", "forward", 0.01)]
        + [("send", "world", p, MB) for p in range(4) if p != r]
        + [("recv", "world", p, MB) for p in range(4) if p != r]
        for r in range(4)
    ]
    assert inferred(Job(programs, {"world": (0, 1, 2, 3)})).stages == {}


def test_embedding_groups_join_first_and_last_stage():
    job = dp_pp(2, 4)
    job.groups |= {"e0": (0, 6), "e1": (1, 7)}
    for rank in (0, 1, 6, 7):
        job.programs[rank].insert(-1, ("coll", f"e{rank % 2}", Op.ALLREDUCE, MB))
    found = inferred(job)
    assert found.groups_with("embedding") == ("e0", "e1")


def test_no_traffic_at_all():
    job = ddp(2)
    found = infer_layout(job.infos, [dataclasses.replace(s, streams=()) for s in job.run(1)[0]])
    assert found.roles["world"][0] == "unknown"
    assert infer_layout({}, ()).roles == {}


def test_a_declared_layout_names_roles_by_membership_and_stages_by_coordinates() -> None:
    layout = ParallelLayout.declared("tp2-dp2-pp2")
    groups = {
        "0": GroupInfo("0", tuple(range(8))),
        "1": GroupInfo("1", (0, 1)),
        "2": GroupInfo("2", (0, 2)),
        "3": GroupInfo("3", (2, 6)),
        "4": GroupInfo("4", (0, 7)),
        "5": GroupInfo("5", (0, 12)),
    }
    told = declared_layout(layout, groups)
    assert [told.roles[name][0] for name in groups] == ["world", "tp", "dp", "pp", "unknown", "unknown"]
    assert [told.stages[rank] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ParallelLayout.declared("pp2-tp2-dp2").coordinates(1)["pp"] == 1
