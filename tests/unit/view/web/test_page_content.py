"""What the page gets of a snapshot: bounded, the worst first, without numbers that JSON has no word for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from tests.unit.view.web.served_run import CRASH, SLOW, MadeRun

from keepstep.core.incident import Culprit, Event, Link
from keepstep.view.run_snapshot import LinkRate, NodeView, RunSnapshot
from keepstep.view.web.feed import changed_sections
from keepstep.view.web.page_content import page_content, shown_incidents


def content_of(snapshot: RunSnapshot) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(page_content(snapshot, "runs/made")))


def test_a_run_of_which_nothing_is_known_has_all_sections() -> None:
    content = content_of(RunSnapshot("new", 0.0))
    assert content["job"]["newest_step"] == -1
    assert content["job"]["iteration_s"] is None
    assert (
        content["ranks"] == content["incidents"] == content["nodes"]["rows"] == content["links"]["rows"] == []
    )


def test_a_large_job_fits() -> None:
    notices, troubles = ("y" * 5000,), ("z" * 5000,) * 9
    nodes = tuple(NodeView(at, "x" * 500, notices=notices, storage_troubles=troubles) for at in range(16_384))
    links = tuple(LinkRate(a, b, 1e9, 1e9) for a in range(200) for b in range(200) if a != b)
    events = (Event("sharper", 1.0, 1, "d" * 9000),) * 999
    noisy = replace(SLOW, events=events, culprits=SLOW.culprits * 999)
    many = tuple(replace(noisy, number=number) for number in range(1, 400))
    changes = {
        "nodes": nodes,
        "links": links,
        "incidents": many,
        "layout": None,
        "troubles": ("t" * 9999,) * 99,
    }
    snapshot = MadeRun(steps=2, world=4096, **changes).refresh()
    content = content_of(snapshot)
    assert len(content["nodes"]["rows"]) == 64
    assert len(content["links"]["nodes"]) == 24
    assert len(content["links"]["rows"]) == 24 * 23
    assert len(content["incidents"]) <= 120
    assert len(content["job"]["troubles"]) == 13
    assert len(msgspec.json.encode(content)) < 2_000_000


def test_open_incidents_are_shown_however_old() -> None:
    many = [
        replace(CRASH, number=number, status="open" if number == 3 else "relieved")
        for number in range(1, 500)
    ]
    shown = [one.number for one in shown_incidents(many)]
    assert shown[0] == 3
    assert shown[1:] == list(range(400, 500))
    content = page_content(replace(MadeRun().refresh(), incidents=tuple(many)), "r")
    assert content["older_open"] == [3]
    over = page_content(
        replace(MadeRun().refresh(), incidents=tuple(replace(one, status="relieved") for one in many)), "r"
    )
    changed = changed_sections(content, over)
    assert (changed["older_open"], changed["incidents"]) == ([], []), "a viewer shows it as open no more"
    assert list(over).index("older_open") < list(over).index("incidents"), "as it takes them in this order"


def test_the_worst_nodes_and_links_are_those_that_are_shown() -> None:
    nodes = tuple(NodeView(at, f"n{at}", backed_up_step=39 - (at == 900) * 7) for at in range(1000))
    links = tuple(LinkRate(at, at + 1, 1e8 if at == 700 else 1e9, 1e9) for at in range(998))
    content = content_of(MadeRun(nodes=nodes, links=links).refresh())
    assert content["nodes"]["lost_steps"] == [[0, 999], [7, 1]]
    assert "n900" in [row["name"] for row in content["nodes"]["rows"]]
    assert {700, 701} <= {node for node, _ in content["links"]["nodes"]}


def test_who_is_blamed_comes_first_then_the_dead_then_those_behind() -> None:
    snapshot = MadeRun().refresh()
    assert snapshot.ranks is not None
    step = snapshot.ranks.step.copy()
    alive = snapshot.ranks.is_alive.copy()
    step[2], alive[7] = 11, False
    ranks = replace(snapshot.ranks, step=step, is_alive=alive)
    told = [row["rank"] for row in content_of(replace(snapshot, ranks=ranks))["ranks"]]
    assert told[:3] == [5, 7, 2]


def test_numbers_that_are_none_are_null() -> None:
    odd = replace(
        SLOW, lost_s=math.nan, job_slowdown=math.inf, onset_unix_s=math.nan, iteration_after_s=-math.inf
    )
    snapshot = MadeRun(incidents=(odd,), links=(LinkRate(0, 1, math.nan, math.inf),)).refresh()
    assert snapshot.ranks is not None
    ranks = replace(snapshot.ranks, self_s=np.full(8, np.nan, np.float32))
    content = content_of(replace(snapshot, ranks=ranks))
    assert content["incidents"][0]["lost_s"] is None
    assert content["ranks"][0]["self_s"] is None
    assert content["links"]["rows"][0][2:4] == [None, None]


def test_a_link_is_named_by_its_nodes() -> None:
    link = Culprit(link=Link((0, 4), ("gpu-1", "gpu-2")), confidence="medium", cause="network")
    one = content_of(MadeRun(incidents=(replace(SLOW, culprits=(link, Culprit())),)).refresh())["incidents"][
        0
    ]
    assert one["who"] == "link gpu-1 – gpu-2; the network"
