"""Has the kernel told of broken hardware? Where its log may be read; elsewhere nothing is found.

Only what somebody has to mend makes a node unfit. Errors that the hardware corrected, or that are over with the
application that met them, are told and no more: nobody gains when a node is drained for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from keepstep.core.kernel_records import KernelLog, Record
from keepstep.launch.node.checks import Found, Subject
from keepstep.launch.node.checks.xids import (
    ACTIONS,
    FALLEN_OFF_THE_BUS,
    PASSING,
    RECOVERY_ACTION,
    UNFIT,
    catalogue,
)

_MOST = 20_000  # most lines of the log that are read
_MOST_QUOTED = 160  # most characters of a line that are quoted

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)\b(.*)")
_FALLEN = re.compile(r"NVRM: .*fallen off the bus")
_SXID = re.compile(r"SXid \([^)]*\): (\d+), (.*)")
_SXID_DETAILS = re.compile(r"Data \{|Severity \d")  # a line with details of the SXid in the line before it
_FATAL = re.compile(r"(?<!non-)(?<!non)fatal", re.IGNORECASE)
_REQUIRED = re.compile(r" to \w+ \([^)]*(Reset|Reboot) Required\)")  # in a line of Xid 154
_RECOVERED = re.compile(r" to \w+ \(None\)")
_DRAIN = re.compile(r" to \w+ \(Drain")
_REGISTERS = re.compile(r"\((0x[0-9a-fA-F]+(?:, *0x[0-9a-fA-F]+){4,})\)")  # in a line of Xid 74
# Bits of the registers in a line of Xid 74 that the catalogue calls harmless, by register.
_HARMLESS = (0x4080_0001, 0, 0, 0, 0x2490_0000, 0, 0)

_BROKEN = re.compile(
    r"\[Hardware Error\].*(Uncorrected|System Fatal|Machine Check Exception|(severity|type): fatal|\[[^\]]*\bUE\b)"
    r"|mce: .*Uncorrected|EDAC .*\bUE\b"
    r"|(I/O|critical medium) error, dev (?!sr|fd|loop)\w+"
    r"|nvme\w*: (controller is down|I/O (tag )?\d+.*timeout(?!, completion polled))"
    r"|mlx5_core.*(health compromised|(?<!non-)fatal)|Remounting filesystem read-only"
)
_UNCLEAR = re.compile(r"\[Hardware Error\].*(Deferred|(severity|type): recoverable)")
_CORRECTED = re.compile(r"\[Hardware Error\]|Machine check events|EDAC .*\bCE\b")


class _Weight(IntEnum):
    """How grave a line is for the node."""

    PAST = 0  # corrected, or only the trace of an application that ended
    APPLICATION = 1  # the application has to begin again, anywhere
    UNCLEAR = 2  # the catalogue does not say, or says that it depends
    BROKEN = 3


@dataclass(frozen=True, slots=True)
class _Told:
    line: str
    weight: _Weight
    meaning: str = ""


def look(subject: Subject) -> Iterator[Found]:
    """One finding at most: the newest of the gravest errors since ``subject.since_s``, and how many there were.

    Where nothing has failed yet it makes no node unfit, and errors of earlier applications are left out.
    """
    records = tuple(_records(subject.kernel_log, subject.since_s))
    told = list(_judged([record.text for record in records]))
    gravest = max((one.weight for one in told), default=_Weight.PAST)
    alike = [one for one in told if one.weight == gravest]
    if not alike or (subject.fresh and gravest < _Weight.UNCLEAR):
        return
    newest = alike[-1]
    more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
    broken = newest.weight == _Weight.BROKEN
    yield Found(
        f"node {subject.node}: the kernel tells of {'broken hardware' if broken else 'an error'}: "
        f"{newest.line[:_MOST_QUOTED]}{more}; {newest.meaning and newest.meaning + '; '}"
        f"{'drain the node and have it looked at' if broken else 'the node stays in use'}",
        unfit=broken and not subject.fresh,
        broken=broken and not subject.fresh,
        told=newest.line if broken else "",
        told_s=next(record.at_s for record in reversed(records) if record.text == newest.line),
    )


def tell_of_broken_hardware(lines: Sequence[str]) -> bool:
    """Whether lines of a node's kernel tell of hardware that somebody has to mend."""
    return any(told.weight == _Weight.BROKEN for told in _judged(lines))


