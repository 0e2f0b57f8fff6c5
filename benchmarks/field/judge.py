"""Whether keepstep was right about a case: a pure function of the truth and of what was seen.

Several readings of ``truth.json`` are decided here. The incident that is judged is the last one, as the cases' README
has it. A desync is a hang of which it is known why, so that it is right where ``kinds`` has "hang": the READMEs of
cases with such a truth expect it. Words about an incident are looked for in its verdict and its JSON; where no culprit
is asked for, they may be in any line that the run said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.field.truth import CONFIDENCES, Truth

Incident = Mapping[str, Any]
Status = Literal["right", "wrong", "noted"]

WITHIN = 3  # steps by which onset and relief of a slowdown may be off
_ENDED = "end the hung process"  # name of the action
_INSIDE = {"hang": ("hang", "desync")}
_WATCHED = "those ranks watched"  # alternative of ``says_once`` that no run says in words


@dataclass(frozen=True)
class Seen:
    """What came of a run, or of ``keepstep analyze``.

    Attributes:
        incidents: by number, as their JSON.
        texts: the verdict of each.
        run_text: what the run said on the console, the script's output among it.
        exit_code: of the launcher.
        cut_off: it was ended from outside, because the limit was over.
    """

    incidents: Sequence[Incident]
    texts: Sequence[str]
    run_text: str
    exit_code: int
    cut_off: bool = False

    @property
    def ended(self) -> tuple[int, ...]:
        """Ranks whose process keepstep ended because it hung, by the incidents' actions and by the console."""
        told = " ".join(
            action["detail"]
            for incident in self.incidents
            for action in incident.get("actions", ())
            if action["name"] == _ENDED
        )
        said = re.findall(r"rank (\d+), process", told) + re.findall(r"rank (\d+): it hung:", self.run_text)
        return tuple(sorted(set(map(int, said))))

    @property
    def restarts(self) -> int:
        """How often the job began again."""
        numbers = [int(number) for number in re.findall(r"\brestart (\d+) of \d+", self.run_text)]
        return max([*numbers, *(incident.get("incarnation", 0) for incident in self.incidents)], default=0)


@dataclass(frozen=True)
class Judgement:
    """``why`` is empty exactly when nothing was wrong."""

    status: Status
    why: tuple[str, ...]
    harmed: bool  # a process was ended that was not to blame, or a healthy job did not end well
    wrong_with_high: bool  # somebody was named with confidence high who is not to blame


def judge(truth: Truth, seen: Seen) -> Judgement:
    """Judge a case by its truth alone."""
    harm = list(_harm(truth, seen))
    wrong_with_high = bool(_wrong(truth, seen, ("high",)))
    if not truth.judged:
        return Judgement("noted", (), bool(harm), wrong_with_high)
    why = [*harm, *(_healthy(truth, seen) if truth.healthy else _faulty(truth, seen))]
    return Judgement("wrong" if why else "right", tuple(why), bool(harm), wrong_with_high)


def culprits_of(incident: Incident) -> frozenset[int]:
    """The ranks that an incident names; a link or a node is no rank, and counts as -1."""
    return frozenset(-1 if one.get("rank") is None else one["rank"] for one in incident["culprits"])


def in_a_line(incident: Incident) -> str:
    """An incident in a few words."""
    named = ", ".join(
        f"{_who(one)} {one['confidence']}: {one.get('cause') or 'cause unknown'}"
        for one in incident["culprits"][:4]
    )
    step = incident.get("onset_step")
    return f"{incident['kind']}{'' if step is None else f' step {step}'} ({named or 'nobody named'})"


def _harm(truth: Truth, seen: Seen) -> Iterator[str]:
    """Processes that were ended and are not to blame; a healthy job that did not come to its end by itself."""
    for rank in seen.ended:
        if not any(rank in ranks for ranks in truth.culprits):
            yield f"harmed: the process of rank {rank} was ended"
    if truth.healthy and not truth.analyze:
        if seen.restarts:
            yield f"harmed: the job began again {seen.restarts} times"
        if seen.exit_code and not seen.cut_off:
            yield f"harmed: exit code {seen.exit_code}"


def _healthy(truth: Truth, seen: Seen) -> Iterator[str]:
    if seen.cut_off:
        yield "the job did not end by itself"
    for rank, confidence, kind in _wrong(truth, seen, ("high",)):
        yield f"false alarm: {kind} of {rank} with confidence {confidence}"
    if truth.analyze and seen.exit_code:
        yield f"exit code {seen.exit_code}: {'; '.join(map(in_a_line, seen.incidents)) or last_line(seen.run_text)}"


def _faulty(truth: Truth, seen: Seen) -> Iterator[str]:
    last = seen.incidents[-1] if seen.incidents else None
    about_one = bool(truth.culprits or truth.kinds or truth.sites or truth.phase or truth.slow)
    if about_one and last is None:
        yield f"silent: no incident ({last_line(seen.run_text)})"
        return
    yield from _victims(truth, seen)
    if last is not None:
        yield from _named(truth, last)
        yield from _confidence(truth, last)
        yield from _described(truth, last)
    yield from _words(truth, seen)
    yield from _slowdowns(truth, seen)
    if truth.restarts_at_most is not None and seen.restarts > truth.restarts_at_most:
        yield f"{seen.restarts} restarts, at most {truth.restarts_at_most} are right"


