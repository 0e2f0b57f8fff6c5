"""The settings of a controller, fixed at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keepstep.core.budgets import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a job that its controller needs. Times are in seconds."""

    nodes: int = 1  # nodes that the job was started for
    heartbeat_s: float = 1.0  # time between two heartbeats of an agent
    mute_s: float = 1.3  # without a heartbeat for so long, nobody waits for the agent's answers
    silent_s: float = 3.0  # without a heartbeat for so long, the agent is silent
    lost_s: float = 3.0  # without a connection of agent or launcher for so long, the node is lost
    # Added to lost_s where a connection ended without a last packet: its link may have been cut for 5 s.
    link_s: float = 2.0
    gone_s: float = 60.0  # without restarts, the job ends when all others wait for a lost node this long
    answer_s: float = 1.0  # longest wait for profiles and states
    probe_s: float = 4.0  # longest wait for probes: the agents' own limit, and a margin
    # In place of lost_s for nodes not heard since this controller began, or when many are gone at once.
    away_s: float = 10.0
    halt_s: float = 60.0  # longest wait for a launcher to end its workers
    join_s: float = 600.0  # longest wait for launchers: for the first ones, and for a vacant place
    shrink_s: float = 30.0  # longest wait for a spare, where the job may go on with fewer nodes
    last_call_s: float = 30.0  # wait for further nodes once there are enough
    grace_s: float = 1.0  # time from the end of the last launcher to the end of the controller
    backups: int = 0  # nodes that back up each rank's checkpoints
    validate: bool = True  # hold the job to test devices and links when profiles leave a doubt
    mitigate: Literal["off", "advise", "auto"] = "auto"  # what is done about slowdowns that last
    restart_budget: Limits = field(default_factory=Limits)
    restart_hangs: bool = False  # end processes that surely hang, so that the launchers restart the job
    hang_patience_s: float = 0.0  # how long one is left alone; 0: by the timeouts and pauses of its rank
    stopped_patience_s: float = 60.0  # how long a stopped one is left alone
    restore_corrupt: bool = (
        False  # have all ranks go back to when replicas were alike, where it is sure who is wrong
    )
    slow_ratio: float = 1.0  # slowdowns of an iteration by less than this factor are not told
    hang_after_s: float = 0.0  # standstills shorter than this are not told; 0: by what is usual in the job
    max_restarts: int = 0  # how often the job may be restarted after failures
    seat: int = 0  # token of the launcher on this host; 0: the controller never moves to another host
    term: int = 0  # the term for which that launcher was elected; 1: the first, without an election
