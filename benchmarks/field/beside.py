"""What torch's analyser of flight-recorder dumps (``torchfrtrace``) finds on the same dumps, and whether we tell it.

It compares the calls of ranks one by one, and says of a call which rank's differs (*culprit*) or which ranks do not
take part (*missing*). A missing rank may be behind, or right where the others made a call too many: a verdict that
names one of either side tells the finding. Only the first finding of each group counts, because the others follow from
it, and none about a message, whose two ends it takes for all ranks of the group.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.field.running import analyzed

_TIMEOUT_S = 300.0
_PREFIX = re.compile(r"(.*?)\d+$")


@dataclass(frozen=True)
class Finding:
    """One finding: its group and call, the ranks that it names, and the other members of the group."""

    group: str
    call: str
    ranks: frozenset[int]
    others: frozenset[int]


def findings(folder: Path) -> tuple[list[Finding], str]:
    """The first finding of each group, and why there are none where the tool fails."""
    names = {match[1] for path in folder.iterdir() if (match := _PREFIX.fullmatch(path.name))}
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    command += ["--allow-incomplete-ranks", "-p", next(iter(names), "dump_")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )
    said = ended.stdout + ended.stderr
    if ended.returncode:
        return [], said.strip().rpartition("\n")[2][:120]
    first: dict[str, Finding] = {}
    for found in _parsed(said):
        first.setdefault(found.group, found)
    return list(first.values()), ""


def _parsed(said: str) -> Iterator[Finding]:
    """The tool's blocks: a line that begins one, then lines of ``name: value``."""
    for block in re.split(r"^(?=Not all ranks joining|Collective sequence number)", said, flags=re.MULTILINE)[
        1:
    ]:
        values = dict(re.findall(r"^([a-z ]+): (.*)$", block, flags=re.MULTILINE))
        call = values.get("collective", "")
        expected = _ranks(values.get("expected ranks", ""))
        culprits = re.findall(r"Culprit rank (\d+)", values.get("error msg", ""))
        named = frozenset(map(int, culprits)) or _ranks(values.get("missing ranks", ""))
        if named and not re.search(r":(send|recv) ", call):
            yield Finding(
                values.get("group info", ""), call, named, expected - named if not culprits else frozenset()
            )


def _ranks(listed: str) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"\d+", listed)))


def untold(folder: Path) -> tuple[int, list[str], str]:
    """How many findings the tool has, those that our verdict does not tell, and why it has none where it fails."""
    found, failed = findings(folder)
    try:
        incidents = json.loads(analyzed(folder, "--json").stdout).get("incidents", [])
    except json.JSONDecodeError:
        incidents = []
    ours = {culprit["rank"] for incident in incidents for culprit in incident.get("culprits", [])}
    left = [
        f"{one.group} {one.call}: ranks {sorted(one.ranks)}, ours {sorted(ours)}"
        for one in found
        if not ours & one.ranks and not ours & one.others
    ]
    return len(found), left, failed
