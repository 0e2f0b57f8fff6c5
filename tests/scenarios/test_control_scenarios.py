"""Runs ``control_*.txt``: commands to the controller's core, and below ``----`` what it must do, word for word.

A scenario is rewritten from what the core does with ``KEEPSTEP_REWRITE=1 pytest tests/scenarios``; read the diff.
Commands (``node`` and ``rank`` are numbers; every node has ``ranks`` of them):

    cluster nodes=2 ranks=2 [joined=0] [validate=0] [restarts=2]   a controller; with joined, all launchers and agents
                                              are connected; with restarts, hung processes are ended
    launcher node=0 [pid=] [wish=] [min=] [max=] [ranks=]     connect, Hello, Join
    agent node=0                              connect, Hello
    beat step=10 [node=0] [overdue=2] [inside=4] [slow=3]      a heartbeat of all (or one) connected agents; all ranks
                                              wait too long, or are in an operation for so long; the own time of rank 3
                                              is twice that of the others
    found kind=slow rank=1 step=32 ...        a finding by its agent (crash, exit: launcher); rank=0-3: several
    profiles [nodes=0,1] rank=1 onset=30 [own=0.5]      answer the last ProfileRequest
    states [nodes=0,1] rank=1 idle=40 [going=1] [dead=1] [none=1] [done=1] [over=0-2] [other=1]   answer the last
                                              StateRequest; rank is not in the collective, or none is; its device has
                                              done all it was given; those that are over wind up, in no collective;
                                              other is in another operation
    reachable node=0-2                        their agents say where they answer probes
    probes [nodes=0,1] [lost=gpu-0:gpu-1]     answer the last ProbeRequests; nothing comes back between the pair,
                                              or from the node
    held [nodes=0,1] [state=2]                how ranks stand to the last Hold (ring.orders.State; 2: held)
    measured [nodes=0,1] [rank=2] [link=0-1]  figures of the ranks that the last RunTests named; who is slow
    validate [ranks=0-1] [hold=5]             an operator asks
    lose node=0 role=agent                    its connection breaks
    ended node=0 code=0
    wait 1.5                                  ticks of 0.1 s
    restart                                   a new controller process with the files of the old one
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, StorePlacement, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.events import Op, Phase
from keepstep.core.finding import Finding
from keepstep.core.incident import Incident
from keepstep.core.ranges import expand_ranks
from keepstep.core.summary import DeviceCalls, Endpoint, PathProbe
from keepstep.core.validation import TransferEndpoint
from keepstep.report.timeline import rows
from keepstep.wire.messages import (
    Ended,
    Found,
    Heartbeat,
    Held,
    HeldRank,
    Hello,
    Hold,
    Join,
    Measured,
    Message,
    Probed,
    ProbeRequest,
    Profile,
    ProfileRequest,
    RankBeat,
    Reachable,
    RunTests,
    StateRequest,
    States,
    Validate,
)

SCENARIOS = sorted(Path(__file__).parent.glob("control_*.txt"))


class Stage:
    """The controller's core, with peers that the scenario plays."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.names: dict[int, str] = {}
        self.written: dict[int, Incident] = {}
        self.placed: StorePlacement | None = None
        self.asked: Message | None = None
        self.to_probe: dict[int, ProbeRequest] = {}  # by peer
        self.hold: Hold | None = None
        self.tests: dict[int, RunTests] = {}
        self.nodes = self.ranks = 1
        self.validates = True
        self.restarts = 0  # with which hung processes are ended
        self.sequence = 0
        self.numbers = 0
        self.controller = self.fresh()

    def fresh(self) -> Controller:
        self.names = {}
        settings = Settings(
            nodes=self.nodes,
            grace_s=0.5,
            validate=self.validates,
            restart_hangs=self.restarts > 0,
            hang_patience_s=30.0 if self.restarts else 0.0,
            max_restarts=self.restarts,
        )
        return Controller(settings, locators=stand_ins.PlainLocators(), unix_s=lambda now_s: 1000.0 + now_s)

    def run(self, line: str) -> list[str]:
        word, *rest = line.split()
        if word == "wait":
            return self.wait(float(rest[0]))
        options = dict(pair.split("=", 1) for pair in rest)
        out: list[str] = []
        for effect in getattr(self, f"do_{word}")(**options):
            out += self.note(effect)
        return out

    def note(self, effect: Effect) -> list[str]:
        if isinstance(effect, WriteIncident):
            self.written[effect.incident.number] = effect.incident
        elif isinstance(effect, StorePlacement):
            self.placed = effect
        elif isinstance(effect, Send) and isinstance(effect.message, ProfileRequest | StateRequest):
            self.asked = effect.message
        elif isinstance(effect, Send) and isinstance(effect.message, ProbeRequest):
            self.to_probe.update(dict.fromkeys(effect.peers, effect.message))
        elif isinstance(effect, Send) and isinstance(effect.message, Hold):
            self.hold = effect.message
        elif isinstance(effect, Send) and isinstance(effect.message, RunTests):
            for peer in effect.peers:
                self.tests[int(self.names[peer].removeprefix("agent"))] = effect.message
        return stand_ins.describe(effect, self.names, 1000.0 + self.now_s)

    def wait(self, seconds: float) -> list[str]:
        out: list[str] = []
        for _ in range(round(seconds * 10)):
            self.now_s = round(self.now_s + 0.1, 3)
            lines = [line for effect in self.controller.tick(self.now_s) for line in self.note(effect)]
            out += [f"at {self.now_s:g}", *lines] if lines else []
        return out

    def peer(self, name: str) -> int:
        return next(number for number, known in self.names.items() if known == name)

    def connect(self, name: str, role: str) -> int:
        self.numbers += 1
        self.names[self.numbers] = name
        self.controller.connected(self.numbers, role)
        return self.numbers

    def say(self, peer: int, *messages: Message) -> list[Effect]:
        return [effect for one in messages for effect in self.controller.message(peer, one, self.now_s)]

    def agents(self, chosen: str = "") -> list[int]:
        here = [int(name.removeprefix("agent")) for name in self.names.values() if name.startswith("agent")]
        return [node for node in sorted(here) if not chosen or str(node) in chosen.split(",")]

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks, (node + 1) * self.ranks)

    def do_cluster(
        self, nodes: str, ranks: str, joined: str = "1", validate: str = "1", restarts: str = "0"
    ) -> list[Effect]:
        self.validates, self.restarts = validate == "1", int(restarts)
        self.nodes, self.ranks = int(nodes), int(ranks)
        self.controller = self.fresh()
        if joined == "1":
            for node in range(self.nodes):
                self.do_launcher(str(node))
            for node in range(self.nodes):
                self.do_agent(str(node))
            self.placed = StorePlacement(
                tuple((one.node, one.pid, at) for one, at in self.controller.rendezvous.placements.items())
            )
            self.do_beat("0")
        return []

    def do_launcher(
        self,
        node: str,
        pid: str = "",
        wish: str = "",
        min: str = "",
        max: str = "",
        ranks: str = "",
        name: str = "",
    ) -> list[Effect]:
        who, process = f"gpu-{node}", int(pid or 100 + int(node))
        peer = self.connect(name or f"launcher{node}", "launcher")
        join = Join(
            who,
            f"10.0.0.{node}",
            int(ranks or self.ranks),
            29500 + int(node),
            int(wish or node),
            int(min or self.nodes),
            int(max or self.nodes),
        )
        return self.say(peer, Hello("launcher", who, -1, process), join)

    def do_agent(self, node: str, pid: str = "") -> list[Effect]:
        peer = self.connect(f"agent{node}", "agent")
        return self.say(peer, Hello("agent", f"gpu-{node}", int(node), int(pid or 200 + int(node))))

    def do_beat(
        self,
        step: str,
        node: str = "",
        iteration: str = "0.5",
        overdue: str = "0",
        slow: str = "-1",
        inside: str = "",
    ) -> list[Effect]:
        self.sequence += 1
        out: list[Effect] = []
        for one in self.agents(node):
            ranks = tuple(
                RankBeat(
                    *(rank, int(step), 2, 100, float(iteration), 0.4 if rank == int(slow) else 0.2),
                    overdue_s=float(overdue),
                    idle_s=float(inside or 0),
                    in_flight=stand_ins.all_reduce(self.now_s - float(inside)) if inside else None,
                )
                for rank in self.ranks_of(one)
            )
            out += self.say(self.peer(f"agent{one}"), Heartbeat(one, self.sequence, self.now_s, ranks))
        return out

    def do_found(self, kind: str, rank: str, **fields: str) -> list[Effect]:
        out: list[Effect] = []
        for one in expand_ranks(rank):
            node = one // self.ranks
            finding = Finding(
                kind,
                one,
                f"gpu-{node}",
                float(fields.get("time", self.now_s)),
                int(fields.get("step", -1)),
                int(fields.get("onset", -1)),
                float(fields.get("before", 0)),
                float(fields.get("after", 0)),
                float(fields.get("stuck", 0)),
                float(fields.get("limit", 0)),
                exit_code=int(fields.get("code", 0)),
                message=fields.get("message", "").replace("_", " "),
                phase=int(Phase[fields["phase"]]) if "phase" in fields else -1,
            )
            who = "launcher" if kind in ("crash", "exit") else "agent"
            out += self.say(self.peer(f"{who}{node}"), Found(finding))
        return out

    def do_profiles(
        self,
        rank: str,
        onset: str,
        nodes: str = "",
        before: str = "0.5",
        after: str = "1.0",
        until: str = "100000",
        own: str = "",
    ) -> list[Effect]:
        asked, out = self.asked, []
        assert isinstance(asked, ProfileRequest)
        for node in self.agents(nodes):
            rows = stand_ins.iterations(
                self.ranks_of(node),
                asked.first_step,
                asked.last_step,
                onset=int(onset),
                until=int(until),
                slow_rank=int(rank),
                before_s=float(before),
                after_s=float(after),
                own_s=float(own) if own else None,
            )
            out += self.say(self.peer(f"agent{node}"), Profile(asked.request, node, rows))
        return out

    def do_states(
        self,
        rank: str,
        idle: str,
        nodes: str = "",
        going: str = "0",
        dead: str = "0",
        none: str = "0",
        done: str = "0",
        over: str = "",
        other: str = "-1",
    ) -> list[Effect]:
        asked, out = self.asked, []
        at_end = set(expand_ranks(over)) if over else set[int]()
        assert isinstance(asked, StateRequest)
        for node in self.agents(nodes):
            idle_s = 0.0 if going == "1" else float(idle)
            states = tuple(
                replace(
                    stand_ins.state(
                        one,
                        self.now_s,
                        step=40,
                        idle_s=idle_s,
                        waits=none == "0" and one not in {int(rank), *at_end},
                        op=Op.BARRIER if one == int(other) else Op.ALLREDUCE,
                    ),
                    alive=dead == "0",
                    phase=int(Phase.TEARDOWN if one in at_end else Phase.BACKWARD),
                    device=DeviceCalls() if done == "1" and one == int(rank) else None,
                )
                for one in self.ranks_of(node)
            )
            out += self.say(self.peer(f"agent{node}"), States(asked.request, node, states))
        return out

    def do_reachable(self, node: str) -> list[Effect]:
        return [
            effect
            for one in expand_ranks(node)
            for effect in self.say(
                self.peer(f"agent{one}"), Reachable(one, (Endpoint(f"10.0.0.{one}", 4000 + one),))
            )
        ]

    def do_probes(self, nodes: str = "", lost: str = "") -> list[Effect]:
        out: list[Effect] = []
        for node in self.agents(nodes):
            peer, source = self.peer(f"agent{node}"), f"gpu-{node}"
            asked = self.to_probe.pop(peer, None)
            if asked is None:
                continue
            probes = tuple(
                PathProbe(source, target.node, "timeout", 2.5)
                if lost and {source, target.node}.issuperset(lost.split(":"))
                else PathProbe(source, target.node, "echo", 0.0003)
                for target in asked.targets
            )
            out += self.say(peer, Probed(asked.request, node, probes))
        return out

    def do_held(self, nodes: str = "", state: str = "2", why: str = "") -> list[Effect]:
        hold, out = self.hold, []
        assert hold is not None
        for node in self.agents(nodes):
            ranks = tuple(
                HeldRank(
                    rank,
                    int(state),
                    TransferEndpoint("10.0.0.1", 5000 + rank, "00") if state == "2" else None,
                    why,
                )
                for rank in self.ranks_of(node)
            )
            out += self.say(self.peer(f"agent{node}"), Held(hold.number, node, ranks))
        return out

    def do_measured(self, nodes: str = "", rank: str = "-1", link: str = "") -> list[Effect]:
        ends = expand_ranks(link) if link else (-1, -1)
        out: list[Effect] = []
        for node in self.agents(nodes):
            asked = self.tests.get(node)
            for tests in asked.ranks if asked else ():
                told = stand_ins.figures(tests, slow_rank=int(rank), slow_link=(ends[0], ends[1]))
                assert asked is not None
                out += self.say(self.peer(f"agent{node}"), Measured(asked.number, asked.tests, node, told))
        return out

    def do_validate(self, ranks: str = "", hold: str = "5") -> list[Effect]:
        peer = self.connect("operator", "client")
        chosen = expand_ranks(ranks) if ranks else ()
        return self.say(peer, Hello("client", "laptop", -1, 7), Validate(chosen, float(hold)))

    def do_lose(self, node: str, role: str) -> list[Effect]:
        peer = self.peer(f"{role}{node}")
        del self.names[peer]
        return self.controller.disconnected(peer, self.now_s)

    def do_ended(self, node: str, code: str, message: str = "") -> list[Effect]:
        return self.say(self.peer(f"launcher{node}"), Ended(int(node), int(code), message.replace("_", " ")))

    def do_restart(self) -> list[Effect]:
        self.controller = self.fresh()
        self.controller.restore(self.written.values(), self.placed.placements if self.placed else ())
        return []


