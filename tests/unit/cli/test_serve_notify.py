"""``keepstep serve --notify``, as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.view.notify.receiving import Web, web
from tests.unit.view.notify.told_runs import over, slow

from keepstep.cli import main
from keepstep.report.incidents import incident_to_json

SECRET = "s3cr3t-of-the-path"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with an open incident."""
    folder = tmp_path / "run"
    (folder / "incidents").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"host": os.uname().nodename, "nproc_per_node": 4}))
    (folder / "incidents" / "0001.json").write_bytes(incident_to_json(slow(1, 3)))
    return folder


def notify_file(folder: Path, server: Web) -> Path:
    (folder / "hook.url").write_text(server.url)
    (folder / "hook.url").chmod(0o600)
    (folder / "notify.toml").write_text("[webhook.ops]\nurl_file = 'hook.url'\n")
    return folder / "notify.toml"


def test_a_test_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web("200", "500") as server:
        words = ["serve", str(run), "--notify", str(notify_file(tmp_path, server)), "--notify-test"]
        assert main(words) == 0
        assert capsys.readouterr() == ("webhook.ops: arrived\n", "")
        assert main(words) == 1
        out, err = capsys.readouterr()
    assert out == f"webhook.ops: http://127.0.0.1:{server.port}: it answers 500\n"
    assert err == ""


def test_what_is_missing_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--notify-test", "--no-page"):
        assert main(["serve", str(run), flag]) == 2
        assert f"{flag} needs --notify FILE" in capsys.readouterr().err
    assert main(["serve", str(run), "--no-page", "--notify", str(tmp_path / "none.toml")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_without_a_page_it_tells_until_the_job_has_ended(run: Path, tmp_path: Path) -> None:
    with web() as server:
        command = [sys.executable, "-m", "keepstep.cli", "serve", str(run), "--no-page"]
        command += ["--notify", str(notify_file(tmp_path, server))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            wait_for(server, 1)
            shown = (
                Path(f"/proc/{process.pid}/cmdline").read_text()
                + Path(f"/proc/{process.pid}/environ").read_text()
            )
            (run / "incidents" / "0001.json").write_bytes(incident_to_json(over(slow(1, 3))))
            wait_for(server, 2)
            (run / "end.json").write_text(
                json.dumps({"exit_code": 1, "category": "training", "reason": "rank 3 failed"})
            )
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert [json.loads(one.body)["what"] for one in server.requests] == ["opened", "over", "died"]
    assert (output, process.returncode) == ("", 0)
    assert SECRET not in shown


def test_the_page_and_who_is_told(run: Path, tmp_path: Path) -> None:
    """A receiver that hangs does not keep the server from its end."""
    with web("hang") as server:
        command = [sys.executable, "-m", "keepstep.cli", "serve", str(run), "--listen", "127.0.0.1:0"]
        command += ["--notify", str(notify_file(tmp_path, server))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            wait_for(server, 1)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert SECRET not in output
    assert output.count("\n") == 1, "where it listens, and nothing else"


def wait_for(server: Web, count: int) -> None:
    until_s = time.monotonic() + 60
    while len(server.requests) < count:
        assert time.monotonic() < until_s, f"{len(server.requests)} of {count} were told"
        time.sleep(0.01)
