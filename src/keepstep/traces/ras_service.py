"""Asks the RAS service of a running NCCL job for its status.

A query can crash a job that is making or ending communicators, with NCCL 2.26 (NVIDIA/nccl#1669, #1718) and up to
2.29.7 (#2346): ask when a job stands still, not over and over.
"""

from __future__ import annotations

import socket
import time

from keepstep.core.errors import TraceError
from keepstep.traces.ras import MOST_BYTES

# Older than 2.28.7, NCCL does not know the second line, says so, and answers in text.
_QUERY = b"CLIENT PROTOCOL 2\nSET FORMAT json\nVERBOSE STATUS\n"
_PIECE_BYTES = 1 << 20


def ask(host: str, port: int, patience_s: float = 30.0) -> bytes:
    """What RAS answers at this address, by default ``localhost:28028`` of any node of a job.

    Args:
        patience_s: seconds in which the whole answer must have come. NCCL itself waits 5 s for each process.

    Raises:
        TraceError: nobody answers, the answer does not end in time, or it is larger than ``MOST_BYTES``.
    """
    where = f"{host}:{port}"
    until_s = time.monotonic() + patience_s
    pieces: list[bytes] = []
    size = 0
    try:
        with socket.create_connection((host, port), timeout=patience_s) as connection:
            connection.sendall(_QUERY)
            while size <= MOST_BYTES:
                connection.settimeout(max(until_s - time.monotonic(), 1e-3))
                piece = connection.recv(_PIECE_BYTES)
                if not piece:
                    return b"".join(pieces)
                size += len(piece)
                pieces.append(piece)
                if time.monotonic() > until_s:
                    raise TimeoutError
    except TimeoutError as error:
        told = f"{size} bytes came" if size else "nothing came"
        raise TraceError(
            f"{where}: RAS does not end its answer within {patience_s:.0f} s ({told}); ask on another node of the job"
        ) from error
    except OSError as error:
        raise TraceError(
            f"{where}: no RAS there: {error.strerror or error}; NCCL from 2.24 on answers at localhost:28028 of each "
            "node (NCCL_RAS_ADDR), unless NCCL_RAS_ENABLE=0"
        ) from error
    raise TraceError(f"{where}: answers with more than {MOST_BYTES >> 20} MiB; it is no RAS")
