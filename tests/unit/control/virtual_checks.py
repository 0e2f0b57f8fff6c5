"""What holds in a virtual job: after every event, whenever something is given out or started, and at its end."""

from __future__ import annotations

import math

from tests.unit.control import reforming_invariants
from tests.unit.control.virtual_job import JobState
from tests.unit.control.virtual_parts import ATTEMPT_S, DEAD_HOST_S, RANKS, Host, Site

from keepstep import wire
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.launch.controller.lease import UNREACHED_S
from keepstep.launch.controller.member import LEASE_S


def check(job: JobState) -> None:
    """What holds at every moment."""
    for site in job.sites:
        reforming_invariants.check(site.controller.reforming)
    assert job.newest - job.pauses <= job.max_restarts, "more restarts than --max-restarts"
    leader = job.leader()
    if leader is not None and leader.controller.reforming.suspended:
        running = [h.name for h in job.hosts if h.alive and h.running >= 0 and not h.was_cut(job.now_s)]
        assert not running, f"suspended, but {running} run"
    for host in job.hosts:
        if host.running < 0 or not host.alive or host.finished:
            continue
        # A node that is cut off ends its workers by itself, within its lease and what ending takes.
        acts = host.elector.may_act(job.now_s)  # then others are cut off, or gone
        if (host.cut and not acts) or (host.deaf and host.running < job.newest):
            late_s = job.now_s - host.cut_s - LEASE_S - DEAD_HOST_S - ATTEMPT_S
            assert late_s < 8.0, f"{host.name} is cut off and trains on"

        since_s = max(job.newest_s, host.healed_s, job.back_s, leader.stalled_until_s if leader else 0)
        late = host.running < job.newest and leader is not None and not host.cut and not host.deaf
        # Whom nobody is left to tell of another leader, as when all others were stopped, ends as if it were cut off.
        alone = not any(one.alive and one.exit_code is None for one in job.hosts if one is not host)
        patience_s = 25.0 + LEASE_S if alone else 25.0
        assert not late or job.now_s - since_s < patience_s, f"{host.name} goes on with {host.running}"

    acting = [host for host in job.hosts if host.alive and host.elector.may_act(job.now_s)]
    assert len(acting) <= 1 or not acting[1].elector.council, [host.name for host in acting]
    check_seats(job, leader)
    for host in job.hosts:
        if not host.alive or host.exit_code is not None:
            host.gone_s = min(host.gone_s, job.now_s)
        if host.elector.leads:
            other = job.leaders.setdefault(host.elector.leads, host)
            assert other is host, f"{host.name} and {other.name} both lead term {host.elector.leads}"


def check_seats(job: JobState, leader: Site | None) -> None:
    """Nobody has two, all are launchers of this job, and nobody who has gone for good keeps one."""
    councils = leader.controller.councils if leader is not None else None
    newest = councils.newest if councils is not None else None
    for seats in (newest.seats, newest.former) if newest is not None else ():
        assert len({seat.token for seat in seats}) == len(seats), f"two seats of one launcher: {seats}"
        known = {(h.elector.seat.token, h.name, h.pid) for h in job.hosts}
        strange = [seat for seat in seats if (seat.token, seat.node, seat.pid) not in known]
        assert not strange, f"seats of launchers of no node of the job: {strange}"
    if leader is None or newest is None or newest.former or not councils.is_settled:  # type: ignore[union-attr]
        job.settled_s = math.inf
        return
    job.settled_s = min(job.settled_s, job.now_s)
    since_s = max(job.settled_s, job.back_s, leader.stalled_until_s, leader.host.healed_s)
    if leader.host.deaf:  # nothing is settled without its own launcher, which gives the lease up soon
        since_s = max(since_s, leader.host.cut_s + UNREACHED_S + ATTEMPT_S - 20.0)
    ends = leader.controller.ending.over or leader.host.exit_code is not None
    for seat in newest.seats[1:] if not ends else ():
        host = next(h for h in job.hosts if h.elector.seat.token == seat.token)
        assert job.now_s - max(host.gone_s, since_s) < 20.0, f"{host.name} has gone, and has a seat"


