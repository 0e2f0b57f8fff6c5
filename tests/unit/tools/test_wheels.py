"""What a wheel is built for, and with what; the building itself is `make wheels`."""

from __future__ import annotations

import os
import platform
import sys
import zipfile
from pathlib import Path

import pytest
from tools import wheel_check, wheels


def python_of(minor: int, headers: Path) -> wheels.Python:
    return wheels.Python(
        f"python3.{minor}", (3, minor), f".cpython-3{minor}-{platform.machine()}-linux-gnu.so", headers
    )


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    (tmp_path / "Python.h").write_text("")
    return tmp_path


def test_one_python_of_each_version_that_has_its_headers(headers: Path) -> None:
    first = python_of(12, headers)
    found = [
        first,
        python_of(9, headers),
        python_of(11, headers),
        python_of(12, headers),
        python_of(13, headers / "no"),
    ]
    chosen = wheels.one_of_each(found)
    assert [python.tag for python in chosen] == ["cp311", "cp312"]
    assert chosen[1] is first


def test_a_program_that_is_no_python_is_none() -> None:
    assert wheels.asked("/bin/false") is None
    assert wheels.asked("/no/such/python") is None
    python = wheels.asked(sys.executable)
    assert python is not None
    assert python.version == sys.version_info[:2]


def test_another_processor_is_in_all_names(headers: Path, tmp_path: Path) -> None:
    environ = wheels.settings(tmp_path, python_of(12, headers), "aarch64")
    assert environ["SETUPTOOLS_EXT_SUFFIX"] == ".cpython-312-aarch64-linux-gnu.so"
    assert environ["_PYTHON_HOST_PLATFORM"] == "linux-aarch64"
    assert "-target aarch64-linux-gnu.2.28" in Path(environ["CXX"]).read_text()
    assert os.access(environ["CXX"], os.X_OK)


def test_the_newest_wheel_that_fits_this_machine_is_checked(tmp_path: Path) -> None:
    def wheel(version: str, tag: str, arch: str, age: int) -> Path:
        path = tmp_path / f"keepstep-{version}-{tag}-{tag}-manylinux_2_28_{arch}.whl"
        path.write_text("")
        os.utime(path, (1000 - age, 1000 - age))
        return path

    here = platform.machine()
    wheel("0.1.0", "cp311", here, 2)
    newer = wheel("0.2.0", "cp311", here, 1)
    wheel("0.3.0", "cp311", "riscv64", 0)
    wheel("0.3.0", "cp312", here, 0)
    assert wheel_check.fitting(tmp_path, "cp311") == newer
    assert wheel_check.fitting(tmp_path, "cp313") is None


def test_a_wheel_tells_what_it_needs_besides_torch(tmp_path: Path) -> None:
    wheel = tmp_path / "keepstep.whl"
    lines = [
        "torch>=2.7",
        "numpy>=1.26",
        "tomli>=2; python_version < '3.11'",
        "pyarrow>=15; extra == 'traces'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "keepstep-0.1.0.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in lines)
        )
    assert wheel_check.needs(wheel) == lines[1:3]


def test_the_empty_environment_has_no_compiler_and_no_source_tree(tmp_path: Path) -> None:
    environ = {
        "PATH": "/usr/bin",
        "CXX": "g++",
        "PYTHONPATH": "src",
        "KEEPSTEP_RUN_DIR": "run",
        "PIP_CERT": "file",
    }
    assert wheel_check.empty_environ(environ, tmp_path) == {"PATH": str(tmp_path / "bin"), "PIP_CERT": "file"}
