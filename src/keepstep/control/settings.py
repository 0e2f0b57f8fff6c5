"""What a controller is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keepstep.core.budgets import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """Waiting times in seconds, and the number of nodes that the job was started for."""

    nodes: int = 1
    heartbeat_s: float = 1.0
    mute_s: float = 1.3  # without a heartbeat, that comes every second: nobody waits for the agent's answers
    silent_s: float = 3.0  # without a heartbeat: the agent is silent
    lost_s: float = 3.0  # neither agent nor launcher connected: the node is lost
    link_s: float = (
        2.0  # the same, more: of one that sent no last packet, whose link may have been cut for 5 s
    )
    gone_s: float = 60.0  # all others wait while a node is lost, and there are no restarts: the job ends
    answer_s: float = 1.0  # longest wait for profiles and states
    probe_s: float = 4.0  # for probes: what agents wait, and a margin
    away_s: float = (
        10.0  # the same of one not heard since this controller began, or when many are gone at once
    )
    halt_s: float = 60.0  # for a launcher to end its workers
    join_s: float = 600.0  # for launchers to come, at first and for a place that is vacant
    shrink_s: float = 30.0  # for a node in place of a lost one, where the job may go on with fewer
    last_call_s: float = 30.0
    grace_s: float = 1.0  # from the last launcher's end to our own
    backups: int = 0  # nodes that back up each rank's checkpoints
    validate: bool = True  # hold the job to test devices and links when profiles leave a doubt
    mitigate: Literal["off", "advise", "auto"] = "auto"  # what is done about slowdowns that last
    restart_budget: Limits = field(default_factory=Limits)
    restart_hangs: bool = False  # have processes ended that hang for sure: the launchers begin again
    max_restarts: int = 0  # how often the job may begin again after failures
    seat: int = 0  # token of the launcher beside us; 0: the controller stays where it is
    term: int = 0  # in which that launcher was elected; 1: it was there first
