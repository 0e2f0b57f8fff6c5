"""Templates of log messages by an own tree after Drain (He, Zhu, Zheng, Lyu, ICWS 2017): a fixed depth, one pass.

Messages are led by their number of tokens and their first tokens to a few groups, and join the group that they are most
similar to. A group's template has ``<*>`` where its messages differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

WILD = "<*>"
MASKS = (
    r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
    r"(?:/|)(?:\d+\.){3}\d+(?::\d+)?",
    r"\b(?:[\w-]+\.)+[\w-]+:\d+\b",
    r"0[xX][0-9a-fA-F]+",
    r"<?\b\d+(?:\.\d+)? ?(?:sec|ms|secs|seconds)\b|\b\d\d:\d\d(?::\d\d)*\b",
    r"(?<![\w<])/(?:[\w.-]+/)+[\w.-]*",
    r"(?<=[^A-Za-z0-9])[-+]?\d+(?=[^A-Za-z0-9])|[0-9]+$",
)
"""What stands for a value wherever it is: identifiers, addresses, hexadecimal numbers, durations, paths, numbers."""


@dataclass(slots=True)
class Template:
    """A group of messages that are alike: its tokens, and how many messages it has."""

    number: int
    tokens: list[str]
    count: int = 0

    @property
    def text(self) -> str:
        """The template in one line."""
        return " ".join(self.tokens)


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    groups: list[Template] = field(default_factory=list[Template])


class TemplateTree:
    """Finds the template of each message. Beyond ``most`` templates messages join those that are there, or none."""

    def __init__(
        self,
        depth: int = 5,
        similarity: float = 0.7,
        masks: Sequence[str] = MASKS,
        *,
        values_count: bool = True,
        most_children: int = 100,
        most: int = 10_000,
    ) -> None:
        """Make an empty tree.

        ``depth``: of the paper, with root, length and leaves. ``similarity``: least share of tokens that are equal.
        ``values_count``: ``key=value`` is two tokens, and places that are masked in both count as equal; not so in the
        paper.
        """
        self._values_count = values_count
        self._leading = max(depth - 3, 0)
        self._similarity = similarity
        self._most_children = most_children
        self._masks = re.compile("|".join(f"(?:{mask})" for mask in masks)) if masks else None
        self._most = most
        self._by_length: dict[int, _Node] = {}
        self.templates: list[Template] = []

    def add(self, message: str) -> Template | None:
        """The template that a message has joined, perhaps a new one; None where there is no room for a new one."""
        if self._values_count:
            message = message.replace("=", " = ")
        if self._masks is not None:
            message = self._masks.sub(WILD, message)
        tokens = message.split()
        leaf = self._leaf(tokens)
        group = self._closest(leaf.groups, tokens)
        if group is None:
            if len(self.templates) >= self._most:
                return None
            group = Template(len(self.templates), tokens)
            self.templates.append(group)
            leaf.groups.append(group)
        else:
            own = group.tokens
            for at, (mine, theirs) in enumerate(zip(own, tokens, strict=True)):
                if mine != theirs:
                    own[at] = WILD
        group.count += 1
        return group

    def _leaf(self, tokens: Sequence[str]) -> _Node:
        node = self._by_length.get(len(tokens))
        if node is None:
            node = self._by_length[len(tokens)] = _Node()
        for token in tokens[: self._leading]:
            key = WILD if any(map(str.isdigit, token)) else token
            below = node.children.get(key)
            if below is None:
                # One place is kept for what finds no other.
                if key != WILD and len(node.children) >= self._most_children - (WILD not in node.children):
                    key = WILD
                below = node.children.setdefault(key, _Node())
            node = below
        return node

    def _closest(self, groups: Sequence[Template], tokens: Sequence[str]) -> Template | None:
        """The group with the most equal tokens; of several the one with the most places that differ."""
        best, best_equal, best_wild = None, -1, -1
        for group in groups:
            equal = sum(map(str.__eq__, group.tokens, tokens))
            wild = group.tokens.count(WILD)
            if not self._values_count:
                equal -= sum(a == b == WILD for a, b in zip(group.tokens, tokens, strict=True))
            if (equal, wild) > (best_equal, best_wild):
                best, best_equal, best_wild = group, equal, wild
        return best if best is not None and best_equal >= self._similarity * len(tokens) else None
