import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.operate.fake_runs import KINDS, FakeRun, make_run
from tests.manual_clock import ManualClock

from keepstep.core.errors import RunError
from keepstep.core.process_mark import process_mark
from keepstep.core.regular_files import read_regular
from keepstep.report.incidents import incident_to_json
from keepstep.traces import open_run
from keepstep.view.folder import FolderSource, Times
from keepstep.view.run_source import open_source


def look(folder: Path) -> FolderSource:
    return FolderSource(open_run(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_read(tmp_path: Path, kind) -> None:
    run = make_run(tmp_path / "run", kind, ranks=16, steps=30, layout="tp2-dp2-pp4")
    source = open_source(tmp_path / "run")
    found = source.read_all()
    assert found.troubles == ()
    states = {"ended": "ended", "failed": "ended", "silent": "silent"}
    assert found.state == states.get(kind, "running")
    assert (found.name, found.world_size, len(found.nodes)) == ("run", 16, 2)
    assert found.newest_step == run.step - 1
    assert str(found.layout) == "tp2-dp2-pp4"
    assert [one.number for one in found.incidents] == [one.number for one in run.incidents]
    assert (found.end is not None) == (found.state == "ended")
    assert found.ranks is not None
    assert found.ranks.rank.tolist() == list(range(16))
    assert source.samples.ranks == 16
    assert len(source.samples) == run.step
    assert found.loss_now_steps == 1
    assert [(one.source, one.target) for one in found.links] == [(0, 1), (1, 0)]
    slow = 2.4 if kind == "exchange" else 1.0
    assert found.links[0].usual_bytes_per_s / found.links[0].bytes_per_s == pytest.approx(slow)
    source.close()


def test_an_open_incident_whose_file_was_cut_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "slow", ranks=8, steps=30)
    file = tmp_path / "run" / "incidents" / "0001.json"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    status = tmp_path / "run" / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"open_incidents": [1]}))
    source = look(tmp_path / "run")
    assert source.refresh().unread_open == (1,)
    file.write_bytes(content)
    assert source.refresh().unread_open == ()


def test_a_layout_that_no_job_has_is_none(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ranks=8, steps=3)
    about = tmp_path / "run" / "run.json"
    for layout in ("tp4-pp500000000", "tp" + "9" * 5000):
        about.write_text(json.dumps(json.loads(about.read_text()) | {"layout": layout}))
        assert look(tmp_path / "run").refresh().layout is None


def test_a_file_that_is_too_large_is_not_read_first(tmp_path: Path) -> None:
    with open(tmp_path / "status.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="is larger than the 64 MiB"):
        read_regular(tmp_path / "status.json", 64 << 20)
    make_run(tmp_path / "run", ranks=8, steps=3)
    (tmp_path / "status.json").replace(tmp_path / "run" / "status.json")
    (told,) = look(tmp_path / "run").refresh().troubles
    assert told.endswith("is larger than the 64 MiB that are read of it")


def test_what_a_slow_rank_did_is_in_the_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "slow", ranks=16, steps=60)
    source = look(tmp_path / "run")
    source.read_all()
    colours = source.samples.tile(against="peers").colours
    assert (colours[run.culprit, run.onset + 1 :] > 145).all()
    colours[run.culprit] = 128
    assert colours.max() < 145


def test_steps_after_a_restart_are_those_of_the_newest_incarnation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "recovered", ranks=16, steps=30)
    source = look(tmp_path / "run")
    found = source.read_all()
    assert found.incarnation == 1
    assert source.samples.marks == [(0, 0), (1, run.onset)]
    assert source.samples.tile().incarnations.tolist() == [0] * 20 + [1] * 10


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    source = look(tmp_path / "run")
    source.read_all()
    version = source.samples.version
    for _ in range(3):
        run.go_on(2)
    found = source.refresh()
    assert (found.newest_step, len(source.samples)) == (25, 26)
    news = source.samples.changed_since(version)
    assert news is not None
    assert news.columns.tolist() == list(range(20, 26))


def test_nothing_new_costs_no_new_version(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "hang", steps=20)
    source = look(tmp_path / "run")
    source.read_all()
    version = source.samples.version
    run.go_on()  # the controller writes the status again, and nobody has moved
    source.refresh()
    assert source.samples.version == version


