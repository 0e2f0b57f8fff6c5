"""The shim against the real ``nccl.h``: what it hooks, what it leaves out on purpose, and the calls' binary interface.

The headers are those of the newest wheels (``make nccl``), or the one in ``KEEPSTEP_NCCL_H``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.nccl.shim import COMPILER, NATIVE, Built

from keepstep.core.events import Flag, Kind, Life, Op
from keepstep.ring import RingReader

LISTED = Path(__file__).with_name("functions.txt")
CUDA = """
#pragma once
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
"""
SAME = """
#define NCCL_OS_LINUX 1
#include <nccl.h>
#include "nccl_api.hpp"
#include <type_traits>
template <typename A, typename B>
constexpr bool same_place = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
    std::is_class_v<A> == std::is_class_v<B> && std::is_floating_point_v<A> == std::is_floating_point_v<B>;
template <typename A, typename B> struct Same;
template <typename R, typename... A, typename S, typename... B>
struct Same<R(A...), S(B...)> {
  static constexpr bool count = sizeof...(A) == sizeof...(B);
  static constexpr bool value = same_place<R, S> && (same_place<A, B> && ...);
};
#define CHECK(name, parameters, ...)                                                                         \\
  static_assert(Same<decltype(::name), ncclResult_t parameters>::count, #name ": number of parameters");    \\
  static_assert(Same<decltype(::name), ncclResult_t parameters>::value, #name ": parameters");
#define CHECK_CONFIG(name, parameters, ...)                                                                  \\
  static_assert(Same<decltype(::name##Config), ncclResult_t(KEEPSTEP_NCCL_LIST parameters, const void*)>::value,  \\
                #name "Config: parameters");
namespace keepstep::nccl {
KEEPSTEP_NCCL_CONFIGURABLE(CHECK)
KEEPSTEP_NCCL_CONFIGURABLE(CHECK_CONFIG)
KEEPSTEP_NCCL_PLAIN(CHECK)
KEEPSTEP_NCCL_LIFE(CHECK)
KEEPSTEP_NCCL_ASKED(CHECK)
static_assert(sizeof(UniqueId) == sizeof(::ncclUniqueId) && sizeof(UniqueId) == NCCL_UNIQUE_ID_BYTES);
static_assert(kSuccess == ncclSuccess && kInvalidUsage == ncclInvalidUsage && kInProgress == ncclInProgress);
static_assert(kNoColor == NCCL_SPLIT_NOCOLOR && ncclNumTypes == 12 && ncclFloat8e5m2 == 11 && ncclBfloat16 == 9);
static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4 && ncclNumOps == 5);
}
"""


def listed() -> dict[str, str]:
    """Function -> ``hooked`` or why not."""
    lines = [line for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    return {name: how for name, _, how in (line.split(maxsplit=2) for line in lines)}


def headers() -> list[Path]:
    told = os.environ.get("KEEPSTEP_NCCL_H")
    if told:
        return [Path(told)]
    return sorted(Path(sys.prefix, "nccl").glob("*/nvidia/nccl/include/nccl.h"))


@pytest.fixture(scope="module", params=headers() or [None], ids=str)
def header(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("no nccl.h: make nccl, or name one in KEEPSTEP_NCCL_H")
    return request.param


def test_the_list_is_what_the_shim_hooks(built: Built) -> None:
    shown = subprocess.run(["readelf", "--dyn-syms", "-W", built.shim], capture_output=True, text=True).stdout
    hooked = set(re.findall(r" (nccl\w+)@KEEPSTEP_NCCL", shown))
    assert hooked == {name for name, how in listed().items() if how == "hooked"}


def test_the_numbers_are_those_of_core() -> None:
    text = (NATIVE / "nccl_api.hpp").read_text()
    for ours in (Op, Life):
        (found,) = re.findall(rf"enum class {ours.__name__} : unsigned char {{([^}}]*)}}", text)
        number, numbers = 0, {}
        for entry in found.replace("\n", " ").strip(" ,").split(","):
            name, _, told = entry.partition("=")
            number = int(told) if told else number + 1
            numbers[name.strip().upper()] = number
        assert numbers.items() <= {one.name: int(one) for one in ours}.items()
        assert len(numbers) >= len(ours) - 1  # a BARRIER is no call of NCCL


def test_every_function_of_the_header_is_hooked_or_left_out_on_purpose(header: Path) -> None:
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    text = re.sub(r"//.*", "", text)
    functions = set(
        re.findall(r"^\s*(?:ncclResult_t|const\s+char\s*\*|void)\s+(nccl[A-Z]\w+)\s*\(", text, re.MULTILINE)
    )
    assert len(functions) > 30
    new = functions - listed().keys()
    assert not new, (
        f"{header} has functions that the shim neither hooks nor leaves out on purpose: {sorted(new)}"
    )


def test_the_calls_have_the_binary_interface_of_the_header(header: Path, tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler (set CXX)")
    version = re.search(r"define NCCL_VERSION_CODE (\d+)", header.read_text())
    if version is None or int(version[1]) < 23200:
        pytest.skip(f"{header} is older than 2.32, whose calls the shim knows")
    (tmp_path / "cuda_runtime.h").write_text(CUDA)
    (tmp_path / "cuda_fp16.h").write_text("")
    (tmp_path / "same.cpp").write_text(SAME)
    argv = [COMPILER, "-std=c++17", "-fsyntax-only", f"-I{NATIVE}", f"-I{header.parent}", f"-I{tmp_path}"]
    done = subprocess.run([*argv, tmp_path / "same.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REAL = """
made, comm, data = Id(), ctypes.c_void_p(), floats(1)
version = ctypes.c_int()
good(ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)))
good(nccl.caller_ncclGetUniqueId(ctypes.byref(made)))
if nccl.caller_ncclCommInitRank(ctypes.byref(comm), 1, made, 0) == 0:
    print("initialized")
assert nccl.caller_ncclAllReduce(data, data, size(1), FLOAT32, SUM, None, STREAM) == 4
print(version.value)
"""


def test_the_real_library_is_called_through_the_shim(built: Built, rings: list[int], header: Path) -> None:
    """Without a GPU its calls fail: they are recorded as that."""
    library = header.parent.parent / "lib" / "libnccl.so.2"
    if not library.exists():
        pytest.skip(f"no {library}")
    environment = built.environment(rings[0], LD_LIBRARY_PATH=str(library.parent))
    stdout, _ = built.run(REAL, environment)
    records = RingReader(rings[0]).snapshot()
    assert int(stdout.split()[-1]) >= 21800
    assert records[["kind", "op", "bytes"]].tolist() == [
        (Kind.COMMUNICATOR, Life.INIT, 1),
        (Kind.COLLECTIVE, Op.ALLREDUCE, 4),
    ]
    failed = ((records["flags"] & Flag.FAILED) != 0).tolist()
    assert failed == ["initialized" not in stdout, True]
