"""The core of the controller, without I/O or a clock: messages and time come in, effects go out.

`ControlServer` calls ``connected``, ``message``, ``disconnected`` and, ten times a second, ``tick``; each returns
effects to be carried out in order. All state here may be lost: after a restart, agents and launchers say again who they
are and which groups they know; incident numbers and open incidents are read from the run's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from keepstep.control.backup_orders import Backups
from keepstep.control.cases import Cases
from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Send, StoreStop, Tell
from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.open_cases import OpenCases
from keepstep.control.membership.council import Councils
from keepstep.control.membership.ending import Ending, exit_code_of
from keepstep.control.membership.job_state import JobStates
from keepstep.control.membership.node_names import NodeNames
from keepstep.control.membership.pauses import Growth, OperatorOrders, Pauses, RankMoves
from keepstep.control.membership.peers import Admission, Peer, Peers
from keepstep.control.membership.placing import Placing
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import End, Exclude, HaltThese, Lapsed, Lost, Order, Renew
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.restart_budget import Spending
from keepstep.control.membership.transitions import JobState
from keepstep.control.notices import Notices
from keepstep.control.running.running_orders import RunningOrders
from keepstep.control.running.thresholds import LiveSettings
from keepstep.control.settings import Settings
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.core.incident import Incident
from keepstep.wire.messages import (
    Bye,
    Checksums,
    Council,
    Ended,
    Failed,
    Families,
    Found,
    Groups,
    Halt,
    Halted,
    Heartbeat,
    Held,
    Hello,
    Imports,
    Inventory,
    Join,
    Kept,
    Locate,
    Measured,
    Message,
    Moved,
    Operate,
    Placement,
    Probed,
    Profile,
    Reachable,
    Recovered,
    Renamed,
    Sealed,
    Splits,
    States,
    Stop,
    Validate,
    Words,
)

_MOST_TEXT = 500  # characters kept of a message about a failure
_FINISHED = Stop(0, "all nodes have finished")
_NOT_AGREED = "most of the nodes that have to agree on who plays which rank are lost, or cut off from here"

_Handlers: TypeAlias = Mapping[type, Callable[[Any, Any, Any, float], None]]
_OrderHandlers: TypeAlias = Mapping[type, Callable[[Any, Any, float], None]]


class Controller:
    """The controller of one job: hands each message to the parts that it concerns, and collects their effects."""

    def __init__(
        self,
        settings: Settings,
        *,
        locators: Locators | None = None,
        unix_s: Callable[[float], float] = lambda now_s: now_s,
        clock_s: Callable[[], float] | None = None,
        pid: int = 0,
    ) -> None:
        """``unix_s``: Unix time of a moment on this controller's clock, which goes on evenly when clocks are set.

        ``clock_s``: Unix time now, as clocks are set now, which those of joining nodes are compared with.
        """
        self.cluster = Cluster(max(settings.nodes, 1))
        self.rendezvous = Rendezvous(settings.nodes, join_s=settings.join_s, last_call_s=settings.last_call_s)
        self.admission, self.names = Admission(clock_s), NodeNames(self.rendezvous)
        self.councils = Councils(settings.seat, settings.term)
        self.backups = Backups(settings.backups, settings.lost_s)
        self.states, self.notices = JobStates(), Notices()
        self.ending = Ending(settings.join_s, settings.grace_s)
        self._effects: list[Effect] = []  # what is to be done, in order; every part adds to it
        self.peers = Peers(settings, self.cluster, self.rendezvous, self._effects, pid)
        self.placing = Placing(
            *(self.cluster, self.rendezvous, self.councils, self.peers, self.ending, self._effects),
            admission=self.admission,
        )
        spending = Spending(settings.restart_budget, unix_s)
        self.reforming = Reforming(self.rendezvous, settings, self.peers.is_heard, spending)
        membership = (self.rendezvous, self.reforming)
        self._pauses = Pauses(*membership, self.backups.withheld, self._effects)
        self.operator_orders = OperatorOrders(*membership, self._pauses, self._effects)
        self._growth = Growth(*membership, self._pauses)
        live = LiveSettings(settings)
        self.cases = Cases(
            live,
            self.cluster,
            locators or Locators(),
            OpenCases(self.ending, self.reforming),
            RankMoves(*membership, self._pauses),
            self._effects,
            unix_s,
        )
        parts = (self.cases, self.ending, self.reforming, self._pauses, self._effects)
        self.running = RunningOrders(live, *parts, self._reform)

    def restore(
        self,
        incidents: Iterable[Incident],
        placements: Sequence[tuple[str, int, Placement]] = (),
        stop: Stop | None = None,
        council: Council | None = None,
    ) -> None:
        """Continue a run that an earlier controller began: its numbers, open incidents, rank table, end.

        ``council``: the council of this host's launcher. Its rank table is used, and its leader counts as lost where
        that was another launcher.
        """
        if stop is not None:
            self.ending.begin(stop, is_told=True)
        self.cases.restore(incidents)
        former = None
        if council is not None:
            self.councils.restore(council)
            if self.ending.stop is None and council.stop is not None:
                self.ending.begin(council.stop)
            placements = [(row.node, row.pid, row.placement) for row in council.table]
            if council.leader.token != self.peers.settings.seat:
                former = Launcher(council.leader.node, council.leader.pid)
        if placements:
            table = {Launcher(node, pid): placement for node, pid, placement in placements}
            self.rendezvous.restore(table)
            self.reforming.restored(former)
            self.placing.take(table)
        if self.ending.stop is not None:
            self.councils.end(self.ending.stop)
            self.reforming.over()

    def connected(self, peer: int, role: str) -> None:
        """Note a new connection whose peer has proved that it holds the run's secret."""
        self.peers.connected[peer] = Peer(peer, role)

    def disconnected(self, peer: int, now_s: float, *, unanswered: bool = False) -> list[Effect]:
        """Note that a connection has ended. ``unanswered``: its host fell silent, without a last packet."""
        since_s = now_s + self.peers.settings.link_s if unanswered else now_s  # a cut link may be back soon
        gone = self.peers.gone(peer, since_s)
        if gone is None or gone.launcher is None:
            return self._taken()
        if self.rendezvous.leave(gone.launcher, peer):
            self.reforming.gone(gone.launcher, since_s)
        if self.rendezvous.peer(gone.launcher) is None:
            self.councils.electors.gone(gone.launcher, now_s)
        return self._taken()

    def reached(self, peer: int) -> list[Effect]:
        """Note that the election port of this launcher can be reached, as `Reach` had asked."""
        sender = self.peers.connected.get(peer)
        launcher = sender.launcher if sender is not None else None
        if launcher is not None and self.rendezvous.peer(launcher) == peer:
            self.councils.electors.reached(launcher)
        return self._taken()

    def message(self, peer: int, message: Message, now_s: float) -> list[Effect]:
        """Handle one message from a connected peer."""
        sender = self.peers.connected.get(peer)
        if sender is None:
            return []
        if type(message) is Heartbeat:
            self._heartbeat(sender, message, now_s)
            return self._taken() if self._effects else []
        kind = type(message)
        if type(message) is Hello:
            self._hello(sender, message, now_s)
        elif sender.hello is None:
            self.peers.refuse(peer, "say Hello first")
        elif handler := self._FROM_ANYBODY.get(kind):
            handler(self, sender, message, now_s)
        elif sender.launcher is not None and (of_launcher := self._FROM_LAUNCHERS.get(kind)):
            of_launcher(self, sender.launcher, message, now_s)
        elif sender.node is not None and (of_node := self._FROM_NODES.get(kind)):
            of_node(self, sender.node, message, now_s)
        return self._taken()

    def tick(self, now_s: float) -> list[Effect]:
        """Let time pass. Call it about ten times a second."""
        self.ending.slept(self.peers.slept_s(now_s))
        self.placing.answer(self.rendezvous.tick(now_s))
        self._watch_nodes(now_s)
        self._reform(self.reforming.tick(now_s), now_s)
        self.operator_orders.tick()
        self._reform(self._pauses.tick(self.peers.connected.keys(), now_s), now_s)
        newcomers = self.backups.copies > 0 and bool(self._growth.newcomers)
        if (newcomers or self.reforming.is_untried) and self.state(now_s) is JobState.RUNNING:
            self.reforming.trains()
            self._growth.tick(now_s)
        self._tick_councils(now_s)
        self.cases.tick(self.peers.connected.keys(), now_s)
        self.running.tick(self.peers.connected.keys(), now_s)
        self._tick_backups(now_s)
        if (leaving := self.ending.exit(now_s)) is not None:
            self.cases.end(now_s)
            self._effects.append(leaving)
        return self._taken()

    def end(self, now_s: float) -> list[Effect]:
        """Decide what is undecided and close all incidents, as the job is over or this process is told to end."""
        self.cases.end(now_s)
        return self._taken()

    def state(self, now_s: float) -> JobState:
        """The state of the job. Looks at every rank until all train."""
        known = (self.cluster, self.rendezvous, self.reforming, self.cases.dying)
        return self.states.look(*known, self.ending.exit_code, now_s)

    def _found(self, sender: Peer, message: Found, now_s: float) -> None:
        if not self.ending.over:
            self.cases.found(message.finding, now_s)

    def _locate(self, sender: Peer, message: Locate, now_s: float) -> None:
        located = self.backups.locate(message, self.cluster, self._expected_nodes, now_s)
        self._effects += [Send((sender.number,), located)] if located is not None else []

    def _hello(self, sender: Peer, hello: Hello, now_s: float) -> None:
        agent_of = self.peers.hello(sender, hello, now_s)
        if sender.launcher is not None:
            self.ending.launchers.setdefault(sender.launcher, None)
        if agent_of is not None:
            self.backups.forget(agent_of.rank)
            self.cases.tell_doubt(sender.number)
            self.running.standing.greet(sender.number)

    def _heartbeat(self, sender: Peer, beat: Heartbeat, now_s: float) -> None:
        node = self.peers.heartbeat(sender, beat, now_s)
        if node is not None and (node.overdue or node.inside):
            self.cases.watch_waiting(now_s)
        if node is not None and beat.notices:
            self._effects += map(Tell, self.notices.fresh(beat.notices, now_s))

    def _join(self, sender: Peer, join: Join, now_s: float) -> None:
        peer = sender.number
        reason = self.admission.objection(join) if sender.launcher else "only launchers join"
        if reason or sender.launcher is None:
            self.peers.refuse(peer, reason)
            return
        if name := self.names.another(join):
            self._effects += [Tell(self.names.told(join, name)), Send((peer,), Renamed(name))]
            return
        if not join.max_restarts and join.incarnation > self.reforming.incarnation:
            self.cases.incarnation_over(now_s)
            self.cases.desk.words.begins(join.incarnation)
            self.cluster.begin_again({})  # the launcher of a single node restarts its workers by itself
            self.cases.processes_began(now_s)
        placed = self.rendezvous.join(sender.launcher, join, peer, now_s)
        if not placed.refusals:
            self.councils.here(sender.launcher, join.seat)
        self.placing.answer(placed)
        if not placed.refusals and (council := self.councils.told(sender.launcher)) is not None:
            self._effects.append(Send((peer,), council))
        if placed.is_new:
            self._tick_councils(now_s)
        if self.ending.under_way:
            if self.ending.is_told or self.ending.over:
                self._effects.append(Send((peer,), self.ending.stop or _FINISHED))
        elif self.rendezvous.placements and not placed.refusals:
            self._reform(self.reforming.here(sender.launcher, join.incarnation, now_s), now_s)

    def _reform(self, orders: Sequence[Order], now_s: float) -> None:
        for order in orders:
            self._ORDERS[type(order)](self, order, now_s)

    def _halt(self, order: HaltThese, now_s: float) -> None:
        self.cases.halted(now_s)
        found = (self.rendezvous.peer(launcher) for launcher in order.launchers)
        halt = Halt(order.incarnation, order.suspend, order.fresh)
        self._effects.append(Send(tuple(p for p in found if p is not None), halt))

    def _lost(self, order: Lost, now_s: float) -> None:
        for launcher in order.launchers:
            node = self.cluster.nodes[self.rendezvous.placements[launcher].node_rank]
            node.lost_s = None
            self.cases.lost_in(self.rendezvous.incarnation, node, now_s)

    def _renew(self, order: Renew, now_s: float) -> None:
        table, before = self.rendezvous.placements, len(self.cluster.nodes)
        self.cases.incarnation_over(now_s)
        self.cases.desk.words.begins(self.rendezvous.incarnation)
        self.cluster.begin_again({one.node_rank: launcher.node for launcher, one in table.items()})
        self.ending.launchers.update(dict.fromkeys(table))
        how = f"restart {self.reforming.restarts} of {self.rendezvous.max_restarts}"
        if len(table) != before:
            how += f", {len(table)} of {self.rendezvous.most} nodes"
        if len(table) != before or self.reforming.exchanged:  # nodes have other ranks now
            self.backups.begin_again()
        self.cases.processes_began(now_s, exchanged=self.reforming.exchanged)
        self.cases.begin_again(how)
        self.placing.answer(order.placed)

    def _operate(self, sender: Peer, message: Operate, now_s: float) -> None:
        why = "the job is ending" if self.ending.under_way else ""
        self._reform(self.operator_orders.asked(sender.number, message, why, now_s), now_s)

    def _sealed(self, launcher: Launcher, message: Sealed, now_s: float) -> None:
        sealed = (message.incarnation, message.step, message.why[:_MOST_TEXT])
        self._reform(self._pauses.sealed(launcher, *sealed, now_s), now_s)

    def _halted(self, launcher: Launcher, message: Halted, now_s: float) -> None:
        self._reform(self.reforming.halted(launcher, message, now_s), now_s)

    def _failed(self, launcher: Launcher, failed: Failed, now_s: float) -> None:
        self.reforming.spending.failed(launcher.node, failed, now_s)
        code, text = failed.exit_code, failed.message[:_MOST_TEXT]
        self._reform(self.reforming.failed(launcher, failed.incarnation, code, text, now_s), now_s)

    def _tick_councils(self, now_s: float) -> None:
        table = self.rendezvous.placements if self.rendezvous.max_restarts and not self.ending.over else {}
        council = self.councils.tick(table, now_s)
        self.placing.reach(table)
        is_agreed = self.councils.is_settled and self.councils.allows(self.rendezvous.incarnation)
        if self.ending.withheld(not table or is_agreed, now_s):
            self._end_job(End(1, _NOT_AGREED), now_s)
        self._tell_stop(now_s)
        if council is not None:
            self.placing.tell(council)

    def _kept(self, launcher: Launcher, kept: Kept, now_s: float) -> None:
        incarnation = self.rendezvous.incarnation
        waited = not self.councils.allows(incarnation)
        if not self.councils.kept(launcher, kept):
            return
        self._tell_stop(now_s)
        self._consider_over(now_s)
        if waited and self.ending.stop is None and self.councils.allows(incarnation):
            self.placing.agreed()
        self._tick_councils(now_s)

    def _watch_nodes(self, now_s: float) -> None:
        if now_s < self.peers.quiet_until_s:
            return
        for node in self.peers.watch(now_s):
            if not self.ending.over and self.cases.lost(node, now_s):
                node.lost_s, node.lost = None, True
        lost, waited_s = self.cluster.wait_for_lost()
        begins_again = self.rendezvous.max_restarts > 0
        if lost and waited_s > self.peers.settings.gone_s and not (begins_again or self.ending.under_way):
            reason = f"{lost} lost without a last packet; all other ranks have waited for {waited_s:.0f} s"
            self._end_job(End(TEMPORARY_FAILURE, reason, kind="node-lost"), now_s)

    def _tick_backups(self, now_s: float) -> None:
        if self.backups.copies and not self.ending.over:
            orders = self.backups.tick(self.cluster, self._expected_nodes, now_s, self.cases.doubted)
            self._effects += [Send((peer,), order) for peer, order in orders]

    @property
    def _expected_nodes(self) -> int:
        return len(self.rendezvous.placements) or self.peers.settings.nodes

    def _ended(self, sender: Peer, ended: Ended, now_s: float) -> None:
        if sender.launcher is None:
            return
        if self.rendezvous.placements and sender.launcher not in self.rendezvous.placements:
            return  # the loss of a spare changes nothing
        if ended.exit_code == 0 and ended.incarnation < self.reforming.incarnation:
            return  # the launcher has begun another incarnation since
        self.ending.launchers[sender.launcher] = ended
        if sender.node is not None:
            sender.node.left = True
        if ended.exit_code == 0:
            self.reforming.ended(sender.launcher)
            if sender.node is not None:
                self.cases.finished(sender.node, ended.incarnation, now_s)
        elif self.ending.stop is None:
            who = "" if ended.by_operator or ended.kind else f"node {sender.launcher.node} failed: "
            self._end_job(End(ended.exit_code, who + ended.message, ended.by_operator, ended.kind), now_s)
        self._consider_over(now_s)

    def _bye(self, sender: Peer, bye: Bye, now_s: float) -> None:
        node, plays = sender.node, self.rendezvous.placements.items()
        if node is not None and bye.orphaned:
            for launcher in [one for one, placement in plays if placement.node_rank == node.rank]:
                self.reforming.orphaned(launcher)
            return
        launcher = sender.launcher
        if launcher is not None and launcher in self.rendezvous.placements and self.rendezvous.max_restarts:
            self.cluster.nodes[self.rendezvous.placements[launcher].node_rank].parting = bye.reason
            self.reforming.orphaned(launcher)
            return
        if node is not None and (sender.role == "launcher" or node.launcher is None):
            node.left = True
        if launcher is None:
            return
        if self.ending.launchers.get(launcher) is None:
            self.ending.launchers[launcher] = bye
        peer = self.rendezvous.peer(launcher)
        if peer is not None and launcher not in self.rendezvous.placements:
            self.rendezvous.leave(launcher, peer)  # a spare that has left gets no place
            self.reforming.gone(launcher, now_s)
            self.councils.electors.leaves(launcher)
            self._tick_councils(now_s)

    def _end_job(self, end: End, now_s: float) -> None:
        """End the job: all nodes end with the exit code of the first failure."""
        code = exit_code_of(end, self.cases.exit_code(now_s))
        stop = Stop(code, end.reason[:_MOST_TEXT], end.by_operator, end.kind)
        self.ending.begin(stop)
        self.reforming.over()
        self._pauses.give_up("the job ends")
        self.councils.end(stop)
        self._tell_stop(now_s)

    def _tell_stop(self, now_s: float) -> None:
        """Tell launchers that the job ends, once that holds under any leader or no leader can be elected."""
        stop = self.ending.to_tell(self.councils.stop, now_s)
        if stop is None:
            return
        self._effects.append(StoreStop(stop))
        self.cases.stopped(stop.exit_code)
        self.peers.tell_launchers(stop)
        self._consider_over(now_s)

    def _consider_over(self, now_s: float) -> None:
        if not self.ending.is_over(self.rendezvous.placements.keys(), self.councils.is_settled, now_s):
            return
        self.reforming.over()
        if self.ending.stop is None:
            self._effects.append(StoreStop(_FINISHED))  # for launchers that only a later controller reaches
            self.peers.tell_launchers(_FINISHED)

    def _taken(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    _FROM_ANYBODY: ClassVar[_Handlers] = {
        Groups: lambda self, _, message, now_s: self.cluster.learn_groups(message.groups, message.rank),
        Recovered: lambda self, _, message, now_s: self.cases.recovered(message.recovery, now_s),
        Found: _found,
        Locate: _locate,
        Operate: _operate,
        Validate: lambda self, by, message, now_s: self.cases.desk.validations.asked(
            by.number, message, now_s
        ),
        Join: _join,
        **dict.fromkeys(
            RunningOrders.BY_OPERATOR, lambda self, by, it, at: self.running.ordered(by.number, it, at)
        ),
        Moved: lambda self, sender, message, now_s: self.placing.moved(sender, message),
        Ended: _ended,
        Bye: _bye,
    }
    _FROM_LAUNCHERS: ClassVar[_Handlers] = {
        Sealed: _sealed,
        Failed: _failed,
        Halted: _halted,
        Kept: _kept,
        Imports: lambda self, _, message, now_s: self.placing.imported(message),
    }
    _FROM_NODES: ClassVar[_Handlers] = {
        **dict.fromkeys((Profile, States, Probed), lambda self, by, it, at: self.cases.answered(by, it, at)),
        **dict.fromkeys(
            (Held, Measured), lambda self, by, it, at: self.cases.desk.validations.told(by, it, at)
        ),
        **dict.fromkeys(RunningOrders.BY_AGENT, lambda self, node, it, at: self.running.told(node, it, at)),
        Reachable: lambda self, node, message, now_s: node.answers_at(message.endpoints),
        Splits: lambda self, node, message, now_s: self.cases.mitigation.shares.told(node, message),
        Words: lambda self, node, message, now_s: self.cases.heard(node, message),
        Inventory: lambda self, node, message, now_s: self.backups.heard(node, message),
        **dict.fromkeys((Families, Checksums), lambda self, one, told, at: self.cases.compare(one, told, at)),
    }
    _ORDERS: ClassVar[_OrderHandlers] = {
        HaltThese: _halt,
        Lost: _lost,
        Exclude: lambda self, order, now_s: self.placing.exclude(order),
        Renew: _renew,
        Lapsed: lambda self, order, now_s: self.cases.mitigation.not_moved(order.why, now_s),
        Tell: lambda self, order, now_s: self._effects.append(order),
        End: _end_job,
    }
