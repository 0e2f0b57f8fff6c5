"""The kernel's log from its beginning or its end, from a file or FIFO of its form, and what is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.core.kernel_records import KERNEL_LOG, KernelLog


def line(number: int, text: str) -> str:
    return f"3,{number},{number}500000,-;{text}\n SUBSYSTEM=pci\n"


def read(log: KernelLog, most: int = 100) -> list[tuple[float, str]]:
    return [(one.at_s, one.text) for one in log.records(most)]


def test_a_file_is_read_from_its_beginning_or_from_its_end_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(line(1, "old; and odd") + "no record\n3,x,y;neither\n")
    whole, news = KernelLog(str(path)), KernelLog(str(path), from_end=True)
    assert not whole.is_kernels
    assert read(whole) == [(1.5, "old; and odd")]
    with path.open("a") as file:
        file.write(line(2, "new") + "3,3,3000000,-;half")
        file.flush()
        assert read(whole) == read(news) == [(2.5, "new")]
        assert read(whole) == read(news) == []
        file.write(" and whole\n")
    assert read(whole) == read(news) == [(3.0, "half and whole")]
    whole.close()
    news.close()


def test_a_fifo_is_read_and_never_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    log = KernelLog(str(path), from_end=True)
    assert log.is_fifo
    assert read(log) == []
    writer = os.open(path, os.O_WRONLY)
    assert read(log) == []
    os.write(writer, line(7, "GPU").encode())
    assert read(log) == [(7.5, "GPU")]
    os.close(writer)
    assert read(log) == []
    log.close()


def test_what_is_read_at_once_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("".join(line(number, "x") for number in range(100)))
    log = KernelLog(str(path))
    assert 0 < len(read(log, 21)) <= 20
    assert len(read(log, 1000)) >= 80
    log.close()


def test_another_device_is_not_the_kernels_log() -> None:
    with pytest.raises(OSError, match="another device"):
        KernelLog("/dev/null")


def test_the_kernels_own(tmp_path: Path) -> None:
    try:
        log = KernelLog(KERNEL_LOG)
    except OSError:
        pytest.skip("the kernel log may not be read here")
    assert log.is_kernels
    found = read(log, 50)
    assert all(text and "\n" not in text for _, text in found)
    log.close()
