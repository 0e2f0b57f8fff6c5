"""Culprits, actions and times in words."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from keepstep.core.incident import NETWORK, Action, Culprit, Incident, Recovery
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.report.folding import alike, shared_detail, span

# Kinds of causes in `detect/tables/checkpoint.toml` that lie in what was saved.
_OF_CHECKPOINTS = frozenset({"checkpoint-misfit", "checkpoint-refused", "corrupt-checkpoint"})
_FOLDED, _FOLDED_NODES = 64, 40  # longest lists of folded ranks and nodes that are printed


def who(culprit: Culprit) -> str:
    """A culprit's name: its rank, link or node."""
    if culprit.link is not None:
        (first, second), (here, there) = culprit.link.ranks, culprit.link.nodes
        return f"link {here} ↔ {there}  (rank {first} ↔ {second})"
    if culprit.rank is not None:
        return f"rank {culprit.rank}  {culprit.node}".rstrip()
    if culprit.node:
        return f"node {culprit.node}"
    return "the network" if culprit.cause == NETWORK else "somebody"


def who_all(ones: Sequence[Culprit]) -> str:
    """The name of culprits that are alike: ``ranks 64-126  gpu-[08-15]``."""
    if len(ones) == 1:
        return who(ones[0])
    ranks = fold_ranks(one.rank for one in ones if one.rank is not None)
    nodes = {one.node for one in ones if one.node}
    told = fold_nodes(nodes)
    first = f"ranks {ranks}" if len(ranks) <= _FOLDED else f"{len(ones)} ranks"
    return f"{first}  {told if len(told) <= _FOLDED_NODES else f'{len(nodes)} nodes'}".rstrip()


def named(incident: Incident) -> str:
    """The first culprits of an incident and the confidence in them, in a few words."""
    if not incident.culprits:
        return "cause unknown"
    ones = alike(incident.culprits)[0]
    others = len(incident.culprits) - len(ones)
    parts = [who_all(ones).replace("  ", " ") + (f" and {others} more" if others else ""), ones[0].cause]
    return ", ".join(filter(None, (*parts, f"confidence {ones[0].confidence}")))


def done(action: Action) -> str:
    """An action in words: what was done, what was expected of it, and its effect."""
    text = f"{action.name}: {action.detail}" if action.detail else action.name
    return f"{text}; {effect}" if (effect := _effect(action)) else text


def _effect(action: Action) -> str:
    """The effect of an action: ``expected 490 ms → 310 ms an iteration, measured 330 ms``."""
    before = "" if action.before_iteration_s is None else f"{seconds(action.before_iteration_s)} → "
    told: list[str] = []
    if action.expected_iteration_s is not None:
        told.append(f"expected {before}{seconds(action.expected_iteration_s)} an iteration")
    if action.measured_iteration_s is not None:
        measured = seconds(action.measured_iteration_s)
        told.append(f"measured {measured}" if told else f"measured {before}{measured} an iteration")
    return ", ".join(told)


def what_happened(incident: Incident) -> str:
    """The step, how much slower it became or what everybody waits in, and for how long."""
    parts: list[str] = []
    if incident.onset_step is not None:
        parts.append(f"step {incident.onset_step}")
    if incident.kind == "slow":
        before, after = incident.iteration_before_s, incident.iteration_after_s
        if before and after:
            factor = incident.job_slowdown or after / before
            parts.append(f"iteration {seconds(before)} → {seconds(after)} (×{factor:.2f})")
        elif incident.job_slowdown:
            parts.append(f"iteration ×{incident.job_slowdown:.2f}")
        if incident.detected_step is not None and incident.onset_step is not None:
            parts.append(f"seen at step {incident.detected_step}")
    if incident.summary:
        parts.append(incident.summary)
    if incident.stuck_s is not None and "stuck" not in incident.summary:
        parts.append(f"stuck {incident.stuck_s:.0f} s")
    return "  ".join(parts)


def blamed(ones: Sequence[Culprit]) -> str:
    """Culprits that are alike, in one line: who, what is wrong there, where in the step."""
    first, detail = ones[0], shared_detail(ones)
    what = first.cause or "cause unknown"
    if first.slowdown > 0:
        what += f" ×{span([one.slowdown for one in ones], '.1f')}"
    where = first.stage if not first.stage or first.stage.startswith("after ") else f"in {first.stage}"
    if where in what + detail:
        where = ""
    return f"{who_all(ones)}  {'; '.join(filter(None, (what, detail, where)))}"


