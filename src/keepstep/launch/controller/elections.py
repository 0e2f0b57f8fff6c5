"""The connections between electors: the port on which others ask this launcher for its vote, and its questions."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable

from msgspec import structs

from keepstep import wire
from keepstep.launch.controller.lease import Elector

_TICK_S = 0.2
_LOOK_S = 1.0  # seconds between two questions where the controller is
_GUIDE_S = 2.0  # seconds after which an elector that cannot be connected is replaced by another


class Elections:
    """Sends and receives for this launcher's ``elector``, which there is once it is open."""

    def __init__(
        self,
        seat: wire.Seat,
        *,
        tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
        member_is_connected: Callable[[], bool],
        changed: Callable[[], None],
        led: Callable[[], None],
    ) -> None:
        """``seat``: this launcher's, whose port is not known yet. ``tls``: contexts of a server and of a client.

        ``member_is_connected`` tells whether a controller's orders are heard. ``changed`` is called about five times a
        second, to act on what the elector knows; ``led`` when the controller's host says that it has the lease.
        """
        self._seat = seat
        self._tls = tls
        self._member_is_connected, self._changed, self._led = member_is_connected, changed, led
        self._dice = random.Random()
        self._key = wire.RunKey(b"")
        self._server: wire.Server | None = None
        self._clients: dict[int, wire.Client] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ticks: asyncio.Task[None] | None = None
        self._looked_s = 0.0
        self._guide, self._guided_s = 0, 0.0  # the elector that is asked without a seat, and since when
        self.elector: Elector | None = None

    async def open(self, key: wire.RunKey) -> wire.Seat:
        """Listen, and return this launcher's seat. Raises OSError when no port can be had."""
        await self.close()
        self._key = key
        callbacks = wire.ServerCallbacks(self._asked, lambda _: None, lambda _, __: None)
        try:
            self._server = await wire.serve(
                self._seat.address, 0, key, callbacks, tls=self._tls[0], roles=wire.TO_ELECTOR
            )
        except OSError:  # behind NAT no interface of this node has the address that others see
            anywhere = "::" if ":" in self._seat.address else "0.0.0.0"
            self._server = await wire.serve(
                anywhere, 0, key, callbacks, tls=self._tls[0], roles=wire.TO_ELECTOR
            )
        seat = structs.replace(self._seat, port=self._server.port)
        self.elector = Elector(seat, self._dice.random)
        self._ticks = asyncio.get_running_loop().create_task(self._run())
        return seat

    async def close(self) -> None:
        """Close all connections and the port."""
        if self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None
        for token in list(self._clients):
            self._leave(token)
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _run(self) -> None:
        assert self.elector is not None
        while True:
            at_s = now_s()
            self._keep_clients(self.elector)
            for seat, ask in self.elector.tick(at_s, connected=self._member_is_connected()):
                client = self._clients.get(seat.token)
                if client is not None and client.connected:  # a question that waits would come too late
                    client.send(ask)
            if not self._member_is_connected() and at_s - self._looked_s >= _LOOK_S:
                self._looked_s = at_s
                for client in self._clients.values():
                    if client.connected:
                        client.send(wire.Where())
            self._changed()
            await asyncio.sleep(_TICK_S)

    def _keep_clients(self, elector: Elector) -> None:
        """Hold connections to all electors, or without a seat to some of them while the controller is lost."""
        council = elector.council
        if council is None:
            return
        seats = {seat.token: seat for seat in (*council.seats, *council.former)}
        if seats.pop(elector.seat.token, None) is None:
            seats = {} if self._member_is_connected() else self._guides(seats, council.leader.token)
        for token in self._clients.keys() - seats.keys():
            self._leave(token)
        for token, seat in seats.items():
            if token not in self._clients:
                self._clients[token] = wire.Client(
                    (seat.address, seat.port),
                    self._key,
                    role="elector",
                    greet=lambda: () if self._member_is_connected() else (wire.Where(),),
                    message=self._answered,
                    tls=self._tls[1],
                )

    def _guides(self, seats: dict[int, wire.Seat], leader: int) -> dict[int, wire.Seat]:
        """Seats to ask for the controller: the leader, and one other by chance, as thousands may ask at once."""
        client = self._clients.get(self._guide)
        late = now_s() - self._guided_s >= _GUIDE_S
        if self._guide not in seats or (late and (client is None or not client.connected)):
            self._guided_s, self._guide = now_s(), self._dice.choice(list(seats))
        return {token: seat for token, seat in seats.items() if token in (self._guide, leader)}

    def _leave(self, token: int) -> None:
        task = asyncio.get_running_loop().create_task(self._clients.pop(token).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _asked(self, connection: wire.Connection, message: wire.Message) -> None:
        assert self.elector is not None
        if isinstance(message, wire.Ask):
            answer = self.elector.asked(message, now_s())
            if answer is not None:
                connection.send(answer)
        elif isinstance(message, wire.Where):
            connection.send(self.elector.where(now_s()))

    def _answered(self, message: wire.Message) -> None:
        assert self.elector is not None
        if isinstance(message, wire.Answer):
            self.elector.answered(message, now_s())
        elif isinstance(message, wire.Leads):
            self.elector.learned(message)
            if message.acts:
                self._led()


def now_s() -> float:
    """The event loop's time, by which electors and the launcher's link go."""
    return asyncio.get_running_loop().time()
