"""``keepstep ctl RUN VERB``: stop, suspend, resume or restart a running job by hand, move its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.cli._parsing import Parser
from keepstep.cli.status import show as show_status
from keepstep.core.errors import RunError, UsageError
from keepstep.core.log_lines import one_line

Verb = Literal["status", "suspend", "resume", "start", "restart", "stop", "exchange", "replace"]

_WANTED = {
    "exchange": (2, "two nodes, by name or node rank"),
    "replace": (1, "one node, by name or node rank"),
}
_ABOUT = (
    "Suspend a job (workers end, standbys and checkpoints stay), resume, restart or stop it; say where it "
    "stands. Or have two of its nodes exchange their ranks, which moves traffic off a slow link, or a spare take "
    "a node's ranks; that node leaves the job, for repair."
)


def main(argv: Sequence[str]) -> int:
    """Give the order and wait until it is carried out."""
    parser = Parser("ctl", _ABOUT)
    parser.add_run()
    text = f"what the job is to do: {', '.join(get_args(Verb))}; start is resume"
    parser.add_argument("verb", metavar="VERB", choices=get_args(Verb), help=text)
    text = "names or node ranks; of exchange: the two that swap their ranks; of replace: the one that leaves"
    parser.add_argument("nodes", nargs="*", metavar="NODE", help=text)
    text = "end the workers at once, not when the next step is sealed"
    parser.add_argument("--now", action="store_true", help=text)
    text = "seconds to wait until it is done (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help=text)
    given = parser.parse(argv)
    run, verb = given.run, given.verb
    count, wanted = _WANTED.get(verb, (0, "no node"))
    if len(given.nodes) != count:
        raise UsageError(f"keepstep ctl {run} {verb}: give {wanted}")
    if given.now and count:
        raise UsageError(f"keepstep ctl {run} {verb}: no --now, nodes take over a step that is sealed")
    if verb == "status":
        return show_status(run, json=False)
    answer = ask(
        run,
        wire.Operate(verb, given.now, tuple(given.nodes)),
        wire.Operated,
        given.timeout,
        only="only a running job takes orders",
        gone=f"see keepstep status {run} for whether it was done",
    )
    if answer.refused:
        raise RunError(f"{run}: not done ({verb}): {answer.refused}")
    print(one_line(f"{run}: {answer.done}"))
    return 0
