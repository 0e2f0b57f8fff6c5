"""Every name that the docs use is there; none of them is loaded before it is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import keepstep
import keepstep.checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_NAMES = {
    "keepstep.toml": "a file of settings",
    "keepstep.validate_tests": "a group of entry points",
}

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`@?(keepstep(?:\.\w+)+)(?:\(.*?\))?`")


def names_of_code(code: str) -> Iterator[str]:
    """Full names that the code imports or reaches through what it imports."""
    homes: dict[str, str] = {}
    tree = ast.parse(textwrap.dedent(code))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                homes[one.asname or one.name.split(".")[0]] = (
                    one.name if one.asname else one.name.split(".")[0]
                )
                yield one.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                homes[one.asname or one.name] = f"{node.module}.{one.name}"
                yield f"{node.module}.{one.name}"
    for node in ast.walk(tree):
        words: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            words.insert(0, at.attr)
            at = at.value
        if words and isinstance(at, ast.Name) and at.id in homes:
            yield ".".join([homes[at.id], *words])


def names_of_page(text: str) -> Iterator[str]:
    for language, code in FENCED.findall(text):
        if language == "python":
            yield from names_of_code(code)
    yield from INLINE.findall(FENCED.sub("", text))


def names_of_docs() -> list[str]:
    found = {name for page in PAGES for name in names_of_page(page.read_text())}
    return sorted(name for name in found if name.split(".")[0] == "keepstep" and name not in NO_NAMES)


def resolved(name: str) -> Any:
    """The object of that name; modules on the way are imported."""
    words = name.split(".")
    found: Any = import_module(words[0])
    for at, word in enumerate(words[1:], start=2):
        if not hasattr(found, word):
            import_module(".".join(words[:at]))
        found = getattr(found, word)
    return found


def test_names_are_found_in_code_and_in_text() -> None:
    page = (
        "Say `keepstep.here(1)`, `@keepstep.there` or `keepstep run`.\n"
        "```python\nimport keepstep.checkpoint as kept\nfrom keepstep.a import b as c\n"
        "@keepstep.unknown\ndef f(): kept.load(c.d)\n```\n"
        "```\nkeepstep.not_python\n```\n"
    )
    assert set(names_of_page(page)) == {
        "keepstep.checkpoint",
        "keepstep.a.b",
        "keepstep.checkpoint.load",
        "keepstep.a.b.d",
        "keepstep.here",
        "keepstep.there",
    }


def test_the_docs_name_something() -> None:
    assert {"keepstep.Session", "keepstep.checkpoint.load", "keepstep.resilient"} <= set(names_of_docs())


@pytest.mark.parametrize("name", names_of_docs())
def test_a_name_of_the_docs_is_there(name: str) -> None:
    try:
        assert resolved(name) is not None
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if not name.startswith("keepstep.integrations.") or missing == "keepstep":
            raise
        pytest.skip(f"{missing} is not installed, which {name} needs")


@pytest.mark.parametrize("module", [keepstep, keepstep.checkpoint], ids=lambda module: module.__name__)
def test_all_public_names_are_there(module: Any) -> None:
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_the_error_that_users_catch_is_one() -> None:
    assert keepstep.CheckpointError is keepstep.checkpoint.CheckpointError
    assert issubclass(keepstep.CheckpointError, keepstep.KeepstepError)


def test_import_loads_neither_torch_nor_numpy_nor_a_room() -> None:
    code = (
        "import sys, keepstep\n"
        "assert not [name for name in sys.modules if name.startswith('keepstep.')]\n"
        "keepstep.checkpoint.CheckpointError, keepstep.KeepstepError\n"
        "print([name for name in ('torch', 'numpy', 'msgspec') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