def blocks(text: str) -> list[tuple[list[str], list[str]]]:
    """(lines up to ``----``, expected lines) of each block; blocks are separated by an empty line."""
    found: list[tuple[list[str], list[str]]] = []
    for block in text.strip("\n").split("\n\n"):
        head, bar, tail = block.partition("\n----")
        found.append((head.splitlines(), tail.strip("\n").splitlines() if bar else []))
    return found


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    stage, lines, expected = Stage(), [], path.read_text()
    for head, _ in blocks(expected):
        commands = [line for line in head if line and not line.startswith("#")]
        out = [text for line in commands for text in stage.run(line)]
        if commands:
            head = [*head, "----", *(out or ["nothing"])]
        lines.append("\n".join(head))
    told = "\n\n".join(lines) + "\n"
    if os.environ.get("KEEPSTEP_REWRITE"):
        path.write_text(told)
    assert told == expected


@pytest.mark.parametrize(
    ("name", "timeline"),
    [
        (
            "validation",
            [
                "slow from here on",
                "noticed",
                "verdict",
                "validation (ranks 0-3 held 0.6 s)",
                "sharper verdict",
            ],
        ),
        ("slow", ["slow from here on", "noticed", "verdict", "over"]),
        ("hang", ["last progress", "noticed", "verdict", "over"]),
        ("crash", ["first death", "verdict", "stop the job", "over with the job, or by what came after it"]),
    ],
)
def test_timeline(name: str, timeline: list[str]) -> None:
    stage = Stage()
    for head, _ in blocks((Path(__file__).parent / f"control_{name}.txt").read_text()):
        for line in head:
            if line and not line.startswith("#"):
                stage.run(line)
    assert [row.text.split(":")[0] for row in rows(stage.written[1])] == timeline
