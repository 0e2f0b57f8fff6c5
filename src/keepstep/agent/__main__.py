"""``python -m keepstep.agent``."""

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
    sys.exit(main())
