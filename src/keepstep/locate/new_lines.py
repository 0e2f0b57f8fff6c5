"""The cause that no row knows, by comparison: what only one rank said, and only near the end.

After L4 (Jiang et al., Diagnosing large-scale LLM training failures via automated log analysis): a failure's lines are
compared with healthy stretches of this job and with earlier runs, with other ranks, and with the phase of the job.
Where all comparisons leave one line, or the lines of one rank, that line is told, with low confidence; else nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from keepstep.core.lost_connection import tells_of_another
from keepstep.core.told import FEW_STEPS, Failure, Named, NewLine, Row, Seen, Told, Words, like

# A healthy stretch has so many lines, of which so many are of progress.
_HEALTHY_LINES, _HEALTHY_PROGRESS = 200, 20
# Where more than one line in so many is new while all is well, being new tells nothing.
_SELDOM = 100
# A rank that writes so many times what others write speaks for all of them.
_SPOKESMAN = 4
_WRONG = (
    "error", "fail", "abort", "fatal", "unable", "cannot", "can't", "could not", "invalid", "lost", "refused", "denied",
    "corrupt", "exceed", "timeout", "timed out", "killed", "panic", "exception", "missing", "not found", "broken",
    "mismatch", "unexpected", "illegal", "bad ", "dead", "down",
)  # fmt: skip

NEW_LINE = Row(
    "new-line", (), (), "suspect", "other", "new-line", "no known message", "speaker",
    "read this line and those around it; if it is a cause, add a row for it (docs/design/why.md)",
)  # fmt: skip


def to_compare(failure: Failure, words: Sequence[Words]) -> tuple[NewLine, ...]:
    """The new lines near the end among which the cause may be; none where a row knows the cause, or nothing failed."""
    if failure.root is not None or not failure.cause_class:
        return ()
    progress = sum(one.progress for one in words)
    heard = {rank for one in words for rank in one.heard}
    found: list[NewLine] = []
    for log in words:
        enough = FEW_STEPS * (1 if len(words) > 1 else max(1, len(heard)))
        found += [one for one in log.new if log.progress - one.progress <= enough and _says_something(one)]
    first_s = min((one.time_s for one in failure.followers if one.time_s is not None), default=None)
    early = [one for one in found if first_s is None or one.time_s is None or one.time_s <= first_s]
    return tuple(early) if progress else ()


def by_comparison(
    failure: Failure, new: Sequence[NewLine], seen: Seen, healthy: Seen | None = None
) -> Failure:
    """The failure with the line that comparisons leave; as it was where they leave none, or lines of several ranks.

    Args:
        new: by `to_compare`; ``seen``: what the job's logs had of them.
        healthy: what logs of earlier runs, or of healthy ones, had of them.
    """
    several = [who for who, lines in seen.speakers.items() if lines > FEW_STEPS]
    left = [one for one in new if _is_new(one, healthy)]
    left = [one for one in left if healthy is not None or _in_its_phase(one, seen)]
    if len(several) > 1:
        left = [one for one in left if _alone(one, seen)]
        writers = {_alone(one, seen) for one in left}
        if len(writers) != 1 or any(_speaks_for_all(who, seen.speakers) for who in writers):
            return failure
    else:
        left = [one for one in left if _sounds_wrong(one)]
    if not left:
        return failure
    first = min(left, key=lambda one: (one.source, one.number))
    return _told(failure, first, healthy, _alone(first, seen) if len(several) > 1 else "")


def _told(failure: Failure, first: NewLine, healthy: Seen | None, alone: str) -> Failure:
    root = Told(
        NEW_LINE, first.line, first.text, first.number, first.source, first.time_s, speaker=first.speaker
    )  # fmt: skip
    lines = healthy.lines if healthy and healthy.lines >= _HEALTHY_LINES else first.settled_lines
    said = f"first said only by {alone}, " if alone else ""
    title = f"no known message; {said}new against {lines:,} healthy lines"
    rank = first.speaker.rank
    culprits = (Named(rank, node=first.speaker.node),) if rank is not None and said else ()
    row = replace(NEW_LINE, title=title)
    return replace(
        failure, kind=NEW_LINE.kind, title=title, root=replace(root, row=row), culprits=culprits, confidence="low",
        advice=NEW_LINE.advice,
    )  # fmt: skip


def _says_something(one: NewLine) -> bool:
    """Whether a line may be a cause: in words, neither a notice nor a warning, and not about another rank."""
    if one.level in ("info", "warning") or tells_of_another(one.text):
        return False
    return sum(word.isalpha() for word in one.text.split()) >= 2


def _sounds_wrong(one: NewLine) -> bool:
    return one.level == "error" or any(word in one.text.lower() for word in _WRONG)


def _is_new(one: NewLine, healthy: Seen | None) -> bool:
    """Whether no healthy stretch had it: of an earlier run, or of this job where it was long enough and uniform."""
    if healthy is not None and healthy.lines >= _HEALTHY_LINES:
        return not healthy.by.get(like(one.text))
    settled = one.settled_lines >= _HEALTHY_LINES and one.progress >= _HEALTHY_PROGRESS
    return settled and (one.settled_new - 1) * _SELDOM <= one.settled_lines


def _in_its_phase(one: NewLine, seen: Seen) -> bool:
    """Whether the job had been in the phase of this line before: a first checkpoint has lines of its own."""
    phase, before = seen.phase.get(like(one.text), ("start", 0))
    return phase == "step" or before > 0


def _alone(one: NewLine, seen: Seen) -> str:
    """Who alone said it; empty where several did."""
    by = seen.by.get(like(one.text), {})
    return next(iter(by)) if len(by) == 1 else ""


def _speaks_for_all(who: str, speakers: Mapping[str, int]) -> bool:
    others = [lines for name, lines in speakers.items() if name != who]
    return not others or speakers.get(who, 0) > _SPOKESMAN * max(1, median(others))
