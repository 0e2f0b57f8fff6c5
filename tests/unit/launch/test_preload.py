from __future__ import annotations

from pathlib import Path

from keepstep.launch.preload import preload, shim

SHIM = Path("/somewhere/libkeepstep_nccl.so")


def test_it_comes_after_what_the_user_preloads() -> None:
    assert preload({}, SHIM) == {"LD_PRELOAD": str(SHIM)}
    assert preload({"LD_PRELOAD": "libasan.so:x.so"}, SHIM) == {"LD_PRELOAD": f"libasan.so:x.so:{SHIM}"}


def test_it_can_be_left_out_and_comes_once() -> None:
    assert preload({"KEEPSTEP_NCCL_SHIM": "0"}, SHIM) == {}
    assert preload({"KEEPSTEP_NCCL_SHIM": "1"}, SHIM) == {"LD_PRELOAD": str(SHIM)}
    assert preload({"LD_PRELOAD": f"x.so:{SHIM}"}, SHIM) == {}
    assert preload({}, None) == {}
    assert preload({}, Path("/my files/libkeepstep_nccl.so")) == {}


def test_it_is_installed() -> None:
    found = shim()
    assert found is not None
    assert found.read_bytes().startswith(b"\x7fELF")
