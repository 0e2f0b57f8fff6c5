"""From a file to threads that tell: who hangs holds up nobody, and nothing secret is shown."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.unit.view.notify.receiving import Web, refused_port, web
from tests.unit.view.notify.told_runs import ended, over, seen, slow

from keepstep.view.notify import starting
from keepstep.view.notify.starting import Telling, start
from keepstep.view.run_snapshot import RunSnapshot

ODD = Path(__file__).with_name("odd_tracker.py")


def notify_file(folder: Path, **servers: Web) -> Path:
    """A file with one webhook for each server, named as it is here."""
    text = ""
    for name, server in servers.items():
        url = folder / f"{name}.url"
        url.write_text(server.url)
        url.chmod(0o600)
        text += f"[webhook.{name}]\nurl_file = '{name}.url'\ntimeout_s = 30\n"
    file = folder / "notify.toml"
    file.write_text(text)
    return file


def tell(telling: Telling, *snapshots: object) -> None:
    for snapshot in snapshots:
        telling(snapshot)  # type: ignore[arg-type]
        assert telling.settle(30.0)


def test_a_webhook_gets_what_happens(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "key").write_text("signing key")
    (tmp_path / "key").chmod(0o600)
    lines: list[str] = []
    with web() as server:
        file = notify_file(tmp_path, pager=server)
        file.write_text(file.read_text() + "key_file = 'key'\n")
        telling = start(file, "train-7b", tmp_path / "run", {}, lines.append)
        tell(telling, seen(), seen(slow(1, 3)), seen(over(slow(1, 3))))
        telling.close()
    assert [json.loads(one.body)["what"] for one in server.requests] == ["opened", "over"]
    assert lines == []
    (request, _) = server.requests
    assert request.headers["content-type"] == "application/json"
    moment, _, digest = request.headers["x-keepstep-signature"].removeprefix("t=").partition(",v1=")
    expected = hmac.new(b"signing key", moment.encode() + b"." + request.body, hashlib.sha256)
    assert digest == expected.hexdigest()


def test_who_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """Neither the caller, nor other receivers, nor the end."""
    (tmp_path / "run").mkdir()
    with web("hang") as hanging, web() as good:
        telling = start(notify_file(tmp_path, hanging=hanging, good=good), "r", tmp_path / "run", {}, print)
        telling(seen())
        wait_until(lambda: telling.settle(1.0))
        telling(seen(slow(1, 3)))
        wait_until(lambda: len(good.requests) == 1 and len(hanging.requests) == 1)
        telling(seen(over(slow(1, 3))))
        wait_until(lambda: len(good.requests) == 2)
        began_s = time.monotonic()
        telling.close(0.2)
        assert time.monotonic() - began_s < 20, "it does not wait for the 30 s of the one that hangs"
    assert len(hanging.requests) == 1


def test_a_tracker_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    (tmp_path / "run").mkdir()
    command = (sys.executable, str(ODD), str(tmp_path / "got"), "hang")
    monkeypatch.setattr(starting, "COMMAND", command)
    with web() as good:
        file = notify_file(tmp_path, good=good)
        file.write_text(file.read_text() + "[tensorboard]\nfolder = 'tb'\n")
        telling = start(file, "r", tmp_path / "run", {}, print)
        telling(seen())
        for step in range(1000):
            telling(seen(newest_step=step))
        telling(seen(slow(1, 3)))
        wait_until(lambda: len(good.requests) == 1)
        telling.close(0.2)
    assert not [one for one in threading.enumerate() if one.name == "notify tensorboard"], (
        "its process was killed"
    )


def wait_until(condition: object) -> None:
    until_s = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_what_fails_is_told_without_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with web("404\n\nno such path: /services/T000/B000/s3cr3t-of-the-path") as server:
        telling = start(notify_file(tmp_path, pager=server), "r", tmp_path / "run", dict(os.environ))
        tell(telling, seen(), seen(slow(1, 3)))
        telling.close()
    told = capsys.readouterr().err
    assert (
        f"notify webhook.pager: not delivered, http://127.0.0.1:{server.port}: it answers 404: no such path: ***"
        in told
    )
    assert "s3cr3t" not in told
    kept = [path.read_bytes() for path in (tmp_path / "run" / "notified").iterdir()]
    assert not any(b"s3cr3t" in content for content in kept)
    assert b"s3cr3t" not in Path("/proc/self/cmdline").read_bytes()


def test_a_test_says_what_became_of_each(tmp_path: Path) -> None:
    with web() as good, web("302\nLocation: /x") as bad, refused_port() as port:
        gone = Web([], port=port)
        results = starting.test(notify_file(tmp_path, good=good, bad=bad, gone=gone), seen(), {})
    assert [name for name, _ in results] == ["webhook.good", "webhook.bad", "webhook.gone"]
    assert results[0][1] == ""
    assert "that is not followed" in results[1][1]
    assert results[2][1].endswith("Connection refused")
    (request,) = good.requests
    assert json.loads(request.body)["what"] == "test"


def test_a_test_of_a_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard")
    file = tmp_path / "notify.toml"
    file.write_text("[tensorboard]\nfolder = 'tb'\n")
    assert starting.test(file, seen(), {}) == [("tensorboard", "")]
    assert list((tmp_path / "tb" / "keepstep").iterdir())
    (tmp_path / "in the way").touch()
    file.write_text("[tensorboard]\nfolder = 'in the way'\n")
    ((_, why),) = starting.test(file, seen(), {})
    assert "in the way" in why


class Offered:
    """A receiver that keeps what it is offered."""

    def __init__(self) -> None:
        self.snapshots: list[RunSnapshot] = []

    def start(self) -> None: ...

    def offer(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)

    def settle(self, timeout_s: float) -> bool:
        return timeout_s >= 0

    def close(self, timeout_s: float) -> None: ...


def test_that_the_folder_cannot_be_read_any_more_is_silence() -> None:
    receiver = Offered()
    telling = Telling([receiver], stuck_s=0.05)
    telling(seen(slow(1, 3)))
    while len(receiver.snapshots) < 2:  # nobody looks: the thread that does is held up
        time.sleep(0.01)
    telling.close()
    first, silent = receiver.snapshots[:2]
    assert (first.state, silent.state) == ("running", "silent")
    assert silent.age_s > first.age_s
    assert "its file system hangs" in silent.troubles[0]
    assert silent.incidents == first.incidents


def test_of_a_job_that_has_ended_no_silence_is_told() -> None:
    receiver = Offered()
    telling = Telling([receiver], stuck_s=0.02)
    telling(ended(1))
    time.sleep(0.1)
    telling.close()
    assert len(receiver.snapshots) == 1
