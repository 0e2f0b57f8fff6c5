"""``why-live`` and ``why-vain``: what is drawn, the scripts, and how verdicts are judged."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign import why_draw, why_scripts
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.running import run_case, skipped
from benchmarks.campaign.trial import Outcome, Plan
from benchmarks.campaign.why_draw import KINDS, LIVE, VAIN, VAIN_KINDS, Why, draw, draw_vain, truth_of
from benchmarks.campaign.why_faults import lacking
from benchmarks.campaign.why_fuse import Storage
from benchmarks.campaign.why_live import compare, first_observed, told
from benchmarks.campaign.why_processes import MARK, RankProcesses
from benchmarks.campaign.why_trial import command

_CONSOLE = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-28_07:50:20
  host      : vm
  rank      : 0 (local_rank: 0)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : vm
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 26144)
============================================================
"""


def planned(kind: str, **changes: Any) -> Plan:
    """The first seed of a kind, with changes."""
    case = CASES[LIVE]
    plan = next(plan for plan in map(case.plan, range(len(KINDS))) if plan.truth["kind"] == kind)
    assert plan.why is not None
    return replace(plan, why=replace(plan.why, **{"ranks": 4, "hosts": 1, "rank": 2, **changes}))


def an_incident(
    *ranks: int, cause: dict[str, Any] | None = None, kind: str = "crash", **more: Any
) -> dict[str, Any]:
    culprits = [{"rank": rank, "link": None, "node": "node-a", "confidence": "high"} for rank in ranks]
    events = [
        {"what": "noticed", "unix_s": 100.1},
        {"what": "verdict", "unix_s": 100.5},
        {"what": "sharper", "unix_s": 102.5},
    ]
    told_cause = {"cause": cause} if cause else {}
    return {"kind": kind, "culprits": culprits, "events": events, **told_cause, **more}


def judged(plan: Plan, *incidents: dict[str, Any], case: str = LIVE, **changes: Any) -> tuple[str, Any]:
    notes = {"failed_s": 100.0, "restarts": 0, "commit": "abc"}
    outcome = replace(Outcome(1, 9.0, False, [*incidents], {}, {}, {}, {}, [], [], notes, ""), **changes)
    verdict = CASES[case].judge(plan, outcome)
    return "; ".join(verdict.why), verdict.measured


USER = {
    "cause_class": "user",
    "kind": "exception",
    "title": "an error of the program",
    "root": "ValueError: 1e-4,",
}


# --- what is drawn --------------------------------------------------------------------------------------------------


def test_each_block_of_seeds_has_every_kind_once_where_it_can_be() -> None:
    for first in (0, len(KINDS)):
        block = [draw(seed) for seed in range(first, first + len(KINDS))]
        assert sorted(why.kind for why in block) == sorted(KINDS)
        for why in block:
            assert why.hosts in why.rules.hosts
            assert why.way in why.rules.ways
            assert why.rank < why.ranks
    ways = [draw(seed).way for seed in range(4 * len(KINDS)) if draw(seed).kind == "exception"]
    assert sorted(ways) == sorted(KINDS["exception"].ways)
    assert {draw_vain(seed).kind for seed in range(len(VAIN_KINDS))} == set(VAIN_KINDS)
    assert {draw(seed).hosts for seed in range(60)} == {1, 2}
    assert {draw(seed).stream for seed in range(20)} == {"console", "files"}


def test_who_is_right_and_who_is_a_victim() -> None:
    def truth(kind: str) -> why_draw.Truth:
        return truth_of(planned(kind).why or pytest.fail("no failure"))

    assert truth("exception").culprits == ((2,),)
    assert truth("exception").erring == (2,)
    assert truth("import").culprits == ((),)
    assert truth("import").erring == (0, 1, 2, 3)
    assert truth("disk full").culprits == ((), (2,))
    assert truth("disk full").path
    assert truth("link cut").link == why_draw.HOSTS
    assert truth("link cut").erring == ()
    assert truth("time limit").silent
    assert truth("time limit").erring == ()


