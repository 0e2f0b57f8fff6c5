"""``keepstep validate``: hold a running job for seconds, test its devices and links, let it go on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.core.errors import RunError, UsageError
from keepstep.core.ranges import expand_ranks

_MOST_RANKS = 8192  # as the controller has it


def validate(
    run: Annotated[str, typer.Argument(help="The run's folder, or its name under ./runs.")],
    ranks: Annotated[str, typer.Option("--ranks", help="Test these ranks only, e.g. 0-7,12.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    hold: Annotated[
        float,
        typer.Option(
            "--hold",
            min=wire.LEAST_HOLD_S,
            max=wire.MOST_HOLD_S,
            help="Seconds that the ranks may be held: more where hosts or links are slow to test.",
        ),
    ] = wire.LEAST_HOLD_S,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the outcome.")] = 120.0,
) -> int:
    """Compare devices and links while the training waits. Exit code 0: alike, 1: one stands out."""
    import msgspec

    from keepstep.report.validation import table

    answer = ask(
        run,
        wire.Validate(_chosen(ranks), hold),
        wire.Validated,
        timeout,
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
    if json:
        sys.stdout.write(msgspec.json.encode(answer.outcome).decode() + "\n")
    else:
        print(table(answer.outcome, dict(answer.nodes)))
    return 1 if answer.outcome.devices or answer.outcome.links else 0


def _chosen(text: str) -> tuple[int, ...]:
    ranks = expand_ranks(text)
    if len(ranks) > _MOST_RANKS:
        raise UsageError(f"--ranks {text}: {len(ranks)} ranks; at most {_MOST_RANKS} can be tested at once")
    return ranks
