"""The code keeps its shape: files that can be read in one go, and tables instead of chains of `isinstance`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "benchmarks", "tests", "tools", "examples")
MOST_LINES = 500
MOST_KINDS = 3


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def asks_for_a_kind(test: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for node in ast.walk(test)
    )


def kinds_asked_for(statement: ast.stmt) -> int:
    """How many branches of an if, elif, … ask for a kind."""
    count = 0
    while isinstance(statement, ast.If):
        count += asks_for_a_kind(statement.test)
        if len(statement.orelse) != 1:
            break
        statement = statement.orelse[0]
    return count


def longest_chain(tree: ast.Module) -> tuple[int, int]:
    """The most kinds asked for in a row, and the line of the first."""
    longest = (0, 0)
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            counts = [(kinds_asked_for(one), one.lineno) for one in body] if isinstance(body, list) else []
            for asks, chain in groupby(counts, key=lambda count: count[0] > 0):
                row = list(chain)
                longest = max(longest, (sum(count for count, _ in row) if asks else 0, row[0][1]))
    return longest


def test_no_file_is_too_long_to_read() -> None:
    lines = {path: path.read_text().count("\n") for path in sources(*FOLDERS)}
    assert not {str(path): count for path, count in lines.items() if count > MOST_LINES}


def test_many_kinds_are_told_apart_by_a_table() -> None:
    for path in sources("src", "benchmarks"):
        count, line = longest_chain(ast.parse(path.read_text()))
        assert count <= MOST_KINDS, f"{path}:{line}: {count} times isinstance in a row: use a table"


def test_a_chain_is_seen_in_either_form() -> None:
    asks = [f"if isinstance(a, {kind}): pass" for kind in "ABCD"]
    branches = f"{asks[0]}\nel{asks[1]}\nelse:\n  {asks[2]}\n  el{asks[3]}"
    returns = "\n".join(asks)
    assert longest_chain(ast.parse(branches))[0] == 4
    assert longest_chain(ast.parse(returns))[0] == 4