def _judged(lines: Sequence[str]) -> Iterator[_Told]:
    xids = [(line, found) for line in lines if (found := _XID.search(line))]
    # A GPU that remapped the row or contained the error may be reset when it suits.
    contained = {
        found[1]
        for _, found in xids
        if found[2] in ("63", "94") or (int(found[2]) == RECOVERY_ACTION and _DRAIN.search(found[3]))
    }
    newest_action = {found[1]: line for line, found in xids if int(found[2]) == RECOVERY_ACTION}
    for line in lines:
        if found := _XID.search(line):
            gpu, number = found[1], int(found[2])
            if number != RECOVERY_ACTION or newest_action[gpu] == line:
                yield _xid(line, number, found[3], contained=gpu in contained)
        elif _FALLEN.search(line):
            yield _xid(line, FALLEN_OFF_THE_BUS, "", contained=False)
        elif found := _SXID.search(line):
            if not _SXID_DETAILS.match(found[2]):
                fatal = _FATAL.match(found[2]) is not None
                how = "fatal" if fatal else "which does not say that it is fatal"
                weight = _Weight.BROKEN if fatal else _Weight.UNCLEAR
                yield _Told(line, weight, f"SXid {found[1]} of an NVSwitch, {how}")
        elif _BROKEN.search(line):
            yield _Told(line, _Weight.BROKEN)
        elif _UNCLEAR.search(line):
            yield _Told(line, _Weight.UNCLEAR)
        elif _CORRECTED.search(line):
            yield _Told(line, _Weight.PAST, "nothing says that it was not corrected")


def _xid(line: str, number: int, rest: str, *, contained: bool) -> _Told:
    """The judgement of a line with an Xid.

    ``rest``: the line after the number. ``contained``: the GPU has shown that the error harms no other application.
    """
    xid = catalogue().get(number)
    if xid is None:
        return _Told(line, _Weight.UNCLEAR, f"keepstep does not know Xid {number}: see NVIDIA's catalogue")
    if xid.action in PASSING:
        weight = _Weight.APPLICATION if xid.action == "RESTART_APP" else _Weight.PAST
    elif number == RECOVERY_ACTION and _RECOVERED.search(rest):
        weight = _Weight.PAST
    elif xid.action in UNFIT or _says_so(xid.action, rest, contained=contained):
        weight = _Weight.BROKEN
    else:
        weight = _Weight.UNCLEAR
    meaning = f"Xid {number} ({xid.name}), in NVIDIA's catalogue {xid.action}: {ACTIONS[xid.action]}"
    return _Told(line, weight, meaning)


def _says_so(action: str, rest: str, *, contained: bool) -> bool:
    """Whether the line makes the node unfit, where the catalogue's action depends on what the line says."""
    if action == "WORKFLOW_XID_48":
        return not contained
    if action == "XID_154":
        return _REQUIRED.search(rest) is not None
    if not action.startswith("WORKFLOW_NVLINK") or not _FATAL.search(rest):
        return False
    found = _REGISTERS.search(rest)
    return found is None or any(
        int(text, 16) & ~harmless
        # Drivers print different numbers of registers.
        for text, harmless in zip(found[1].split(","), _HARMLESS, strict=False)
    )


def _records(path: str, since_s: float) -> Iterator[Record]:
    """Records of the kernel's log since then; none of a FIFO, which gives each line to one reader only."""
    try:
        log = KernelLog(path)
    except OSError:
        return
    try:
        if not log.is_fifo:
            yield from (record for record in log.records(_MOST) if record.at_s >= since_s)
    except OSError:
        return
    finally:
        log.close()
