"""``keepstep serve``: what is wrong with a command line is one line that says what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.unit.view.web.test_access import TOKEN, token_file

from keepstep.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has just begun."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"host": os.uname().nodename, "nproc_per_node": 2}))
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


def test_other_machines_reach_it_only_with_a_token_and_tls(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = said(capsys, str(run), "--listen", "0.0.0.0:0")
    assert "needs --token-file and --tls-cert with --tls-key" in told
    assert "ssh -L" in told
    token = str(token_file(tmp_path, TOKEN))
    assert "--tls-cert" in said(capsys, str(run), "--listen", "0.0.0.0:0", "--token-file", token)
    assert "belong together" in said(capsys, str(run), "--tls-cert", token)
    told = said(capsys, str(run), "--tls-cert", token, "--tls-key", token)
    assert "both are PEM files" in told
    assert TOKEN.decode() not in told


def test_without_the_extra_it_says_how_to_get_it(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "pip install keepstep[web]" in said(capsys, str(run))


def test_a_run_that_is_not_there_is_told_before_anything_listens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no run folder" in said(capsys, str(tmp_path / "none"))


def test_a_port_in_use_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = said(capsys, str(run), "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert "the port is in use" in told
    assert "--listen HOST:PORT" in told


def test_it_serves_a_folder_and_ends_at_a_signal_without_noise(run: Path) -> None:
    (run / "status.json").write_text('{"cut": [1, 2')  # as a job that died while it wrote
    command = [sys.executable, "-m", "keepstep.cli", "serve", str(run), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        url = next(word for word in serving.stderr.readline().split() if word.startswith("http://"))
        for _ in range(500):
            try:
                with urllib.request.urlopen(f"{url}api", timeout=30) as answer:
                    content = json.load(answer)
                break
            except ConnectionError:
                time.sleep(0.02)
        assert content["job"]["troubles"]
        serving.send_signal(signal.SIGINT)
        assert serving.stderr.read() == ""
        assert serving.wait() in (0, 130)


def test_it_ends_at_a_signal_though_the_file_system_hangs(run: Path) -> None:
    program = (
        "import sys, threading\n"
        "from keepstep.cli import serve\n"
        "from keepstep.view.folder import FolderSource\n"
        "look, looks = FolderSource.refresh, []\n"
        "def hang(*args):\n"
        "    looks.append(0)\n"
        "    return look(*args) if len(looks) == 1 else threading.Event().wait()\n"
        "FolderSource.refresh, serve._END_S = hang, 0.5\n"
        "serve.main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", program, str(run), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        url = next(word for word in serving.stderr.readline().split() if word.startswith("http://"))
        for _ in range(500):
            try:
                with urllib.request.urlopen(f"{url}healthz", timeout=30):
                    break
            except ConnectionError:
                time.sleep(0.02)
        with contextlib.suppress(TimeoutError):
            urllib.request.urlopen(f"{url}api", timeout=0.5)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 128 + signal.SIGTERM
