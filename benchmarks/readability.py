"""Draw comments and docstrings of the package, each to be restated by a reader who sees nothing else.

    python -m benchmarks.readability --seed 28 --count 40 > draw.jsonl

One line an entry: what it is, where it stands, the code that it belongs to (a name with its signature's first line, or
the line that a comment stands on), and its text. A second reader who knows the code marks the answers.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A comment or docstring; ``belongs_to``: the line of code that it explains."""

    kind: str
    path: str
    line: int
    belongs_to: str
    text: str


def docstrings(path: Path, name: str) -> Iterator[Entry]:
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            text = statement.value.value
            if not isinstance(text, str):
                continue
            if before is not None:
                belongs_to = lines[before.lineno - 1].strip()
            elif isinstance(node, ast.Module):
                belongs_to = f"module {name}"
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                belongs_to = lines[node.lineno - 1].strip()
            else:
                continue
            yield Entry("docstring", name, statement.lineno, belongs_to, " ".join(text.split()))


def comments(path: Path, name: str) -> Iterator[Entry]:
    lines = path.read_text().splitlines()
    block: list[str] = []
    with open(path, "rb") as file:
        found = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    for number, token in enumerate(found):
        line, column = token.start
        text = token.string.lstrip("# ").strip()
        if token.string.startswith(("# pyright", "# type:", "# noqa", "# fmt", "#!")) or not text:
            continue
        before = lines[line - 1][:column].strip()
        if before:
            yield Entry("comment", name, line, before, text)
            continue
        block.append(text)
        following = found[number + 1] if number + 1 < len(found) else None
        if following and following.start == (line + 1, column):
            continue
        code = next((one.strip() for one in lines[line:] if one.strip()), "")
        yield Entry("comment", name, line, code, " ".join(block))
        block = []


def drawn(root: Path, seed: int, count: int) -> list[Entry]:
    """So many docstrings and so many comments, in an order that says nothing of where they stand."""
    picked: list[Entry] = []
    for of_kind in (docstrings, comments):
        entries = [
            entry
            for path in sorted(root.rglob("*.py"))
            for entry in of_kind(path, str(path.relative_to(root)))
        ]
        random.Random(seed).shuffle(entries)
        picked += entries[:count]
    random.Random(seed).shuffle(picked)
    return picked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("src/keepstep"))
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--count", type=int, default=40, help="docstrings, and as many comments")
    options = parser.parse_args()
    for number, entry in enumerate(drawn(options.root, options.seed, options.count), 1):
        print(json.dumps({"number": number, **asdict(entry)}))


if __name__ == "__main__":
    main()
