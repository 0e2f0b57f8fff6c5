"""scikit-build-core, which first says in one line what a build of keepstep misses here.

CMake alone says it, too, at the end of a page about what it tried.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build  # pyright: ignore[reportMissingImports]

# The hooks that are not wrapped below.
from scikit_build_core.build import *  # noqa: F403 # pyright: ignore

COMPILERS = ("c++", "g++", "clang++", "icpx")
"""Names under which CMake looks for one, too."""

OR_A_WHEEL = "or install a keepstep wheel, which needs none: docs/howto/install.md"


def missing(told: str) -> str | None:
    """What to install before a build can succeed, in one line; nothing when all is there.

    ``told`` is what the user tells CMake: a compiler or folder named there is CMake's to judge.
    """
    if sys.platform != "linux":
        return f"keepstep runs on Linux only, and this is {sys.platform}"
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    left_to_cmake = "CXX_COMPILER" in told.upper() or "TOOLCHAIN" in told.upper()
    if not left_to_cmake and not any(map(shutil.which, named or COMPILERS)):
        why = f"CXX={named[0]} cannot be run" if named else f"none of {', '.join(COMPILERS)} is on the PATH"
        return f"keepstep: no C++ compiler, {why}: install one (Debian: apt install g++), {OR_A_WHEEL}"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if "INCLUDE_DIR" not in told.upper() and not headers.exists():
        install = "install them (Debian: apt install python3-dev)"
        return f"keepstep: no headers of Python, {headers} does not exist: {install}, {OR_A_WHEEL}"
    return None


def _check(settings: Mapping[str, Any] | None) -> None:
    told = [f"{name}={value}" for name, value in os.environ.items() if "CMAKE" in name]
    if (line := missing(f"{settings} {told}")) is not None:
        raise SystemExit(line)


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """What pip asks first: where something is missing it ends here, before CMake is downloaded and run."""
    _check(config_settings)
    return _build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """The same for ``pip install -e``."""
    _check(config_settings)
    return _build.get_requires_for_build_editable(config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Checks once more, as ``pip install --no-build-isolation`` asks for no requirements."""
    _check(config_settings)
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The same for ``pip install -e``."""
    _check(config_settings)
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
