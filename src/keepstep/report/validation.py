"""The outcome of a validation, as a line of evidence and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_ranks
from keepstep.core.validation import SlowDevice, SlowLink, Validation
from keepstep.validate.judge import cause_of, link_speeds, link_transports

_NAMES = {"nccl": "NCCL", "tcp": "TCP"}
_ALIKE = "are alike"  # how a line ends where nobody stood out
_ROWS = 64  # most rows of each table


def in_a_line(outcome: Validation) -> str:
    """What was tested in a validation and who stood out, in a line."""
    tested = f"ranks {fold_ranks(outcome.ranks)} held {outcome.held_s:.1f} s"
    transports = Counter(link_transports(outcome.figures).values())
    links = " and ".join(f"{count} links over {_NAMES[name]}" for name, count in sorted(transports.items()))
    found = [f"rank {slow.figure.rank} {of_device(slow)}" for slow in outcome.devices[:2]]
    found += [f"link {slow.source} → {slow.target} {of_link(slow)}" for slow in outcome.links[:2]]
    devices = len({one.rank for rank in outcome.figures for one in rank.devices})
    alike = f"{devices} devices and {links or '0 links'} {_ALIKE}" if devices or links else "no figures came"
    ended = "; ".join(found) or alike
    return f"validation ({tested}): {ended}"


def clears(line: str) -> bool:
    """Whether nobody stood out in a validation. ``line``: as `in_a_line` tells it."""
    return line.endswith(_ALIKE)


def of_device(slow: SlowDevice) -> str:
    """A slow device in words: ``fp32 0.9 TFLOP/s against 1.8 of its peers``."""
    one = slow.figure
    figure = f"{one.test} {_short(one.value)} {one.unit}".rstrip()
    told = f"{figure} against {_short(slow.median)} of its peers"
    if cause_of(slow) == "cpu quota":
        told += f", cpu quota: off its core {one.limited:.0%} of its time"
    return told


def of_link(slow: SlowLink) -> str:
    """A slow link in words: ``120 MB/s against 900 of the others``, or that nothing came."""
    if slow.bytes_per_s == 0:
        return (
            f"nothing came, {_short(slow.median / 1e6)} MB/s over the others"
            if slow.median
            else "nothing came"
        )
    return f"{_short(slow.bytes_per_s / 1e6)} MB/s against {_short(slow.median / 1e6)} of the others"


def table(outcome: Validation, nodes: Mapping[int, str]) -> str:
    """A table of all devices and links, the slowest first; at most 64 rows of each."""
    slow_ranks = {slow.figure.rank for slow in outcome.devices}
    slow_pairs = {(slow.source, slow.target) for slow in outcome.links}
    lines = [in_a_line(outcome), "", f"{'RANK':<8}{'NODE':<18}{'TEST':<12}{'FIGURE':<18}"]
    figures = sorted(
        (one for rank in outcome.figures for one in rank.devices), key=lambda one: (one.test, one.value)
    )
    for one in figures[:_ROWS]:
        mark = "slow" if one.rank in slow_ranks else ""
        shown = f"{_short(one.value)} {one.unit}"
        lines.append(f"{one.rank:<8}{nodes.get(one.rank, ''):<18}{one.test:<12}{shown:<18}{mark}".rstrip())
    speeds = sorted(link_speeds(outcome.figures).items(), key=lambda item: item[1])
    transports = link_transports(outcome.figures)
    if speeds:
        lines += ["", f"{'LINK':<14}{'NODES':<36}{'OVER':<6}{'MB/s':<12}"]
    for (source, target), speed in speeds[:_ROWS]:
        mark = "slow" if (source, target) in slow_pairs else ""
        over = _NAMES[transports[source, target]]
        between = f"{nodes.get(source, '')} → {nodes.get(target, '')}"
        lines.append(f"{f'{source} → {target}':<14}{between:<36}{over:<6}{speed / 1e6:<12.1f}{mark}".rstrip())
    hidden = max(len(figures) - _ROWS, 0) + max(len(speeds) - _ROWS, 0)
    lines += [f"and {hidden} more; all of them with --json"] if hidden else []
    lines += [f"missing: {text}" for text in outcome.missing[:_ROWS]]
    return "\n".join(one_line(line) for line in lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
