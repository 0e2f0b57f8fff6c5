"""What a scheduler says of a job in the environment of its launchers. Pure: an environment in, an `Allocation` out."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.launch.schedulers import kubernetes, slurm
from keepstep.launch.schedulers.local import NOTHING_TOLD, Allocation


def allocation_of(environ: Mapping[str, str], fqdn: str) -> Allocation:
    """What the scheduler that started this process says; `NOTHING_TOLD` where there is none.

    ``fqdn``: this host's name with its domain. Slurm comes before Kubernetes, as its daemons may run in pods. Raises
    UsageError where a scheduler's variable is not of the form that it is documented to have.
    """
    return slurm.allocation_of(environ) or kubernetes.allocation_of(environ, fqdn) or NOTHING_TOLD
