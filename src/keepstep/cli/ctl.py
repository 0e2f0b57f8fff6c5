"""``keepstep ctl RUN VERB``: stop, suspend, resume or restart a running job by hand, move its nodes."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.cli.status import status as show_status
from keepstep.core.errors import RunError, UsageError
from keepstep.core.log_lines import one_line


class Verb(Enum):
    """What may be ordered."""

    status = "status"
    suspend = "suspend"
    resume = "resume"
    start = "start"
    restart = "restart"
    stop = "stop"
    exchange = "exchange"
    replace = "replace"


_WANTED = {
    Verb.exchange: (2, "two nodes, by name or node rank"),
    Verb.replace: (1, "one node, by name or node rank"),
}


def ctl(
    run: Annotated[str, typer.Argument(help="The run's folder, or its name under ./runs.")],
    verb: Annotated[Verb, typer.Argument(help="What the job is to do; start is resume.")],
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODE NODE]",
            help="Names or node ranks. Of exchange: the two that swap their ranks. Of replace: the one that leaves.",
        ),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="End the workers at once, not when the next step is sealed.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait until it is done.")] = 300.0,
) -> int:
    """Suspend a job (workers end, standbys and checkpoints stay), resume, restart or stop it; say where it stands.

    Or have two of its nodes exchange their ranks, which moves traffic off a slow link, or a spare take a node's ranks;
    that node leaves the job, for repair.
    """
    count, wanted = _WANTED.get(verb, (0, "no node"))
    if len(nodes or ()) != count:
        raise UsageError(f"keepstep ctl {run} {verb.value}: give {wanted}")
    if now and count:
        raise UsageError(f"keepstep ctl {run} {verb.value}: no --now, nodes take over a step that is sealed")
    if verb is Verb.status:
        return show_status(run)
    answer = ask(
        run,
        wire.Operate(verb.value, now, tuple(nodes or ())),
        wire.Operated,
        timeout,
        only="only a running job takes orders",
        gone=f"see keepstep status {run} for whether it was done",
    )
    if answer.refused:
        raise RunError(f"{run}: not done ({verb.value}): {answer.refused}")
    print(one_line(f"{run}: {answer.done}"))
    return 0
