"""Tells errors about another process, which has gone or did not come, from errors about what went wrong in this one.

Torch's libraries speak of lost peers and of timeouts in words of their own, which are taken at their word. Words that
anybody uses ("Connection reset by peer") count only where torch may have said them: it raises its lost connections as
``RuntimeError`` or ``Dist…Error``. Errors of other types, and those that name a service, are about a connection of the
rank's own: to its data, to a store, to a database.
"""

from __future__ import annotations

import re

_MOST_NAMED = 4096  # ranks taken from one message


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


# A thread of torch's that passes an error on: what counts is that error.
_PASSED_ON = re.compile(r"terminated with exception: (?=\S)", re.IGNORECASE)

# Torch's watchdog takes the communicator away that it has aborted, while another thread may be about to use it.
_NOT_ABORTED = r"(?![\s\S]*comm argument is null)"

_OWN = _words(
    r"\b(cuda|hip|xpu)( runtime| driver)? (error|failure)",
    r"uncorrectable|illegal memory access|device-side assert",
    rf"(invalid (usage|argument)|nccl_?invalid){_NOT_ABORTED}|duplicate gpu",
    r"no space left|out of memory|cannot allocate|bad_alloc|too many open files|permission denied|disk quota",
    r"already in use|eaddrinuse|fail(ed)? to (bind|listen)|server (could not|cannot) be initialized",
    r"failed to extend|dataloader worker",
)

_TIMED_OUT = _words(
    r"operation timed out!|operation to complete|timeout caused pair closure|collective operation timeout",
    r"timed out (waiting|initializing|in monitored|after \d+ seconds)|timeout waiting for key",
    r"\b(wait|socket|read|write|connect) timeout\b|has timed out after|rpc ran for more than",
    r"failed to pass monitored ?barrier|joined collective|join collective",
    r"operations have failed or timed out|to avoid data inconsistency|watchdog got stuck|heartbeat ?monitor",
)

# Words of Gloo, of torch's store and groups, and of NCCL and its kin.
_OF_RANKS = _words(
    r"gloo/transport/(?!tcp/(device|listener|address)\.)|connectfullmesh",
    r"monitored ?barrier|store[ -]based barrier|waiting on barrier on",
    r"socketimpl\(|recvvalue|sendbytes|recvbytes|tcpstore|store->get|dist(network|store)error|client socket has",
    r"watchdog (caught|got stuck|thread)|collective operation timeout|heartbeat ?monitor",
    r"operations have failed or timed out|to avoid data inconsistency|rpc ran for more than",
    r"ccl ?remote ?error|remote process exited|got completion from peer",
    r"ccl communicator was aborted|comm argument is null",
    r"unhandled system error|ccl ?system ?error",
    r"operation timed out!|\d ?ms for \w+ operation to complete|timeout caused pair closure",
    r"wait timeout after|timeout waiting for key|seconds waiting for clients",
)

# Services and Python's own connections: no rank of the job is at their other end.
_OUTSIDE = _words(
    r"\[errno|\(\d+, ['\"]|\b(connection\w*|brokenpipe|timeout|os)error\(",
    r"\b(?!tcp:|env:)[a-z][a-z0-9+.-]*://",
    r"\bs3\b|\bbucket\b|https?(s?connection|\b)|urllib3|boto|aiohttp|httpx|fsspec|gcsfs|adlfs|azure",
    r"psycopg|postgres|mysql|sqlalchemy|redis|etcd|grpc|zookeeper|kazoo|kafka|mongo|cassandra|clickhouse",
    r"hdfs|\bnfs\b|\bsftp\b|paramiko|wandb|mlflow|huggingface|\bray\b",
)

_OF_ANYBODY = _words(
    r"connection (was )?(likely )?(closed|reset|refused|aborted|lost|timed out)|closed by (the )?(remote )?peer",
    r"peer (has )?closed|remote peer|broken pipe|socket (was |unexpectedly )?closed|no route to host",
    r"network is unreachable|timed out (waiting|initializing)|socket timeout",
)

# What `keepstep.checkpoint` raises where another rank says why nothing is restored.
_SAID_BY_ANOTHER = re.compile(r"\s*(?:[A-Za-z_]\w*\.)*SaidByAnother: ")

_WRONG = _words(
    r"\b(error|fatal|fail(ed|ure|s)?|abort(ed|ing)?|exception|terminate called|assert\w*|cannot|unable)\b"
)
_TYPE = re.compile(r"\s*([A-Za-z_][\w.:]*(?:Error|Exception|Timeout|Disconnected|NotMet)): ")
_TORCHS = re.compile(r"(^|[.:])(RuntimeError|Dist\w*Error)$|::")

_RANKS = r"\d{1,7}(?:, ?\d{1,7})*"
_NAMED = (
    re.compile(rf"\branks? ({_RANKS}) failed to pass", re.IGNORECASE),
    re.compile(rf"missing[_ ]ranks(?:=\[|: )({_RANKS})\]", re.IGNORECASE),
    re.compile(r"/task:(\d{1,7}) heartbeat timeout", re.IGNORECASE),
    re.compile(rf"\[({_RANKS})\] finished collective #\d+, but didn't join", re.IGNORECASE),
)


def tells_of_another(message: str) -> bool:
    """Whether an error's message is about a lost connection or a wait in vain, hence about another process.

    ``message``: with or without the type of the error in front.
    """
    said = _cause(message)
    if _SAID_BY_ANOTHER.match(said):
        return True
    if _OWN.search(said):
        return False
    if _OF_RANKS.search(said):
        return True
    kind = _TYPE.match(said)
    if (kind and not _TORCHS.search(kind[1])) or _OUTSIDE.search(said):
        return False
    return _OF_ANYBODY.search(said) is not None


def tells_of_a_timeout(message: str) -> bool:
    """Whether an error `tells_of_another` that did not come in time; one that is gone closes its connections."""
    return tells_of_another(message) and _TIMED_OUT.search(_cause(message)) is not None


def names_an_error(message: str) -> bool:
    """Whether a message names what went wrong; a last line such as "shutting down" does not."""
    return (
        _TYPE.match(message) is not None
        or _OWN.search(message) is not None
        or _WRONG.search(message) is not None
    )


def is_of_another_type(message: str) -> bool:
    """Whether a message begins with the type of an error that torch does not raise for what happens to a collective."""
    kind = _TYPE.match(message)
    return kind is not None and not _TORCHS.search(kind[1])


def ranks_named(message: str) -> tuple[int, ...]:
    """The ranks that an error names as the ones that did not come, in order; empty where it names none.

    Torch names them in ``monitored_barrier``, in the barrier of its elastic launcher, and in NCCL's desync report.
    """
    found = {
        int(rank) for pattern in _NAMED for ranks in pattern.findall(message) for rank in ranks.split(",")
    }
    return tuple(sorted(found))[:_MOST_NAMED]


def _cause(message: str) -> str:
    return _PASSED_ON.split(message)[-1]
