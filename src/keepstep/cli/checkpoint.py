"""``keepstep checkpoint``: plan how often to save; look after what is on storage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.checkpoint.storage.backend import Storage, open_storage
from keepstep.checkpoint.storage.manifest import Manifest, folder_name, key_text
from keepstep.checkpoint.storage.persist import remove
from keepstep.checkpoint.storage.read import StoredStep, scan
from keepstep.checkpoint.storage.read import verify as problems_of
from keepstep.cli._checkpoint_plan import bytes_text, plan
from keepstep.core.errors import CheckpointError, UsageError

_MOST_LINES = 20

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

Where = Annotated[str, typer.Argument(metavar="PATH", help="Folder or URL (s3://…) with the steps.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _checkpoint() -> None:  # pyright: ignore[reportUnusedFunction]
    """Plan how often to save checkpoints; list, verify, export and prune those on storage."""


app.command("plan")(plan)


@app.command("list")
def list_steps(path: Where, json: Json = False) -> None:
    """Show the steps on storage, newest first, by manifests and sizes. Exit code 0, or 2: cannot be read."""
    steps = scan(open_storage(path))
    if json:
        _print_json([_as_json(step) for step in steps])
        return
    if not steps:
        print(f"keepstep: {path}: no checkpoint there", file=sys.stderr)
        return
    row = "{:>12}  {:>11}  {:>7}  {:>10}  {}"
    print(row.format("STEP", "INCARNATION", "RANKS", "SIZE", "STATE"))
    for step in steps:
        ranks, size = (
            (step.manifest.world_size, bytes_text(step.manifest.nbytes)) if step.manifest else ("-", "-")
        )
        state = "whole" if step.whole else _folded(step.problems)[0]
        print(row.format(step.key.step, step.key.incarnation, ranks, size, state))


@app.command()
def verify(
    path: Where,
    step: Annotated[int | None, typer.Option("--step", help="This step only.")] = None,
    json: Json = False,
) -> None:
    """Read every byte and compare it with the manifests. Exit code 0: all are sound, 1: damage, 2: cannot tell."""
    storage = open_storage(path)
    found: list[dict[str, Any]] = []
    for one in _chosen(storage, path, step):
        lines = one.problems
        if one.manifest:
            named = {line.split(": ", 1)[0] for line in lines}
            deep = (line for line in problems_of(storage, one.manifest))
            lines = (*lines, *(line for line in deep if line.split(": ", 1)[0] not in named))
        found.append({**_as_json(one), "whole": not lines, "problems": lines})
        if not json:
            size = f"{bytes_text(one.manifest.nbytes)} sound" if one.manifest and not lines else "DAMAGED"
            print(f"{key_text(one.key)}: {size}")
            for line in _folded(lines):
                print(f"  {line}")
    if json:
        _print_json(found)
    raise typer.Exit(0 if all(one["whole"] for one in found) else 1)


@app.command()
def export(
    path: Where,
    step: Annotated[int | None, typer.Option("--step", help="Default: the newest whole one.")] = None,
    safetensors: Annotated[
        Path | None, typer.Option("--safetensors", help="File to write: all tensors put together.")
    ] = None,
    dcp: Annotated[
        Path | None,
        typer.Option("--dcp", help="Folder to write: torch.distributed.checkpoint, plain values included."),
    ] = None,
) -> None:
    """Write a step for other tools; every byte that is read is verified. Exit code 0, or 2: it cannot be done."""
    if (safetensors is None) == (dcp is None):
        raise UsageError("give either --safetensors FILE or --dcp FOLDER")
    storage = open_storage(path)
    manifest = _whole(storage, path, step)
    if safetensors:
        from keepstep.checkpoint.storage.export import export_safetensors

        count, target = export_safetensors(storage, manifest, safetensors), safetensors
    else:
        from keepstep.checkpoint.storage.export_dcp import export_dcp

        assert dcp
        count, target = export_dcp(storage, manifest, dcp), dcp
    print(f"wrote {target}: {count} entries of {key_text(manifest.key)}", file=sys.stderr)


@app.command()
def prune(
    path: Where,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest whole steps stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove old steps, and broken ones that are older than a whole one. Exit code 0, or 2: nothing was touched."""
    storage = open_storage(path)
    steps = scan(storage)
    whole = [step.key for step in steps if step.whole]
    if not whole:
        raise CheckpointError(f"{path}: no whole step there; nothing is removed")
    stay = set(whole[:keep])
    gone = [step for step in reversed(steps) if step.key not in stay and step.key < whole[0]]
    for step in gone:
        if not dry_run:
            try:
                remove(storage, step.key)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: {key_text(step.key)} cannot be removed: {error.strerror or error}"
                ) from None
        if not json:
            print(f"{'would remove' if dry_run else 'removed'} {key_text(step.key)}")
    if json:
        _print_json([_as_json(step) for step in gone])


def _chosen(storage: Storage, path: str, step: int | None) -> list[StoredStep]:
    found = [one for one in scan(storage) if step is None or one.key.step == step]
    if not found:
        raise CheckpointError(
            f"{path}: no checkpoint there" + (f" of step {step}" if step is not None else "")
        )
    return found


def _whole(storage: Storage, path: str, step: int | None) -> Manifest:
    steps = _chosen(storage, path, step)
    for one in steps:
        if one.manifest and one.whole:
            return one.manifest
    raise CheckpointError(f"{path}: no whole step: {steps[0].problems[0]}")


def _as_json(step: StoredStep) -> dict[str, Any]:
    return {
        "step": step.key.step,
        "incarnation": step.key.incarnation,
        "folder": folder_name(step.key),
        "world_size": step.manifest.world_size if step.manifest else None,
        "nbytes": step.manifest.nbytes if step.manifest else None,
        "whole": step.whole,
        "problems": step.problems,
    }


def _print_json(content: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")


def _folded(lines: tuple[str, ...]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"… and {more} more"] if more > 0 else list(lines)
