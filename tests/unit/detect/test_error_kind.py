"""The kinds of errors on which the decision about a restart hangs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keepstep.detect.error_kind import kind_of, speaks_of_hardware


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ModuleNotFoundError: No module named 'apex'", ("user", "import")),
        ("ImportError: cannot import name 'foo' from 'bar' (/x/bar.py)", ("user", "import")),
        ("SyntaxError: invalid syntax (train.py, line 3)", ("user", "syntax")),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", ("user", "gpu-oom")),
        ("OSError: [Errno 28] No space left on device: '/ckpt/a'", ("storage", "no-space")),
        ("OSError: [Errno 122] Disk quota exceeded", ("storage", "quota")),
        ("OSError: [Errno 116] Stale file handle", ("storage", "stale-handle")),
        ("KeyError: 'input_ids'", None),
        ("ImportError: libx.so: cannot open shared object file: Input/output error", None),
        ("ImportError: libx.so: cannot open shared object file: Stale file handle", None),
        ("ValueError: the import of goods has ended", None),
        ("RuntimeError: Connection closed by peer [10.0.0.1]:4711", None),
    ],
)
def test_kinds_of_one_line(error: str, kind: tuple[str, str] | None) -> None:
    assert kind_of(error) == kind


def test_a_launcher_that_asks_for_a_kind_loads_no_numpy() -> None:
    code = "import sys\nfrom keepstep.detect.error_kind import kind_of\nkind_of('CUDA out of memory.')\n"
    code += "assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("error", "is_hardware"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError: CUDA error: unspecified launch failure", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("KeyError: 'input_ids'", False),
        ("RuntimeError: Connection closed by peer [10.0.0.1]:4711", False),
    ],
)
def test_which_errors_a_check_of_the_node_is_waited_for(error: str, is_hardware: bool) -> None:
    assert speaks_of_hardware(error) is is_hardware
