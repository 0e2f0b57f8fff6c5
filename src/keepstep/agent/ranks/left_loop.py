"""Whether a rank is out of the loop in which it made its operations: by its Python stack and the script's source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_MOST_SOURCE = 1 << 20  # characters
_SITE = re.compile(r"(?P<file>.+):(?P<line>\d+) (?P<function>\S+)(?P<library> \(called through .+\))?$")
_FRAME = re.compile(r"(?P<function>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_OTHER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

Lines = tuple[int, int]  # the first and the last one


def left_loop(stack: str, site: str) -> str:
    """The lines "file:first-last" of the loop around ``site`` if the main thread is not in them; "" if it may be.

    Where the user's line called a library that has the loop, the lines are those of that call.

    Args:
        stack: what py-spy prints.
        site: the place in the code from which the rank made its operations, "file:line function".
    """
    place = _SITE.match(site)
    frames = list(_main_frames(stack))
    if place is None or not frames or frames[-1][0] != "<module>":
        return ""
    file, function = place["file"], place["function"]
    lines = _loop_lines(file, int(place["line"]), function, place["library"] is not None)
    if lines is None:
        return ""
    same = [line for name, own, line in frames if name == function and _is_same_file(file, own)]
    if not same and function == "<module>":
        return ""  # the script's own frame is always there: it is told under another name
    if any(lines[0] <= line <= lines[1] for line in same):
        return ""
    return f"{file}:{lines[0]}-{lines[1]}"


def _main_frames(stack: str) -> Iterator[tuple[str, str, int]]:
    """Function, file and line of the main thread's frames, innermost first."""
    is_main = False
    for line in stack.splitlines():
        if line.startswith("Thread "):
            is_main = '"MainThread"' in line
        elif is_main and (frame := _FRAME.match(line.strip())):
            yield frame["function"], frame["file"], int(frame["line"])


def _is_same_file(file: str, shown: str) -> bool:
    """Whether the name that py-spy shows, often only the end of the path, may be that of the file."""
    return file == shown or file.endswith(f"/{shown.lstrip('/')}")


@lru_cache(maxsize=64)
def _loop_lines(file: str, line: int, function: str, is_call: bool) -> Lines | None:
    """The lines of the outermost loop around a line in its function, else of the statement if that is a library's call.

    None where there is no such thing, or the source cannot be read.
    """
    try:
        if Path(file).stat().st_size > _MOST_SOURCE:
            return None
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    scope: ast.AST | None = tree
    if function != "<module>":
        around = [node for node in ast.walk(tree) if isinstance(node, _OTHER_SCOPES) and _holds(node, line)]
        named = [node for node in around if getattr(node, "name", "") == function]
        scope = max(named, key=lambda node: node.lineno, default=None)
    inside = [node for node in _own_nodes(scope) if _holds(node, line)] if scope is not None else []
    loops = [node for node in inside if isinstance(node, _LOOPS)]
    calls = [node for node in inside if is_call and isinstance(node, ast.stmt)]
    # The outermost loop, or the innermost statement.
    found = min(loops, key=lambda node: node.lineno, default=None) or max(
        calls, key=lambda node: node.lineno, default=None
    )
    return (found.lineno, found.end_lineno or found.lineno) if found is not None else None


def _holds(node: ast.AST, line: int) -> bool:
    first = getattr(node, "lineno", 0)
    return first <= line <= (getattr(node, "end_lineno", None) or first)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside a function or module, without those of functions and classes in it."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _OTHER_SCOPES):
            todo += ast.iter_child_nodes(node)
