"""Is the port free that was asked for?"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from keepstep.launch.node.checks import Found, Subject


def look(subject: Subject) -> Iterator[Found]:
    """Find whether the port that was asked for cannot be used."""
    if not subject.port:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", subject.port))
        except OSError as error:
            yield Found(
                f"node {subject.node}: port {subject.port} cannot be used: {error.strerror}; "
                "give another --master-port, or none for any free one",
                unfit=True,
            )
