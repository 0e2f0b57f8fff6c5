"""Looks at a run again and again while somebody wants to see it, and has what is new encoded once for all viewers."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from keepstep.core.errors import KeepstepError
from keepstep.core.log_lines import one_line
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.run_source import RunSource
from keepstep.view.web.heat import HeatMap, heat_of, heat_section, pace_section
from keepstep.view.web.page_content import page_content, words_content
from keepstep.view.words import answer

_LOG = logging.getLogger("keepstep.serve")
_SECOND_RANKS, _SLOW_RANKS = 4096, 32_768  # above these a look takes longer, and is taken less often
_INTERVALS_S = (1.0, 2.0, 5.0)
_UNREAD_S = 0.3  # while a run's folder is still being read
_ENDED_S = 5.0  # a run that has ended may be begun again in the same folder
_LOOKED_S = 20.0  # after a request for data somebody is taken to look for so long
_PATIENCE_S = 60.0  # a first look at a large run takes a while
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Moment:
    """A look at the run as viewers get it. What is encoded is encoded once, when the first viewer needs it."""

    version: int
    snapshot: RunSnapshot
    content: dict[str, Any]
    changed: dict[str, Any]  # against the moment before
    heat: HeatMap
    looked_s: float = field(default=0.0)  # on the feed's clock

    @cached_property
    def whole(self) -> bytes:
        """All of it as JSON."""
        return _encode({"version": self.version, **self.content})

    @cached_property
    def whole_gzipped(self) -> bytes:
        """The same, gzipped."""
        return gzip.compress(self.whole, 5, mtime=0)

    @cached_property
    def whole_frame(self) -> bytes:
        """All of it as a server-sent event, for a viewer that has missed a moment."""
        return b"id: %d\nevent: whole\ndata: %b\n\n" % (self.version, self.whole)

    @cached_property
    def change_frame(self) -> bytes:
        """What has changed, as a server-sent event, for a viewer that has the moment before."""
        data = _encode({"version": self.version, **self.changed})
        return b"id: %d\nevent: change\ndata: %b\n\n" % (self.version, data)


class Feed:
    """The newest moment of one run, and who waits for the next.

    Each viewer gets the newest moment whenever it can take one: what it missed is left out for it, and nothing is
    kept for it. ``on_snapshot`` are called with each snapshot, in a thread; with ``always`` the run is looked at
    though nobody views it.
    """

    def __init__(
        self,
        source: RunSource,
        run: str = "",
        *,
        on_snapshot: Sequence[Callable[[RunSnapshot], None]] = (),
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._run = source, run
        self._on_snapshot, self._clock = on_snapshot, clock
        self._always = always
        self._moment: Moment | None = None
        self._lock = threading.Lock()  # of the store, which is not for several threads at once
        self._arrived = asyncio.Event()  # the next moment; a new event for each
        self._wanted = asyncio.Event()
        self._asked_s = -_LOOKED_S
        self._once = False  # one look is wanted, and no more after it
        self._closed = False
        self.viewers = 0

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        if self._moment is None or not self._source.is_whole:
            return _UNREAD_S
        snapshot = self._moment.snapshot
        if snapshot.state == "ended":
            return _ENDED_S
        ranks = snapshot.world_size
        return _INTERVALS_S[(ranks > _SECOND_RANKS) + (ranks > _SLOW_RANKS)]

    async def run(self) -> None:
        """Look for as long as the server runs, while somebody wants it."""
        while True:
            if not self.is_wanted():
                self._wanted.clear()
                await self._wanted.wait()
            began_s, self._once = self._clock(), False
            try:
                await self.look()
            except Exception:  # what is wrong with one look must not end all
                _LOG.exception("the run could not be looked at")
            # A look that takes long leaves the machine as much time as it took.
            took_s = self._clock() - began_s
            await asyncio.sleep(max(self.interval_s - took_s, min(took_s, _INTERVALS_S[0])))

    def close(self) -> None:
        """Let go of everybody who waits."""
        self._closed = True
        self._arrived.set()

    async def look(self) -> Moment:
        """Look once and tell everybody who waits."""
        moment = await asyncio.to_thread(self._looked)
        self._moment = moment
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()
        return moment

    async def newest(self, *, lingers: bool = True) -> Moment:
        """A moment that is not older than two looks.

        ``lingers``: whoever asks looks on for a while, so that the next moments are made as well. Raises
        asyncio.TimeoutError when the run cannot be looked at.
        """
        self._want(lingers)
        moment = self._moment
        if moment is not None and self._clock() - moment.looked_s <= 2 * self.interval_s:
            return moment
        found = await asyncio.wait_for(
            self._next_after(-1 if moment is None else moment.version), _PATIENCE_S
        )
        if found is None:
            raise asyncio.TimeoutError
        return found

    async def frames(self, seen: int = -1) -> AsyncGenerator[bytes]:
        """Server-sent events for one viewer that has the moment ``seen``, the newest each time it can take one."""
        self.viewers += 1
        self._want()
        try:
            while not self._closed:
                moment = self._moment
                if moment is None or moment.version == seen:
                    moment = await self._next_after(seen)
                if moment is None:
                    return
                yield moment.change_frame if 0 <= seen == moment.version - 1 else moment.whole_frame
                seen = moment.version
        finally:
            self.viewers -= 1

    async def _next_after(self, seen: int) -> Moment | None:
        """The next moment; None when there will be none any more."""
        while not self._closed and (self._moment is None or self._moment.version == seen):
            await self._arrived.wait()
        return None if self._closed else self._moment

    def _want(self, lingers: bool = True) -> None:
        if lingers:
            self._asked_s = self._clock()
        else:
            self._once = True
        self._wanted.set()

    def is_wanted(self) -> bool:
        """Whether somebody looks, or wants one look."""
        return self._always or self._once or self.viewers > 0 or self._clock() - self._asked_s < _LOOKED_S

    def _looked(self) -> Moment:
        before = self._moment
        try:
            with self._lock:
                snapshot = self._source.refresh()
        except (KeepstepError, OSError) as error:
            if before is None:
                raise
            why = one_line(str(error))
            age_s = before.snapshot.age_s + self._clock() - before.looked_s
            snapshot = replace(before.snapshot, age_s=age_s, troubles=(why,))
        for told in self._on_snapshot:
            try:
                told(snapshot)
            except Exception:  # noqa: PERF203 - what a tracker does wrong must not blind the page
                _LOG.exception("who is told of each snapshot has failed")
        with self._lock:
            heat = heat_of(snapshot, self._source.samples, self._lock, before.heat if before else None)
            content = content_of(snapshot, heat, self._run)
        changed = changed_sections(before.content if before else {}, content)
        version = before.version + 1 if before else 0
        return Moment(version, snapshot, content, changed, heat, self._clock())


def content_of(snapshot: RunSnapshot, heat: HeatMap, run: str) -> dict[str, Any]:
    """All sections of the page."""
    return {
        **page_content(snapshot, run, heat.store.usual_s()),
        "words": words_content(answer(snapshot, run)),
        "heat": heat_section(heat),
        "pace": pace_section(heat.store),
    }


def changed_sections(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The sections that differ. Of the incidents only those that are new or differ; of the pace the new points."""
    changed: dict[str, Any] = {}
    for name, section in now.items():
        known = before.get(name)
        if known == section:
            continue
        if name == "incidents" and known is not None:
            by_number = {one["number"]: one for one in known}
            changed[name] = [one for one in section if by_number.get(one["number"]) != one]
        elif name == "pace" and known is not None and known["stride"] == section["stride"]:
            changed[name] = _later_points(section, _alike(known, section))
        else:
            changed[name] = section
    return changed


def _later_points(curve: dict[str, Any], first: int) -> dict[str, Any]:
    """A curve without its first points; ``from`` says how many."""
    later: dict[str, Any] = {"from": first}
    for name, values in curve.items():
        later[name] = values[first:] if isinstance(values, list) else values
    return later


def _alike(before: dict[str, Any], now: dict[str, Any]) -> int:
    """How many points of two curves are the same from their beginning on."""
    columns = [name for name, values in now.items() if isinstance(values, list)]
    pairs = zip(
        zip(*(before[name] for name in columns), strict=True),
        zip(*(now[name] for name in columns), strict=True),
        strict=False,
    )
    count = 0
    for old, new in pairs:
        if old != new:
            break
        count += 1
    return count
