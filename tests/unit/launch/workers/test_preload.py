from __future__ import annotations

from pathlib import Path

from keepstep.launch.workers.rings import preload, shim

SHIM = Path("/somewhere/libkeepstep_nccl.so")


def test_it_comes_after_what_the_user_preloads() -> None:
    assert preload({}, SHIM) == {"LD_PRELOAD": str(SHIM)}
    assert preload({"LD_PRELOAD": "libasan.so:x.so"}, SHIM) == {"LD_PRELOAD": f"libasan.so:x.so:{SHIM}"}


def test_it_can_be_left_out_and_comes_once() -> None:
    assert preload({"KEEPSTEP_NCCL_SHIM": "0"}, SHIM) == {}
    assert preload({"KEEPSTEP_NCCL_SHIM": "1"}, SHIM) == {"LD_PRELOAD": str(SHIM)}
    assert preload({"LD_PRELOAD": f"x.so:{SHIM}"}, SHIM) == {}
    assert preload({}, None) == {}


def test_a_path_that_cannot_stand_in_the_variable_is_replaced(tmp_path: Path) -> None:
    library = tmp_path / "my files:1" / "libkeepstep_nccl.so"
    library.parent.mkdir()
    library.write_bytes(b"ELF")
    path = preload({}, library)["LD_PRELOAD"]
    assert not set(path) & set(" :")
    assert Path(path).read_bytes() == b"ELF"
    assert preload({}, library) == {"LD_PRELOAD": path}  # one descriptor, however often workers start


def test_it_is_installed() -> None:
    found = shim()
    assert found is not None
    assert found.read_bytes().startswith(b"\x7fELF")
