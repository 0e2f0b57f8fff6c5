"""``keepstep status``: how far every rank is, worst first, in columns like those of ``squeue``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from keepstep.cli._parsing import Parser, print_json, reach_run
from keepstep.core.errors import RunError
from keepstep.core.events import Op, Phase
from keepstep.core.group_names import shown_name
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.traces import Run, notices_of, open_run

_STALE_S = (
    10.0  # a status file older than this, or from later than now, has to change to be the present state
)
_CHANGES_S, _FEW_NODES, _RARELY_S = (
    2.5,
    1024,
    7.0,
)  # seconds in which the file changes, up to so many nodes; with more
_LOOK_S = 0.1
_COLUMNS = ("RANKS", "NODE", "STATE", "STEP", "PHASE", "ITER", "OWN", "IDLE", "WAITS IN")
_WIDTHS = (12, 16, 9, 8, 14, 9, 9, 8, 0)

_ABOUT = "Show where a run stands. Ranks that are alike share a row; the one furthest behind comes first."


def main(argv: Sequence[str]) -> int:
    """Print the status of a run."""
    parser = Parser("status", _ABOUT)
    parser.add_run(elsewhere=True)
    parser.add_json("print the whole status as JSON")
    given = parser.parse(argv)
    reach_run(given.run)
    return show(given.run, json=given.json)


def show(run: str, *, json: bool) -> int:
    """Print where ``run`` stands."""
    opened = open_run(run)
    found = opened.status()
    if found is None:
        raise RunError(f"{run}: no status yet; the controller writes it within a second of the job's start")
    if json:
        print_json(found)
        return 0
    try:
        found, age_s = _newest(opened, found)
        lines = _lines(opened, found, age_s)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(
            f"{run}: its status is incomplete or of another version of keepstep ({type(error).__name__}: {error}); "
            f"`keepstep status {run} --json` prints what is there"
        ) from error
    for line in lines:
        print(one_line(line))
    return 0


def _newest(run: Run, found: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The present status, and how old it is, in seconds: 0 if it changes while it is looked at.

    Clocks differ and are set: only where its time says nothing against it, it is taken for the present one at once.
    """
    age_s = time.time() - float(found["unix_s"])
    if run.end() is not None or abs(age_s) < _STALE_S:
        return found, 0.0
    until_s = time.monotonic() + (_CHANGES_S if len(found["nodes"]) <= _FEW_NODES else _RARELY_S)
    while time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        now = run.status()
        if now is not None and now["unix_s"] != found["unix_s"]:
            return now, 0.0
    return found, age_s


def _lines(run: Run, found: dict[str, Any], age_s: float) -> list[str]:
    """All that is shown. Raises LookupError, TypeError, … for a status that is not as the controller writes it."""
    rows = sorted(_rows(found), key=lambda row: (row[3], -row[-1]))
    table = [_line(_COLUMNS), *(_line(row) for row in _folded(rows))]
    head = [_headline(run, found, age_s), *_by_order(run, found)]
    return [*head, *table, *notices_of(found), *_checks(found), *_checkpoints(run)]


def _by_order(run: Run, found: dict[str, Any]) -> Iterator[str]:
    """What an operator has changed in how the job is watched: nobody is to forget it."""
    since_s = float(found.get("unwatched_since_unix_s") or 0.0)
    if since_s > 0 and run.end() is None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_s))
        yield f"watching off since {since}: no verdicts, no remedies; `keepstep ctl {run.path.name} watch on`"
    thresholds: dict[str, Any] = found.get("thresholds") or {}
    if thresholds:
        yield f"thresholds by order: {', '.join(f'{name}={word}' for name, word in sorted(thresholds.items()))}"


def _checks(found: dict[str, Any]) -> Iterator[str]:
    """What the checks before the start have found, a line for each node; nodes without a finding share one."""
    checks: dict[str, Any] = found.get("checks") or {}
    well = sorted(node for node, lines in checks.items() if not lines)
    if well:
        yield f"checks: {fold_nodes(well)}: nothing found"
    for node, lines in sorted(checks.items()):
        if lines:
            yield f"checks: {node}: {'; '.join(lines)}"


def _checkpoints(run: Run) -> Iterator[str]:
    """Which steps are on storage or on their way there, and what is in their way: a line each."""
    for node, told in run.checkpoints().items():
        newest, way = told["newest"], ", ".join(map(str, told["on_the_way"]))
        on_storage = "nothing is on storage yet" if newest is None else f"step {newest} is on storage"
        if told["storage"]:
            yield f"node {node}: {told['storage']}: {on_storage}{f'; step {way} on its way' if way else ''}"
        for line in told["troubles"]:
            yield f"node {node}: {line}"