def test_the_iterations_are_followed_when_their_file_is_rotated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    source = look(tmp_path / "run")
    source.read_all()
    (tmp_path / "run/status.json").unlink()
    run.write_steps(10, 15)
    log = tmp_path / "run/nodes/0/iterations.jsonl"
    os.replace(log, log.with_suffix(".1.jsonl"))
    run.write_steps(15, 20)
    source.refresh()
    assert (source.samples.tile().colours > 0).all()
    assert len(source.samples) == 20


def test_a_cut_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=10)
    (tmp_path / "run/status.json").unlink()
    log = tmp_path / "run/nodes/0/iterations.jsonl"
    text = log.read_bytes()
    log.write_bytes(text[:-100])
    source = look(tmp_path / "run")
    source.read_all()
    assert len(source.samples) == 9
    with log.open("ab") as file:
        file.write(text[-100:])
    assert source.refresh().troubles == ()
    assert len(source.samples) == 10


def test_lines_that_are_none_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=10)
    log = tmp_path / "run/nodes/0/iterations.jsonl"
    text = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*text[:5], "[]\n", text[5][:40] + "\n", '{"step":1e999}\n', *text[5:]]))
    source = look(tmp_path / "run")
    assert any("3 lines of iterations.jsonl" in line for line in source.read_all().troubles)
    assert len(source.samples) == 10


def test_a_very_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.view.node_files._ALL_BYTES", 1 << 16)
    run = FakeRun(tmp_path / "run", ranks=8, steps=2000)
    run.write_steps(0, 2000)
    source = look(tmp_path / "run")
    source.read_all()
    assert source.samples.first_steps[-1] + source.samples.stride == pytest.approx(2000, abs=150)
    seen = (source.samples.tile().colours[0] > 0).sum()
    assert 10 <= seen <= 300
    assert source.refresh().troubles == ()


@pytest.mark.parametrize("name", ["run.json", "status.json", "end.json", "incidents/0001.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b"null"])
def test_a_damaged_file_is_one_line_of_trouble_and_the_rest_is_shown(
    tmp_path: Path, name: str, content: bytes
) -> None:
    make_run(tmp_path / "run", "failed", steps=12)
    (tmp_path / "run" / name).write_bytes(content)
    source = look(tmp_path / "run")
    found = source.read_all()
    assert [line for line in found.troubles if name in line]
    assert len(found.troubles) == 1
    assert len(source.samples) == 12
    assert len(found.incidents) == (name != "incidents/0001.json")
    assert bool(found.nodes) == (name != "status.json")


def test_a_file_that_is_cut_later_keeps_what_was_known(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "slow", steps=12)
    source = look(tmp_path / "run")
    before = source.read_all()
    for name in ("run.json", "status.json", "incidents/0001.json"):
        path = tmp_path / "run" / name
        path.write_bytes(path.read_bytes()[:50])
    found = source.refresh()
    assert len(found.troubles) == 3
    assert replace(found, troubles=(), unix_s=before.unix_s).incidents == before.incidents
    assert (found.state, found.world_size, found.newest_step) == ("running", 8, 11)


def test_numbers_that_no_rank_can_have_are_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=12)
    path = tmp_path / "run/status.json"
    status = json.loads(path.read_text())
    status["nodes"][0]["ranks"][0][:2] = [1 << 70, 1 << 70]
    path.write_text(json.dumps(status))
    found = look(tmp_path / "run").read_all()
    assert found.ranks is None or found.ranks.rank.tolist() == list(range(1, 8))


def test_fifos_folders_and_links_into_nowhere_stop_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=12)
    os.mkfifo(tmp_path / "run/incidents/0002.json")
    (tmp_path / "run/incidents/0003.json").mkdir()
    (tmp_path / "run/incidents/0004.json").symlink_to("nowhere")
    os.mkfifo(tmp_path / "run/nodes/0/iterations.jsonl.1")
    (tmp_path / "run/nodes/7").write_text("no folder")
    (tmp_path / "run/nodes/x").mkdir()
    found = look(tmp_path / "run").read_all()
    assert found.newest_step == 11
    assert 2 <= len(found.troubles) <= 5


