"""A snapshot as the page and ``/api`` get it: plain values, bounded however large the job is, text left as it came."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.core.events import Phase
from keepstep.core.incident import Action, Culprit, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.view.run_snapshot import LinkRate, NodeView, RankTable, RunSnapshot
from keepstep.view.words import Answer
from keepstep.view.worst_ranks import own_time_ratios, worst_ranks

MOST_INCIDENTS = 100  # of which the page tells; older ones by /api/incidents
_MOST_OPEN = 20
_MOST_NODES = 64
_MOST_LINK_NODES = 24
_MOST_RANKS = 12
_MOST_TEXTS = 12
_MOST_EVENTS = 24
_LONGEST = 300
_PHASES = {int(phase): phase.title for phase in Phase}


def page_content(
    snapshot: RunSnapshot, run: str, usual_s: npt.NDArray[np.float32] | None = None
) -> dict[str, Any]:
    """The sections of the page. Each is sent again only when it has changed, so what often changes stands apart."""
    shown = shown_incidents(snapshot.incidents)
    return {
        "job": {**_job(snapshot), "run": cut(run or snapshot.name)},
        "clock": {"unix_s": round(snapshot.unix_s, 1), "age_s": round(snapshot.age_s, 1)},
        "ranks": _worst_ranks(snapshot, usual_s),
        "nodes": _nodes(snapshot),
        "links": _links(snapshot),
        # Open ones that a viewer goes on to show.
        "older_open": [one.number for one in shown[:-MOST_INCIDENTS]],
        "incidents": incidents_content(shown),
    }


def shown_incidents(incidents: Sequence[Incident]) -> list[Incident]:
    """The newest incidents, and of older ones those that are still open; oldest first."""
    older = [one for one in incidents[:-MOST_INCIDENTS] if one.status == "open"][-_MOST_OPEN:]
    return [*older, *incidents[-MOST_INCIDENTS:]]


def incidents_content(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Incidents as the page draws them."""
    return [_incident(one) for one in incidents]


def cut(text: str, most: int = _LONGEST) -> str:
    """The text, or its beginning where it is long. It stays hostile: a viewer shows it as text only."""
    return text if len(text) <= most else f"{text[:most]}…"


def words_content(told: Answer) -> dict[str, Any]:
    """The answer in words."""
    return {
        "mood": told.mood,
        "headline": cut(told.headline),
        "what": [told.what] if told.what else [],
        "who": _texts(told.who),
        "since": [told.since] if told.since else [],
        "done": _texts(told.done),
        "advice": [
            {"text": cut(step.text, 600), "command": cut(step.command, 600)}
            for step in told.advice[:_MOST_TEXTS]
        ],
        "notes": _texts(told.notes),
        "others": _texts(told.others),
        "incident": told.incident,
    }


def _job(snapshot: RunSnapshot) -> dict[str, Any]:
    layout, end = snapshot.layout, snapshot.end
    ranks = snapshot.ranks
    return {
        "name": cut(snapshot.name),
        "state": snapshot.state,
        "since_unix_s": round(snapshot.unix_s + snapshot.age_s - snapshot.state_s)
        if snapshot.state_s
        else None,
        "end": None
        if end is None
        else {"exit_code": end.exit_code, "category": cut(end.category), "reason": cut(end.reason)},
        "world_size": snapshot.world_size,
        "nodes": len(snapshot.nodes),
        "most_nodes": snapshot.most_nodes,
        "spares": [cut(name, 60) for name in snapshot.spares[:_MOST_TEXTS]],
        "newest_step": snapshot.newest_step,
        "incarnation": snapshot.incarnation,
        "restarts": snapshot.restarts,
        "max_restarts": snapshot.max_restarts,
        "started_unix_s": round(snapshot.started_unix_s) or None,
        "layout": None
        if layout is None
        else {"text": str(layout), "order": layout.order}
        | {name: layout.size(name) for name in ("tp", "cp", "ep", "dp", "pp")},
        "iteration_s": _rounded(_pace_s(ranks)),
        "ranks_alive": int(np.count_nonzero(ranks.is_alive)) if ranks is not None else None,
        "loss_now_steps": None if snapshot.loss_now_steps is None else max(snapshot.loss_now_steps, 0),
        "has_checkpoints": snapshot.has_checkpoints,
        "backup_trouble": cut(snapshot.backup_trouble),
        "incidents": len(snapshot.incidents),
        "open_incidents": len(snapshot.open_incidents),
        "troubles": _texts(snapshot.troubles),
        "notices": _texts(dict.fromkeys(text for node in snapshot.nodes for text in node.notices)),
    }


