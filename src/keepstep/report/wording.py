"""Culprits, actions and times in words."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.incident import NETWORK, Action, Culprit, Incident, Recovery
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.report.folding import alike

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
