"""The file that Kubernetes reads a container's last message from (``terminationMessagePath`` of a pod)."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from keepstep.core.exit_codes import Category
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_nodes
from keepstep.detect.secrets import blanked

MOST_BYTES = 4096
"""Kubernetes takes so many bytes of one container."""


def message(code: int, category: Category, reason: str, folder: Path) -> str:
    """How a job ended, in one line, with the newest verdict where this node's run folder has it."""
    from keepstep.report.ended_run import newest_verdict, verdict_line  # here, because it loads msgspec

    incident, nodes = newest_verdict(folder)
    blamed = f"; nodes blamed: {fold_nodes(nodes)}" if nodes else ""
    found = f"; incident {incident}: {verdict_line(folder, incident)}" if incident else ""
    return f"keepstep: exit code {code} ({category}): {reason}{blamed}{found}"


def leave_message(path: str, text: str) -> bool:
    """Leave a line where the container's runtime has made the file, and it may be written; whether that was so."""
    data = one_line(blanked(text)).encode(errors="replace")[:MOST_BYTES]
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                os.ftruncate(file, 0)
                os.write(file, data)
                return True
        finally:
            os.close(file)
    return False
