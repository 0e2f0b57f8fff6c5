"""``keepstep operator``: a controller for Kubernetes that makes the pods of training jobs and tells of bad nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Sequence

from keepstep import wire
from keepstep.cli._parsing import Parser
from keepstep.core.errors import RunError, UsageError

_ABOUT = (
    "Make the pods of training jobs (kind TrainingJob) in Kubernetes, make lost ones again on other nodes, and tell of "
    "nodes that keepstep has proven to be bad, those of pods with the label keepstep.dev/watch, too. Runs in a pod, or "
    "anywhere with a kubeconfig."
)


def main(argv: Sequence[str]) -> int:
    """Run the operator until it is told to end, or clear one node. Raises UsageError where there is no cluster."""
    parser = Parser("operator", _ABOUT)
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="namespace of jobs, once for each; default: the operator's own",
    )
    parser.add_argument(
        "--node-remedy",
        choices=("off", "advise", "auto"),
        default="advise",
        help="the most that is done about bad nodes, whatever jobs want (default: advise)",
    )
    parser.add_argument(
        "--clear", metavar="NODE", help="remove keepstep's conditions and taints from a node, and end"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    given = parser.parse(argv)
    try:
        from keepstep.kubernetes import operator_program
        from keepstep.kubernetes.cluster_api import FAILURES, client_from_environment, told_by
    except ImportError as error:
        raise UsageError(
            f"operator: {error.name} is not installed: pip install 'keepstep[kubernetes]'"
        ) from None

    async def work() -> int:
        speaker, client = operator_program.Speaker(), client_from_environment()
        try:
            if given.clear:
                return await operator_program.clear(
                    client, given.clear, dry_run=given.dry_run, speaker=speaker
                )
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            operator = operator_program.Operator(
                client,
                list(dict.fromkeys(given.namespace)) or [client.namespace],
                me=f"{os.uname().nodename}-{uuid.uuid4().hex[:8]}",
                most=given.node_remedy,
                dry_run=given.dry_run,
                speaker=speaker,
            )
            await operator.run(stop)
            return 0
        except FAILURES as error:
            raise RunError(f"operator: {told_by(error)}") from error

    return wire.run(work())