# --- scripts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_are_programs_and_tell_nothing_of_a_campaign(kind: str) -> None:
    for way in KINDS[kind].ways:
        plan = planned(kind, way=way)
        assert plan.why is not None
        text = why_scripts.script(plan.why, "/mnt/checkpoints", "node-a", 29511)
        assert "$" not in text
        assert not re.search(r"keepstep|campaign|\bfaults?\b|inject", text)
        if kind == "syntax":
            with pytest.raises(SyntaxError):
                compile(text, "train.py", "exec")
        else:
            compile(text, "train.py", "exec")


def test_an_error_of_one_rank_is_of_that_rank_at_that_step() -> None:
    plan = planned("exception", way="KeyError", rank=3, step=7)
    assert plan.why is not None
    assert "if RANK == 3 and step == 7:\n            warmup()" in why_scripts.script(plan.why)


def test_each_kind_has_its_part_for_each_way() -> None:
    for kind, rules in KINDS.items():
        part = why_scripts.PARTS[kind]
        assert isinstance(part, why_scripts.Part) or set(rules.ways) <= set(part)


def test_the_command_line_is_a_users() -> None:
    plan = planned("exception", hosts=2, stream="files", max_restarts=0)
    assert plan.why is not None
    words = " ".join(command(plan, plan.why, Path("/trial"), 1))
    assert "--nproc-per-node 2 --run-dir /trial/run" in words
    assert "--nnodes 2 --node-rank 1" in words
    assert words.endswith("/trial/train.py")


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_the_right_class_and_rank_pass() -> None:
    why, measured = judged(planned("exception"), an_incident(2, cause=USER))
    assert why == ""
    assert measured["page_s"] == 0.5
    assert (measured["right"], measured["victim_named"], measured["no_culprit"]) == (True, 0, False)
    assert (measured["class"], measured["cause_kind"]) == ("user", "exception")


def test_an_incident_without_a_cause_has_no_class() -> None:
    why, measured = judged(planned("exception"), an_incident(2))
    assert why == "class not told, true user"
    assert measured["culprit_right"]
    assert judged(planned("exception"), an_incident(2) | {"cause": None})[0] == why


def test_no_incident_is_silence_except_at_a_time_limit() -> None:
    assert "silent" in judged(planned("exception"))[0]
    assert judged(planned("time limit"))[0] == ""
    other = {**USER, "cause_class": "other", "kind": "time-limit"}
    assert judged(planned("time limit"), an_incident(cause=other))[0] == ""
    assert "victims [1] named" in judged(planned("time limit"), an_incident(1, cause=other))[0]


def test_a_victim_counts_in_whichever_incident_it_is_named() -> None:
    why, measured = judged(planned("exception"), an_incident(0), an_incident(2, cause=USER))
    assert why == "victims [0] named"
    assert measured["victim_named"] == 1


def test_naming_everybody_is_no_victim_but_wrong_where_it_is_the_program() -> None:
    why, measured = judged(planned("import"), an_incident(0, 1, cause={**USER, "kind": "import"}))
    assert "named [0, 1], true []" in why
    assert measured["victim_named"] == 0


def test_a_link_or_its_node_may_be_named_and_no_other() -> None:
    network = {"cause_class": "network", "kind": "link"}
    plan = planned("link cut", hosts=2)

    def of(*nodes: str) -> str:
        link = {"rank": None, "link": {"ranks": [0, 2], "nodes": nodes}}
        return judged(plan, an_incident(cause=network, kind="hang") | {"culprits": [link]})[0]

    assert of("node-b", "node-a") == ""
    assert "named" in of("node-b", "node-c")
    node = {"rank": None, "link": None, "node": "node-b"}
    assert judged(plan, an_incident(cause=network) | {"culprits": [node]})[0] == ""


def test_the_node_of_a_broken_device_may_stand_for_its_rank() -> None:
    truth = truth_of(planned("Xid", hosts=2).why or pytest.fail("no failure"))
    said = told([an_incident(cause={"cause_class": "node", "kind": "gpu-ecc"})])
    assert compare(truth, replace(said, nodes=("node-b",)))[0] == []
    assert compare(truth, replace(said, nodes=("node-a",)))[0]
    assert compare(truth, said)[0]
    alone = truth_of(planned("Xid").why or pytest.fail("no failure"))
    assert compare(alone, replace(said, nodes=("vm",)))[0] == []
    assert compare(alone, replace(said, nodes=("vm",), ranks=(1,)))[0]


