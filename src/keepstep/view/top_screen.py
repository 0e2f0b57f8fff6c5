"""What ``keepstep top`` shows, as lines of styled text: pure, for any size of terminal."""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from keepstep.core.events import phase_title
from keepstep.core.log_lines import one_line
from keepstep.report.wording import closing, seconds
from keepstep.view.incident_words import Answer, Mood, for_how_long, headline
from keepstep.view.run_snapshot import LinkRate, NodeView, RunSnapshot
from keepstep.view.terminal_text import columns_of, fitted, in_ascii, wrapped
from keepstep.view.worst_ranks import own_time_ratios, worst_ranks

Style = Literal["", "bar", "head", "bad", "warn", "good", "dim", "bold"]
"""Of a piece of a line; without colours each of them is still told by the words."""

LEAST_WIDTH, LEAST_HEIGHT = 40, 8
_TALL = 40  # lines from which a screen shows more of everything
_LABEL = 6  # columns of the labels at the left
_MOST_WIDTH = 512
_MOODS: dict[Mood, Style] = {
    "healthy": "good",
    "changing": "warn",
    "trouble": "bad",
    "unknown": "bad",
    "ended": "good",
    "failed": "bad",
}
_BARS, _BARS_IN_ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_HEAT, _HEAT_IN_ASCII = " ·░▒▓█", " .:=%#"
_HEAT_FROM = (0.0, 1.15, 1.5, 2.0, 3.0)  # ratios to the usual own time from which the next sign is shown
_LEAST_SCALE = 1.25  # a pace that varies by less looks flat
_OF_SCALE = 0.97  # share of the paces that the scale is made for
_SLOW, _VERY_SLOW = 1.15, 1.5  # ratios to the usual own time from which a rank is told by a colour


