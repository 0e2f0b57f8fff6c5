"""How often to checkpoint, and what saving and loading cost. Pure: all times in seconds, sizes in bytes.

The interval follows FlashRecovery (§II, equations 1 to 4; §III-F, equation 5), the sizes and load times TRANSOM
(§IV-C, equations 1 to 3). Both assume that failures are independent and spread evenly over the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from keepstep.core.errors import CheckpointError

MOST_STEPS = 10**12


@dataclass(frozen=True, slots=True)
class Costs:
    """The terms that say what a job's checkpoints and failures cost.

    Attributes:
        period_s: length of the period that is considered (the paper's d).
        failures: failures of the whole job in that period (m); above 0.
        recovery_s: one failure's detection, replacement and restart, without lost work (s0).
        checkpoint_s: what one checkpoint adds to the training's time (k0): all of the copy when training waits
            for it, the measured increase of the step when the copy is hidden behind it.
        step_s: one training step (τ).

    Raises:
        CheckpointError: a value is not finite, negative, or 0 where it divides.
    """

    period_s: float
    failures: float
    recovery_s: float
    checkpoint_s: float
    step_s: float

    def __post_init__(self) -> None:
        _require(
            self, above_zero=("period_s", "failures", "step_s"), not_negative=("recovery_s", "checkpoint_s")
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Lower limits for an interval, beside what is optimal by the costs alone.

    Attributes:
        copy_s: duration of the copy to memory, hidden or not; the next checkpoint begins after it.
        backup_s: time to bring one checkpoint of a node to its neighbour.
        slowdown: largest share of the training's time that checkpoints may add, above 0.
    """

    copy_s: float = 0.0
    backup_s: float = 0.0
    slowdown: float = 0.05

    def __post_init__(self) -> None:
        _require(self, above_zero=("slowdown",), not_negative=("copy_s", "backup_s"))


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval between checkpoints and what it costs over the period.

    Attributes:
        steps: steps from one checkpoint to the next, at least 1.
        optimum_steps: the optimum t* that the equation gives without limits.
        decided_by: ``optimum``, or the limit that asks for more steps: ``step``, ``copy``, ``backup``, ``slowdown``.
        saving_s: time that checkpoints add.
        lost_s: time of work that is repeated after failures.
        recovery_s: time that the recoveries themselves take.
    """

    steps: int
    optimum_steps: float
    decided_by: str
    saving_s: float
    lost_s: float
    recovery_s: float

    @property
    def total_s(self) -> float:
        """The total cost over the period, F(t) in the paper."""
        return self.saving_s + self.lost_s + self.recovery_s


def total_cost_s(costs: Costs, steps: float) -> float:
    """F(t) = m·(s0 + t·τ/2) + d/(t·τ)·k0: time lost to failures and checkpoints at an interval of ``steps``."""
    interval_s = steps * costs.step_s
    return (
        costs.failures * (costs.recovery_s + interval_s / 2)
        + costs.period_s / interval_s * costs.checkpoint_s
    )


def optimal_steps(costs: Costs) -> float:
    """t* = sqrt(2·d·k0/m)/τ: the interval in steps that minimizes F; 0 when checkpoints cost nothing."""
    return math.sqrt(2 * costs.period_s * costs.checkpoint_s / costs.failures) / costs.step_s


def kept_cost_s(costs: Costs) -> float:
    """The cost over the period, seconds, if every step is saved, so that a failure loses one step (equation 5)."""
    return (
        costs.failures * (costs.recovery_s + costs.step_s)
        + costs.period_s / costs.step_s * costs.checkpoint_s
    )


def best_interval(costs: Costs, limits: Limits | None = None) -> Interval:
    """The whole number of steps with the least total cost that the limits allow.

    Raises:
        CheckpointError: the interval would be longer than ``MOST_STEPS``, so a term must have a wrong unit.
    """
    limits = limits or Limits()
    least = {
        "step": 1.0,
        "copy": limits.copy_s / costs.step_s,
        "backup": limits.backup_s / costs.step_s,
        "slowdown": costs.checkpoint_s / (limits.slowdown * costs.step_s),
    }
    decided_by = max(least, key=lambda name: least[name])
    optimum = optimal_steps(costs)
    if not max(optimum, least[decided_by]) < MOST_STEPS:
        raise CheckpointError(
            f"an interval of {max(optimum, least[decided_by]):.3g} steps cannot be meant; check the units: "
            f"period {costs.period_s:g} s, checkpoint {costs.checkpoint_s:g} s, step {costs.step_s:g} s"
        )
    # Because F is convex, the best whole number is next to the optimum, or the smallest that is allowed.
    floor = math.ceil(least[decided_by])
    around = {max(floor, math.floor(optimum)), max(floor, math.ceil(optimum))}
    steps = min(sorted(around), key=lambda count: total_cost_s(costs, count))
    if optimum >= least[decided_by]:
        decided_by = "optimum"
    interval_s = steps * costs.step_s
    return Interval(
        steps=steps,
        optimum_steps=optimum,
        decided_by=decided_by,
        saving_s=costs.period_s / interval_s * costs.checkpoint_s,
        lost_s=costs.failures * interval_s / 2,
        recovery_s=costs.failures * costs.recovery_s,
    )


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Sizes of a model trained with a sharded optimizer (ZeRO) and mixed precision, by TRANSOM's equations.

    Every rank saves its part of the optimizer's state; weights that several ranks hold are saved by one of them.

    Attributes:
        parameters: number of parameters (P).
        nodes: number of nodes (N).
        data_parallel: data-parallel size (DP); at most ``ranks_per_node``, or a multiple of it.
        ranks_per_node: ranks of a node, 8 in the paper.
        weight_bytes: bytes of a parameter's weight, 2 in the paper.
        optimizer_bytes: bytes of a parameter's optimizer state, 12 in the paper.

    Raises:
        CheckpointError: the sizes do not fit together.
    """

    parameters: float
    nodes: int
    data_parallel: int
    ranks_per_node: int = 8
    weight_bytes: float = 2.0
    optimizer_bytes: float = 12.0

    def __post_init__(self) -> None:
        _require(
            self,
            above_zero=("parameters", "nodes", "data_parallel", "ranks_per_node"),
            not_negative=("weight_bytes", "optimizer_bytes"),
        )
        if self.ranks % self.data_parallel:
            raise CheckpointError(
                f"data parallel size {self.data_parallel} does not divide the {self.ranks} ranks of "
                f"{self.nodes} nodes"
            )
        if self.data_parallel > self.ranks_per_node and self.data_parallel % self.ranks_per_node:
            raise CheckpointError(
                f"data parallel size {self.data_parallel}: above one node's {self.ranks_per_node} ranks it must "
                "be a multiple of them"
            )

    @property
    def ranks(self) -> int:
        """The world size: nodes times ranks of a node."""
        return self.nodes * self.ranks_per_node

    @property
    def rank_weight_bytes(self) -> float:
        """Bytes of the weights that one rank holds."""
        return self.weight_bytes * self.parameters * self.data_parallel / self.ranks

    @property
    def rank_optimizer_bytes(self) -> float:
        """Bytes of the optimizer state that one rank holds."""
        return self.optimizer_bytes * self.parameters / self.ranks

    @property
    def most_saved_bytes(self) -> float:
        """The most bytes that one rank saves (equation 1); each rank loads as many."""
        return self.rank_weight_bytes + self.rank_optimizer_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes that all ranks save together."""
        return (self.weight_bytes + self.optimizer_bytes) * self.parameters

    def load_s(self, memory_bandwidth: float, node_bandwidth: float) -> float:
        """Time to load from the nodes' caches (equation 3).

        When the data-parallel size exceeds the ranks of a node, only one node of each data-parallel group holds the
        weights, and it sends them to the other nodes one after the other. As in the paper, the copy out of memory is
        then counted for the optimizer's state only.

        Args:
            memory_bandwidth: bytes per second that one rank copies from memory.
            node_bandwidth: bytes per second of a node's network.
        """
        if self.data_parallel <= self.ranks_per_node:
            return self.most_saved_bytes / memory_bandwidth
        other_nodes = self.data_parallel // self.ranks_per_node - 1
        return (
            self.rank_optimizer_bytes / memory_bandwidth
            + other_nodes * self.rank_weight_bytes / node_bandwidth
        )


def save_gain(memory_bandwidth: float, storage_bandwidth: float) -> float:
    """How many times faster a save to memory is than one to storage (equation 2), the same for each rank."""
    return memory_bandwidth / storage_bandwidth


def _require(terms: object, *, above_zero: tuple[str, ...], not_negative: tuple[str, ...]) -> None:
    for name in (*above_zero, *not_negative):
        value: float = getattr(terms, name)
        if not math.isfinite(value) or value < 0 or (value == 0 and name in above_zero):
            least = "above 0" if name in above_zero else "0 or more"
            raise CheckpointError(
                f"{name.replace('_', ' ')} is {value:g}; it must be a finite number, {least}"
            )
