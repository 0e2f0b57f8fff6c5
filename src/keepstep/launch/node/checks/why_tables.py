"""The check of the tables that ``[why] tables`` of the configuration names: what is left out of them, and why."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.launch.node.checks import Found, Subject


def look(subject: Subject) -> Iterator[Found]:
    """Find tables that cannot be used; only before the first start."""
    if not subject.fresh:
        return
    # Imported here so that a restart does not wait for it.
    from keepstep.detect.own_tables import own_rows

    for line in own_rows()[1]:
        yield Found(f"node {subject.node}: {line}")
