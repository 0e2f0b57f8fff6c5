"""What agents are asked and ordered: a question goes to many at once, and is decided when its time is up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Effect, Send
from keepstep.control.settings import Settings
from keepstep.core.summary import PathProbe
from keepstep.wire.messages import (
    Message,
    Probed,
    ProbeRequest,
    ProbeTarget,
    Profile,
    ProfileRequest,
    StateRequest,
    States,
)

PACKED_WORLD = 512  # larger jobs send iterations as columns, which are many times faster to look through
_ROW_BYTES = 56  # least size of a packed iteration
_MOST_TARGETS = 16  # nodes that one agent probes for one question
MOST_ROWS = 4_000_000  # iteration summaries or states kept for one question


@dataclass(slots=True)
class Question:
    """One request to many agents. It is due when all agents that are waited for have answered, or at its deadline."""

    number: int
    kind: type  # the class of message that answers
    unanswered: set[int]  # node ranks
    deadline_s: float
    mute: frozenset[int] = frozenset()  # node ranks whose agents are not waited for
    answers: list[Any] = field(default_factory=list[Any])
    rows: int = 0
    is_decided: bool = False  # no further answer is waited for

    def answer(self, node_rank: int, answer: Any, rows: int) -> bool:
        """Take one node's answer; a second one, or one beyond the bound, is ignored."""
        if type(answer) is not self.kind or node_rank not in self.unanswered:
            return False
        self.unanswered.discard(node_rank)
        if self.rows + rows > MOST_ROWS:
            return False
        self.rows += rows
        self.answers.append(answer)
        return True

    def due(self, now_s: float) -> bool:
        """Whether to stop waiting for answers: enough agents have answered, or the deadline has passed."""
        return self.unanswered <= self.mute or now_s >= self.deadline_s


class Agents:
    """The connected agents of a job, and the questions to them that are open."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        effects: list[Effect],
        unix_s: Callable[[float], float],
    ) -> None:
        self._cluster, self._settings = cluster, settings
        self._effects, self._unix_s = effects, unix_s
        self._newest_question = self._newest_order = 0
        self._open: dict[int, Question] = {}

    def order(self, message: Message, node: int | None = None) -> None:
        """Send an order to all connected agents, or to the agent of one node."""
        agents = self._cluster.agents()
        peers = tuple(peer for rank, peer in agents.items() if node is None or rank == node)
        if peers:
            self._effects.append(Send(peers, message))

    def order_number(self, now_s: float) -> int:
        """A number for an order that no controller of this run has used before."""
        self._newest_order = max(self._newest_order + 1, int(self._unix_s(now_s) * 1000))
        return self._newest_order

    def ask_profiles(
        self,
        first_step: int,
        last_step: int,
        now_s: float,
        onset_step: int = -1,
        blocks_of: tuple[int, ...] = (),
    ) -> int:
        """Ask all agents for iterations and traffic around the onset; returns the number of the question."""
        agents = self._cluster.agents()
        packed = self._cluster.known_ranks > PACKED_WORLD
        number = self._new(Profile, agents, now_s + self._settings.answer_s)
        request = ProfileRequest(number, first_step, last_step, onset_step, blocks_of, packed)
        self._effects.append(Send(tuple(agents.values()), request))
        return number

    def ask_states(
        self,
        stacks: bool,
        now_s: float,
        nodes: Collection[int] | None = None,
        *,
        launched: bool = False,
        devices: bool = True,
    ) -> int:
        """Ask all agents, or the agents of ``nodes``, where their ranks are; returns the number of the question."""
        agents = self._cluster.agents()
        if nodes is not None:
            agents = {rank: peer for rank, peer in agents.items() if rank in nodes}
        names = self._cluster.mute_nodes()
        mute = frozenset(rank for rank in agents if self._cluster.nodes[rank].name in names)
        number = self._new(States, agents, now_s + self._settings.answer_s, mute)
        self._effects.append(Send(tuple(agents.values()), StateRequest(number, stacks, launched, devices)))
        return number

    def ask_probes(self, pairs: Sequence[tuple[str, str]], now_s: float, load_bytes: int = 0) -> int | None:
        """Have the agents of these pairs of nodes probe each other; the question's number, None if none can.

        Each probe carries ``load_bytes``, which shows how fast the path is.
        """
        by_name = {node.name: node for node in self._cluster.nodes.values()}
        wanted: dict[int, list[ProbeTarget]] = {}
        for pair in pairs:
            for source, target in (pair, pair[::-1]):
                here, there = by_name.get(source), by_name.get(target)
                if here is None or there is None or here is there or here.agent is None or here.mute:
                    continue
                targets = wanted.setdefault(here.rank, [])
                if there.endpoints and len(targets) < _MOST_TARGETS:
                    targets.append(ProbeTarget(target, there.endpoints))
        wanted = {rank: targets for rank, targets in wanted.items() if targets}
        if not wanted:
            return None
        agents = self._cluster.agents()
        number = self._new(Probed, wanted, now_s + self._settings.probe_s)
        for rank, targets in wanted.items():
            self._effects.append(Send((agents[rank],), ProbeRequest(number, tuple(targets), load_bytes)))
        return number

    def answered(self, node: Node, answer: Profile | States | Probed, now_s: float) -> Question | None:
        """Take one node's answer; returns its question, closed if that is due now, or None if nobody waits for it."""
        question = self._open.get(answer.request)
        if question is None:
            return None
        if isinstance(answer, Probed):
            rows = len(answer.probes)
        else:
            node.clock.extend(answer.clock)
            rows = len(answer.states) if isinstance(answer, States) else _rows(answer)
        if isinstance(answer, Profile) and answer.causes:
            node.causes, node.causes_s = answer.causes, now_s
        if not question.answer(node.rank, answer, rows):
            return None
        if question.due(now_s):
            self._close(question)
        return question

    def due(self, now_s: float) -> list[Question]:
        """The questions to decide now; they are closed."""
        due = [question for question in self._open.values() if question.due(now_s)]
        for question in due:
            self._close(question)
        return due

    def _close(self, question: Question) -> None:
        question.is_decided = True
        del self._open[question.number]

    def _new(
        self, kind: type, nodes: Iterable[int], deadline_s: float, mute: frozenset[int] = frozenset()
    ) -> int:
        self._newest_question += 1
        self._open[self._newest_question] = Question(
            self._newest_question, kind, set(nodes), deadline_s, mute
        )
        return self._newest_question


def probes_of(question: Question) -> list[PathProbe]:
    """All probes that were answered, except those with impossible times."""
    probes = [probe for answer in question.answers for probe in answer.probes[:_MOST_TARGETS]]
    return [one for one in probes if 0 <= one.round_trip_s < math.inf and 0 <= one.load_s < math.inf]


def _rows(profile: Profile) -> int:
    packed = len(profile.packed.rows) // _ROW_BYTES if profile.packed is not None else 0
    return len(profile.iterations) + packed
