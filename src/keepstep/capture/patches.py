"""Replacements of other people's functions that can be taken out and put in again at run time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _own(owner: Any, name: str) -> Any:
    """The attribute as it stands in the class or module itself, unbound; None where there is none."""
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
        # Somebody may have replaced it again on top of us: then ours stays beneath and passes through.
        if _own(self.owner, self.name) is self.ours:
            setattr(self.owner, self.name, self.original)


@dataclass(slots=True)
class _Registration:
    """A callback in somebody's list: ``register`` returns what takes it out again."""

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
    """Everything we put into torch, in order. ``missing`` names what this torch version does not have."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self._entries: list[_Replacement | _Registration] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)`` in the place of ``owner.name``; note it as missing where there is none."""
        original = _own(owner, name)
        if original is None:
            self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
            return
        entry = _Replacement(owner, name, original, make(original))
        entry.put_in()
        self._entries.append(entry)

    def register(self, register: Callable[[], Callable[[], None]]) -> None:
        """Call ``register``, which hands a callback to somebody and returns what takes it back."""
        entry = _Registration(register)
        entry.put_in()
        self._entries.append(entry)

    def take_out(self) -> None:
        """Leave everything as it was before us."""
        for entry in reversed(self._entries):
            entry.take_out()

    def restore(self) -> None:
        """Give torch its own functions back; callbacks stay: this may run inside one, whose list is being walked."""
        for entry in reversed(self._entries):
            if isinstance(entry, _Replacement):
                entry.take_out()

    def put_in(self) -> None:
        """Undo :meth:`take_out`."""
        for entry in self._entries:
            entry.put_in()
