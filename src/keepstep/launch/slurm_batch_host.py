"""The end of Slurm's job where the host of its batch script was lost, and `keepstep slurm` with it.

Slurm (with ``--no-kill``) lets the other nodes go on, and would keep them until the job's time is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.launch.schedulers.slurm import OWN_NODES, expand_nodes, job_of, nodes_in
from keepstep.launch.schedulers.slurm_preemption import fields_in
from keepstep.launch.slurm_orders import is_unreachable, output_of

REQUEUES = "KEEPSTEP_SLURM_REQUEUES"
"""Set by ``keepstep slurm --requeue``: a job that ends with 75 is started again."""
_LOOK_S = 5.0
_PATIENCE_S = 900.0
"""Slurm takes a silent node for lost after SlurmdTimeout, 300 s where nothing else is set."""


async def end_without_batch_host(environ: Mapping[str, str], code: int, say: Callable[[str], object]) -> None:
    """End the job, or have it begin again after ``code`` 75, where Slurm says that its batch host is lost.

    Called in a step of ``keepstep slurm``, on the one node that hosts the controller as the job ends.
    """
    job, host = job_of(environ), nodes_in(environ, OWN_NODES)[0]
    if environ.get("SLURMD_NODENAME") == host:
        return
    until_s, said = time.monotonic() + _PATIENCE_S, False
    while time.monotonic() < until_s:
        told = fields_in(await output_of("scontrol", "show", "job", job))
        has_begun_again = told.get("Restarts") != (environ.get("SLURM_RESTART_COUNT") or "0")
        # Under salloc no batch script is lost: the nodes stay with whoever asked for them.
        is_batch = told.get("BatchFlag", "0") != "0"
        if told.get("JobState") != "RUNNING" or has_begun_again or not is_batch:
            return
        try:
            left = expand_nodes(told.get("NodeList", ""))
        except ValueError:  # Slurm tells no list: nothing is known, so nothing is ordered
            return
        if host not in left:
            break
        if not await is_unreachable(await output_of("scontrol", "show", "node", host)):
            return
        if not said:
            said = True
            say(
                f"{host}, the host of the batch script, does not answer: waiting for Slurm to take it for lost"
            )
        await asyncio.sleep(_LOOK_S)
    else:
        return
    if code == TEMPORARY_FAILURE and environ.get(REQUEUES):
        say(f"{host}, the host of the batch script, is lost: Slurm is told to start the job again")
        await output_of("scontrol", "requeue", job)
    else:
        say(f"{host}, the host of the batch script, is lost: Slurm is told that the job has ended")
        await output_of("scancel", job)