def _headline(run: Run, found: dict[str, Any], age_s: float) -> str:
    end = run.end()
    if end is not None:
        state = f"ended with exit code {end.get('exit_code')} ({end.get('reason')})"
    elif age_s < 0:
        state = f"not heard of any more, last at a time that is {-age_s:.0f} s ahead of this clock"
    else:
        state = f"last heard of {age_s:.0f} s ago" if age_s else _state(found)
    incidents = found["open_incidents"]
    still = f"open incidents {', '.join(f'{n:04d}' for n in incidents)}" if incidents else "no open incident"
    steps, most, nodes = found["newest_step"], found.get("most_nodes", 0), len(found["nodes"])
    few = f" ({nodes} of {most} nodes)" if nodes < most else ""
    told = f"{run.path.name}: {state}; world of {found['world_size']}{few}, newest step {steps}; {still}"
    told += _backed_up(found.get("backups")) + _recovered(found.get("recovery")) + _restarts(found)
    share = found["counters"].get("bytes_in", 0) / max(found["world_size"] * (steps + 1), 1)
    return f"{told}; {share:.0f} bytes a rank and step have reached the controller" if steps >= 0 else told


def _state(found: dict[str, Any]) -> str:
    """The state of the job, and since when, unless it is running."""
    since_s = float(found.get("state_s", 0.0))
    return str(found["state"]) + (
        f" for {since_s:.0f} s" if found["state"] != "running" and since_s >= 1 else ""
    )


def _restarts(found: dict[str, Any]) -> str:
    most, spares = found.get("max_restarts", 0), found.get("spares", ())
    made = found.get("restarts", found.get("incarnation", 0))
    told = f"; restart {made} of {most}" if most and made else ""
    return told + (f"; spare: {fold_nodes(spares)}" if spares else "")


def _backed_up(backups: dict[str, Any] | None) -> str:
    if not backups or (backups["step"] < 0 and not backups["trouble"]):
        return ""  # one node, no backups or no checkpoints, or no step has been backed up yet
    step = f"step {backups['step']}" if backups["step"] >= 0 else "nothing"
    return f"; backed up: {step}" + (f" ({backups['trouble']})" if backups["trouble"] else "")


def _recovered(recovery: dict[str, Any] | None) -> str:
    if not recovery:
        return ""
    after = f"after rank {recovery['rank']} {recovery['what']}"
    return f"; incarnation {recovery['incarnation']}, training again {recovery['seconds']:.2f} s {after}"


def _rows(found: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """A row for each rank: its rank number and the other columns as text, and last its idle time in seconds."""
    for node in found["nodes"]:
        for cells in node["ranks"]:
            beat = dict(zip(found["rank_columns"], cells, strict=False))
            state = "ended" if not beat["alive"] else str(node["agent"])
            if not beat.get("watched", True) and state == "ok":
                state = "unwatched"
            flying, waits_in = beat.get("in_flight"), ""
            if flying and beat["idle_s"] >= 1.0:
                waits_in = f"{_named(Op, flying['op'])} {shown_name(flying['group'])} seq {flying['seq']}"
            idle = f"{beat['idle_s']:.0f} s" if beat["idle_s"] >= 1.0 else ""
            yield (
                beat["rank"], node["node"], state, beat["step"], _named(Phase, beat["phase"]),
                f"{beat['iteration_s']:.3f} s", f"{beat['self_s']:.3f} s", idle, waits_in, beat["idle_s"],
            )  # fmt: skip


def _folded(rows: list[tuple[Any, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows as text; neighbours that differ only in rank and in the last digits of their times share one."""
    group: list[tuple[Any, ...]] = []
    for row in [*rows, None]:
        if group and (row is None or _alike(row) != _alike(group[0])):
            yield (fold_ranks(one[0] for one in group), *(str(cell) for cell in group[0][1:-1]))
            group = []
        if row is not None:
            group.append(row)


def _alike(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[1:5], row[5][:4], row[6][:4], row[7], row[8])


def _named(kind: type[Op] | type[Phase], code: int) -> str:
    try:
        known = kind(code)
    except ValueError:
        return str(code)
    return known.title.replace("its last ", "") if isinstance(known, Phase) else known.name


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