def nobody_blamed(incident: Incident) -> str:
    """Why an incident without culprits has none."""
    missing = "; ".join(incident.missing)
    if not missing and incident.cause is not None and incident.cause.first is not None:
        if incident.cause.kind in _OF_CHECKPOINTS:
            return "no rank: it is what was saved"
        whom = {"storage": "the storage", "other": "whoever ended the job"}
        return f"no rank: it is {whom.get(incident.cause.cause_class, 'the program, or what all ranks use')}"
    return f"cause unknown; missing: {missing}" if missing else "cause unknown"


def who_waits(incident: Incident, world: int) -> str:
    """The victims: ``ranks 0-2 waiting (3 of 4)``. ``world``: number of ranks of the job; 0: not known."""
    count, folded = len(incident.victims), fold_ranks(incident.victims)
    verb = "waiting" if incident.kind in ("hang", "slow", "desync") else "lost a peer"
    if verb != "waiting" and not incident.culprits and incident.cause is not None and incident.cause.first:
        verb = "stopped by it"  # nobody else has died that they would have lost
    if len(folded) > _FOLDED:
        return f"{count} ranks {verb}"
    share = f" ({count} of {world})" if world else ""
    return f"{'rank' if count == 1 else 'ranks'} {folded} {verb}{share}"


def outlook(incident: Incident, now_unix_s: float | None) -> str:
    """What comes next where nothing was done yet: ``ends rank 0 in 29 s if nothing moves``.

    ``now_unix_s``: the time now; without it the time of day is told. Raises ValueError, OverflowError or OSError for a
    time that cannot be shown.
    """
    if not incident.next_action and incident.has_deaths:
        return "the launchers end the job, or start it again where --max-restarts allows"
    if not incident.next_action:
        return "none (watching only)"
    at_s = incident.next_unix_s
    if at_s is None:
        return incident.next_action
    if now_unix_s is None:
        when = f"at {time.strftime('%H:%M:%S', time.localtime(at_s))}"
    else:
        when = f"in {max(math.ceil(at_s - now_unix_s), 1)} s"
    return f"{incident.next_action} {when} if nothing moves"


def closing(incident: Incident) -> str:
    """How an incident ended and what it cost, or that it is open."""
    if incident.status == "open":
        return f"open{_cost(incident)} so far"
    if incident.status == "ended":
        return "over with the job, or by what came after it" + _cost(incident)
    if incident.status == "transient":
        return "gone before it was located"
    at = f"step {incident.relief_step}" if incident.relief_step is not None else "unknown step"
    if incident.kind == "slow" and incident.onset_step is not None and incident.relief_step is not None:
        return f"{at}  over after {incident.relief_step - incident.onset_step} steps{_cost(incident)}"
    if incident.recovery is not None:
        return f"{at}  training again {seconds(incident.recovery.seconds)} after it"
    if incident.stuck_s is not None:
        return f"{at}  over after {incident.stuck_s:.0f} s"
    return f"{at}  over"


def _cost(incident: Incident) -> str:
    """The cost of a slowdown for all ranks together: ``, 7.2 GPU-seconds lost, 3 GPU-seconds saved``."""
    text = ""
    if incident.lost_s is not None:
        text += f", {accelerator_time(incident.lost_s * incident.world_size)} lost"
    if incident.saved_s > 0:
        text += f", {accelerator_time(incident.saved_s * incident.world_size)} saved"
    return text


def freed_memory(recovery: Recovery) -> str:
    """The GPU memory of the rank that failed: ``GPU 3: rank 5 had 41.0 GB, 79.6 GB were free for its successor``.

    Empty where that was not told.
    """
    return "; ".join(
        f"GPU {one.gpu}: rank {one.rank} had {one.held_bytes / 1e9:.1f} GB, "
        f"{one.free_bytes / 1e9:.1f} GB were free for its successor"
        for one in recovery.gpu_memory
        if one.rank == recovery.rank
    )


def accelerator_time(value: float) -> str:
    """A time of all ranks together, given in seconds: ``7.2 GPU-hours``."""
    amount, unit = (value / 3600, "hour") if value >= 3600 else (value, "second")
    number = f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
    return f"{number} GPU-{unit}" + ("" if number == "1" else "s")


def seconds(value: float) -> str:
    """A time with three digits or, from 1000 s on, whole seconds: ``1.25 s``, ``310 ms``."""
    if value >= 99.95:
        return f"{value:.0f} s"
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"
