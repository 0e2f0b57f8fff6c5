"""What every incident's case works with: one small object for each thing that it may ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.agent_orders import AgentOrders
from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.questions import Questions
from keepstep.control.incidents.register import Register
from keepstep.control.incidents.validations import Validations
from keepstep.control.membership.operator_orders import Operating


@dataclass(frozen=True, slots=True)
class Desk:
    """Made once for a job, before its first case."""

    cluster: Cluster
    locators: Locators
    questions: Questions  # to agents
    orders: AgentOrders
    validations: Validations
    operating: Operating  # has ranks play on other nodes
    register: Register  # numbers, and where incidents are published
    unix_s: Callable[[float], float]  # Unix time of a moment on the controller's clock

    def clocks(self) -> Any:
        """Clock offsets as the locators understand them; None when they cannot be told."""
        try:
            return self.locators.offsets(self.cluster.clock_samples())
        except Exception:  # without clocks the locators still have durations
            return None
