"""What you should do about an incident: what to look at, and which commands to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_ranks

_STACK = "Look at its stack: a lock, a data loader, a retry loop."
_CALLS = "Look at the call sites in the evidence."
_DATA = "Look for a last batch that is shorter, a mask, a branch on a value."
_HOST = "Look at the host, by another way."
_HUNG_PATH = "Look at the path between them: cable, switch port, firewall."
_SLOW_PATH = "Look at the path between these nodes: switch port, cable, other traffic."

# Sentences of docs/howto/by-symptom.md, as a test sees to. The first counts with whose words the cause begins.
_BY_CAUSE: tuple[tuple[str, str], ...] = (
    ("cpu quota", "Look at the CPU limit of the job or pod."),
    ("run queue", "Look at what else runs on the node, and at CPU pinning."),
    ("GPU clock", "Look at cooling, power supply and that GPU's settings."),
    ("data loading", "Look at storage and the number of loader workers."),
    ("inside the node", "Look at what else runs on that node: cores, memory, device links."),
    (
        "compute",
        "Look at clocks, temperature and neighbours of that device, and other processes on the node.",
    ),
    ("device", "Look at that device: clocks, temperature, memory errors."),
    ("asleep", _STACK),
    ("busy", _STACK),
    ("never entered", _STACK),
    ("at work", "It may go on by itself."),
    ("stuck in the kernel", "Look at storage and drivers of that node."),
    ("stopped", "Find out who did it; `kill -CONT PID` lets it go on."),
    ("process died", "Look at the memory of the node (`dmesg`) and the launcher's log."),
    ("path broken", _HUNG_PATH),
    ("link down", _HUNG_PATH),
    ("its GPU stands still", "Look at that GPU (XIDs, `nvidia-smi`), and at kernels of your own."),
    ("does not read", "Look at the stacks of all its threads: `py-spy dump --native`."),
    ("silent", _HOST),
    ("node unreachable", _HOST),
    ("node lost", _HOST),
    ("entered another operation", _CALLS),
    ("skipped an operation", _CALLS),
    ("another order of operations", _CALLS),
    ("another size", _DATA),
    ("another element type", _DATA),
    ("another reduction", _DATA),
    ("two threads on one group", "Give each thread a group of its own."),
    ("left the training loop", "Look at what ends the loop there: early stopping, the length of its data."),
    (
        "left with exit code 0",
        "Look for a `return`, a `sys.exit()` or a loop that is shorter on that rank.",
    ),
    ("a message with another peer", "Look at how that line reckons the rank to send to."),
    ("made a call that no other rank made", "Look for a condition around that call."),
    ("its state is wrong", "Validate the device, and replace the node if it stands out."),
)


@dataclass(frozen=True, slots=True)
class Step:
    """Something that you should do: a sentence, a command to type, or a command and what it is for."""

    text: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.command}  # {self.text}" if self.command else self.text


def what_to_look_at(incident: Incident) -> str:
    """One sentence for the first culprit; empty where its cause is unknown or says nothing."""
    if not incident.culprits:
        return ""
    cause = incident.culprits[0].cause
    if cause.startswith("network"):
        return _SLOW_PATH if incident.kind == "slow" else _HUNG_PATH
    return next((text for words, text in _BY_CAUSE if cause.startswith(words)), "")


def advice_for(incident: Incident, run: str, spares: Sequence[str]) -> Iterator[Step]:
    """What to do, the surest first; of an incident that is over only where to read about it."""
    number = f"{incident.number:04d}"
    cause = incident.cause
    if cause is not None and cause.advice:
        yield Step(clean(cause.advice[:1].upper() + cause.advice[1:]))
    if incident.status == "open":
        if looked := what_to_look_at(incident):
            yield Step(looked)
        elif not incident.culprits and incident.missing:
            yield Step(clean(f"To know more: {'; '.join(incident.missing)}"))
        yield from _BY_KIND[incident.kind](incident, run, spares)
    if cause is not None and (cause.first is not None or cause.following):
        yield command("what the ranks said", "why", run, number, "--lines")
    yield command("all evidence and the timeline", "report", run, number)


def _for_slow(incident: Incident, run: str, spares: Sequence[str]) -> Iterator[Step]:
    if not incident.culprits:
        yield command("holds the training for seconds, tests devices and links", "validate", run)
        return
    first = incident.culprits[0]
    if first.link is not None and len(set(first.link.nodes)) == 2:
        text = "shows whether other ranks can have this link"
        yield command(text, "ctl", run, "exchange", *first.link.nodes, "--dry-run")
    elif first.rank is not None:
        ranks = fold_ranks(one.rank for one in incident.culprits[:64] if one.rank is not None)
        yield command("holds the training for seconds, tests the devices", "validate", run, "--ranks", ranks)
        if spares and first.node:
            text = f"shows what {clean(spares[0])} in its place would mean"
            yield command(text, "ctl", run, "replace", first.node, "--dry-run")


def _for_hang(incident: Incident, run: str, spares: Sequence[str]) -> Iterator[Step]:
    del spares
    ranks = [one for one in incident.culprits if one.rank is not None and one.cause != "process died"]
    if ranks:
        where = f" on {ranks[0].node}" if ranks[0].node else ""
        text = f"where the Python of rank {ranks[0].rank} stands;{where} its PID is in the node's agent.log"
        yield Step(clean(text), "py-spy dump --pid PID")
    yield command("whether anything moves", "status", run)
    if incident.kind == "hang":
        text = "if nothing moves: begins again from the newest step that all have"
        yield command(text, "ctl", run, "restart", "--now")
    else:
        yield Step("A restart does not help: the program would go astray again.")


def _for_crash(incident: Incident, run: str, spares: Sequence[str]) -> Iterator[Step]:
    del spares
    if not incident.actions:
        yield command("whether it trains again", "status", run)


def _for_corrupt(incident: Incident, run: str, spares: Sequence[str]) -> Iterator[Step]:
    del spares
    ranks = fold_ranks(one.rank for one in incident.culprits[:64] if one.rank is not None)
    if ranks:
        yield command("holds the training for seconds, tests the devices", "validate", run, "--ranks", ranks)
    yield command("goes back to the last step at which all were alike", "ctl", run, "restart", "--now")


_BY_KIND = {
    "slow": _for_slow,
    "hang": _for_hang,
    "desync": _for_hang,
    "crash": _for_crash,
    "corrupt": _for_corrupt,
}


def command(text: str, verb: str, *words: str) -> Step:
    """A command of keepstep. Names from the job are quoted: the line is made to be pasted into a shell."""
    return Step(text, one_line(" ".join(["keepstep", verb, *(shlex.quote(word) for word in words)])))


def clean(text: str) -> str:
    """Foreign text in one line that is safe for a terminal, with secrets blanked."""
    from keepstep.detect.secrets import blanked  # `detect` takes longer to load than all of `keepstep ls`

    return one_line(blanked(text))
