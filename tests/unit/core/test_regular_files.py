from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from keepstep.core.regular_files import open_regular, read_regular


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    (tmp_path / "link").symlink_to(path)
    assert len(read_regular(tmp_path / "link", 1 << 20)) == 1 << 20
    with pytest.raises(OSError, match="is larger than the 0 MiB"):
        read_regular(path, (1 << 20) - 1)


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name in ("fifo", "endless"):
        with pytest.raises(OSError, match="is a FIFO, socket or device"):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="is a folder"):
        open_regular(tmp_path)
    with pytest.raises(OSError, match="No such device"):
        open_regular(tmp_path / "socket")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")
