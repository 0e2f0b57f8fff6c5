"""Builds the stand-ins for CUDA's and NCCL's libraries: ``python -m benchmarks.stand_in.build VENV``.

VENV is an environment with the CUDA build of torch, made by ``make cuda``; its folder ``headers`` has CUDA's. The
libraries go to ``VENV/stand_in``: those of native/tests/stand_in_gpu, each with the functions that torch's own
libraries want from it besides, which say "not supported" or do nothing. What is up to date is not built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "native" / "tests" / "stand_in_gpu"
OPERATORS = "operators.so"
"""For ``torch.ops.load_library``, where torch's operators are to compute."""
DRIVER = "driver"
"""The folder of NVML, which torch takes for a whole driver where it finds it: only jobs that are to use it do."""
_WANTED = re.compile(r"NEEDED.*\[((?:libcu|libnccl|libnvrtc|libnvshmem)[^\]]*)\]")
_PREFIXES = {  # of the functions that are wanted without a symbol version
    "libcudnn.so": "cudnn", "libnvrtc.so": "nvrtc", "libcufile.so": "cuFile", "libcusparseLt.so": "cusparseLt",
    "libcufft.so": "cufft", "libcurand.so": "curand", "libcusparse.so": "cusparse", "libcusolver.so": "cusolver",
    "libnccl.so": "nccl",
}  # fmt: skip
_KERNEL_OF = "getComputedKernelForDispatchKey"
_NOT_SUPPORTED = 801
_FLAGS = ["-O2", "-shared", "-fPIC", "-std=c++17", "-fno-builtin", "-pthread"]
_WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
_DEFINED = re.compile(r"^[^\s#/].*?\b(_{0,2}cu[a-zA-Z0-9_]+|nccl[A-Z]\w+)\(", re.MULTILINE)
_DEFINED_BY_MACRO = re.compile(r"^PRODUCT\((\w+)\)", re.MULTILINE)