def _pace_s(ranks: RankTable | None) -> float | None:
    """The median duration of the newest iterations of all ranks."""
    if ranks is None:
        return None
    known = ranks.iteration_s[ranks.iteration_s > 0]
    return float(np.median(known)) if len(known) else None


def _worst_ranks(snapshot: RunSnapshot, usual_s: npt.NDArray[np.float32] | None) -> list[dict[str, Any]]:
    """The ranks to look at first."""
    ranks = snapshot.ranks
    if ranks is None or not len(ranks):
        return []
    blamed = [one.rank for case in snapshot.open_incidents for one in case.culprits if one.rank is not None]
    order = worst_ranks(ranks, own_time_ratios(ranks, usual_s), np.array(blamed, np.int64), _MOST_RANKS)
    names = {node.node_rank: node.name for node in snapshot.nodes}
    return [
        {
            "rank": int(ranks.rank[i]),
            "node": cut(names.get(int(ranks.node[i]), f"node {int(ranks.node[i])}"), 60),
            "step": int(ranks.step[i]),
            "phase": _PHASES.get(int(ranks.phase[i]), ""),
            "iteration_s": _rounded(float(ranks.iteration_s[i])),
            "self_s": _rounded(float(ranks.self_s[i])),
            "idle_s": _rounded(float(ranks.idle_s[i]), 2),
            "alive": bool(ranks.is_alive[i]),
            "watched": bool(ranks.is_watched[i]),
        }
        for i in order.tolist()
    ]


def _nodes(snapshot: RunSnapshot) -> dict[str, Any]:
    """How well the state of each node is kept; the worst nodes first where there are many."""
    newest = snapshot.newest_step
    lost = Counter(_lost_steps(node, newest) for node in snapshot.nodes)
    rows = sorted(
        snapshot.nodes,
        key=lambda node: (
            node.agent == "ok" and node.launcher == "ok",
            -_lost_steps(node, newest),
            node.node_rank,
        ),
    )[:_MOST_NODES]
    rows.sort(key=lambda node: node.node_rank)
    return {
        "count": len(snapshot.nodes),
        "lost_steps": sorted(lost.items())[-_MOST_NODES:],  # (steps lost if it died now, number of nodes)
        "silent": sum(node.agent != "ok" or node.launcher != "ok" for node in snapshot.nodes),
        "rows": [
            {
                "node": node.node_rank,
                "name": cut(node.name, 60),
                "agent": node.agent,
                "launcher": node.launcher,
                "sealed": node.sealed_step,
                "backed_up": node.backed_up_step,
                "stored": node.stored_step,
                "troubles": _texts(node.storage_troubles, 3),
            }
            for node in rows
        ],
    }


def _lost_steps(node: NodeView, newest: int) -> int:
    """Steps lost if the node died now; as many as there are where nothing of it is kept."""
    return max(newest - max(node.backed_up_step, node.stored_step), 0)


def _links(snapshot: RunSnapshot) -> dict[str, Any]:
    """The links among the nodes whose links are worst."""
    worst: dict[int, float] = {}
    for link in snapshot.links:
        badness = _badness(link)
        for node in (link.source, link.target):
            worst[node] = max(worst.get(node, 0.0), badness)
    shown = sorted(sorted(worst, key=lambda node: (-worst[node], node))[:_MOST_LINK_NODES])
    names = {node.node_rank: node.name for node in snapshot.nodes}
    return {
        "count": len(snapshot.links),
        "nodes": [[node, cut(names.get(node, f"node {node}"), 60)] for node in shown],
        "of_nodes": len(worst),
        "rows": [
            [
                link.source,
                link.target,
                _rounded(link.bytes_per_s, 2),
                _rounded(link.usual_bytes_per_s, 2),
                _rounded(link.retransmits_per_s, 2),
            ]
            for link in snapshot.links
            if link.source in shown and link.target in shown
        ],
    }


