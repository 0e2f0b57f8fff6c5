"""What of a run is told, and when: from snapshots to notices, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.core.incident import Confidence, Incident
from keepstep.view.notify import notice_text
from keepstep.view.notify.flapping import Flapping
from keepstep.view.notify.notice import (
    CONFIDENCES,
    SEVERITIES,
    JobBrief,
    Notice,
    Severity,
    What,
    brief,
    confidence_in,
    part_name,
    plain,
    severity_of,
)
from keepstep.view.notify.told_state import Folded, Told, ToldIncident
from keepstep.view.run_snapshot import RunEnd, RunSnapshot

# Waits before a changed verdict of one incident is told again, in seconds: a verdict that wavers is told rarely.
_CHANGE_WAITS_S = (0.0, 60.0, 600.0, 3600.0)
_NOT_SEEN = ("", "silent")  # states of a snapshot that tell nothing of incidents
_OVER = ("ended", "done", "failed")  # states of a job that has ended
_SAME_S = 1.0  # times of one incident differ by less


@dataclass(frozen=True, slots=True)
class Rules:
    """What one receiver wants to be told."""

    least_severity: Severity = "info"
    least_confidence: Confidence = "low"  # of slowdowns and hangs; a death is a fact and told anyway
    at_once: int = 10  # most notices in a row
    per_hour: float = 60.0  # how many in the long run; what is more is summed up
    flapping_times: int = 3  # the same thing so often within `flapping_window_s` is held back from then on
    flapping_window_s: float = 600.0
    silent_after_s: float = 60.0
    page_url: str = ""


@dataclass(frozen=True, slots=True)
class _Change:
    """Something to tell, before it is put into words: of a storm most never are."""

    what: What
    severity: Severity
    incident: Incident | None = None
    key: str = ""  # of what flaps
    stands_for: int = 1
    folded: Folded | None = None


class Notices:
    """Tells what is new since the last snapshot. `told` has all that must be kept to go on after a restart."""

    def __init__(self, rules: Rules, told: Told | None = None) -> None:
        self.told = Told() if told is None else told
        self._rules = rules
        self._begin()

    def _begin(self) -> None:
        rules, told = self._rules, self.told
        self._done = told.done_numbers()
        self._flapping = Flapping(told.flaps, rules.flapping_times, rules.flapping_window_s)
        self._has_new_done = False
        self._settled: dict[int, Incident] = {}  # open ones of which all was told, as they were then

    def since(self, snapshot: RunSnapshot, now: float) -> list[Notice]:
        """What is to be told now. ``now``: Unix seconds on this host; it may stand still, and jump back."""
        if self._is_another_run(snapshot):
            self.told = Told(undelivered=self.told.undelivered)
            self._begin()
        told = self.told
        if not told.has_begun and not self._first_look(snapshot):
            return []
        changes = [*self._silence(snapshot, now), *self._incidents(snapshot, now), *self._calm(snapshot, now)]
        sent = [*self._limited(changes, now), *self._end(snapshot)]
        self._remember(snapshot)
        return [self._notice(one, snapshot, now) for one in sent]

    def _is_another_run(self, snapshot: RunSnapshot) -> bool:
        """Whether the run in this folder was begun anew: the times of its incidents do not fit what was told."""
        number, detected_s = self.told.identity
        for one in reversed(snapshot.incidents):
            if one.number == number:
                return abs(one.detected_unix_s - detected_s) > _SAME_S
            if one.number < number:
                return one.detected_unix_s > detected_s + _SAME_S
        return False

    def _first_look(self, snapshot: RunSnapshot) -> bool:
        """What is over, and known for long, is not news. Returns whether there was anything to see."""
        if snapshot.state in _NOT_SEEN and snapshot.end is None and not snapshot.incidents:
            return False
        told = self.told
        told.has_begun, told.has_ended = True, self._end_of(snapshot) is not None
        told.is_silent = self._is_silent(snapshot)
        told.allowance = float(self._rules.at_once)
        self._done.update(one.number for one in snapshot.incidents if one.status != "open")
        told.first = max((one.number for one in snapshot.incidents), default=0)
        self._has_new_done = True
        return True

    def _is_silent(self, snapshot: RunSnapshot) -> bool:
        """Whether nothing was heard for so long that it is told; a shorter silence changes nothing."""
        if snapshot.end is not None or snapshot.state in _OVER:
            return False
        if snapshot.state in _NOT_SEEN and snapshot.age_s < self._rules.silent_after_s:
            return self.told.is_silent
        return snapshot.age_s >= self._rules.silent_after_s

    def _silence(self, snapshot: RunSnapshot, now: float) -> list[_Change]:
        told, is_silent = self.told, self._is_silent(snapshot)
        if is_silent == told.is_silent:
            return []
        told.is_silent = is_silent
        if self._end_of(snapshot) is not None:
            return []  # that it ended is told
        key = "silence"
        if is_silent:
            return self._opened(_Change("silent", "critical", key=key), now)
        held = self._flapping.holds(key)
        self._flapping.closes(key, now)
        return [] if held else [_Change("heard", "info")]

    def _incidents(self, snapshot: RunSnapshot, now: float) -> list[_Change]:
        found: list[_Change] = []
        for one in snapshot.incidents:
            if one.number in self._done or self._settled.get(one.number) is one:
                continue
            record = self.told.open.get(one.number)
            if record is not None:
                found += self._followed(one, record, now)
            elif self._is_wanted(one):
                found += self._begun(snapshot, one, now)
            if one.status != "open":
                self.told.open.pop(one.number, None)
                self._done.add(one.number)
                self._has_new_done = True
                self._settled.pop(one.number, None)
            elif record is None or record.blamed == _blamed(one):
                self._settled[one.number] = one
        return found

    def _is_wanted(self, incident: Incident) -> bool:
        rules = self._rules
        if SEVERITIES.index(severity_of(incident)) < SEVERITIES.index(rules.least_severity):
            return False
        sure = CONFIDENCES.index(confidence_in(incident.culprits))
        return incident.has_deaths or sure >= CONFIDENCES.index(rules.least_confidence)

    def _begun(self, snapshot: RunSnapshot, one: Incident, now: float) -> list[_Change]:
        """An incident that was not told yet. It may be over already, as a death after which training goes on."""
        if one.status != "open" and one.number < self.told.first:
            return []
        if one.status == "transient" or (one.status == "ended" and self._end_of(snapshot) is not None):
            return []  # it had no verdict, or the notice of the end tells of it
        what: What = "over" if one.status == "relieved" else "opened"
        blamed = _blamed(one)
        key = plain(f"{one.kind} {blamed}", 200)
        self.told.open[one.number] = record = ToldIncident(blamed, _acted_s(one), True, key)
        changes = self._opened(_Change(what, severity_of(one), one, key), now)
        record.is_single = bool(changes) and changes[0].what != "flapping"
        return changes

    def _opened(self, change: _Change, now: float) -> list[_Change]:
        """What came, unless it came so often lately that it is held back."""
        if self._flapping.holds(change.key):
            self._flapping.hold_back(change.key, now)
            return []
        if self._flapping.opens(change.key, now):
            return [replace(change, what="flapping")]
        return [change]

    def _followed(self, one: Incident, record: ToldIncident, now: float) -> list[_Change]:
        """What became of an incident that was told."""
        if one.status != "open":
            self._flapping.closes(record.key, now)
            # The end of the job, or what came after it, is told instead.
            return [_Change("over", "info", one)] if self._tells_end(one, record) else []
        blamed = _blamed(one)
        is_changed, has_acted = blamed != record.blamed, _acted_s(one) > record.acted_s
        if is_changed and not has_acted:
            wait_s = _CHANGE_WAITS_S[min(record.changes, len(_CHANGE_WAITS_S) - 1)]
            is_changed = abs(now - record.changed_s) >= wait_s
        if not is_changed and not has_acted:
            return []
        if is_changed:
            record.changes, record.changed_s = record.changes + 1, now
        record.blamed, record.acted_s = blamed, _acted_s(one)
        if not record.is_single:
            return []
        return [_Change("action" if has_acted else "sharper", severity_of(one), one)]

    @staticmethod
    def _tells_end(one: Incident, record: ToldIncident) -> bool:
        return record.is_single and one.status in ("relieved", "transient")

    def _calm(self, snapshot: RunSnapshot, now: float) -> list[_Change]:
        found: list[_Change] = []
        calmed = self._flapping.calmed(now)
        incidents = {one.number: one for one in snapshot.incidents} if calmed else {}
        for key, held_back in calmed:
            lasting: Incident | None = None
            for number, record in self.told.open.items():
                if record.key == key and number in incidents:
                    record.is_single, lasting = True, incidents[number]
            severity = "info" if lasting is None else severity_of(lasting)
            found.append(_Change("calm", severity, lasting, key, held_back))
        return found

    def _end_of(self, snapshot: RunSnapshot) -> RunEnd | None:
        """How the job ended. Where ``end.json`` does not come in time the controller's last state must do."""
        if snapshot.end is not None or snapshot.state not in _OVER:
            return snapshot.end
        if snapshot.age_s < self._rules.silent_after_s:
            return None
        return RunEnd(int(snapshot.state != "done"), "", "")

    def _end(self, snapshot: RunSnapshot) -> list[_Change]:
        """The end of the job, which is told however much was told before."""
        end = self._end_of(snapshot)
        if end is None or self.told.has_ended:
            return []
        self.told.has_ended = True
        if end.exit_code == 0 or end.category == "stopped":
            change = _Change("ended", "info")
        else:
            is_usual = end.category in ("scheduler", "signal")
            change = _Change("died", "warning" if is_usual else "critical")
        least = SEVERITIES.index(self._rules.least_severity)
        return [change] if SEVERITIES.index(change.severity) >= least else []

    def _allowance(self, now: float) -> float:
        """How many notices may be sent now. Where the clock was put back, time begins again."""
        told, rules = self.told, self._rules
        if now < told.allowance_s:
            told.allowance_s = now
        return min(told.allowance + (now - told.allowance_s) * rules.per_hour / 3600, float(rules.at_once))

    def _spend(self, allowance: float, count: int, now: float) -> None:
        if count:
            self.told.allowance, self.told.allowance_s = allowance - count, now

    def _limited(self, changes: Sequence[_Change], now: float) -> list[_Change]:
        """As many as may be sent, the most severe first; the others are summed up."""
        told = self.told
        if not changes and not told.folded.counts:
            return []
        allowance = self._allowance(now)
        room = int(allowance)
        if not told.folded.counts and len(changes) <= room:
            self._spend(allowance, len(changes), now)
            return list(changes)
        # One place is for the summary.
        ordered = sorted(changes, key=lambda one: -SEVERITIES.index(one.severity))
        single, others = ordered[: max(room - 1, 0)], ordered[max(room - 1, 0) :]
        for one in others:
            self._fold(one)
        if room < 1:
            return []
        folded, told.folded = told.folded, Folded()
        self._spend(allowance, len(single) + 1, now)
        count = sum(folded.counts.values())
        return [*single, _Change("summary", folded.severity, stands_for=count, folded=folded)]

    def _fold(self, change: _Change) -> None:
        folded, about = self.told.folded, change.what
        if change.incident is not None:
            number = change.incident.number
            about = f"{change.incident.kind} {change.what}"
            folded.first = min(folded.first or number, number)
            folded.last = max(folded.last, number)
            if (record := self.told.open.get(number)) is not None:
                record.is_single = False
        folded.counts[about] = folded.counts.get(about, 0) + max(change.stands_for, 1)
        if SEVERITIES.index(change.severity) > SEVERITIES.index(folded.severity):
            folded.severity = change.severity

    def _remember(self, snapshot: RunSnapshot) -> None:
        if self._has_new_done:
            self.told.take_done(self._done)
            self._has_new_done = False
        if snapshot.incidents:
            newest = snapshot.incidents[-1]
            self.told.identity = (newest.number, newest.detected_unix_s)

    def _notice(self, change: _Change, snapshot: RunSnapshot, now: float) -> Notice:
        told, incident, end = self.told, change.incident, self._end_of(snapshot)
        told.sent += 1
        subject = notice_text.Subject(
            change.what, snapshot, incident, change.key, change.stands_for, change.folded
        )
        title, lines = notice_text.words(subject, self._rules.flapping_window_s)
        about = "run" if incident is None else f"{incident.number:04d}"
        return Notice(
            id=plain(f"{snapshot.name}/{snapshot.started_unix_s:.0f}/{about}/{change.what}/{told.sent}", 300),
            what=change.what,
            severity=change.severity,
            run=plain(snapshot.name, 200),
            unix_s=now,
            title=title,
            lines=lines,
            job=JobBrief(
                state=plain(snapshot.state, 100),
                newest_step=snapshot.newest_step,
                world_size=snapshot.world_size,
                restarts=snapshot.restarts,
                exit_code=None if end is None else end.exit_code,
                category="" if end is None else plain(end.category, 100),
            ),
            incident=None if incident is None else brief(incident),
            stands_for=max(change.stands_for, 1),
            page_url=self._rules.page_url,
        )


def _acted_s(incident: Incident) -> float:
    """When the newest action was begun. Their number does not tell: old ones are left out, some are replaced."""
    return max((one.begun_unix_s or 0.0 for one in incident.actions), default=0.0)


def _blamed(incident: Incident) -> str:
    return plain(", ".join(sorted({part_name(one) for one in incident.culprits})), 1000)