@dataclass
class Wanted:
    """What torch's libraries ask of others."""

    sonames: set[str] = field(default_factory=set)
    versioned: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Functions by the symbol version that they are wanted with."""
    unversioned: set[str] = field(default_factory=set)

    def of(self, soname: str) -> set[str]:
        """The functions of this library."""
        stem = soname[: soname.index(".so") + 3]
        prefix = _PREFIXES.get(stem)
        loose = {name for name in self.unversioned if prefix is not None and name.startswith(prefix)}
        return self.versioned.get(_version_of(soname), set()) | loose


def _version_of(soname: str) -> str:
    return "NVSHMEM" if soname.startswith("libnvshmem") else soname


def _run(*words: str | Path) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"cannot build the stand-in GPU: {' '.join(map(str, words[:2]))} said\n{done.stderr[-2000:]}"
        )
    return done.stdout


def wanted_by(libraries: Iterable[Path]) -> Wanted:
    """Reads the dynamic sections and undefined symbols of ``libraries``, by readelf and nm."""
    wanted = Wanted()
    for library in libraries:
        wanted.sonames |= set(_WANTED.findall(_run("readelf", "-d", library)))
        for line in _run("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            (wanted.versioned[version.lstrip("@")] if version else wanted.unversioned).add(name)
    return wanted


def _defined_in(*sources: str) -> set[str]:
    text = "".join((SOURCES / source).read_text() for source in sources)
    return set(_DEFINED.findall(text)) | set(_DEFINED_BY_MACRO.findall(text))


class _Builder:
    def __init__(self, headers: Path, wanted: Wanted, out: Path) -> None:
        # CUDA 13's wheels share a folder, each of CUDA 12's has one of its own.
        self.includes = [f"-I{folder}" for folder in sorted(headers.glob("nvidia/*/include"))]
        self.wanted = wanted
        self.out = out

    def library(
        self, soname: str, *sources: str, over: tuple[str, ...] = (), stubs: set[str], says: int = 0
    ) -> None:
        """One library from ``sources`` and ``stubs``, linked to those libraries of ours it stands ``over``."""
        (self.out / "stubs.cpp").write_text(
            'extern "C" {\n'
            + "".join(f"int {name}() {{ return {says}; }}\n" for name in sorted(stubs))
            + "}\n"
        )
        words: list[str | Path] = ["g++", *_FLAGS, *self.includes]
        _run(*words, "-w", "-c", self.out / "stubs.cpp", "-o", self.out / "stubs.o")
        link: list[str | Path] = [self.out / "stubs.o", "-o", self.out / soname, f"-Wl,-soname,{soname}"]
        version = _version_of(soname)
        if version in self.wanted.versioned:
            (self.out / "versions.map").write_text(f"{version} {{ global: *; }};\n")
            link.append(f"-Wl,--version-script={self.out / 'versions.map'}")
        link += ["-Wl,--no-as-needed", *(self.out / other for other in over)]
        _run(*words, *_WARNINGS, *(SOURCES / source for source in sources), *link, "-ldl")


def build(venv: Path) -> Path:
    """Builds what is not there yet, and returns the folder for ``LD_LIBRARY_PATH``.

    Raises ``SystemExit`` with one line when torch, CUDA's headers or a compiler are missing.
    """
    torch = next(iter(venv.glob("lib/python*/site-packages/torch/lib")), None)
    headers = venv / "headers"
    if torch is None or not headers.is_dir():
        raise SystemExit(f"{venv} has no CUDA build of torch, or no headers of CUDA: make cuda")
    out = venv / "stand_in"
    state = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        state.update(path.read_bytes())
    state.update(str(torch.stat().st_mtime_ns).encode())
    built = out / "built"
    if built.is_file() and built.read_text() == state.hexdigest():
        return out
    with open(venv / "stand_in.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not (built.is_file() and built.read_text() == state.hexdigest()):
            new = venv / "stand_in.new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            _build(torch, headers, new)
            (new / "built").write_text(state.hexdigest())
            # Those that run have the old files open.
            shutil.rmtree(out, ignore_errors=True)
            new.rename(out)
    return out


def _build(torch: Path, headers: Path, out: Path) -> None:
    wanted = wanted_by(sorted(torch.glob("*.so")))
    builder = _Builder(headers, wanted, out)

    driver = {
        name
        for header in headers.glob("nvidia/*/include/cuda.h")
        for name in re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header.read_text())
    }
    core = ("device.cpp", "memory.cpp", "control.cpp", "driver.cpp")
    builder.library("libcuda.so.1", *core, stubs=driver - _defined_in(*core))
    (cudart,) = (soname for soname in wanted.sonames if soname.startswith("libcudart.so."))
    # CUDA 12's header renames some of them by a macro.
    ours = {name + ending for name in _defined_in("runtime.cpp") for ending in ("", "_v2")}
    runtime = wanted.of(cudart) - ours
    builder.library(cudart, "runtime.cpp", over=("libcuda.so.1",), stubs=runtime, says=_NOT_SUPPORTED)
    nccl = ("nccl.cpp", "nccl_values.cpp", "nccl_work.cpp", "ras.cpp")
    builder.library(
        "libnccl.so.2", *nccl, over=("libcuda.so.1",), stubs=wanted.of("libnccl.so.2") - _defined_in(*nccl)
    )
    (out / DRIVER).mkdir()
    over = ("../libcuda.so.1",)
    _Builder(headers, wanted, out / DRIVER).library("libnvidia-ml.so.1", "nvml.cpp", over=over, stubs=set())
    blas = {soname for soname in wanted.sonames if soname.startswith("libcublas")}
    for soname in sorted(blas):
        stubs = wanted.of(soname) - _defined_in("blas.cpp")
        builder.library(soname, "blas.cpp", over=("libcuda.so.1",), stubs=stubs)
    done = {"libcuda.so.1", cudart, "libnccl.so.2", *blas}
    for soname in sorted(wanted.sonames - done):
        builder.library(soname, stubs=wanted.of(soname))
    dispatcher = torch.parent / "include/ATen/core/dispatch/Dispatcher.h"
    if _KERNEL_OF not in dispatcher.read_text():
        return  # torch 2.7 tells no kernel of an operator: there they compute nothing
    includes = [f"-I{torch.parent / 'include' / folder}" for folder in ("", "torch/csrc/api/include")]
    operators = [SOURCES / "operators.cpp", "-o", out / OPERATORS, f"-L{torch}", f"-Wl,-rpath,{torch}"]
    libraries = ["-lc10", "-ltorch_cpu", "-lc10_cuda", out / "libcuda.so.1", "-Wl,--allow-shlib-undefined"]
    _run(
        "g++",
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++20",
        "-w",
        *includes,
        *builder.includes,
        *operators,
        *libraries,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.stand_in.build VENV")
    print(build(Path(sys.argv[1]).resolve()))
