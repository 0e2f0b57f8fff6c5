"""Culprits, actions and times in words."""

from __future__ import annotations

from keepstep.core.incident import Action, Culprit, Incident


def who(culprit: Culprit) -> str:
    """A culprit's name: its rank, link or node."""
    if culprit.link is not None:
        (first, second), (here, there) = culprit.link.ranks, culprit.link.nodes
        return f"link {here} ↔ {there}  (rank {first} ↔ {second})"
    if culprit.rank is not None:
        return f"rank {culprit.rank}  {culprit.node}".rstrip()
    return f"node {culprit.node}" if culprit.node else "somebody"


def named(incident: Incident) -> str:
    """The first culprit of an incident and the confidence in it, in a few words."""
    if not incident.culprits:
        return "cause unknown"
    first, others = incident.culprits[0], len(incident.culprits) - 1
    parts = [who(first).replace("  ", " ") + (f" and {others} more" if others else ""), first.cause]
    return ", ".join(filter(None, (*parts, f"confidence {first.confidence}")))


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
