"""``keepstep check`` of this node: exit code, table and JSON, and what it refuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from keepstep.cli import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPSTEP_NODE_NAME", "gpu-1")
    monkeypatch.setenv("KEEPSTEP_KERNEL_LOG", "/dev/null")


def test_a_fit_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "--path", f"{tmp_path}:rw"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["nodes"]
    assert (row["node"], row["unfit"], row["paths"][0]["path"]) == ("gpu-1", [], str(tmp_path))
    assert dict(row["versions"])["keepstep"]


def test_an_unfit_node_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--path", "/no/such/data"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["gpu-1", "unfit"]
    assert (
        lines[2]
        == "unfit: node gpu-1: /no/such/data: No such file or directory; mount it there or correct the path"
    )


def test_broken_hardware_that_the_kernel_told_of_lately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"3,1,{10**15},-;NVRM: Xid (PCI:0000:0f:00): 79, GPU has fallen off the bus.\n")
    monkeypatch.setenv("KEEPSTEP_KERNEL_LOG", str(log))
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "unfit: node gpu-1: the kernel tells of broken hardware: NVRM: Xid" in out
    assert " errors " in out.splitlines()[1]


def test_paths_of_the_settings_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEPSTEP_DATASET_PATHS", f"{tmp_path},/no/such/data")
    assert main(["check", "--json"]) == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--nnodes", "2"), "say where the nodes meet, --rdzv-endpoint HOST:PORT"),
        (("--nnodes", "2", "--rdzv-endpoint", "h:0"), "give a port that all nodes know"),
        (("--nnodes", "0"), "argument --nnodes: 0 is not between 1 and 4096"),
        (("--burn-in", "nan"), "argument --burn-in"),
        (("--path", "s3://bucket"), "give a folder or file of a file system"),
        (("x",), "unrecognized arguments: x"),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *flags]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--local-addr", "203.0.113.9"),
            "test data cannot be taken at 203.0.113.9: Cannot assign requested address",
        ),
        (("--rdzv-conf", "join_timeout=2"), "only 1 of 2 nodes came within 2 s (gpu-1); start the others"),
    ],
)
def test_a_check_of_several_nodes_that_cannot_be_done(
    tmp_path: Path, flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = [
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--secret-file",
        str(tmp_path / "secret"),
    ]
    assert main(["check", *meet, *flags]) == 2
    assert told in capsys.readouterr().err
