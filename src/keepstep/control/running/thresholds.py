"""The settings of a running controller that an operator may change: each can be taken back, and none touches a worker.

How long nodes are waited for, restarts and backups are no thresholds: they were promised to the job at its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.control.settings import Settings
from keepstep.wire.messages import Threshold

_ON_OFF = {"on": True, "off": False}
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Spec:
    """One threshold: the setting that it is, and its values.

    Attributes:
        setting: its name.
        text: what it is, in a few words.
        choices: value of the setting by the word for it; empty: it is a number.
        low, high: bounds of a number.
        needs_restarts: the word that takes a job that can be restarted.
    """

    setting: str
    text: str
    choices: Mapping[str, Any] = field(default_factory=dict[str, Any])
    low: float = 0.0
    high: float = 0.0
    needs_restarts: str = ""

    def read(self, name: str, word: str, settings: Settings) -> tuple[Any, str]:
        """The value that a word stands for, and ""; or None, and why it has none."""
        if self.choices:
            if word not in self.choices:
                return None, f"{name}={word}: give {' or '.join(self.choices)}"
            if word == self.needs_restarts and not settings.max_restarts:
                return None, f"{name}={word} takes a job that was started with --max-restarts"
            return self.choices[word], ""
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high:
            return None, f"{name}={word}: give a number from {self.low:g} to {self.high:g}"
        return value, ""

    def word(self, settings: Settings) -> str:
        """The value in these settings, as one writes it."""
        value = getattr(settings, self.setting)
        if not self.choices:
            return f"{value:g}"
        return next((word for word, known in self.choices.items() if known == value), str(value))


_SPECS: Mapping[str, _Spec] = {
    "mitigate": _Spec(
        "mitigate",
        "what is done about a slowdown that lasts",
        {"off": "off", "advise": "advise", "auto": "auto"},
    ),
    "slow-ratio": _Spec(
        "slow_ratio", "a slowdown of an iteration by less than this factor is not told", low=1.0, high=10.0
    ),
    "hang-after": _Spec(
        "hang_after_s",
        "s; a standstill shorter than this is not told (0: as is usual in the job)",
        high=_DAY_S,
    ),
    "on-hang": _Spec(
        "restart_hangs",
        "whether a process that hangs for sure is ended",
        {"report": False, "restart": True},
        needs_restarts="restart",
    ),
    "hang-patience": _Spec(
        "hang_patience_s",
        "s; how long one that hangs is left alone (0: by its timeouts and pauses)",
        high=_DAY_S,
    ),
    "stopped-patience": _Spec("stopped_patience_s", "s; how long a stopped one is left alone", high=_DAY_S),
    "on-corrupt": _Spec(
        "restore_corrupt",
        "what is done where a rank's state is wrong",
        {"report": False, "restore": True},
        needs_restarts="restore",
    ),
    "validate": _Spec("validate", "whether the job is held to test devices and links in doubt", _ON_OFF),
}


class LiveSettings:
    """The settings as they are now: as the job was started, and changed since.

    Attributes:
        start: the settings that the controller was started with.
        now: those in force.
        orders: the words that an operator gave, by name of the threshold.
    """

    def __init__(self, start: Settings) -> None:
        self.start = self.now = start
        self.orders: dict[str, str] = {}

    def objection(self, changes: Iterable[tuple[str, str]]) -> str:
        """Why these cannot be ordered; "": they can."""
        named: set[str] = set()
        for name, word in changes:
            if why := self.unknown((name,)) or _SPECS[name].read(name, word, self.start)[1]:
                return why
            if name in named:
                return f"{name} is given twice"
            named.add(name)
        return ""

    def unknown(self, names: Iterable[str]) -> str:
        """Which of these names none is; "": all are thresholds."""
        return next(
            (
                f"{name[:40]} is no threshold; there are {', '.join(_SPECS)}"
                for name in names
                if name not in _SPECS
            ),
            "",
        )

    def order(self, orders: Mapping[str, str]) -> None:
        """Have these orders in force and no others. What has no meaning here is left out."""
        self.orders = {name: word for name, word in orders.items() if not self.objection([(name, word)])}
        values = {
            _SPECS[name].setting: _SPECS[name].read(name, word, self.start)[0]
            for name, word in self.orders.items()
        }
        self.now = replace(self.start, **values)

    def rows(self) -> tuple[Threshold, ...]:
        """All thresholds as they are now."""
        return tuple(
            Threshold(name, spec.word(self.now), self._origin(name, spec), spec.word(self.start), spec.text)
            for name, spec in _SPECS.items()
        )

    def _origin(self, name: str, spec: _Spec) -> Any:
        if name in self.orders:
            return "order"
        usual = Settings(restart_hangs=self.start.max_restarts > 0)
        return "default" if getattr(self.start, spec.setting) == getattr(usual, spec.setting) else "flag"
