"""What a re-forming has the controller do, in the order in which it is to be done."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.control.effects import Tell
from keepstep.control.membership.rendezvous import Launcher, Placed
from keepstep.core.exit_codes import TemporaryKind


@dataclass(frozen=True, slots=True)
class HaltThese:
    """Tell these launchers to end their workers of this incarnation, and to say so."""

    launchers: tuple[Launcher, ...]
    incarnation: int
    suspend: bool = False  # until an operator resumes the job
    fresh: bool = False  # no process may go on in the next incarnation


@dataclass(frozen=True, slots=True)
class Lost:
    """The nodes of these launchers are lost."""

    launchers: tuple[Launcher, ...]


@dataclass(frozen=True, slots=True)
class Exclude:
    """This launcher plays no part any more: end it."""

    launcher: Launcher
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """There is a new rank table; tell who plays what."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class End:
    """The job ends: no restart is left, there is nobody to go on with, or an operator stopped it."""

    exit_code: int
    reason: str
    by_operator: bool = False
    kind: TemporaryKind = ""


@dataclass(frozen=True, slots=True)
class Lapsed:
    """An exchange or replacement that no operator waits for will not be: tell the planner why."""

    why: str


Order = HaltThese | Lost | Exclude | Renew | Lapsed | End | Tell
