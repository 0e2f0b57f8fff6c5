"""Replacements of functions of torch, which can be removed and put back at run time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _own(owner: Any, name: str) -> Any:
    """The unbound attribute of the class or module itself, not of its parents; None if there is none."""
    attributes: dict[str, Any] = owner.__dict__
    return attributes.get(name)


@dataclass(slots=True)
class _Replacement:
    owner: Any
    name: str
    original: Any
    ours: Any

    def put_in(self) -> None:
        if _own(self.owner, self.name) is self.original:
            setattr(self.owner, self.name, self.ours)

    def take_out(self) -> None:
        # If another library has wrapped our function since, it stays inside that wrapper and only passes calls on.
        if _own(self.owner, self.name) is self.ours:
            setattr(self.owner, self.name, self.original)


@dataclass(slots=True)
class _Registration:
    """A callback in a list of torch or Python; ``register`` returns the function that removes it again."""

    register: Callable[[], Callable[[], None]]
    remove: Callable[[], None] | None = None

    def put_in(self) -> None:
        if self.remove is None:
            self.remove = self.register()

    def take_out(self) -> None:
        remove, self.remove = self.remove, None
        if remove is not None:
            remove()


class Patches:
    """All replacements and callbacks, in order. ``missing`` names what this version of torch does not have."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self._entries: list[_Replacement | _Registration] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)`` in the place of ``owner.name``, or note in ``missing`` that there is no such name."""
        original = _own(owner, name)
        if original is None:
            self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
            return
        entry = _Replacement(owner, name, original, make(original))
        entry.put_in()
        self._entries.append(entry)

    def register(self, register: Callable[[], Callable[[], None]]) -> None:
        """Call ``register``, which adds a callback to a list and returns the function that removes it."""
        entry = _Registration(register)
        entry.put_in()
        self._entries.append(entry)

    def take_out(self) -> None:
        """Remove all replacements and callbacks."""
        for entry in reversed(self._entries):
            entry.take_out()

    def restore(self) -> None:
        """Remove the replacements only: this may run inside a callback, while torch iterates over its list of them."""
        for entry in reversed(self._entries):
            if isinstance(entry, _Replacement):
                entry.take_out()

    def put_in(self) -> None:
        """Put back everything that :meth:`take_out` removed."""
        for entry in self._entries:
            entry.put_in()
