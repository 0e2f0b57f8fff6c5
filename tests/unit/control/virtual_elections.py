"""Elections of the controller's host in a virtual job: launchers ask each other, over a network that loses words."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.control.virtual_job import JobState
from tests.unit.control.virtual_parts import Host

from keepstep import wire

ELECTOR_S = 0.3


def elect(job: JobState, host: Host) -> None:
    """What a launcher does every `ELECTOR_S`: ask for votes, host the controller, or connect to another's."""
    if not host.alive or host.exit_code is not None:
        return
    elector = host.elector
    for seat, ask in elector.tick(job.now_s, connected=host.connection is not None and not host.part.is_void):
        _ask(job, host, seat, ask)
    site = host.site
    if site is not None and not site.over and elector.leads != site.term and elector.council is not None:
        job.kill_site(site)
        site.over = True
    if elector.leads > (site.term if site is not None else 0) and not host.starting:
        host.starting = True
        job.at(job.random.uniform(0.3, 2.0), lambda term=elector.leads: _lead(job, host, term))
    if host.connection is not None and host.connection.site is not job.target(host):
        job.break_connection(host.connection, host)
    if host.aims != elector.leader.term:
        host.aims, host.failures = elector.leader.term, 0
        job.connect(host)
    if host.connection is None and elector.council is not None and job.random.random() < 0.3:
        for other in [_at(job, seat) for seat in elector.council.seats]:
            if other is not None and other is not host:
                _pass(job, host, other, lambda other=other: _where(job, other, host))
    job.at(ELECTOR_S, lambda: elect(job, host))


def _lead(job: JobState, host: Host, term: int) -> None:
    host.starting = False
    if host.alive and host.exit_code is None and host.elector.leads == term:
        job.start_site(host, term)


def _where(job: JobState, asked: Host, by: Host) -> None:
    leads = asked.elector.where(job.now_s)

    def told() -> None:
        by.elector.learned(leads)
        if leads.acts:
            by.part.led(job.now_s)

    _pass(job, asked, by, told)


def _ask(job: JobState, host: Host, seat: wire.Seat, ask: wire.Ask) -> None:
    other = _at(job, seat)
    if other is None:
        return

    def arrived() -> None:
        answer = other.elector.asked(ask, job.now_s)
        if answer is not None:
            _pass(job, other, host, lambda: host.elector.answered(answer, job.now_s))

    _pass(job, host, other, arrived)


def _pass(job: JobState, here: Host, there: Host, arrived: Callable[[], None]) -> None:
    """A message from one launcher to another: it may be lost, repeated or overtaken."""

    def deliver() -> None:
        if there.alive and there.exit_code is None and not here.cut and not there.cut:
            arrived()

    for _ in range(job.random.choice((0, 1, 1, 1, 1, 1, 1, 1, 1, 2))):
        job.at(job.delay_s(), deliver)


def _at(job: JobState, seat: wire.Seat) -> Host | None:
    """The launcher that listens at this address now."""
    return next((h for h in reversed(job.hosts) if h.elector.seat.address == seat.address), None)