def test_a_path_is_told_where_storage_is_to_blame() -> None:
    plan = planned("disk full")
    cause = {
        "cause_class": "storage",
        "kind": "no-space",
        "root": "OSError: [Errno 28] No space left: '/trial/ckpt/1'",
    }
    assert judged(plan, an_incident(2, cause=cause))[1]["path_told"] is True
    assert judged(plan, an_incident(cause={**cause, "root": "OSError: [Errno 28]"}))[1]["path_told"] is False


def test_torchruns_view_is_the_earliest_root_cause() -> None:
    early, late = (
        _CONSOLE.format(time="2026-11-28_07:50:18", rank=3),
        _CONSOLE.format(time="2026-11-28_07:50:20", rank=1),
    )
    assert first_observed(early) == 3
    assert first_observed(f"step 10\n{late}said\n{early}") == 3
    assert first_observed("nothing") is None
    measured = judged(planned("exception"), an_incident(2, cause=USER), console=early)[1]
    assert (measured["first_observed"], measured["first_observed_right"]) == (3, False)
    assert judged(planned("import"), console=early)[1]["first_observed_right"] is None


@pytest.mark.parametrize(("kind", "most"), VAIN_KINDS.items())
def test_restarts_in_vain_fail(kind: str, most: int) -> None:
    plan = replace(planned(kind), truth={"kind": kind})
    for restarts in (0, 1, 2, None):
        why, _ = judged(plan, case=VAIN, notes={"restarts": restarts})
        assert (why == "") == (restarts is not None and restarts <= most)


# --- what is skipped, and the means ---------------------------------------------------------------------------------


def test_seeds_that_cannot_be_run_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    case = CASES[LIVE]
    seed = next(seed for seed in range(len(KINDS)) if draw(seed).kind == "disk full")
    assert skipped(case, [seed]) == {"it needs root": [seed]}
    given = argparse.Namespace(again=True, out=tmp_path, runs=tmp_path, keep_runs=False, parallel=1)
    run_case(case, [seed], given)
    assert "1 seeds are skipped: it needs root" in capsys.readouterr().out
    assert not (tmp_path / "seeds.jsonl").exists()


def test_a_file_system_that_cannot_be_served_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert lacking("fuse")
    assert lacking("memory cgroup")


def test_the_storage_refuses_what_is_over_its_quota() -> None:
    storage = Storage(10)
    assert storage.answer(1, 1, b"a\0") == errno.ENOENT
    created = storage.answer(35, 1, bytes(16) + b"a\0")
    assert isinstance(created, bytes)
    node = struct.unpack_from("<Q", created)[0]

    def write(size: int) -> bytes | int:
        return storage.answer(16, node, struct.pack("<QQIIQII", 0, 0, size, 0, 0, 0, 0) + bytes(size))

    assert write(8) == struct.pack("<II", 8, 0)
    assert write(8) == errno.EDQUOT
    assert isinstance(storage.answer(1, 1, b"a\0"), bytes)
    assert storage.answer(22, 1, b"") == errno.ENOSYS


def test_a_ranks_process_is_found_and_its_death_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(60)\n")
    env = {**os.environ, MARK: str(tmp_path), "RANK": "3"}
    ranks = RankProcesses(tmp_path, script.name)
    with subprocess.Popen([sys.executable, str(script)], env=env) as process:
        try:
            for _ in range(500):
                ranks.look()
                if ranks.living():
                    break
                time.sleep(0.01)
            assert ranks.pid(3) == ranks.pid_on_host(3) == process.pid
            with pytest.raises(LookupError):
                ranks.pid(0)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    ranks.close()
    assert [rank for rank, _ in ranks.died] == [3]
    assert ranks.living() == []


def test_no_plan_is_run_with_what_was_drawn_in_its_command_line() -> None:
    why: Why = draw(0)
    words = command(CASES[LIVE].plan(0), why, Path("/trial"), 0)
    assert not any(why.kind in word for word in words)