def test_it_may_be_elsewhere_and_read_only(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "failed", steps=12)
    there = tmp_path / "a copy of it"
    shutil.copytree(tmp_path / "run", there)
    for path in [there, *there.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    found = look(there).read_all()
    assert (found.state, found.troubles, len(found.incidents)) == ("ended", (), 1)
    assert found.end is not None
    assert found.end.exit_code == 1


def test_a_run_without_a_status_yet_is_shown(tmp_path: Path) -> None:
    FakeRun(tmp_path / "run")
    found = look(tmp_path / "run").read_all()
    assert (found.state, found.world_size, found.ranks, found.troubles) == ("", 8, None, ())


def test_a_run_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        open_source(tmp_path)


def test_silence_is_told_by_this_clock_once_the_status_was_seen_to_change(tmp_path: Path) -> None:
    """The controller's clock is an hour ahead of this one."""
    clock, unix_s = ManualClock(), time.time()
    run = make_run(tmp_path / "run", steps=12, now=unix_s + 3600)
    source = FolderSource(open_run(tmp_path / "run"), Times(clock, lambda: unix_s + clock()))
    assert source.refresh().state == "running"
    clock.advance(9.0)
    run.go_on()
    assert source.refresh().state == "running"
    clock.advance(9.0)
    assert (source.refresh().state, source.refresh().age_s) == ("running", 0.0)
    clock.advance(2.0)
    found = source.refresh()
    assert (found.state, found.state_s, found.age_s) == ("silent", 11.0, 11.0)


class TickingClock(ManualClock):
    """Each look at it takes 15 ms."""

    def __call__(self) -> float:
        self.advance(0.015)
        return super().__call__()


def test_who_looks_again_after_a_while_sees_all_nodes_at_once(tmp_path: Path) -> None:
    clock = TickingClock()
    run = make_run(tmp_path / "run", ranks=64, steps=12)
    source = FolderSource(open_run(tmp_path / "run"), Times(clock))
    source.read_all()
    clock.advance(60.0)
    run.go_on(20)
    source.refresh()
    assert (source.samples.tile().colours > 0).all()


def test_a_launcher_that_was_killed_is_silent_soon(tmp_path: Path) -> None:
    clock, unix_s = ManualClock(), time.time()
    make_run(tmp_path / "run", steps=12, now=unix_s)
    path = tmp_path / "run/run.json"
    about = json.loads(path.read_text())
    about["launcher"] = process_mark(os.getpid()) | {"start_ticks": 1}
    path.write_text(json.dumps(about))
    source = FolderSource(open_run(tmp_path / "run"), Times(clock, lambda: unix_s + clock()))
    assert source.refresh().state == "running"
    clock.advance(4.0)
    assert source.refresh().state == "silent"


def test_incidents_that_come_and_change_are_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "slow", steps=12)
    source = look(tmp_path / "run")
    first = source.read_all().incidents
    assert source.refresh().incidents is first  # the same object: nothing has changed
    run.add_incident(replace(run.incidents[0], status="relieved", relief_step=11))
    run.add_incident(replace(run.incidents[0], number=2))
    assert [(one.number, one.status) for one in source.refresh().incidents] == [
        (1, "relieved"),
        (2, "relieved"),
    ]
    assert source.refresh().open_incidents == []


def test_ten_thousand_incidents_are_read_bit_by_bit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "slow", steps=12)
    for number in range(2, 10_001):
        content = incident_to_json(replace(run.incidents[0], number=number), indent=0)
        (tmp_path / f"run/incidents/{number:04d}.json").write_bytes(content)
    source = look(tmp_path / "run")
    assert source.refresh().incidents[-1].number == 10_000  # the newest come first
    found = source.read_all()
    assert [one.number for one in found.incidents] == list(range(1, 10_001))
    assert found.troubles == ()


def test_the_rows_of_ranks_of_a_large_run_are_beside_its_status(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ranks=1030, steps=2, per_node=1)
    source = look(tmp_path / "run")
    found = source.read_all()
    assert found.troubles == ()
    assert found.ranks is not None
    assert found.ranks.node.tolist() == list(range(1030))
    (tmp_path / "run/ranks.msgpack").write_bytes(b"\xdd")
    damaged = look(tmp_path / "run").read_all()
    assert [line for line in damaged.troubles if "ranks.msgpack" in line]
    assert (damaged.ranks, len(damaged.nodes), damaged.newest_step) == (None, 1030, 1)