def _named(truth: Truth, last: Incident) -> Iterator[str]:
    found = culprits_of(last)
    if not truth.culprits or found in truth.culprits:
        return
    right = " or ".join(str(sorted(ranks)) for ranks in truth.culprits)
    if not found:
        yield f"nobody named, true {right}: {in_a_line(last)}"
    elif any(found < ranks for ranks in truth.culprits):
        yield f"named {sorted(found)} alone, true {right}"
    else:
        yield f"wrong culprit, true {right}: {in_a_line(last)}"


def _victims(truth: Truth, seen: Seen) -> Iterator[str]:
    for number, incident in enumerate(seen.incidents, 1):
        blamed = culprits_of(incident) & truth.victims
        if blamed:
            yield f"victims {sorted(blamed)} named in incident {number} of {len(seen.incidents)}"


def _confidence(truth: Truth, last: Incident) -> Iterator[str]:
    told = [CONFIDENCES.index(one["confidence"]) for one in last["culprits"]]
    if not told:
        return  # that nobody is named is told elsewhere
    if truth.confidence_at_least and min(told) < CONFIDENCES.index(truth.confidence_at_least):
        yield f"confidence {CONFIDENCES[min(told)]}, at least {truth.confidence_at_least} is right"
    if truth.confidence_at_most and max(told) > CONFIDENCES.index(truth.confidence_at_most):
        yield f"confidence {CONFIDENCES[max(told)]}, at most {truth.confidence_at_most} is right"


def _described(truth: Truth, last: Incident) -> Iterator[str]:
    """Kind, step and phase."""
    kinds = [kind for wanted in truth.kinds for kind in _INSIDE.get(wanted, (wanted,))]
    if kinds and last["kind"] not in kinds:
        yield f"wrong kind {last['kind']}, true {' or '.join(truth.kinds)}"
    if truth.onset_step is not None and last.get("onset_step") != truth.onset_step:
        yield f"step {last.get('onset_step')}, true {truth.onset_step}"
    stages = [one.get("stage") or "" for one in last["culprits"]]
    if truth.phase and not any(truth.phase in stage for stage in stages):
        yield f"phase {' or '.join(filter(None, stages)) or 'not told'}, true {truth.phase}"


def _words(truth: Truth, seen: Seen) -> Iterator[str]:
    last = ""
    if seen.incidents:
        strings = json.dumps(seen.incidents[-1], ensure_ascii=False)
        last = _unfolded(f"{seen.texts[-1] if seen.texts else ''}\n{strings}")
    if truth.sites and not any(re.search(rf"\b{re.escape(site)}\b", last) for site in truth.sites):
        yield f"site missing: {' or '.join(truth.sites)}"
    lines = [] if truth.culprits else seen.run_text.splitlines()
    if truth.says and not any(re.search(truth.says, place) for place in (last, *lines)):
        yield f"words missing: {truth.says}"
    if truth.says_once:
        yield from _once(truth, seen)


def _once(truth: Truth, seen: Seen) -> Iterator[str]:
    words, _, other = truth.says_once.partition(", or ")
    if other == _WATCHED and any(one.get("world_size", 0) > truth.ranks for one in seen.incidents):
        return
    count = _unfolded(seen.run_text).count(words)
    if count != 1:
        yield f"said {count} times, not once: {words}"


def _slowdowns(truth: Truth, seen: Seen) -> Iterator[str]:
    if not truth.slow:
        return
    found = [
        (one.get("onset_step"), one.get("relief_step")) for one in seen.incidents if one["kind"] == "slow"
    ]
    told = ", ".join(f"{onset} to {relief}" for onset, relief in found) or "none"
    if len(found) != len(truth.slow):
        yield f"{len(found)} slowdowns ({told}), true {len(truth.slow)}"
        return
    for (onset, relief), (true_onset, true_relief) in zip(found, truth.slow, strict=True):
        if not (_near(onset, true_onset) and _near(relief, true_relief)):
            yield f"slow from {onset} to {relief}, true {true_onset} to {true_relief}"


def _near(found: int | None, true: int) -> bool:
    return found is not None and abs(found - true) <= WITHIN


def _wrong(truth: Truth, seen: Seen, confidences: Sequence[str]) -> list[tuple[str, str, str]]:
    """(who, confidence, kind) of all who are named with such a confidence and are not to blame.

    Where the truth says nothing of culprits, only victims are known not to be.
    """
    allowed = frozenset[int]().union(*truth.culprits)
    known = bool(truth.healthy or truth.culprits)
    return [
        (_who(one), one["confidence"], incident["kind"])
        for incident in seen.incidents
        for one in incident["culprits"]
        if one["confidence"] in confidences
        and (one.get("rank") in truth.victims or (known and one.get("rank") not in allowed))
    ]


def _who(culprit: Mapping[str, Any]) -> str:
    if culprit.get("rank") is not None:
        return f"rank {culprit['rank']}"
    return "a link" if culprit.get("link") else f"node {culprit.get('node', '')}"


def _unfolded(text: str) -> str:
    """Without the line ends and spaces that only shape a text."""
    return " ".join(text.split())


def last_line(text: str) -> str:
    """The last line that is not empty, in words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"last line: {lines[-1][:160]}" if lines else "nothing was said"
