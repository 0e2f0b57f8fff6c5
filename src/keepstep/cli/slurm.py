"""``keepstep slurm``: submits a job to Slurm, or runs it in the allocation that this process is in."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from keepstep.core.config import Resolved, config_path, resolve
from keepstep.core.errors import UsageError
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.core.log_lines import one_line
from keepstep.launch.command import flags
from keepstep.launch.command.run_settings import SETTINGS
from keepstep.launch.schedulers.slurm import job_of, nodes_in
from keepstep.launch.slurm_batch_host import REQUEUES
from keepstep.launch.slurm_orders import DRAIN, NodeRemedy, SlurmOrders
from keepstep.launch.slurm_steps import SlurmSteps

_USAGE = """\
usage: keepstep slurm [own flags] [sbatch's flags] [--] [flags of `keepstep run`] SCRIPT [ARGUMENTS]

Submits SCRIPT as a job of Slurm's. In an allocation, as in a batch script or under salloc: runs it there, one job
step with one launcher on each node, and exits with the job's own exit code. Nodes beyond --nnodes are spares.

own flags:
  --node-remedy=off|advise|auto   a node that is broken, lost or slow: nothing, say what to do (default), or drain it
  --requeue                       when the job ends with 75 have Slurm start it again, not on bad nodes
  --srun=FLAG                     a flag of srun for each step, as --srun=--container-image=IMAGE; may come again
  --python=COMMAND                what runs keepstep's Python in a step, as one in a container (default: this one)
  --dry-run                       print the batch script, or the command of each step and what may be ordered of
                                  Slurm meanwhile, and start nothing

sbatch's flags come first, each in one word, as --nodes=5; `--` ends them where `keepstep run` has one of that name.
Set unless given: --job-name, --no-kill, --signal=TERM@60, --open-mode=append.
"""
_PATIENCE_S = 60.0
_OWN = re.compile(r"--dry-run|--requeue|--(node-remedy|srun|python)(=.*)?")


def main(argv: Sequence[str]) -> int:
    """Submit or run a job; returns the job's exit code, or 0 once it is submitted.

    Raises UsageError where the command line cannot be used, there is no Slurm, or it refuses the job.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if argv else 2
    environ = dict(os.environ)
    first, for_run = split_flags(argv, environ)
    own = [word for word in first if _OWN.fullmatch(word)]
    for_sbatch = [word for word in first if word not in own]
    settings = resolve(SETTINGS, environ=environ, flags={}, path=config_path(environ))
    remedy = _remedy(own, settings["node_remedy"])
    srun_flags, python, drain = _values(own, "--srun"), _python(own), _drain(settings["drain_command"])
    given = flags.parse(for_run, environ)
    if not environ.get("SLURM_JOB_ID"):
        return _submit(own, for_sbatch, for_run, Path(given.training_script).stem)
    if for_sbatch:
        raise UsageError(
            f"{for_sbatch[0]}: flags of sbatch have no meaning within job {environ['SLURM_JOB_ID']}"
        )
    runs_dir = Path(str(settings["runs_dir"].value))
    job = job_of(environ)
    folder = Path(given.run_dir or runs_dir / environ["SLURM_JOB_ID"].strip()).absolute()
    command = [*python, "-m", "keepstep.cli", "run", f"--run-dir={folder}", *for_run]
    orders = SlurmOrders(
        *(job, nodes_in(environ, "SLURM_JOB_NODELIST"), folder, remedy, _say),
        drain=drain,
    )
    environ[REQUEUES] = "1" if "--requeue" in own else ""
    steps = SlurmSteps(command, folder, given.max_restarts, environ, orders, _say, srun_flags=srun_flags)
    if "--dry-run" in own:
        orders_told = [f"# {one_line(line)}" for line in orders.possible(requeues="--requeue" in own)]
        print("\n".join([*(shlex.join(one) for one in steps.commands), *orders_told]))
        return 0
    return asyncio.run(_run(steps, requeues="--requeue" in own))


async def _run(steps: SlurmSteps, *, requeues: bool) -> int:
    code = await steps.run()
    if code == TEMPORARY_FAILURE and requeues:
        await steps.orders.requeue()
    return code


def split_flags(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The words for sbatch, and those for ``keepstep run``. Raises UsageError where a value for sbatch stands alone."""
    runs = {name for action in flags.parser(environ)._actions for name in action.option_strings}
    for place, word in enumerate(argv):
        if word == "--":
            return list(argv[:place]), list(argv[place + 1 :])
        if _OWN.fullmatch(word):
            continue
        if not word.startswith("-") or word.partition("=")[0] in runs:
            if place and word.isdigit():
                raise UsageError(
                    f"{argv[place - 1]} {word}: write sbatch's flags in one word, {argv[place - 1]}={word}"
                )
            return list(argv[:place]), list(argv[place:])
    raise UsageError("slurm: there is no script; see `keepstep slurm --help`")


def _values(own: Sequence[str], name: str) -> list[str]:
    """What a flag was given, each time. Raises UsageError where it was given nothing."""
    values = [word.partition("=")[2] for word in own if word.partition("=")[0] == name]
    if "" in values:
        raise UsageError(f"{name}: its value comes in the same word, after a =")
    return values


def _python(own: Sequence[str]) -> list[str]:
    given = _values(own, "--python")
    return _words(f"--python={given[-1]}", given[-1]) if given else [sys.executable]


def _words(told: str, text: str) -> list[str]:
    """The words of a command, as a shell would take them apart. ``told``: where it stands, in words.

    Raises UsageError where it cannot be taken apart.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{told}: {error}") from None


def _drain(setting: Resolved) -> Sequence[str]:
    """The command that drains a node. Raises UsageError where the site's cannot be taken apart."""
    return _words(_where(setting), str(setting.value)) or DRAIN


def _remedy(own: Sequence[str], setting: Resolved) -> NodeRemedy:
    """What is done about bad nodes. Raises UsageError for another word than there are."""
    given = _values(own, "--node-remedy")
    remedy = given[-1] if given else setting.value
    for known in get_args(NodeRemedy):
        if remedy == known:
            return known
    if given:
        raise UsageError(f"--node-remedy={remedy}: say off, advise or auto, after a =")
    raise UsageError(f"{_where(setting)}: say off, advise or auto")


def _where(setting: Resolved) -> str:
    """A setting and where it stands: ``KEEPSTEP_NODE_REMEDY=x`` or ``FILE: run.node_remedy = x``."""
    own, origin = setting.setting, setting.origin
    by_file = f"{origin}: {own.key} = {setting.value}"
    return f"{own.variable}={setting.value}" if origin == own.variable else by_file


def batch_script(own: Sequence[str], for_run: Sequence[str]) -> str:
    """The script that sbatch is given."""
    words = [word for word in own if word != "--dry-run"]
    return f"#!/bin/sh\nexec {shlex.join([sys.executable, '-m', 'keepstep.cli', 'slurm', *words, '--', *for_run])}\n"


def _submit(own: Sequence[str], for_sbatch: Sequence[str], for_run: Sequence[str], name: str) -> int:
    script = batch_script(own, for_run)
    usual = [f"--job-name={one_line(name)}", "--no-kill", "--signal=TERM@60", "--open-mode=append"]
    command = ["sbatch", *usual, *(["--requeue"] if "--requeue" in own else []), *for_sbatch]
    if "--dry-run" in own:
        print(f"# {shlex.join(command)}\n{script}", end="")
        return 0
    waits = any(
        re.fullmatch(r"-W|--wait", word) for word in for_sbatch
    )  # for the job's end, and has its exit code
    output = None if waits else subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            input=script,
            stdout=output,
            stderr=output,
            text=True,
            check=False,
            timeout=None if waits else _PATIENCE_S,
        )
    except OSError as error:
        raise UsageError(
            f"sbatch: cannot be started: {error.strerror}; run this where Slurm's programs are"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"sbatch: has not answered for {_PATIENCE_S:.0f} s; is slurmctld away?") from None
    if waits:
        return done.returncode
    if done.returncode:
        raise UsageError(f"sbatch refuses the job: {one_line(done.stderr.strip()) or done.returncode}")
    print(done.stdout, end="")
    return 0


def _say(text: str) -> None:
    print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)
