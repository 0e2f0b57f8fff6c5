"""Faults on purpose, in sentences that read like English: ``slow rank 2 by 2x at step 30 for 15 steps``."""

from keepstep.faults.grammar import (
    Delay,
    Fault,
    Hang,
    Kill,
    LinkDown,
    LinkFault,
    Raise,
    RankFault,
    Skip,
    Slow,
    SlowData,
    SlowLink,
    Stop,
    parse,
    parse_one,
    sentences,
)
from keepstep.faults.inject import InjectedError, Injector, stop_for
from keepstep.faults.link import Interface, LinkInjector

__all__ = [
    "Delay",
    "Fault",
    "Hang",
    "InjectedError",
    "Injector",
    "Interface",
    "Kill",
    "LinkDown",
    "LinkFault",
    "LinkInjector",
    "Raise",
    "RankFault",
    "Skip",
    "Slow",
    "SlowData",
    "SlowLink",
    "Stop",
    "parse",
    "parse_one",
    "sentences",
    "stop_for",
]
