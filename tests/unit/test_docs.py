"""The pages are readable in an editor, found in the navigation, and name what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *DOCS]
LONGEST = 100

FENCE = re.compile(r"^ *```(\w*)")
URL = re.compile(r"https?://\S+")
SOURCE = re.compile(r"`([\w./-]+\.(?:py|[ch]pp))`")
NO_SOURCES = {  # forms of names, in CONTRIBUTING.md
    "benchmarks/NAME/__main__.py",
    "benchmarks/NAME.py",
}
LABEL = re.compile(r"\]\[([^\]]+)\]")
DEFINED = re.compile(r"^\[([^\]]+)\]: ", re.MULTILINE)
LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )([^)#\s]*)(?:#([^)\s]*))?", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def lines(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Number, text and language of each line; the language is None outside of fences."""
    language: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and language is None:
            language = fence[1]
            yield number, line, language
        else:
            yield number, line, language
            language = None if fence else language


def prose(text: str) -> str:
    """The text without what is in fences."""
    return "\n".join(line for _, line, language in lines(text) if language is None)


def too_long(text: str) -> list[int]:
    """Numbers of the lines that are too long; drawings that are made by a program, and URLs, may be."""
    return [
        number
        for number, line, language in lines(text)
        if language != "mermaid" and len(URL.sub("", line)) > LONGEST
    ]


def test_what_counts_as_too_long() -> None:
    wide = "ü" * (LONGEST + 1)
    page = [wide[1:], wide, "```mermaid", wide, "```", "```", wide, "```", f"https://{wide} is exempt", wide]
    assert too_long("\n".join(page)) == [2, 7, 10]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    wide = [f"{page.relative_to(ROOT)}:{number}" for number in too_long(page.read_text())]
    assert not wide, f"longer than {LONGEST} characters: {', '.join(wide)}"


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    assert listed == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(prose(text)))
    return {re.sub(r"[-\s]+", "-", word) for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """What is linked is there, page and heading, and labels are defined."""
    text = re.sub(r"`[^`]*`", "", prose(page.read_text()))
    assert set(LABEL.findall(text)) == set(DEFINED.findall(text))
    missing: list[str] = []
    for name, anchor in LINK.findall(text):
        target = page.parent / name if name else page
        if URL.match(name) or (target.exists() and (not anchor or anchor in anchors(target.read_text()))):
            continue
        missing.append(f"{name}#{anchor}")
    assert not missing


def test_sources_that_pages_name_are_there() -> None:
    """A module that was renamed or moved is renamed in the pages, too. A name is the end of a path."""
    folders = ("src", "native", "benchmarks", "tests", "tools", "examples")
    paths = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        for name in SOURCE.findall(prose(page.read_text()))
    }
    gone = [
        f"{page}: {name}"
        for page, name in sorted(named)
        if name not in NO_SOURCES and not any(path.endswith(f"/{name}") for path in paths)
    ]
    assert not gone
