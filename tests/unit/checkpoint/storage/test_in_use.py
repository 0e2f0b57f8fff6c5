"""A folder for checkpoints belongs to one run at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.checkpoint.storage.backend import LocalStorage
from keepstep.checkpoint.storage.in_use import FILE, lock_folder
from keepstep.core.errors import UsageError


def test_a_second_run_is_told_who_uses_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = lock_folder(str(folder), "the run /runs/7 (process 12 on a)")
    assert first
    with pytest.raises(
        UsageError, match=r"checkpoints is in use by the run /runs/7 \(process 12 on a\): give another"
    ):
        lock_folder(f"file://{folder}", "another", patience_s=0.0)
    first.close()
    second = lock_folder(str(folder), "another")
    assert second
    assert (folder / FILE).read_text() == "another"
    assert LocalStorage(folder).folders() == []
    second.close()


def test_the_folder_of_a_run_that_died_is_free(tmp_path: Path) -> None:
    code = (
        "import os; from keepstep.checkpoint.storage.in_use import lock_folder; "
        f"lock = lock_folder({str(tmp_path)!r}, 'it'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    lock = lock_folder(str(tmp_path), "another", patience_s=0.0)
    assert lock
    lock.close()


def test_what_cannot_be_locked_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert lock_folder("s3://bucket/run", "it") is None
    assert lock_folder(str(tmp_path / "file" / "below"), "it") is None
    (tmp_path / FILE).mkdir()
    assert lock_folder(str(tmp_path), "it") is None
