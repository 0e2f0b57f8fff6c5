import json
from pathlib import Path

import pytest

from keepstep.cli import main
from keepstep.core.config import Setting, config_path, resolve
from keepstep.core.errors import UsageError

SETTINGS = (
    Setting("run", "count", 3, "a number"),
    Setting("run", "wait_s", 1.5, "a time"),
    Setting("run", "watch", True, "a switch"),
    Setting("run", "folder", "x", "a text"),
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_default_then_file_then_environment_then_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "[run]\ncount = 4\nwait_s = 2\nwatch = false\n[other]\nx = 1\n")
    found = resolve(
        SETTINGS, environ={"KEEPSTEP_WAIT_S": "7"}, flags={"watch": True, "count": None}, path=path
    )
    assert {name: item.value for name, item in found.items()} == {
        "count": 4,
        "wait_s": 7.0,
        "watch": True,
        "folder": "x",
    }
    assert [item.origin for item in found.values()] == [str(path), "KEEPSTEP_WAIT_S", "flag", "default"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run]\ncuont = 4\n", "run.cuont"),
        ("[run]\ncount = 'four'\n", "run.count"),
        ("[run]\nwatch = 1\n", "run.watch"),
        ("[run]\ncount = true\n", "run.count"),
        ("run = 5\n", "[run]"),
        ("[run\n", "correct the file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(UsageError) as raised:
        resolve(SETTINGS, environ={}, path=path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(("variable", "value"), [("KEEPSTEP_COUNT", "x"), ("KEEPSTEP_WATCH", "perhaps")])
def test_what_is_wrong_in_the_environment_is_named(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable):
        resolve(SETTINGS, environ={variable: value})


def test_where_the_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    (home / ".config" / "keepstep").mkdir(parents=True)
    assert config_path({"HOME": str(home)}) is None
    own = write(home / ".config" / "keepstep" / "config.toml", "")
    assert config_path({"HOME": str(home)}) == own
    write(tmp_path / "keepstep.toml", "")
    assert config_path({"HOME": str(home)}) == Path("keepstep.toml")
    assert config_path({"HOME": str(home), "KEEPSTEP_CONFIG": str(own)}) == own
    with pytest.raises(UsageError, match="KEEPSTEP_CONFIG"):
        config_path({"KEEPSTEP_CONFIG": str(tmp_path / "none")})


def test_show_says_where_values_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_CONFIG", str(write(tmp_path / "c.toml", "[run]\nring_records = 1024\n")))
    monkeypatch.setenv("KEEPSTEP_LINGER_S", "3")
    assert main(["config", "show", "--origin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("run.ring_records = 1024") and line.endswith("c.toml") for line in lines)
    assert any(line.startswith("run.linger_s = 3.0") and line.endswith("KEEPSTEP_LINGER_S") for line in lines)
    assert any(line.startswith("run.watch = true") and line.endswith("# default") for line in lines)
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run.ring_records"] == 1024
