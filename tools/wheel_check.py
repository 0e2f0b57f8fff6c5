"""Installs this machine's wheel into an empty environment without a compiler, and runs the demo from there.

    python tools/wheel_check.py FOLDER [--torch REQUIREMENT] [--torch-index URL] [--python PROGRAM ...] [--quick]

The environment, a copy of the examples and the run lie in a new folder, which is removed when all is well. ``--quick``
does without PyTorch: it loads every compiled file and writes and reads an event ring.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "icpx", "zig", "cmake", "ninja", "make", "ld")

LOAD = """
import ctypes, importlib.util, pathlib, sys
import keepstep
home = pathlib.Path(keepstep.__file__).parent
assert home.is_relative_to(sys.prefix), home
files = sorted(home.rglob("*.so"))
for file in files:
    if file.name.startswith("lib"):
        ctypes.CDLL(str(file))
    else:
        name = ".".join(("keepstep", *file.relative_to(home).parent.parts, file.name.split(".")[0]))
        spec = importlib.util.spec_from_file_location(name, file)  # by itself: the package around it may need torch
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
from keepstep.core.events import Kind, Op
from keepstep.ring import RingReader, RingWriter, create
ring = create(64)
writer = RingWriter(ring, rank=0, world_size=1)
reader = RingReader(ring)
writer.start(Kind.COLLECTIVE, Op.ALLREDUCE, 0, -1, 4096)
assert [int(row["bytes"]) for row in reader.poll().started] == [4096]
print(f"loaded {len(files)} compiled files of keepstep {keepstep.__version__}, wrote and read a ring")
"""


def fitting(folder: Path, tag: str) -> Path | None:
    """The newest wheel in the folder for a Python (``cp311``) on this machine's processor."""
    wheels = folder.glob(f"keepstep-*-{tag}-{tag}-*manylinux*_{platform.machine()}.whl")
    return max(wheels, key=lambda path: path.stat().st_mtime, default=None)


def needs(wheel: Path) -> list[str]:
    """What a wheel requires of others besides PyTorch, extras aside."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [need for need in required if "extra ==" not in need and not need.startswith("torch")]


def empty_environ(environ: Mapping[str, str], venv: Path) -> dict[str, str]:
    """No compiler, no source tree: the venv's own programs are all there is on the PATH."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("PYTHON", "KEEPSTEP_", "CMAKE", "SKBUILD", "VIRTUAL_ENV"))
        and name not in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    return {**kept, "PATH": str(venv / "bin")}


def check(python: str, tag: str, wheel: Path, torch: str, index: str, quick: bool) -> int:
    """Install and run; what it did goes to stdout. The exit code is the demo's."""
    place = Path(tempfile.mkdtemp(prefix="keepstep-wheel-check-"))
    venv = place / "venv"
    subprocess.run([python, "-m", "venv", str(venv)], check=True)
    environ = empty_environ(os.environ, venv)
    here = [name for name in COMPILERS if shutil.which(name, path=environ["PATH"])]
    assert not here, f"{here} in an empty environment"
    program = str(venv / "bin" / "python")

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=place, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    install = (
        program,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
    )
    if quick:
        run(*install, *needs(wheel))
        run(*install, "--no-deps", str(wheel))
    else:
        run(*install, *(["--index-url", index] if index else []), torch)
        (place / "constraint.txt").write_text(f"{torch}\n")
        run(*install, "-c", str(place / "constraint.txt"), str(wheel))
    version = run(program, "-c", "import platform; print(*platform.libc_ver(), platform.python_version())")
    print(f"wheels-check: {wheel.name} in {place}, no compiler on its PATH; {version}", flush=True)
    print(f"wheels-check: {run(program, '-c', LOAD)}", flush=True)
    code = 0
    if not quick:
        brought = run(program, "-c", "import torch; print(torch.__version__)")
        print(f"wheels-check: torch {brought}; the demo:\n", flush=True)
        shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        code = subprocess.call([program, str(place / "examples" / "demo.py")], cwd=place, env=environ)
        print(f"\nwheels-check: the demo ended with {code}; {place} " + ("is kept" if code else "is removed"))
    if code == 0:
        shutil.rmtree(place)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the wheel of each Python that is named; 2 where the folder has none for it (``--if-any``: 0)."""
    parser = argparse.ArgumentParser(description="check keepstep's wheels")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--torch-index", default="")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="else the one that runs this")
    parser.add_argument("--quick", action="store_true", help="without PyTorch and the demo")
    parser.add_argument(
        "--if-any", action="store_true", help="where the folder has no wheel that fits, say so only"
    )
    given = parser.parse_args(arguments)
    worst = 0
    for python in given.python:
        told = [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"]
        tag = subprocess.run(told, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        wheel = fitting(given.folder.resolve(), tag)
        if wheel is None:
            print(
                f"wheels-check: no wheel of {tag} for {platform.machine()} in {given.folder}: run `make wheels`"
            )
            worst = max(worst, 0 if given.if_any else 2)
        else:
            worst = max(worst, check(python, tag, wheel, given.torch, given.torch_index, given.quick))
    return worst


if __name__ == "__main__":
    sys.exit(main())
