"""What replaces a function of torch shows no line in tracebacks that has nothing to do with the error."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from keepstep.capture.internals import as_torchs_own

TORCH = """# a file of torch

def forward(x):
    if x > 0:
        raise ValueError("boom")
    return x
"""
FILE = "/torch/a_module.py"


@pytest.fixture
def original() -> Callable[[int], int]:
    names: dict[str, Any] = {}
    exec(compile(TORCH, FILE, "exec"), names)
    lines: list[str] = list(TORCH.splitlines(keepends=True))
    linecache.cache[FILE] = len(TORCH), None, lines, FILE
    return names["forward"]


def replacing(original: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def spanned(*args: Any, **kwargs: Any) -> Any:
        seen.append("begin")
        if len(args) > 7 or kwargs:
            return None
        try:
            return original(*args, **kwargs)
        except OSError:
            return original(*args)
        finally:
            seen.append("end")

    as_torchs_own(spanned, original)
    return spanned


def test_its_frame_is_the_first_line_of_the_original(original: Callable[[int], int]) -> None:
    seen: list[str] = []
    with pytest.raises(ValueError, match="boom") as caught:
        replacing(original, seen)(1)
    assert seen == ["begin", "end"]
    frames = traceback.extract_tb(caught.tb)[1:]
    assert [(one.filename, one.lineno, one.name, one.line) for one in frames] == [
        (FILE, 3, "forward", "def forward(x):"),
        (FILE, 5, "forward", 'raise ValueError("boom")'),
    ]


def test_all_of_its_code_is_on_that_line(original: Callable[[int], int]) -> None:
    code = replacing(original, []).__code__
    assert {line for _, _, line in code.co_lines() if line is not None} == {3}
    assert next(begin for begin, _, _ in code.co_lines()) == 0
    assert max(end for _, end, _ in code.co_lines()) == len(code.co_code)


def test_it_works_as_before(original: Callable[[int], int]) -> None:
    seen: list[str] = []
    assert replacing(original, seen)(-1) == -1
    assert seen == ["begin", "end"]