@dataclass(frozen=True, slots=True)
class Heat:
    """Own times against the usual ones: rows of ranks, columns of steps, NaN where there is no sample."""

    labels: tuple[str, ...]  # of each row
    ratios: npt.NDArray[np.float32]
    first_step: int = 0
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """All that a screen is made of."""

    snapshot: RunSnapshot
    answer: Answer
    pace_s: Sequence[float] = ()  # duration of iterations, oldest first; NaN where it is not known
    lost: float | None = None  # share of the newest iterations that is lost, 0 to 1
    waiting: float | None = None  # share that ranks wait, 0 to 1
    usual_s: npt.NDArray[np.float32] | None = None  # usual own time of each rank
    heat: Heat | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a line in one style."""

    text: str
    style: Style = ""


Line = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Screen:
    """Lines that fill a terminal, and how far they can be scrolled."""

    lines: tuple[Line, ...]
    scroll: int  # that was in force: no more than ``most_scroll``
    most_scroll: int


def screen(look: Look, width: int, height: int, scroll: int = 0, *, ascii_only: bool = False) -> Screen:
    """The screen of exactly ``height`` lines, each of at most ``width`` columns.

    ``scroll``: how many lines of the middle part are above the upper edge.
    """
    width = min(width, _MOST_WIDTH)
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        told = f"at least {LEAST_WIDTH} x {LEAST_HEIGHT} is needed; q quits"
        lines: list[Line] = [(Piece(line),) for line in wrapped(told, max(width, 1), max(height, 1))]
        return Screen(_filled(lines, height), 0, 0)
    body = list(_body(look, width, height, ascii_only))
    room = height - 2
    most = max(len(body) - room, 0)
    scroll = min(max(scroll, 0), most)
    shown = _filled(body[scroll : scroll + room], room)
    last = min(scroll + room, len(body))
    where = f" {scroll + 1}-{last} of {len(body)} " if most else ""
    footer = " q quits  j k and arrows scroll"[: width - len(where)]
    lines = [
        _head_bar(look.snapshot, width),
        *shown,
        (Piece(footer + where.rjust(width - len(footer)), "bar"),),
    ]
    if ascii_only:
        lines = [tuple(Piece(in_ascii(piece.text), piece.style) for piece in line) for line in lines]
        lines = [_cut_pieces(line, width) for line in lines]
    return Screen(tuple(lines), scroll, most)


def _filled(lines: Sequence[Line], height: int) -> tuple[Line, ...]:
    return (*lines[:height], *[()] * max(height - len(lines), 0))


def _cut_pieces(line: Line, width: int) -> Line:
    """A line whose likeness in ASCII may be longer than it was."""
    found: list[Piece] = []
    for piece in line:
        text = piece.text[:width]
        found.append(Piece(text, piece.style))
        width -= len(text)
    return tuple(found)


def _head_bar(snapshot: RunSnapshot, width: int) -> Line:
    parts = [f"keepstep  {fitted(snapshot.name, min(columns_of(one_line(snapshot.name)), width // 3))}"]
    state = snapshot.state or "no status yet"
    since_s = snapshot.state_s
    if state == "running":  # rather since the job's start than since the last restart
        since_s = snapshot.unix_s - snapshot.started_unix_s if snapshot.started_unix_s else 0.0
    parts.append(state + (f" for {for_how_long(since_s)}" if since_s >= 1 else ""))
    if snapshot.newest_step >= 0:
        parts.append(f"step {snapshot.newest_step}")
    if snapshot.world_size:
        nodes = len(snapshot.nodes)
        few = f" of {snapshot.most_nodes}" if nodes < snapshot.most_nodes else ""
        parts.append(f"{snapshot.world_size} ranks, {nodes}{few} node{'s' * (nodes != 1)}")
    if snapshot.restarts:
        parts.append(f"restart {snapshot.restarts} of {snapshot.max_restarts}")
    try:
        clock = time.strftime("%H:%M:%S ", time.localtime(snapshot.unix_s))
    except (ValueError, OverflowError, OSError):
        clock = ""
    left = fitted(f" {'   '.join(map(one_line, parts))}", width - len(clock) - 1)
    return (Piece(f"{left} {clock}", "bar"),)


def _body(look: Look, width: int, height: int, ascii_only: bool) -> Iterator[Line]:
    """The middle part, which can be scrolled; on a tall screen with more of everything."""
    is_tall = height >= _TALL
    yield from _words(look.answer, width, is_tall)
    yield from _pace(look, width, ascii_only)
    yield from _checkpoints(look.snapshot, width, is_tall)
    yield from _links(look.snapshot, width, 8 if is_tall else 2)
    if is_tall and look.heat is not None and len(look.heat.labels):
        yield from _heat(look.heat, width, ascii_only)
    yield from _ranks(look, width)
    yield from _incidents(look.snapshot, width)


def _words(answer: Answer, width: int, is_tall: bool) -> Iterator[Line]:
    """The answer in words. A low screen leaves room for the rest: the report has all of it."""
    most = {"who": 8, "done": 6, "do": 8, "note": 8, "also": 8} if is_tall else {"who": 1, "do": 3}
    shown: dict[str, int] = {}
    label = ""
    for given, text in answer.lines:
        if text is answer.headline and not shown:
            shown[""] = 1
            yield from (
                (Piece(line, _MOODS[answer.mood]), Piece(""))
                for line in wrapped(text, width, 2 + 2 * is_tall)
            )
            continue
        label = given or label
        shown[label] = shown.get(label, 0) + 1
        if shown[label] > most.get(label, 1) or (label == "what" and not is_tall):
            continue
        # A command's purpose may be cut, but not a sentence.
        pieces = wrapped(text, width - _LABEL, 3 if is_tall else 1 if "  # " in text else 2)
        for place, piece in enumerate(pieces):
            first = not place and (given or shown[label] == 1)
            yield (Piece(f"{label if first else '':<{_LABEL}}", "dim"), Piece(piece))


def _pace(look: Look, width: int, ascii_only: bool) -> Iterator[Line]:
    """The newest iteration time, what is lost, and how the pace went: the slower, the higher."""
    known = [value for value in look.pace_s if not math.isnan(value)]
    if not known:
        return
    now = known[-1]
    parts = [seconds(now)]
    goes_on = look.snapshot.end is None
    if goes_on and look.lost is not None and look.lost >= 0.005:
        parts.append(f"{look.lost:.0%} lost")
    if goes_on and look.waiting is not None:
        parts.append(f"{look.waiting:.0%} waiting")
    told = ", ".join(parts) + " "
    room = max(width - _LABEL - len(told), 8)
    bars = _bars(look.pace_s, room, _BARS_IN_ASCII if ascii_only else _BARS)
    yield (
        Piece(f"{'pace':<{_LABEL}}", "dim"),
        Piece(told, "bold"),
        Piece(bars[: width - _LABEL - len(told)]),
    )


def _bars(values: Sequence[float], room: int, signs: str) -> str:
    """A sign for each value, or for the longest of neighbours where there are more than fit; a space for none."""
    together = -(-len(values) // room)
    parts = [values[place : place + together] for place in range(0, len(values), together)]
    shown = [max((value for value in part if not math.isnan(value)), default=math.nan) for part in parts]
    known = sorted(value for value in shown if not math.isnan(value))
    # The few longest share the highest sign: a first step that compiles would else make all others look alike.
    low, high = known[0], max(known[int(_OF_SCALE * (len(known) - 1))], _LEAST_SCALE * known[0], 1e-9)
    scale = len(signs) / max(high - low, 1e-9)
    return "".join(
        " " if math.isnan(value) else signs[min(int((value - low) * scale), len(signs) - 1)]
        for value in shown
    )


def _checkpoints(snapshot: RunSnapshot, width: int, is_tall: bool) -> Iterator[Line]:
    """Steps that would be lost if the worst placed node died now, and where that node stands."""
    loss = snapshot.loss_now_steps
    if loss is None or not snapshot.nodes:
        yield (
            Piece(f"{'saved':<{_LABEL}}", "dim"),
            Piece(fitted("no checkpoints are known", width - _LABEL), "dim"),
        )
        return
    nodes = sorted(snapshot.nodes, key=lambda node: (max(node.backed_up_step, node.stored_step), node.name))
    style: Style = "warn" if loss > 100 or nodes[0].storage_troubles else "bold"
    told = f"loss now: {loss} step{'s' * (loss != 1)}"
    rest = _kept(nodes[0])
    yield (
        Piece(f"{'saved':<{_LABEL}}", "dim"),
        Piece(told, style),
        Piece(fitted(f"   {rest}", width - _LABEL - len(told))),
    )
    for node in nodes[1:8] if is_tall else ():
        yield (
            Piece(" " * (_LABEL + len(told) + 3)),
            Piece(fitted(_kept(node), width - _LABEL - len(told) - 3)),
        )


def _kept(node: NodeView) -> str:
    steps = (("sealed", node.sealed_step), ("backed up", node.backed_up_step), ("stored", node.stored_step))
    kept = ", ".join(f"{word} {step}" for word, step in steps if step >= 0) or "nothing kept"
    trouble = f"; {node.storage_troubles[0]}" if node.storage_troubles else ""
    return f"{one_line(node.name)}: {kept}{trouble}"


def _links(snapshot: RunSnapshot, width: int, most: int) -> Iterator[Line]:
    """The links that are furthest below their usual rate."""
    names = {node.node_rank: node.name for node in snapshot.nodes}

    def rate(link: LinkRate) -> tuple[float, float]:
        share = link.bytes_per_s / link.usual_bytes_per_s if link.usual_bytes_per_s > 0 else 1.0
        return share, -link.retransmits_per_s

    worst = sorted(snapshot.links, key=rate)[:most]
    for place, link in enumerate(worst):
        ends = [one_line(names.get(end, f"node {end}")) for end in (link.source, link.target)]
        told = f"{ends[0]} → {ends[1]}  {_rate(link.bytes_per_s)}"
        share, _ = rate(link)
        if link.usual_bytes_per_s > 0:
            told += f", {share:.0%} of its usual {_rate(link.usual_bytes_per_s)}"
        if link.retransmits_per_s >= 0.5:
            told += f", {link.retransmits_per_s:.0f} retransmits/s"
        style: Style = "bad" if share < 0.5 else "warn" if share < 0.8 else ""
        label = "" if place else "links"
        yield (Piece(f"{label:<{_LABEL}}", "dim"), Piece(fitted(told, width - _LABEL), style))


def _rate(bytes_per_s: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"


def _heat(heat: Heat, width: int, ascii_only: bool) -> Iterator[Line]:
    """Ranks by steps: the darker, the longer a rank took compared with what is usual for it."""
    signs = _HEAT_IN_ASCII if ascii_only else _HEAT
    label = min(max(map(columns_of, map(one_line, heat.labels))), 16)
    room = max(width - label - 1, 1)
    ratios = heat.ratios[:, -room:]
    told = (
        f"own times of ranks, steps {heat.first_step} to {heat.last_step}: the darker, the slower than usual"
    )
    yield (Piece(fitted(told, width), "head"),)
    for name, row in zip(heat.labels, ratios, strict=False):
        codes = [0 if math.isnan(ratio) else bisect(_HEAT_FROM, ratio) for ratio in row.tolist()]
        pieces = [Piece(fitted(name, label) + " ", "dim")]
        for code, alike in groupby(codes):
            style: Style = "bad" if code >= 4 else "warn" if code >= 2 else "dim"
            pieces.append(Piece(signs[code] * len(list(alike)), style))
        yield tuple(pieces)


def _ranks(look: Look, width: int) -> Iterator[Line]:
    """The worst ranks first: those to blame, dead, behind, waiting for too long, slower than usual."""
    table = look.snapshot.ranks
    if table is None or not len(table):
        return
    wide = width >= 110
    widths = (6, 28 if wide else 11, 9, 8, 20 if wide else 10, 7, 7, 7, 6)
    heads = ("RANK", "NODE", "STATE", "STEP", "PHASE", "ITER", "OWN", "×USUAL", "IDLE")
    right = (True, False, False, True, False, True, True, True, True)
    yield (Piece(fitted(_row(heads, widths, right), width), "head"),)
    names = {node.node_rank: node for node in look.snapshot.nodes}
    usual = own_time_ratios(table, look.usual_s)
    blamed = np.array(
        [
            one.rank
            for found in look.snapshot.open_incidents
            for one in found.culprits
            if one.rank is not None
        ],
        np.int64,
    )
    most = 200 if len(table) <= 4096 else 100
    for place in worst_ranks(table, usual, blamed, most).tolist():
        node = names.get(int(table.node[place]))
        ratio = float(usual[place])
        is_alive = bool(table.is_alive[place])
        state = "ended" if not is_alive else node.agent if node is not None else "none"
        if state == "ok" and not table.is_watched[place]:
            state = "unwatched"
        idle = float(table.idle_s[place])
        cells = (
            str(int(table.rank[place])),
            node.name if node is not None else f"node {int(table.node[place])}",
            state,
            str(int(table.step[place])) if table.step[place] >= 0 else "",
            phase_title(int(table.phase[place])) or str(int(table.phase[place])),
            _time(float(table.iteration_s[place])),
            _time(float(table.self_s[place])),
            f"{ratio:.2f}" if np.isfinite(ratio) else "",
            for_how_long(idle) if 1.0 <= idle < 1e9 else "",
        )
        is_blamed = bool((blamed == table.rank[place]).any())
        style: Style = "bad" if is_blamed or state not in ("ok", "unwatched") else ""
        if not style and (ratio >= _VERY_SLOW or table.overdue_s[place] > 0):
            style = "bad" if ratio >= _VERY_SLOW else "warn"
        elif not style and (ratio >= _SLOW or state == "unwatched"):
            style = "warn"
        yield (Piece(fitted(_row(cells, widths, right), width), style),)
    if most < len(table):
        yield (Piece(fitted(f"{len(table) - most} more ranks: keepstep status", width), "dim"),)


def _time(value: float) -> str:
    return seconds(value) if 0 < value < 1e9 else ""


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    columns = zip(cells, widths, right, strict=True)
    return " ".join(fitted(cell, width, right=is_right) for cell, width, is_right in columns)


def _incidents(snapshot: RunSnapshot, width: int) -> Iterator[Line]:
    """The newest incidents that are over."""
    over = [one for one in snapshot.incidents if one.status != "open"]
    if not over:
        return
    yield (Piece(fitted(f"incidents that are over: {len(over)}, the newest first", width), "head"),)
    for one in over[:-21:-1]:
        told = f"{one.number:04d}  {headline(one).removeprefix('over: ')}; {closing(one).replace('  ', ', ')}"
        yield (Piece(fitted(told, width)),)
