"""``keepstep checkpoint``: plan how often to save; look after what is on storage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.checkpoint.storage.backend import Storage, open_storage
from keepstep.checkpoint.storage.manifest import Manifest, folder_name, key_text
from keepstep.checkpoint.storage.persist import remove
from keepstep.checkpoint.storage.read import StoredStep, scan
from keepstep.checkpoint.storage.read import verify as problems_of
from keepstep.cli import _checkpoint_plan
from keepstep.cli._checkpoint_plan import bytes_text
from keepstep.cli._parsing import Parser, choose, number, print_json
from keepstep.core.errors import CheckpointError, UsageError

_MOST_LINES = 20  # problems printed for one step

_ABOUT = "Plan how often to save checkpoints; list, verify, export and prune those on storage."
_VERBS = {
    "plan": "Say after how many steps to save: to memory, and to storage.",
    "list": "Show the steps on storage, newest first, by manifests and sizes.",
    "verify": "Read every byte and compare it with the manifests.",
    "export": "Write a step for other tools; every byte that is read is verified.",
    "prune": "Remove old steps, and broken ones that are older than a whole one.",
}
_EXIT_CODES = {
    "list": "Exit code 0, or 2: cannot be read.",
    "verify": "Exit code 0: all are sound, 1: damage, 2: cannot tell.",
    "export": "Exit code 0, or 2: it cannot be done.",
    "prune": "Exit code 0, or 2: nothing was touched.",
}


def main(argv: Sequence[str]) -> int:
    """Carry out the verb that follows ``checkpoint``."""
    chosen = choose("keepstep checkpoint", _ABOUT, _VERBS, argv)
    if isinstance(chosen, int):
        return chosen
    verb, rest = chosen
    if verb == "plan":
        return _checkpoint_plan.main(rest)
    parser = Parser(f"checkpoint {verb}", f"{_VERBS[verb]} {_EXIT_CODES[verb]}")
    parser.add_argument("path", metavar="PATH", help="folder or URL (s3://…) with the steps")
    carry_out = {"list": list_steps, "verify": verify, "export": export, "prune": prune}[verb]
    if verb in ("verify", "export"):
        text = "this step only" if verb == "verify" else "default: the newest whole one"
        parser.add_argument("--step", type=int, metavar="N", help=text)
    if verb == "export":
        text = "file to write: all tensors put together"
        parser.add_argument("--safetensors", type=Path, metavar="FILE", help=text)
        text = "folder to write: torch.distributed.checkpoint, plain values included"
        parser.add_argument("--dcp", type=Path, metavar="FOLDER", help=text)
    else:
        parser.add_json("print JSON")
    if verb == "prune":
        text = "how many of the newest whole steps stay, at least 1"
        parser.add_argument("--keep", type=number(int, 1), required=True, metavar="K", help=text)
        parser.add_argument("--dry-run", action="store_true", help="say what would go; remove nothing")
    return carry_out(**vars(parser.parse(rest)))


def list_steps(path: str, json: bool) -> int:
    """Print the steps on storage."""
    steps = scan(open_storage(path))
    if json:
        print_json([_as_json(step) for step in steps])
        return 0
    if not steps:
        print(f"keepstep: {path}: no checkpoint there", file=sys.stderr)
        return 0
    row = "{:>12}  {:>11}  {:>7}  {:>10}  {}"
    print(row.format("STEP", "INCARNATION", "RANKS", "SIZE", "STATE"))
    for step in steps:
        ranks, size = (
            (step.manifest.world_size, bytes_text(step.manifest.nbytes)) if step.manifest else ("-", "-")
        )
        state = "whole" if step.whole else _folded(step.problems)[0]
        print(row.format(step.key.step, step.key.incarnation, ranks, size, state))
    return 0


def verify(path: str, step: int | None, json: bool) -> int:
    """Compare all steps, or this one, with their manifests; 1 when one is damaged."""
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
        print_json(found)
    return 0 if all(one["whole"] for one in found) else 1


def export(path: str, step: int | None, safetensors: Path | None, dcp: Path | None) -> int:
    """Write a step as one file of tensors, or as a folder of torch.distributed.checkpoint.

    Raises UsageError unless just one of the two is asked for, CheckpointError where no such step is there and sound.
    """
    if (safetensors is None) == (dcp is None):
        raise UsageError("give either --safetensors FILE or --dcp FOLDER")
    storage = open_storage(path)
    manifest = _whole(storage, path, step)
    if safetensors:
        from keepstep.checkpoint.storage.export_safetensors import export_safetensors

        count, target = export_safetensors(storage, manifest, safetensors), safetensors
    else:
        from keepstep.checkpoint.storage.export_dcp import export_dcp

        assert dcp
        count, target = export_dcp(storage, manifest, dcp), dcp
    print(f"wrote {target}: {count} entries of {key_text(manifest.key)}", file=sys.stderr)
    return 0


def prune(path: str, keep: int, dry_run: bool, json: bool) -> int:
    """Remove whole steps but the newest ``keep``, and broken ones that are older than a whole one.

    Raises CheckpointError where no step is whole, so that none is removed; or where one cannot be removed.
    """
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
        print_json([_as_json(step) for step in gone])
    return 0


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


def _folded(lines: tuple[str, ...]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"… and {more} more"] if more > 0 else list(lines)
