"""``keepstep validate``: hold a running job for seconds, test its devices and links, let it go on."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.cli._parsing import Parser, number, print_json, reach_run
from keepstep.core.errors import RunError, UsageError
from keepstep.core.ranges import expand_ranks

_MOST_RANKS = 8192  # control/incidents/validations.py has the same limit

_ABOUT = "Compare devices and links while the training waits. Exit code 0: alike, 1: one stands out."


def main(argv: Sequence[str]) -> int:
    """Have the job validated; 1 when a device or link stands out."""
    parser = Parser("validate", _ABOUT)
    parser.add_run(elsewhere=True)
    parser.add_argument("--ranks", default="", metavar="RANKS", help="test these ranks only, e.g. 0-7,12")
    parser.add_json("print all figures as JSON")
    least, most = wire.LEAST_HOLD_S, wire.MOST_HOLD_S
    text = (
        f"seconds that the ranks may be held, {least:g} to {most:g}: more where hosts or links are slow to test "
        "(default: %(default)g)"
    )
    parser.add_argument("--hold", type=number(float, least, most), default=least, metavar="S", help=text)
    text = "seconds to wait for the outcome (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help=text)
    given = parser.parse(argv)
    run = given.run
    reach_run(run)
    answer = ask(
        run,
        wire.Validate(_chosen(given.ranks), given.hold),
        wire.Validated,
        given.timeout,
        only="only a running job can be validated",
        gone="the hold ends by itself, ask once more",
    )
    if answer.outcome is None:
        raise RunError(f"{run}: not validated: {answer.refused}; the training goes on as before")
    if not any(one.devices or one.links for one in answer.outcome.figures):
        raise RunError(
            f"{run}: not validated: no rank's figures came in the {answer.outcome.held_s:.1f} s that it was held: "
            "its hosts are too busy, or its devices hang; ask once more, with a longer --hold"
        )
    if given.json:
        print_json(answer.outcome)
    else:
        from keepstep.report.validation import table

        print(table(answer.outcome, dict(answer.nodes)))
    return 1 if answer.outcome.devices or answer.outcome.links else 0


def _chosen(text: str) -> tuple[int, ...]:
    ranks = expand_ranks(text)
    if len(ranks) > _MOST_RANKS:
        raise UsageError(f"--ranks {text}: {len(ranks)} ranks; at most {_MOST_RANKS} can be tested at once")
    return ranks
