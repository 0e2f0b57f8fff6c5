"""Versions and GPUs as the driver's files tell them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import __version__
from keepstep.launch.node.checks import installed

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17 22:55:48 UTC 2024\nGCC version: 12\n"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)\n"
)


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.161.08"), (OPEN, "570.86.15"), ("NVRM", None)])
def test_the_drivers_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert dict(installed.versions(tmp_path)).get("driver") == version


def test_what_is_installed_here(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = dict(installed.versions(tmp_path))
    assert (found["keepstep"], found["torch"]) == (__version__, torch.__version__)
    assert found.get("CUDA") == torch.version.cuda


def test_models_of_gpus_in_the_order_of_their_addresses(tmp_path: Path) -> None:
    for address, model in (("0000:9b:00.0", "NVIDIA H100 80GB HBM3"), ("0000:0f:00.0", "NVIDIA H200")):
        folder = tmp_path / "gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 34\n")
    (tmp_path / "gpus" / "0000:aa:00.0").mkdir()
    assert installed.gpus(tmp_path) == ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "?")
    assert installed.gpus(tmp_path / "none") == ()


@given(st.binary(max_size=400))
def test_no_content_is_too_odd(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "gpus" / "0"
        folder.mkdir(parents=True)
        (folder / "information").write_bytes(b"Model: " + content)
        (Path(name) / "version").write_bytes(b"Kernel Module  " + content)
        assert all(len(text) <= 60 for text in installed.gpus(Path(name)))
        assert all(len(text) <= 60 for _, text in installed.versions(Path(name)))
