"""``python -m keepstep.agent``, with its arguments or with ``--wait``: imported, and told what to do when it is time.

It says so by a line on stdout. What tells it is a line on stdin, the arguments and the file for what it says:
``{"words": […], "log": PATH}``.
"""

import json
import logging
import os
import sys
from pathlib import Path


def main() -> int:
    # Before numpy is imported: the agent needs none of the threads that its linear algebra would start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from keepstep.agent.arguments import parse
    from keepstep.agent.program import serve
    from keepstep.core.errors import KeepstepError

    words = sys.argv[1:]
    if words == ["--wait"]:
        print("waits", flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0  # it is not needed
        words = _told(line)
    try:
        arguments = parse(words)
    except KeepstepError as error:
        print(f"keepstep.agent: {error}", file=sys.stderr)
        return 2
    return serve(arguments)


def _told(line: str) -> list[str]:
    """The arguments; what is said from here on goes to the log."""
    from keepstep.core.own_folders import open_file

    told = json.loads(line)
    log = open_file(Path(told["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return told["words"]


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(
        code
    )  # threads that wait for storage or are in native code end with the process, and do not hold it up
