"""Three launchers on this machine, over real connections: one goes, and one of the others leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep import wire
from keepstep.launch.controller.elections import Elections
from keepstep.launch.controller.lease import Elector

KEY = wire.RunKey(b"s" * 32, "job-a")


async def until(condition: Callable[[], object]) -> None:
    async def met() -> None:
        while not condition():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(met(), 120)


def test_a_launcher_of_another_job_has_no_part_in_an_election() -> None:
    """It asks at an election port that its job had, or that it knows by whatever mistake."""
    heard: list[wire.Message] = []
    troubles: list[Exception] = []

    async def play() -> None:
        one = Elections(
            wire.Seat(1, "node-0", 100, "127.0.0.1", 0),
            tls=(None, None),
            member_is_connected=lambda: True,
            changed=lambda: None,
            led=lambda: None,
        )
        seat = await one.open(KEY)
        assert one.elector is not None
        one.elector.received(wire.Council(1, 1, seat, 0, (seat,)), asyncio.get_running_loop().time())
        ask = wire.Ask(1, 1, 2, 5, 0, (1, 1))
        stranger = wire.Client(
            ("127.0.0.1", seat.port),
            wire.RunKey(KEY.secret, "job-b"),
            role="elector",
            greet=lambda: (wire.Where(), ask),
            message=heard.append,
            trouble=lambda error, attempt: troubles.append(error),
        )
        await until(lambda: len(troubles) >= 2)
        await stranger.close()
        await one.close()

    wire.run(play())
    assert heard == []
    assert {type(error) for error in troubles} == {wire.AnotherJob}


def test_another_launcher_leads_when_the_first_is_gone() -> None:
    led: list[int] = []
    connected = True

    async def play() -> tuple[list[Elector], list[int]]:
        nonlocal connected
        nodes = [
            Elections(
                wire.Seat(n + 1, f"node-{n}", 100 + n, "127.0.0.1", 0),
                tls=(None, None),
                member_is_connected=lambda: connected,
                changed=lambda: None,
                led=lambda n=n: led.append(n),
            )
            for n in range(3)
        ]
        try:
            seats = tuple([await one.open(KEY) for one in nodes])
            electors = [one.elector for one in nodes if one.elector is not None]
            for one in electors:
                one.received(wire.Council(1, 1, seats[0], 0, seats), asyncio.get_running_loop().time())
            await until(lambda: electors[0].may_act(asyncio.get_running_loop().time()))
            connected = False
            await until(lambda: {1, 2} <= set(led))  # told by the first one that it has the lease
            assert [one.leads for one in electors] == [1, 0, 0]
            await nodes[0].close()
            await until(lambda: any(one.leads > 1 for one in electors[1:]))
            leader = next(one for one in electors[1:] if one.leads > 1)
            leader.serves(4000)
            await until(lambda: all(one.leader.port == 4000 for one in electors[1:]))
            return electors, [one.leads for one in electors[1:]]
        finally:
            for one in nodes:
                await one.close()

    electors, leads = wire.run(play())
    assert sorted(leads)[0] == 0
    assert max(leads) >= 2
    assert all(one.leader.term == max(leads) for one in electors[1:])
