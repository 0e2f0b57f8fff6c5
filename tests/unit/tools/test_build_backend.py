"""A build that cannot succeed says so in one line, before CMake runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
WRAPPED = "build_wheel = build_editable = get_requires_for_build_wheel = lambda *given: print('built') or []"
ALL_HOOKS = f"{WRAPPED}\nget_requires_for_build_editable = get_requires_for_build_sdist = build_wheel"


@pytest.fixture
def scikit_build_core(tmp_path: Path) -> Path:
    """The folder of a package that stands for scikit-build-core, which only builds have."""
    package = tmp_path / "stand-in" / "scikit_build_core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "build.py").write_text(ALL_HOOKS)
    return package.parent


@pytest.fixture
def hook(scikit_build_core: Path, tmp_path: Path):
    def call(
        name: str, *arguments: str, before: str = "pass", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        call = f"import sys, sysconfig; {before}; import build_backend; build_backend.{name}({', '.join(arguments)})"
        inherited = {key: value for key, value in os.environ.items() if key != "CXX" and "CMAKE" not in key}
        folders = f"{TOOLS}{os.pathsep}{scikit_build_core}"
        return subprocess.run(
            [sys.executable, "-c", call],
            env={**inherited, "PYTHONPATH": folders, "PATH": str(tmp_path), **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def a_compiler_in(folder: Path) -> None:
    program = folder / "g++"
    program.write_text("")
    program.chmod(0o755)


@pytest.mark.parametrize("name", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_no_compiler_is_one_line_that_says_what_to_do(hook, name: str) -> None:
    done = hook(name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "keepstep: no C++ compiler, none of c++, g++, clang++, icpx is on the PATH: install one "
        "(Debian: apt install g++), or install a keepstep wheel, which needs none: docs/howto/install.md"
    ]


@pytest.mark.parametrize("name", ["build_wheel", "build_editable"])
def test_a_build_that_asked_for_no_requirements_checks_too(hook, name: str) -> None:
    done = hook(name, "'into'")
    assert done.stderr.startswith("keepstep: no C++ compiler")
    assert len(done.stderr.splitlines()) == 1


def test_a_compiler_that_was_named_and_is_not_there_is_named(hook, tmp_path: Path) -> None:
    a_compiler_in(tmp_path)
    assert (
        "no C++ compiler, CXX=/no/such/c++ cannot be run"
        in hook("get_requires_for_build_wheel", CXX="/no/such/c++ -m64").stderr
    )


def test_pythons_headers_are_asked_for(hook, tmp_path: Path) -> None:
    a_compiler_in(tmp_path)
    done = hook("get_requires_for_build_wheel", before="sysconfig.get_path = lambda name: '/no/such/folder'")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "keepstep: no headers of Python, /no/such/folder/Python.h does not exist: install them"
    )


def test_another_system_is_told_that_only_linux_will_do(hook) -> None:
    done = hook("get_requires_for_build_wheel", before="sys.platform = 'darwin'")
    assert done.stderr == "keepstep runs on Linux only, and this is darwin\n"


def test_a_compiler_named_to_cmake_is_left_to_cmake(hook, tmp_path: Path) -> None:
    headers = {"CMAKE_ARGS": "-DPython_INCLUDE_DIR=/elsewhere"}
    in_settings = "{'cmake.define.CMAKE_CXX_COMPILER': '/opt/c++'}"
    assert hook("build_wheel", "'into'", in_settings, **headers).stdout == "built\n"
    assert (
        hook("build_wheel", "'into'", CMAKE_ARGS="-DCMAKE_CXX_COMPILER=x -DPython_INCLUDE_DIR=y").stdout
        == "built\n"
    )
    a_compiler_in(tmp_path)
    assert hook("build_wheel", "'into'", **headers).stdout == "built\n"


def test_a_source_distribution_needs_no_compiler(hook) -> None:
    assert hook("get_requires_for_build_sdist").stdout == "built\n"
