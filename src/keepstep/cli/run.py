"""``keepstep run``: torchrun's command line; the launcher does the rest. Never imports torch."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.core.home import home_folder
from keepstep.core.own_folders import open_to_all
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job, job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import COOKIE, ERROR_FILE, Place, worker_plan
from keepstep.launch.schedulers.kubernetes import is_pod
from keepstep.launch.schedulers.slurm import OWN_NODES
from keepstep.launch.workers.guard import Guard


def main(argv: Sequence[str]) -> int:
    """Run a job; returns its exit code.

    Raises UsageError where the command line cannot be used or the script is not there, RunError for the run folder.
    """
    environ = dict(os.environ)
    job = job_from_command_line(argv, environ)
    folder = run_folder.folder_of(job, environ, time.time())
    if job.dry_run:
        print(json.dumps(plan(job, folder, environ), indent=2))
        return 0
    if job.entry == "script" and job.script != "-" and not Path(job.script).exists():
        raise UsageError(f"{job.script}: there is no such script, seen from {Path.cwd()}")
    for text in job.warnings if not job.verbose else (*job.warnings, *job.remarks):
        print(f"keepstep: {text}", file=sys.stderr)
    hosts_controller = addresses.becomes_host(job.rendezvous)
    if hosts_controller and job.elects and run_folder.lives_elsewhere(folder):
        hosts_controller = False  # another node was elected host of this run since
    # Before a folder is made, as this raises UsageError where there is no place for the secret.
    run_folder.secret_path(job, folder, home_folder(environ))
    folder = run_folder.create(job, folder, first=hosts_controller)
    above = open_to_all(folder)
    # A volume of a pod's own (emptyDir) is always like that, and seen by nobody else.
    if above is not None and not (is_pod(environ) and above.is_mount()):
        print(
            f"keepstep: {above} can be written by everybody: others can put their own folder in the place of {folder}; "
            "run chmod o-w on it, or name a run folder elsewhere with --run-dir",
            file=sys.stderr,
        )
    cookie = secrets.token_hex(8)
    guard = Guard(f"{COOKIE}={cookie}")
    code, knows_the_end = asyncio.run(_run(job, folder, guard, cookie, environ, hosts_controller))
    guard.close()
    if knows_the_end and environ.get(OWN_NODES):
        from keepstep.launch.slurm_batch_host import end_without_batch_host  # here, because it loads msgspec

        asyncio.run(
            end_without_batch_host(environ, code, lambda text: print(f"keepstep: {text}", file=sys.stderr))
        )
    return code


async def _run(
    job: Job, folder: Path, guard: Guard, cookie: str, environ: Mapping[str, str], hosts_controller: bool
) -> tuple[int, bool]:
    from keepstep.launch.launcher import Launcher

    launcher = Launcher(job, folder, guard, cookie, environ)
    code = await launcher.run(hosts_controller=hosts_controller)
    return code, launcher.knows_the_end


def plan(job: Job, folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """What ``--dry-run`` prints: the programs of this node. Of several nodes, all are assumed equal and in order."""
    from keepstep.launch.node.programs import agent_command, controller_command

    rendezvous = job.rendezvous
    node_rank = max(rendezvous.node_rank, 0)
    endpoint = rendezvous.endpoint
    alone = endpoint is None
    place = Place(
        node_rank=node_rank,
        first_rank=node_rank * job.nproc,
        world_size=job.max_nodes * job.nproc,
        node_count=job.max_nodes,
        master_addr=job.master_addr if endpoint is None or rendezvous.backend == "static" else endpoint.host,
        master_port=job.master_port if alone else 0,
    )
    logs = {local: folder / "logs" / f"rank-{place.first_rank + local:05d}" for local in range(job.nproc)}
    secret = run_folder.secret_path(job, folder, home_folder(environ))
    meeting = endpoint or Endpoint("127.0.0.1", 0)
    pages = {place.first_rank + local: "/proc/LAUNCHER/fd/N" for local in range(job.nproc)}
    return {
        "run_dir": str(folder),
        "secret_file": str(secret),
        "place": "known" if alone else "assumed",
        "remarks": [*job.warnings, *job.remarks],
        "controller": controller_command(job, folder, secret, job.controller_listen or meeting)
        if job.watch or not alone
        else None,
        "agent": agent_command(
            *(job, folder, secret, meeting, place),
            pages={"ring": pages, "orders": pages, "links": pages},
            cache="CACHE",
        )
        if job.watch
        else None,
        "workers": [
            asdict(worker_plan(job, place, local, environ, {ERROR_FILE: str(log / "error.json")}))
            for local, log in logs.items()
        ],
    }
