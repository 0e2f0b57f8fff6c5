from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.operate.fake_runs import FakeRun, incident_of

from keepstep.core.incident import Incident
from keepstep.report.incidents import incident_to_json
from keepstep.view.incident_files import IncidentFiles


@pytest.fixture
def incident(tmp_path: Path) -> Incident:
    found = incident_of(FakeRun(tmp_path / "run", "slow", ranks=2000))
    assert found is not None
    return found


def write(folder: Path, incident: Incident) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{incident.number:04d}.json").write_bytes(incident_to_json(incident))


def numbers(files: IncidentFiles) -> list[int]:
    files.look(60.0)
    return [one.number for one in files.incidents]


def test_without_a_folder_there_are_none(tmp_path: Path) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    assert numbers(files) == []
    assert files.is_whole
    assert files.troubles == []


def test_files_that_go_are_forgotten(tmp_path: Path, incident: Incident) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    for number in (1, 2, 10_000):
        write(tmp_path / "incidents", replace(incident, number=number))
    assert numbers(files) == [1, 2, 10_000]
    (tmp_path / "incidents/0002.json").unlink()
    assert numbers(files) == [1, 10_000]


def test_what_has_no_time_today_is_read_at_the_next_look(tmp_path: Path, incident: Incident) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    for number in range(1, 4):
        write(tmp_path / "incidents", replace(incident, number=number))
    seen = []
    while not files.is_whole or not seen:
        files.look(0.0)
        seen.append([one.number for one in files.incidents])
    assert seen == [[3], [2, 3], [1, 2, 3]]


def test_victims_are_shared_numbers(tmp_path: Path, incident: Incident) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    for number in (1, 2):
        write(tmp_path / "incidents", replace(incident, number=number))
    assert numbers(files) == [1, 2]
    first, second = (one.victims for one in files.incidents)
    assert first == second == incident.victims
    assert first[-1] is second[-1]


def test_too_many_bytes_leave_the_oldest_out(
    tmp_path: Path, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    for number in range(1, 6):
        write(tmp_path / "incidents", replace(incident, number=number))
    size = (tmp_path / "incidents/0001.json").stat().st_size
    monkeypatch.setattr("keepstep.view.incident_files.MOST_BYTES", size * 5 // 2)
    assert numbers(files) == [4, 5]
    assert any("the oldest 3 incidents are not shown" in line for line in files.troubles)
    assert numbers(files) == [4, 5]


def test_many_damaged_files_are_few_lines(tmp_path: Path, incident: Incident) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    write(tmp_path / "incidents", replace(incident, number=1000))
    for number in range(1, 100):
        (tmp_path / f"incidents/{number:04d}.json").write_text("{")
    assert numbers(files) == [1000]
    assert len(files.troubles) == 6
    assert files.troubles[-1] == "94 more files of incidents cannot be read"


def test_other_files_are_none_of_them(tmp_path: Path, incident: Incident) -> None:
    write(tmp_path / "incidents", incident)
    for name in ("0001.txt", ".0001.json.77", "x.json", "1²3.json", f"{'9' * 30}.json"):
        (tmp_path / "incidents" / name).write_text("{")
    files = IncidentFiles(tmp_path / "incidents")
    assert numbers(files) == [1]
    assert files.troubles == []


def test_what_a_controller_told_is_kept_until_its_file_is_read(tmp_path: Path, incident: Incident) -> None:
    files = IncidentFiles(tmp_path / "incidents")
    files.take([replace(incident, number=7)])
    assert numbers(files) == [7]
    write(tmp_path / "incidents", replace(incident, number=7, status="relieved"))
    assert numbers(files) == [7]
    assert files.incidents[0].status == "relieved"