def _badness(link: LinkRate) -> float:
    """How much slower than usual a link is, 1 where as usual; it is worse where much is sent again."""
    slower = (
        link.usual_bytes_per_s / link.bytes_per_s
        if link.bytes_per_s > 0 and link.usual_bytes_per_s > 0
        else 1.0
    )
    return slower + min(link.retransmits_per_s, 1000.0) / 1000.0


def _incident(one: Incident) -> dict[str, Any]:
    recovery = one.recovery
    return {
        "number": one.number,
        "kind": one.kind,
        "status": one.status,
        "who": _who(one.culprits),
        "ranks": [c.rank for c in one.culprits if c.rank is not None][:_MOST_RANKS],
        "cause": cut(", ".join(dict.fromkeys(c.cause for c in one.culprits if c.cause)), 120),
        "confidence": one.culprits[0].confidence if one.culprits else "",
        "victims": cut(fold_ranks(one.victims), 60),
        "victim_count": len(one.victims),
        "onset_step": one.onset_step,
        "detected_step": one.detected_step,
        "relief_step": one.relief_step,
        "onset_unix_s": _rounded_time(one.onset_unix_s),
        "detected_unix_s": _rounded_time(one.detected_unix_s or None),
        "closed_unix_s": _rounded_time(one.closed_unix_s),
        "slowdown": _rounded(one.job_slowdown),
        "before_s": _rounded(one.iteration_before_s),
        "after_s": _rounded(one.iteration_after_s),
        "lost_s": _rounded(one.lost_s, 2),
        "saved_s": _rounded(one.saved_s, 2),
        "stuck_s": _rounded(one.stuck_s, 2),
        "next": cut(one.next_action),
        "events": [
            {"what": e.what, "unix_s": _rounded_time(e.unix_s), "step": e.step, "detail": cut(e.detail)}
            for e in one.events[:_MOST_EVENTS]
        ],
        "actions": [_action(action) for action in one.actions[:_MOST_TEXTS]],
        "recovery": None
        if recovery is None
        else {
            "incarnation": recovery.incarnation,
            "rank": recovery.rank,
            "what": cut(recovery.what, 60),
            "seconds": _rounded(recovery.seconds),
            "phases": [(cut(name, 60), _rounded(seconds)) for name, seconds in recovery.phases[:32]],
            "standbys": recovery.standbys,
            "survived": recovery.survived,
            "ranks": recovery.ranks,
        },
    }


def _action(action: Action) -> dict[str, Any]:
    return {
        "name": cut(action.name, 120),
        "detail": cut(action.detail),
        "unix_s": _rounded_time(action.begun_unix_s),
        "step": action.step,
        "before_s": _rounded(action.before_iteration_s),
        "expected_s": _rounded(action.expected_iteration_s),
        "measured_s": _rounded(action.measured_iteration_s),
    }


def _who(culprits: Sequence[Culprit]) -> str:
    """The culprits in a few words."""
    told: list[str] = []
    for one in culprits[:4]:
        if one.link is not None:
            told.append(f"link {one.link.nodes[0]} – {one.link.nodes[1]}")
        elif one.rank is not None:
            told.append(f"rank {one.rank}" + (f" on {one.node}" if one.node else ""))
        else:
            told.append(f"node {one.node}" if one.node else "the network")
    more = len(culprits) - len(told)
    return cut("; ".join([*told, *([f"{more} more"] if more else [])]), 200)


def _texts(texts: Iterable[str], most: int = _MOST_TEXTS) -> list[str]:
    found = [text for text in texts if text]
    return [*map(cut, found[:most]), *([f"and {len(found) - most} more"] if len(found) > most else [])]


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """To so many significant digits: what differs by less is not sent again."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _rounded_time(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 2)