def check_given(job: JobState, site: Site, placement: wire.Placement) -> None:
    """One table per incarnation, of a size that the job may have."""
    count = placement.node_count
    table = (site.term, placement.master_addr, placement.master_port)
    other = job.given.setdefault(placement.incarnation, table)
    assert other[1:] == table[1:], f"two tables of {placement.incarnation}: {other} and {table}"
    size = job.sizes.setdefault(placement.incarnation, count)
    assert size == count, f"{placement.incarnation} has {size} nodes and {count}"
    assert job.least <= count <= job.nodes, f"{count} nodes, not {job.least} to {job.nodes}"
    assert not job.rigid or len(set(job.sizes.values())) == 1, f"{job.sizes} nodes of what has one size"
    told = (placement.first_rank, placement.world_size)
    assert told == (placement.node_rank * RANKS, count * RANKS), f"{placement} of {count} nodes"
    assert placement.node_rank < count, f"{placement} of {count} nodes"


def check_start(job: JobState, host: Host, placement: wire.Placement) -> None:
    """Nobody plays a rank twice, and all older workers have ended."""
    place = (placement.incarnation, placement.node_rank)
    other = job.played.setdefault(place, host)
    assert other is host, f"{host.name} and {other.name} both play {place}"
    orders = job.orders + len(job.seals)
    unplaced = sum(one not in job.given for one in range(placement.incarnation))
    assert placement.pauses <= orders + unplaced, f"{placement.pauses} pauses after {orders} orders"
    for one in job.hosts:
        apart = one.was_cut(job.now_s) or host.was_cut(job.now_s)
        if one is host or not one.alive or one.running < 0 or one.finished or apart:
            continue
        assert one.running >= placement.incarnation, (
            f"{host.name} starts incarnation {placement.incarnation}, {one.name} runs {one.running}"
        )


def check_end(job: JobState, living: list[Host]) -> None:
    """All have ended alike, and nothing began again without a reason."""
    assert job.newest <= job.disturbances + len(job.seals), (
        f"{job.newest} restarts after {job.disturbances} disturbances: {job.told}"
    )
    placed = {host for (incarnation, _), host in job.played.items() if incarnation == job.newest}
    ended = [h for h in living if h in placed and h.part.placement is not None and not h.by_itself]
    # A leader without a majority gives up after a while: what the others come to it cannot know.
    codes = {h.exit_code for h in ended if not gave_up(h)} or {h.exit_code for h in ended}
    well = [host for host in placed if host.finished]
    assert len(codes) <= 1, f"ended with {codes}: {describe(job)}"
    if 0 in codes:
        assert len(well) == job.sizes[job.newest], f"exit code 0, but not all nodes finished: {describe(job)}"
    elif codes:
        assert job.disturbances, "failed without a failure"
        assert codes <= {1, TEMPORARY_FAILURE, *job.codes}, f"ended with {codes}, failed with {job.codes}"
    spares = {host.exit_code for host in living if host.part.placement is None and not host.by_itself}
    missed = not job.played and len(living) < len(job.hosts)  # one died before there was a table
    assert spares <= {0, 130, 2 if missed else 0}, f"spares ended with {spares}"


def gave_up(host: Host) -> bool:
    """It was told by a leader that had no majority."""
    return host.part.stop is not None and host.part.stop.reason.startswith(
        "most of the nodes that have to agree"
    )


def describe(job: JobState) -> str:
    """Where everything stands."""
    hosts = "; ".join(
        f"{h.name} pid {h.pid} alive={h.alive} cut={h.cut} runs={h.running} connected={h.connection is not None} "
        f"code={h.exit_code} halted={h.part._halted} halt={h.part._halt} placed={h.part.incarnation} "
        f"stop={h.part.stop is not None} leads={h.elector.leads} knows={h.elector.leader.term}"
        for h in job.hosts
    )
    sites = "; ".join(
        f"controller {site.term} on {site.host.name} up={site.up} {site.controller.reforming.state.value} "
        f"{site.controller.reforming.incarnation} "
        f"open={[o.node for o in site.controller.reforming._roll.awaited]} "
        f"council={site.controller.councils.is_settled}"
        for site in job.sites
    )
    return f"at {job.now_s:.1f} s: {hosts}; {sites} told={job.told}"
