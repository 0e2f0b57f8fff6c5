"""``python -m keepstep.agent``."""

import logging
import os
import sys


def main() -> int:
    # Before numpy is imported: the agent needs none of the threads that its linear algebra would start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from keepstep.agent.arguments import parse
    from keepstep.core.errors import KeepstepError

    try:
        arguments = parse()
    except KeepstepError as error:
        print(f"keepstep.agent: {error}", file=sys.stderr)
        return 2
    from keepstep.agent.program import serve

    return serve(arguments)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(
        code
    )  # threads that wait for storage or are in native code end with the process, and do not hold it up
