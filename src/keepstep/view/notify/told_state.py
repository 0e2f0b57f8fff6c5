"""What was told to one receiver so far: all that must outlive a restart, and nothing that grows with the run."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepstep.core.errors import RunError, UsageError
from keepstep.core.ranges import expand_ranks, fold_ranks
from keepstep.view.notify.notice import Notice, Severity

TOLD_SCHEMA = 1


class ToldIncident(msgspec.Struct):
    """An open incident that was told."""

    blamed: str  # whom its verdict named when it was told
    acted_s: float  # when the newest action was begun that was told, as Unix time; 0: none
    is_single: bool  # whether it had a notice of its own; else a summary or "flapping" stands for it
    key: str  # incidents of the same key are one thing that comes and goes
    changes: int = 0  # how often a changed verdict was told
    changed_s: float = 0.0  # when that was last


class Flap(msgspec.Struct):
    """How often incidents of one key came lately."""

    opened_s: list[float] = []  # the latest, as many as make it flapping
    last_s: float = 0.0  # when one came or went last
    held_back: int = 0
    is_held: bool = False  # what comes of it is held back


class Folded(msgspec.Struct):
    """Notices that were too many to be told one by one."""

    counts: dict[str, int] = {}  # by what they were about
    first: int = 0  # numbers of the incidents
    last: int = 0
    severity: Severity = "info"


class Told(msgspec.Struct):
    """What one receiver was told."""

    schema: int = TOLD_SCHEMA
    has_begun: bool = False  # what was over before the first look is not told
    first: int = (
        0  # the newest incident at that look: what is read later, but older and over, is not told either
    )
    done: str = ""  # numbers of the incidents of which nothing more is told, folded
    identity: tuple[int, float] = (-1, 0.0)  # number and time of the newest incident: another run has others
    open: dict[int, ToldIncident] = {}
    flaps: dict[str, Flap] = {}
    folded: Folded = msgspec.field(default_factory=Folded)
    allowance: float = 0.0  # notices that could be sent when the last one was sent
    allowance_s: float = 0.0  # when that was, as Unix time
    is_silent: bool = False
    has_ended: bool = False
    sent: int = 0  # counts what has no incident's number, for its id
    undelivered: int = 0
    pending: list[Notice] = []  # on their way

    def done_numbers(self) -> set[int]:
        """The numbers in ``done``; none where the file was damaged."""
        try:
            return set(expand_ranks(self.done))
        except UsageError:
            return set()

    def take_done(self, numbers: Iterable[int]) -> None:
        """Write ``numbers`` into ``done``."""
        self.done = fold_ranks(numbers)


def told_to_json(told: Told) -> bytes:
    """The content of the file that `told_from_json` reads."""
    return msgspec.json.encode(told)


def told_from_json(content: bytes, where: str) -> Told:
    """What was told, from a file. Raises RunError where it is damaged or of a newer keepstep."""
    try:
        told = msgspec.json.decode(content, type=Told)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(
            f"{where}: does not say what was told ({error}): all that is open is told again"
        ) from None
    if told.schema > TOLD_SCHEMA:
        raise RunError(f"{where}: was written by a newer keepstep: all that is open is told again")
    return told
