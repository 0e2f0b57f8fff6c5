"""How a job stands, for a program outside of it that only looks."""

from __future__ import annotations

from keepstep.control.controller import Controller
from keepstep.control.membership.transitions import JobState
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.launch.schedulers.node_faults import faults_of
from keepstep.report.verdict import render
from keepstep.wire.messages import FaultyNode, Moved, Overview
from keepstep.wire.messages.looking import MOST_FAULTS

_MOST_TEXT = 200


def elsewhere(controller: Controller) -> Moved | None:
    """Where the job's controller is, where the job has come to another one than this."""
    return controller.placing.elsewhere if not controller.rendezvous.placements else None


def answer_to_look(controller: Controller, now_s: float) -> Overview | Moved:
    """How the job stands, or `elsewhere`."""
    if (moved := elsewhere(controller)) is not None:
        return moved
    rendezvous = controller.rendezvous
    recent = list(controller.cases.desk.register.recent.values())
    members = {launcher.node for launcher in rendezvous.placements}
    state = controller.state(now_s)
    playing = members if state is JobState.RUNNING else set[str]()
    faults: list[FaultyNode] = []
    for found in reversed(recent):
        own = [
            FaultyNode(
                one.node, one.kind, one.incident, found.detected_unix_s, one_line(one.text)[:_MOST_TEXT]
            )
            for one in faults_of(found, members)
            if one.kind != "told" and not (one.kind == "lost" and one.node in playing)
        ]
        # An incident is told as a whole or not at all, as it matters how many nodes it blames.
        if len(own) + len(faults) <= MOST_FAULTS:
            faults = own + faults
    return Overview(
        state=state.value,
        nodes=len(rendezvous.placements),
        spares=len(rendezvous.spares),
        step=controller.cluster.newest_step,
        incarnation=controller.reforming.incarnation,
        verdict=_headline(recent[-1]) if recent else "",
        faults=tuple(faults),
    )


def _headline(incident: Incident) -> str:
    first = " ".join(render(incident).partition("\n")[0].split())
    return one_line(f"incident {incident.number:04d}: {first}")[:_MOST_TEXT]
