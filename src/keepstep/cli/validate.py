"""``keepstep validate``: hold a running job for seconds, test its devices and links, let it go on."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from keepstep import wire
from keepstep.core.config import config_path, resolve
from keepstep.core.errors import RunError, UsageError
from keepstep.core.ranges import expand_ranks
from keepstep.launch.settings import SETTINGS
from keepstep.traces import open_run

_MOST_RANKS = 8192  # as the controller has it
_FEW = 100
_LOOK_S = 0.5


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

    logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())  # told once, by the error
    answer = _ask(run, wire.Validate(_chosen(ranks), hold), timeout)
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


def _ask(name: str, question: wire.Validate, timeout_s: float) -> wire.Validated:
    """Ask the run's controller. Raises RunError when there is none or it does not answer in time."""
    found = open_run(name)
    run = found.describe()
    if found.end() is not None or not run.get("controller"):
        raise RunError(f"{name}: the run has ended or is not watched; only a running job can be validated")
    options = resolve(SETTINGS, environ=os.environ, path=config_path(os.environ))
    paths = wire.TlsPaths.of(*(str(options[key].value) or None for key in ("tls_cert", "tls_key", "tls_ca")))
    trouble: list[str] = []
    hello = wire.Hello("client", os.uname().nodename, -1, os.getpid())
    client = wire.BackgroundClient(
        wire.parse_address(str(run["controller"])),
        wire.read_secret(Path(str(run["secret_file"]))),
        role="client",
        greet=lambda: [hello],
        trouble=lambda error, attempt: trouble.append(str(error)) if attempt < _FEW else None,
        tls=wire.client_context(paths) if paths else None,
    )
    try:
        client.send(question)
        until_s = time.monotonic() + timeout_s
        connected = False
        while time.monotonic() < until_s:
            answer = client.receive(_LOOK_S)
            if isinstance(answer, wire.Validated):
                return answer
            if isinstance(answer, wire.Refused):
                raise RunError(f"{name}: the controller refuses: {answer.reason}")
            if connected and not client.connected:
                raise RunError(f"{name}: the controller went away; the hold ends by itself, ask once more")
            connected = client.connected
    finally:
        client.close()
    seen = trouble[-1] if trouble else "connected, but no outcome came"
    raise RunError(f"{name}: no answer from the controller at {run['controller']} in {timeout_s:g} s: {seen}")
