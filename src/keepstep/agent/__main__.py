"""``python -m keepstep.agent``, with the agent's arguments, or with ``--wait`` to get them later.

With ``--wait`` the process imports what it needs, prints a line on stdout, and waits for a line on stdin with the
arguments and the path of a file for its output: ``{"words": […], "log": PATH}``.
"""

import json
import logging
import os
import sys
from pathlib import Path


def main() -> int:
    # Must be set before numpy is imported, whose linear algebra would start threads that the agent does not need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from keepstep.agent.arguments import parse
    from keepstep.agent.program import serve
    from keepstep.core.errors import KeepstepError

    words = sys.argv[1:]
    if words == ["--wait"]:
        print("waits", flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0  # the launcher has closed the pipe, because it needs no agent
        words = _told(line)
    try:
        arguments = parse(words)
    except KeepstepError as error:
        print(f"keepstep.agent: {error}", file=sys.stderr)
        return 2
    return serve(arguments)


def _told(line: str) -> list[str]:
    """The arguments in a line from stdin; from now on stdout and stderr go to the log that it names."""
    from keepstep.core.errors import UnsafePathError
    from keepstep.core.own_folders import open_file

    told = json.loads(line)
    try:
        log = open_file(Path(told["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except UnsafePathError:
        raise
    except OSError:  # such as a full disk
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return told["words"]


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Threads that wait for storage or run native code must not delay the end of the process.
    os._exit(code)
