"""Orders that hold until they are taken back: thresholds, and that the job is not watched.

They outlive this process: they lie in the run's folder, and every agent has them and tells them to a later controller.
Restarts are not watching: a process that dies is told and recovered from as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Send, StoreStanding, Tell
from keepstep.control.running.thresholds import LiveSettings
from keepstep.core.log_lines import one_line
from keepstep.wire.messages import Operated, Standing, Tune, Tuned, Watch

logger = logging.getLogger("keepstep.control")

_MOST_NUMBER = 1 << 60  # no time in ms, which numbers are, comes near it
_REMIND_S = 3600.0  # how often it is told that the job is not watched
_ON = "watching is on: what stood still or was slow until now, and is over, is not told"
_OFF = "no verdicts, no remedies and no holds until `keepstep ctl RUN watch on`; deaths are recovered from as ever"


class StandingOrders:
    """The standing orders of one job.

    Attributes:
        settings: the controller's, as they are now.
        off_since_unix_s: since when the job is not watched; 0: it is.
    """

    def __init__(
        self,
        settings: LiveSettings,
        cluster: Cluster,
        effects: list[Effect],
        unix_s: Callable[[float], float],
        watched: Callable[[bool, float], None],
    ) -> None:
        """``watched(on, now_s)`` is called when watching goes on or off."""
        self.settings = settings
        self.off_since_unix_s = 0.0
        self._number = 0
        self._cluster, self._effects = cluster, effects
        self._unix_s, self._watched = unix_s, watched
        self._remind_s = 0.0

    @property
    def is_watched(self) -> bool:
        """Whether the job is watched."""
        return not self.off_since_unix_s

    @property
    def message(self) -> Standing:
        """These orders as agents get them."""
        return Standing(self._number, self.off_since_unix_s, tuple(sorted(self.settings.orders.items())))

    def restore(self, standing: Standing | None, now_s: float) -> None:
        """Go on with the orders that an earlier controller has kept in the run's folder."""
        if standing is not None:
            self._take(standing, now_s)

    def learn(self, standing: Standing, now_s: float) -> None:
        """Take what an agent knows, if it is newer: this controller may have been started on another node."""
        if self._number < standing.number < _MOST_NUMBER:
            self._take(standing, now_s)
            self._keep()

    def greet(self, agent: int) -> None:
        """Tell an agent that has just come, by the number of its connection."""
        if self._number:
            self._effects.append(Send((agent,), self.message))

    def tick(self, now_s: float) -> None:
        """Time passes: remind, now and then, that the job is not watched."""
        if self.is_watched or now_s < self._remind_s:
            return
        if self._remind_s:
            minutes = max(self._unix_s(now_s) - self.off_since_unix_s, 0.0) / 60
            self._effects.append(Tell(f"watching has been off for {minutes:.0f} min: {_OFF}"))
        self._remind_s = now_s + _REMIND_S

    # --- orders ---------------------------------------------------------------------------------------------------

    def tune(self, peer: int, order: Tune, standstill: str, now_s: float) -> None:
        """An operator wants to see or change thresholds. ``standstill``: why the job runs no more, "" while it does."""
        settings, names = self.settings, [name for name, _ in order.changes]
        refused = settings.unknown(names) if order.reset else settings.objection(order.changes)
        if not order.changes and not order.reset:
            self._answer(peer, Tuned(settings.rows()))
            return
        if refused := standstill or refused:
            self._answer(peer, Tuned(refused=refused))
            return
        if order.reset:
            wanted = {} if not names else {k: word for k, word in settings.orders.items() if k not in names}
        else:
            wanted = settings.orders | dict(order.changes)
        before = {row.name: row for row in settings.rows()}
        trial = LiveSettings(settings.start)
        trial.order(wanted)
        changed = [row for row in trial.rows() if row.value != before[row.name].value]
        told = ", ".join(f"{row.name} {before[row.name].value} → {row.value}" for row in changed)
        if not order.only_say and wanted != settings.orders:
            settings.order(wanted)
            self._new_number(now_s)
            self._keep()
            self._say(f"thresholds: {told or 'as before, now by order'}")
        would = "would change: " if order.only_say else "changed: "
        nothing = "nothing would change" if order.only_say else "nothing changed, it is so already"
        self._answer(peer, Tuned(settings.rows(), f"{would}{told}" if told else nothing))

    def watch(self, peer: int, order: Watch, standstill: str, now_s: float) -> None:
        """An operator wants the job to be watched, or not."""
        if order.on == self.is_watched:
            refused = (
                "it is watched already" if order.on else f"it has not been watched since {self.since} already"
            )
        else:
            refused = standstill
        if refused:
            self._answer(peer, Operated(refused=refused))
            return
        told = _ON if order.on else f"watching is off: {_OFF}"
        if order.only_say:
            self._answer(peer, Operated(f"{told.replace('is', 'would be', 1)}; nothing was done"))
            return
        self.off_since_unix_s = 0.0 if order.on else self._unix_s(now_s)
        self._remind_s = now_s + _REMIND_S
        self._new_number(now_s)
        self._keep()
        self._watched(order.on, now_s)
        self._say(told)
        self._answer(peer, Operated(told))

    @property
    def since(self) -> str:
        """Since when the job is not watched, as a time of day; "" while it is."""
        local = time.localtime(self.off_since_unix_s)
        return "" if self.is_watched else time.strftime("%Y-%m-%d %H:%M:%S", local)

    def _take(self, standing: Standing, now_s: float) -> None:
        was_watched = self.is_watched
        self._number = standing.number
        self.off_since_unix_s = standing.off_since_unix_s
        self.settings.order(dict(standing.thresholds))
        if self.is_watched != was_watched:
            self._watched(self.is_watched, now_s)

    def _new_number(self, now_s: float) -> None:
        # Later than any that another controller of this run may have given, whose orders are not known here yet.
        self._number = max(self._number + 1, int(self._unix_s(now_s) * 1000))

    def _keep(self) -> None:
        self._effects.append(StoreStanding(self.message))
        self._send(self._cluster.agents().values(), self.message)

    def _say(self, text: str) -> None:
        logger.info("by order of an operator: %s", one_line(text))
        self._effects.append(Tell(text))

    def _answer(self, peer: int, answer: Tuned | Operated) -> None:
        self._send((peer,), answer)

    def _send(self, peers: Iterable[int], message: Tuned | Operated | Standing) -> None:
        if peers := tuple(peers):
            self._effects.append(Send(peers, message))
