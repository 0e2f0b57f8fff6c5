"""The parts of a launcher, for the modules that make them act together."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.course import Course
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.node_checks import NodeChecks
from keepstep.launch.node.watching import Watching
from keepstep.launch.workers.crew import Crew


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that one launcher owns; each part is made once and lives as long as the launcher."""

    run: LocalRun
    course: Course
    crew: Crew
    controller: Hosting
    watching: Watching
    caching: NodeCache
    checks: NodeChecks
