"""Slowdowns from the first finding to relief: tracked, profiled, judged, judged again, relieved or transient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

from keepstep.control.incidents.case import (
    Case,
    Desk,
    is_port,
    is_traffic,
    new_incident,
    noted,
    unlocated,
    with_action,
)
from keepstep.control.incidents.early_slowness import FIRST_STEPS, known_stages, only_sure, slow_since
from keepstep.control.incidents.locators import NO_WAITS
from keepstep.control.incidents.slow_evidence import (
    IN_FORCE,
    LARGE_WORLD,
    Healthy,
    LateCauses,
    firmness,
    is_block,
    job_pace_s,
    lost_s,
    measured_culprits,
    middle_s,
    middle_step,
    newest_pace_s,
    ratios_of,
    silent_in_words,
    suspects_of,
    untreated_until,
    with_measured,
)
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Diagnosis, Event, Incident
from keepstep.core.slow_steps import UNSTEADY
from keepstep.core.summary import IterationSummary, PathProbe
from keepstep.core.validation import Validation
from keepstep.report.validation import in_a_line
from keepstep.wire.messages import Profile
from keepstep.wire.packed import iterations_of

NEAR_STEPS = 3  # findings with onsets this close are about one cause
SHARPEN_STEPS = 3  # new steps before iterations are asked for again
BEFORE_STEPS = 16  # steps before the onset that are asked for
_EDGE_STEPS = 2  # onsets are accurate to ± this many steps, so the last ones before may be slow already
_LEAST_BEFORE = 8  # earlier steps that suffice as healthy ones; then the last before the onset are left out
_BEFORE_STEPS_LARGE = 4  # steps before the onset that are asked for in large jobs
_ENOUGH_RANKS = 256  # slow ranks that need no other proof, however large the job is
_CONFIRM_RATIO = 1.08  # a growth of all ranks' iteration times that confirms what a few ranks have reported
_OWN_RATIO = 1.10  # likewise of the slow ranks' own, at a second look, where the job as a whole is no faster
# The same of all ranks' iteration times where the slow ranks' time without waits has grown by so much: others' waits
# take up a part of it.
_ABSORBED_RATIO, _SELF_RATIO = 1.05, 1.2
_SHARPEN_S = 60.0  # ask for iterations again after this long when no new steps come
_UNCONFIRMED_TRIES = 3
_MOST_LOOKS = 5  # looks after the verdict, while answers or culprits are missing
_QUIET_STEPS = 10  # steps at the old pace that prove relief when no finding says so
_MOST_ONSETS = 4096
_MOST_BLOCKS = 500_000
_TELL_COST_S = 60.0  # how often the incident is published with what it has cost so far


class SlowCase(Case):
    """One slowdown. Ranks with a similar onset belong to the same one."""

    def __init__(self, desk: Desk, incident: Incident | None = None, *, early: bool = False) -> None:
        """``early``: it began with the first steps, so that peers are the measure."""
        self._desk, self.incident, self.early = desk, incident, early
        # While a remedy is in force, the pace says nothing of the cause.
        self.treated = any(one.name.startswith(IN_FORCE) for one in incident.actions) if incident else False
        self._treated_steps, self._treated_lost_s = 0, 0.0  # steps with a remedy in force, and their cost
        self._probes: Sequence[PathProbe] = ()
        self.stages: Mapping[int, int] = {}  # pipeline stages by rank, once an early case has seen them
        self.healthy: Healthy | None = None  # what was seen before the slowdown
        self._taken: list[Finding] = []  # what agents have found while peers were the measure
        self._slow: dict[int, int] = {}  # onset by slow rank
        self._relieved: set[int] = set()
        self._onsets: Counter[int] = Counter()
        self._relief_steps: Counter[int] = Counter()
        self._before: list[float] = []
        self._after: list[float] = []
        self._tries = 0
        self._looks = 0  # questions asked after the verdict
        self._blocks_of: tuple[int, ...] = ()  # ranks that are asked for their blocks at the next look
        self._waits_recorded = True
        self._cleared = False  # blocks have shown that the delays of all culprits cost nothing
        self._settled = incident is not None  # asking again would tell nothing more
        self._causes = LateCauses(desk.cluster)
        self._asked_s, self._asked_step = 0.0, -1
        self._checks_relief = False  # the open question asks whether the old pace is back
        self._checked_step = -1
        self._detected_step = -1
        self._noticed: Event | None = incident.events[0] if incident and incident.events else None
        self._told_cost_s = 0.0
        self._pace_since: tuple[int, float] | None = None
        self._suspects: tuple[tuple[int, ...], ...] = ()  # groups that a validation would test
        self._validated = incident is not None  # at most once per incident, also under a later controller
        self._proof: tuple[str, ...] = ()  # what the validation showed
        if incident is not None:
            self._onsets[incident.onset_step or 0] += 1
            self._detected_step = incident.detected_step or 0
            self._before = [incident.iteration_before_s] if incident.iteration_before_s else []
            self._after = [incident.iteration_after_s] if incident.iteration_after_s else []

    @property
    def onset_step(self) -> int:
        """The median of the onsets that the ranks have reported."""
        return middle_step(self._onsets)

    def takes(self, finding: Finding) -> bool:
        """Whether a ``slow`` finding is about this slowdown: it has a similar onset, or one until the detection."""
        onset, near = finding.onset_step, max(NEAR_STEPS, finding.together)
        if abs(onset - self._slow.get(finding.rank, onset)) > near:
            return False  # the rank was slow before, and has become slow once more
        latest = max(self.onset_step, self._detected_step if self._detected_step >= 0 else onset)
        return self.onset_step - near <= onset <= latest + near

    def found(self, finding: Finding, now_s: float) -> None:
        """Take one more slow rank into the case; the first one begins the profiling."""
        first = not self._slow
        if self.early and self.incident is None and not first and len(self._taken) < _MOST_ONSETS:
            self._taken.append(finding)
        if finding.rank in self._slow:
            return
        self._slow[finding.rank] = finding.onset_step
        self._relieved.discard(finding.rank)
        if len(self._onsets) < _MOST_ONSETS:
            self._onsets[finding.onset_step] += 1
        if len(self._before) < _MOST_ONSETS and finding.before_s > 0 and finding.after_s > 0:
            self._before.append(finding.before_s)
            self._after.append(finding.after_s)
        if self.incident is None and first:
            self._detected_step = finding.step
            self._noticed = Event("noticed", self._desk.unix_s(now_s), finding.step)
            self._ask(now_s)

    def given_back(self) -> list[Finding]:
        """What agents found while this case compared peers, if that has named nobody: other cases are to take it."""
        return self._taken if self.closed and self.incident is None else []

    def relieved_by(self, finding: Finding) -> bool:
        """Whether a ``relief`` finding ends this slowdown: the rank is back below the mean of both paces."""
        if finding.onset_step <= self.onset_step or not self._before:
            return False
        return finding.after_s < self._middle_pace_s()

    def _middle_pace_s(self) -> float:
        return (median(self._before) + median(self._after)) / 2

    def relief(self, finding: Finding, now_s: float) -> None:
        """Note that one rank is fast again. Most slow ranks being so closes the case, or the pace of all ranks does."""
        if finding.rank in self._relieved or self.treated:
            return
        self._relieved.add(finding.rank)
        if len(self._relief_steps) < _MOST_ONSETS:
            self._relief_steps[finding.onset_step] += 1
        if 2 * len(self._relieved) > max(len(self._slow), 1):
            self._close(middle_step(self._relief_steps), now_s)
        elif self.question is None:
            self._ask_for_relief(now_s)

    def acted(self, action: Action, instead: Action | None = None, *, say: bool = False) -> None:
        """Note what was done about the slowdown; with ``instead``, that replaces an action noted before."""
        if self.incident is not None:
            self.incident = with_action(self._desk, self.incident, action, instead)
            self._publish("acts" if say else "")

    def treated_for(self, steps: int, paces: tuple[float, float] | None) -> None:
        """Count more steps that were made with a remedy in force.

        ``paces``: what each of these steps took, and would have taken without the remedy; None: they are counted in
        another slowdown.
        """
        old = self.incident
        if old is not None:
            self._treated_steps += steps
            if paces is not None:
                self._treated_lost_s += steps * (paces[0] - (old.iteration_before_s or paces[0]))
                self.incident = replace(old, saved_s=old.saved_s + steps * (paces[1] - paces[0]))
            self._tell_cost()

    def cured(self, step: int, now_s: float) -> None:
        """Close the case: the remedy was taken back at this step, as the cause is gone."""
        if not self.closed:
            self._close(step, now_s)

    def profiles(self, answers: Sequence[Profile], unanswered: Sequence[str], now_s: float) -> None:
        """Decide with what the agents have sent."""
        self.question = None
        onset = self.onset_step
        rows = iterations_of(answers)
        if self._checks_relief:
            self._checks_relief, pace_s = False, job_pace_s(rows)
            if pace_s is not None and self._before and pace_s < self._middle_pace_s():
                self._close(middle_step(self._relief_steps), now_s)
            return
        # Imported here, as the controller starts without numpy.
        from keepstep.core.iteration_table import between, column, distinct, table_of

        if len(rows):
            rows = table_of(rows).with_ranks_of_the_job(self._desk.cluster.communicators)
        if self.early:
            self._judge_early(rows, unanswered, now_s)
            return
        before = between(rows, self._other_steps(onset), onset)
        surely = between(before, 0, onset - _EDGE_STEPS)
        steps, ranks = (distinct(column(surely, name)) for name in ("step", "rank"))
        # Where a rank has no earlier steps than those before the onset, all keep these.
        if len(steps) >= _LEAST_BEFORE and len(ranks) == len(distinct(column(before, "rank"))):
            before = surely
        # Steps after another incident's onset are slow for another cause, too, and a remedy gives others more work.
        until = min(self._desk.register.next_change(onset + NEAR_STEPS), untreated_until(self.incident))
        after = between(rows, onset, until)
        if self.incident is not None and len(after) and not len(before):
            self._settled = True  # the healthy time is forgotten by now: peers would be a worse measure
            return
        if self.incident is None and not self._confirmed(before, after):
            self._tries += 1
            self.closed = self._tries >= _UNCONFIRMED_TRIES
            return
        traffic = [one for answer in answers for one in answer.traffic if is_traffic(one)]
        blocks = [one for answer in answers for one in answer.blocks if is_block(one)][:_MOST_BLOCKS]
        ports = [one for answer in answers for one in answer.ports if is_port(one)]
        known = {"before": before, "after": after, "onset_step": onset, "blocks": blocks, "traffic": traffic}
        self._decide(self._desk.evidence(now_s, ports=ports, **known), unanswered, now_s)
        complete = self.incident is not None and bool(self.incident.culprits) and not unanswered
        self._settled = self._looks >= (1 if complete else _MOST_LOOKS)

    def _judge_early(self, rows: Sequence[IterationSummary], unanswered: Sequence[str], now_s: float) -> None:
        """Decide by the peers of the rank that seemed to be slow; close the case if it was not for steps on end."""
        from keepstep.core.iteration_table import between

        first = min((row.step for row in rows), default=0)
        late = between(rows, first + FIRST_STEPS, 1 << 31)
        peers = self._desk.evidence(now_s, before=between(rows, 0, 0), after=late, onset_step=first)
        stages = known_stages(self._desk.locators, peers)
        self.stages = stages or {}
        rows = self._desk.locators.own_times(replace(peers, after=rows), stages or {})
        since = slow_since(rows, next(iter(self._slow), -1), stages) if stages is not None else None
        if since is None:
            self.closed = self.incident is None
            return
        if self.incident is None:
            self._onsets = Counter({since: 1})
        onset = max(self.onset_step, first + FIRST_STEPS)
        after = between(rows, onset, self._desk.register.next_change(onset + NEAR_STEPS))
        known = {"before": between(rows, 0, 0), "after": after, "onset_step": onset}
        self._decide(self._desk.evidence(now_s, **known), unanswered, now_s)
        self._settled = True

    def probed(self, probes: Sequence[PathProbe], now_s: float) -> None:
        """Sharpen the verdict with probes of the links that are blamed."""
        self.probing = None
        self._probes = probes
        old = self.incident
        if old is None or not probes:
            return
        said = Diagnosis("slow", old.culprits, old.victims, old.evidence, old.missing, old.summary)
        diagnosis = self._as_sure_as_may_be(self._desk.locators.probed(said, probes))
        sharper = replace(old, culprits=diagnosis.culprits, evidence=diagnosis.evidence)
        self._tell(sharper, diagnosis, now_s)

    def tick(self, now_s: float) -> None:
        """Ask again when it is time; notice relief that no finding has reported."""
        if not self.closed and now_s - self._told_cost_s >= _TELL_COST_S:
            self._told_cost_s = now_s
            self._tell_cost()
        if self.incident is not None and self._desk.register.is_overdue(self.incident):
            self._publish("")
        if self.closed or self.question is not None:
            return
        newest = self._desk.cluster.newest_step
        if self._relieved and newest > self._checked_step:
            self._ask_for_relief(now_s)
            return
        in_doubt = self.incident is not None and firmness(self.incident.culprits) <= 1
        if self._looks and not self._validated and self._suspects and in_doubt:
            self._validated = self._desk.validations.begin(
                self._suspects, self.validated, lambda: self.closed, now_s
            )
        waited = newest >= self._asked_step + SHARPEN_STEPS or now_s - self._asked_s >= _SHARPEN_S
        if waited and not self._settled:
            self._looks += self.incident is not None
            self._ask(now_s)
        elif self.incident is not None and self._settled:
            self._watch_pace(now_s)
            is_open = not self.closed and not self.treated and self._looks < _MOST_LOOKS
            if waited and is_open and self._causes.has_new(self.incident, now_s):
                self._looks += 1
                self._ask(now_s)

    def validated(self, outcome: Validation | None, refused: str, now_s: float) -> None:
        """Sharpen the incident with what a validation has measured, or note why it was not done."""
        old = self.incident
        if old is None or self.closed:
            return
        if outcome is None:
            without = replace(old, missing=(*old.missing, f"a validation: {refused}"))
            self.incident = noted(self._desk, without, "validation", now_s, f"validation not done: {refused}")
            self._publish("")
            return
        self._proof = (in_a_line(outcome),)
        culprits = measured_culprits(outcome, old.culprits, self._desk.cluster.node_of)
        tested = noted(self._desk, old, "validation", now_s, self._proof[0])
        sharper = with_measured(tested, outcome, culprits, self._proof)
        self.incident = noted(self._desk, sharper, "sharper", now_s) if culprits else sharper
        self._settled = self._settled or bool(culprits)
        self._publish("sharper" if culprits else "")

    def end(self, now_s: float) -> None:
        """Close the case, as the job has ended or a crash came after the slowdown."""
        until_step = max(self._desk.cluster.newest_step, self._detected_step)
        self._finish("ended", now_s, "", lost_s=self._lost_s(until_step))

    def _ask(self, now_s: float) -> None:
        onset = self.onset_step
        reach = BEFORE_STEPS if self._desk.cluster.known_ranks <= LARGE_WORLD else _BEFORE_STEPS_LARGE
        first = 0 if self.early else max(onset - reach, 0)
        first = max(first, self._other_steps(onset))
        newest = max(self._desk.cluster.newest_step, self._detected_step)
        last = max(newest, onset) if newest < onset + 4 * reach else onset + 4 * reach
        self._asked_step, self._asked_s = newest, now_s
        self.question = self._desk.agents.ask_profiles(first, last + 1, now_s, onset, self._blocks_of)

    def _other_steps(self, onset: int) -> int:
        """How many steps at the beginning had another pace, before another incident began or ended."""
        changed = self._desk.register.previous_change(onset - NEAR_STEPS)
        return max(min(changed + 1, onset - NEAR_STEPS), 0)

    def _ask_for_relief(self, now_s: float) -> None:
        """Look at the newest steps of all ranks, as some ranks report relief."""
        if self.incident is None:
            return
        self._checks_relief, self._checked_step = True, self._desk.cluster.newest_step
        last = max(self._checked_step, *self._relief_steps) + 1
        self.question = self._desk.agents.ask_profiles(middle_step(self._relief_steps), last, now_s)

    def _confirmed(self, before: Sequence[IterationSummary], after: Sequence[IterationSummary]) -> bool:
        grown = ratios_of(before, after, "duration_s")
        if not grown:
            return self._many()
        felt = median(grown.values())
        if felt >= _CONFIRM_RATIO:
            return True
        selves = ratios_of(before, after, "self_s") if felt >= _ABSORBED_RATIO else {}
        if self._slow and all(selves.get(rank, 0.0) >= _SELF_RATIO for rank in self._slow):
            return True
        own = [grown[rank] for rank in self._slow if rank in grown and felt >= 1.0]
        return self._tries > 0 and bool(own) and min(own) >= _OWN_RATIO

    def _many(self) -> bool:
        """Whether so many ranks are slow that no other proof is needed."""
        return len(self._slow) >= min(max(self._desk.cluster.known_ranks / 2, 1), _ENOUGH_RANKS)

    def _decide(self, evidence: Evidence, unanswered: Sequence[str], now_s: float) -> None:
        desk, before, after = self._desk, evidence.before, evidence.after
        if self.incident is None:
            self._told_cost_s, self.healthy = now_s, Healthy.of(desk.locators, evidence)
        diagnosis = self._locate(evidence)
        if self.early:
            diagnosis = only_sure(diagnosis, after, self.stages)
            if not (self._waits_recorded and diagnosis.culprits):
                self.closed = self.incident is None
                return
        before_s = job_pace_s(before) or middle_s(self._before)
        after_s = job_pace_s(after) or middle_s(self._after)
        # Where the slowest rank changes, no device is tested, and nobody stays blamed.
        turns = diagnosis.summary == UNSTEADY
        if turns:
            self._suspects = ()
        elif not self._validated and firmness(diagnosis.culprits) <= 1:
            slowdown_s = after_s - before_s if after_s and before_s else 0.0
            self._suspects = suspects_of(desk.cluster, after, diagnosis.culprits, slowdown_s)
        old = self.incident
        firmer = old is not None and firmness(old.culprits) > firmness(diagnosis.culprits)
        if firmer and not self._cleared and not turns:
            return  # the earlier diagnosis is firmer: the newest steps may be healthy again in part
        missing = (*diagnosis.missing, *silent_in_words(unanswered))
        self._conclude(
            replace(diagnosis, evidence=(*self._proof, *diagnosis.evidence), missing=missing),
            now_s,
            {"detected_step": self._detected_step, "events": (self._noticed,) if self._noticed else ()},
            onset_step=self.onset_step,
            job_slowdown=after_s / before_s if before_s and after_s else None,
            iteration_before_s=before_s,
            iteration_after_s=after_s,
            ranks_reporting=len({row.rank for row in after}),
            onset_unix_s=self._onset_unix_s(after_s),
        )
        with suppress(Exception):  # without blocks the verdict stays as it is
            wanted = desk.locators.blocks_wanted(evidence, diagnosis.culprits)
            self._blocks_of = wanted or self._blocks_of
        self._causes.judged(self.incident, now_s)
        links = [culprit.link.nodes for culprit in diagnosis.culprits if culprit.link is not None]
        if links and not self._probes and self.probing is None:
            self.probing = desk.agents.ask_probes(links, now_s)

    def _locate(self, evidence: Evidence) -> Diagnosis:
        locators = self._desk.locators
        try:
            diagnosis = locators.probed(locators.slow(evidence), self._probes)
            self._waits_recorded = locators.waits_recorded(evidence)
            if not evidence.blocks or diagnosis.summary == UNSTEADY:
                return self._as_sure_as_may_be(diagnosis)
            sharper = locators.sharpen(evidence, diagnosis)
            self._cleared = bool(diagnosis.culprits) and not sharper.culprits
            return self._as_sure_as_may_be(sharper)
        except Exception as error:
            return unlocated("slow", error)

    def _as_sure_as_may_be(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis with nobody blamed for sure, where it was not recorded who waits for whom."""
        return diagnosis if self._waits_recorded else diagnosis.doubted(NO_WAITS)

    def _close(self, relief_step: int, now_s: float) -> None:
        if self.incident is None:
            self.closed = True
            if not self._many():
                return  # the slowdown of few ranks has gone away by itself
            self.incident = self._transient(now_s)
        status = "transient" if not self.incident.culprits and not self._looks else "relieved"
        self._finish(status, now_s, "closes", relief_step=relief_step, lost_s=self._lost_s(relief_step))

    def _transient(self, now_s: float) -> Incident:
        """The incident of a slowdown that was over before it could be profiled."""
        before_s, after_s = middle_s(self._before), middle_s(self._after)
        return new_incident(
            self._desk,
            "slow",
            now_s,
            onset_step=self.onset_step,
            detected_step=self._detected_step,
            job_slowdown=after_s / before_s if before_s and after_s else None,
            evidence=(f"{len(self._slow)} ranks slowed down together",),
            missing=("profiles: it was over before they came",),
            iteration_before_s=before_s,
            iteration_after_s=after_s,
            ranks_reporting=len(self._slow),
            world_size=self._desk.cluster.known_ranks,
            onset_unix_s=self._onset_unix_s(after_s),
            events=(self._noticed,) if self._noticed else (),
        )

    def _onset_unix_s(self, after_s: float | None) -> float | None:
        """When the slowdown began: the time of its first finding, less the slow steps until then."""
        if self._noticed is None or not after_s:
            return None
        steps = max((self._noticed.step or 0) - self.onset_step + 1, 0)
        return self._noticed.unix_s - steps * after_s

    def _lost_s(self, until_step: int) -> float | None:
        """Seconds of training that the slowdown has cost until this step; None: its pace is not known."""
        if self.incident is None:
            return None
        return lost_s(self.incident, until_step, self._treated_steps, self._treated_lost_s)

    def _tell_cost(self) -> None:
        """Publish what the slowdown has cost so far, once a step after its detection is known."""
        newest = self._desk.cluster.newest_step
        if self.incident is not None and newest > (self.incident.detected_step or 0):
            self.incident = replace(self.incident, lost_s=self._lost_s(newest))
            self._publish("")

    def _watch_pace(self, now_s: float) -> None:
        """Notice relief by heartbeats alone: agents that were restarted do not know that the job was slow."""
        incident = self.incident
        if self.treated or incident is None:
            return
        before_s, after_s = incident.iteration_before_s, incident.iteration_after_s
        if not before_s or not after_s:
            return
        pace_s = newest_pace_s(self._desk.cluster)
        step = self._desk.cluster.newest_step
        bar_s = before_s + 0.3 * (after_s - before_s)
        if pace_s is None or pace_s > bar_s:
            self._pace_since = None
        elif self._pace_since is None:
            self._pace_since = (step, now_s)
        elif step - self._pace_since[0] >= _QUIET_STEPS and now_s - self._pace_since[1] >= _QUIET_STEPS:
            self._close(self._pace_since[0], now_s)
