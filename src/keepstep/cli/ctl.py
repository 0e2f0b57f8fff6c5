"""``keepstep ctl RUN VERB``: order a running job by hand.

Verbs that begin or end processes are here; those of a job that goes on training are in `_ctl_running`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from keepstep import wire
from keepstep.cli import _ctl_running
from keepstep.cli._asking import ask
from keepstep.cli._parsing import Parser, reach_run
from keepstep.cli.status import show as show_status
from keepstep.core.errors import RunError, UsageError
from keepstep.core.log_lines import one_line
from keepstep.traces import open_run

Verb = Literal[
    "status", "suspend", "resume", "start", "restart", "stop", "exchange", "replace", "swap", "drain"
]

_WANTED = {
    "exchange": (2, "two nodes, by name or node rank"),
    "replace": (1, "one node, by name or node rank"),
    "drain": (1, "one node, by name or node rank"),
}
_MOST_WHY = 120  # characters: a scheduler's reason has little room
_ABOUT = (
    "Suspend a job (workers end, standbys and checkpoints stay), resume, restart or stop it; say where it "
    "stands. Or have two of its nodes exchange their ranks, which moves traffic off a slow link, or a spare take "
    "a node's ranks; that node leaves the job, for repair, and with drain the scheduler gives it to no other job. "
    f"Or, while it trains: {', '.join(_ctl_running.VERBS)}; `keepstep ctl RUN VERB --help` explains these."
)


def main(argv: Sequence[str]) -> int:
    """Give the order and wait until it is carried out."""
    if (verb := _ctl_running.verb_of(argv)) is not None:
        return verb(argv)
    parser = Parser("ctl", _ABOUT)
    parser.add_run(elsewhere=True)
    text = f"what the job is to do: {', '.join(get_args(Verb))}; start is resume, swap is replace"
    choices = (*get_args(Verb), *_ctl_running.VERBS)
    parser.add_argument("verb", metavar="VERB", choices=choices, help=text)
    text = "names or node ranks; of exchange: the two that take each other's ranks; of replace and drain: who leaves"
    parser.add_argument("nodes", nargs="*", metavar="NODE", help=text)
    text = "end the workers at once, not when the next step is sealed"
    parser.add_argument("--now", action="store_true", help=text)
    text = "of drain: what is wrong with the node, for those who mend it"
    parser.add_argument("--reason", metavar="TEXT", help=text)
    text = "say what would be done, and do nothing; not of suspend, resume, restart and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "seconds to wait until it is done (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help=text)
    given = parser.parse(argv)
    if given.verb in _ctl_running.VERBS:
        raise UsageError(f"give {given.verb} right after the run: keepstep ctl {given.run} {given.verb} …")
    run, verb = given.run, "replace" if given.verb == "swap" else given.verb
    reach_run(run)
    count, wanted = _WANTED.get(verb, (0, "no node"))
    if len(given.nodes) != count:
        raise UsageError(f"keepstep ctl {run} {verb}: give {wanted}")
    if given.now and count:
        raise UsageError(f"keepstep ctl {run} {verb}: no --now, nodes take over a step that is sealed")
    if given.dry_run and not count:
        raise UsageError(f"keepstep ctl {run} {verb}: no --dry-run, which is of {', '.join(_WANTED)}")
    if given.reason is not None and verb != "drain":
        raise UsageError(f"keepstep ctl {run} {verb}: no --reason, which is of drain")
    why = one_line(given.reason or "ordered with keepstep ctl")
    if len(why) > _MOST_WHY:
        raise UsageError(
            f"keepstep ctl {run} drain: --reason has {len(why)} characters; give {_MOST_WHY} at most"
        )
    if verb == "status":
        return show_status(run, json=False)
    answer = ask(
        run,
        wire.Operate(verb, given.now, tuple(given.nodes), why if verb == "drain" else "", given.dry_run),
        wire.Operated,
        given.timeout,
        only="only a running job takes orders",
        gone=f"see keepstep status {run} for whether it was done",
    )
    if answer.refused:
        raise RunError(f"{run}: not done ({verb}): {answer.refused}")
    print(one_line(f"{run}: {answer.done}"))
    if verb == "drain":
        print(f"{run}: {_scheduler(run, would=given.dry_run)}")
    return 0


def _scheduler(run: str, *, would: bool) -> str:
    """What becomes of a drained node in the scheduler."""
    by = open_run(run).describe().get("drains")
    if not by:
        return (
            "no scheduler is told, as no `keepstep slurm` is at work: keep other jobs from the node yourself"
        )
    has = "would have" if would else "has"
    return f"{one_line(str(by))} {has} Slurm drain it; the job's output tells whether Slurm does"
