"""Finds files that import each other in a circle, also where an import stands in a function or under TYPE_CHECKING.

    python tools/import_circles.py FOLDER...

Each folder holds packages (``src``) or is one itself (``benchmarks``, ``tests``). Exit code 1 where there is a circle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def modules_in(folder: Path) -> dict[str, Path]:
    """Dotted name by file, of all Python files below a folder."""
    root = folder.parent if (folder / "__init__.py").exists() or folder.name != "src" else folder
    return {_name(path.relative_to(root)): path for path in sorted(folder.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """The known modules that a file names in its imports; the packages around them are not counted."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return {one for one in found if one in known and one != name}


def circles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Each group of modules that reach each other (Tarjan's strongly connected components of two and more)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in sorted(imports.get(name, ())):
            if other not in number:
                yield from visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            place = stack.index(name)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                yield group

    for name in sorted(imports):
        if name not in number:
            yield from visit(name)


def main(folders: list[str]) -> int:
    """Print each circle as a line."""
    known: dict[str, Path] = {}
    for folder in folders:
        known.update(modules_in(Path(folder)))
    imports = {name: imported_by(name, path, known) for name, path in known.items()}
    found = list(circles(imports))
    for group in found:
        print("import circle: " + " -> ".join([*group, group[0]]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main(sys.argv[1:] or ["src", "benchmarks", "tests"]))
