"""Whatever bytes come, in whatever state: a channel raises WireError or nothing, and holds no more than one frame."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep import wire
from keepstep.core.errors import WireError
from keepstep.wire.channel import HANDSHAKE_LIMIT
from keepstep.wire.framing import FrameBuffer, frame

KEY = wire.RunKey(b"s" * 32, "job-a")
ENDS = wire.Ends("a:1", "b:2"), wire.Ends("b:2", "a:1")
BOUND = HANDSHAKE_LIMIT + 4


def pair(state: int) -> tuple[wire.ClientChannel, wire.ServerChannel]:
    """Both ends after ``state`` steps of the handshake."""
    client = wire.ClientChannel(KEY, "agent", ENDS[0])
    server = wire.ServerChannel(KEY, ENDS[1])
    to_server = client.open()
    if state >= 1:
        _, to_client = server.receive(to_server)
        if state >= 2:
            _, to_server = client.receive(to_client)
            if state >= 3:
                server.receive(to_server)
    return client, server


CHUNKS = st.lists(st.one_of(st.binary(max_size=3000), st.binary(max_size=900).map(frame)), max_size=8)


@given(state=st.integers(0, 3), chunks=CHUNKS)
@settings(max_examples=many(400), deadline=None)
def test_random_bytes_raise_wire_errors_only(state: int, chunks: list[bytes]) -> None:
    for end in pair(state):
        proven = end.established
        for chunk in chunks:
            try:
                messages, _ = end.receive(chunk)
                assert messages == []
            except WireError:
                assert len(end._frames) == 0
            if not proven:
                assert len(end._frames) <= BOUND + 3000
        assert end.established == proven


@given(state=st.integers(0, 2), cut=st.integers(0, 400), flip=st.integers(0, 255), at=st.integers(0, 400))
@settings(max_examples=many(300), deadline=None)
def test_mutated_handshake_never_establishes(state: int, cut: int, flip: int, at: int) -> None:
    """Any change to any step of a true handshake ends in a refusal, or in waiting for more."""
    client, server = pair(0)
    steps = [client.open()]
    try:
        for step in range(3):
            data = bytearray(steps[-1])
            if step == state:
                data = data[: max(len(data) - cut, 0)] if cut % 2 else data
                if data:
                    data[at % len(data)] ^= flip
                if bytes(data) == steps[-1]:
                    return
            target = client if step == 1 else server
            _, answer = target.receive(bytes(data))
            steps.append(answer)
    except WireError:
        pass
    if state == 2 or not server.established:
        assert not server.established
    else:
        raise AssertionError(f"a changed step {state} was accepted")


@given(state=st.integers(0, 3), cut=st.integers(0, 400), flip=st.integers(0, 255), at=st.integers(0, 400))
@settings(max_examples=many(300), deadline=None)
def test_two_runs_never_have_a_connection_and_only_a_true_farewell_is_believed(
    state: int, cut: int, flip: int, at: int
) -> None:
    """One secret, two runs; one step of the handshake is changed, or none."""
    client = wire.ClientChannel(wire.RunKey(KEY.secret, "job-b"), "agent", ENDS[0])
    server = wire.ServerChannel(KEY, ENDS[1])
    said, changed = client.open(), False
    refusals: list[WireError] = []
    for step in range(4):
        data = bytearray(said)
        if step == state:
            data = data[: max(len(data) - cut, 0)] if cut % 2 else data
            if data:
                data[at % len(data)] ^= flip
            changed = bytes(data) != said
        target = client if step % 2 else server
        try:
            _, said = target.receive(bytes(data))
        except WireError as error:
            refusals.append(error)
            said = server.denial(error) if target is server and isinstance(error, wire.Violation) else b""
    assert not client.established
    assert not server.established
    believed = [isinstance(error, wire.AnotherJob) for error in refusals]
    assert believed == [True, True] if not changed else believed != [True, True]


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=20), st.lists(st.integers(1, 50), min_size=1))
@settings(max_examples=many(200), deadline=None)
def test_frames_come_out_as_they_went_in(bodies: list[bytes], sizes: list[int]) -> None:
    """Against a dumb twin: the list of bodies itself, however the stream is cut."""
    stream = b"".join(frame(body) for body in bodies)
    frames, out, at, turn = FrameBuffer(60), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        frames.feed(stream[at : at + size])
        while (body := frames.take()) is not None:
            out.append(bytes(body))
        assert len(frames) <= 64
        at, turn = at + size, turn + 1
    assert out == bodies


@given(order=st.permutations(range(4)), twice=st.booleans())
@settings(max_examples=many(60), deadline=None)
def test_sealed_frames_only_once_and_in_order(order: list[int], twice: bool) -> None:
    client, server = pair(3)
    sealed = [client.send(wire.Bye(str(number))) for number in range(4)]
    wanted = [sealed[number] for number in order] + ([sealed[order[-1]]] if twice else [])
    heard: list[str] = []
    try:
        for one in wanted:
            heard += [message.reason for message in server.receive(one)[0] if isinstance(message, wire.Bye)]
    except WireError:
        pass
    assert heard == [str(number) for number in range(len(heard))]
    assert (len(heard) == 4) == (list(order) == [0, 1, 2, 3])


def electors() -> tuple[wire.ClientChannel, wire.ServerChannel]:
    """Two launchers that have proved themselves to each other."""
    client = wire.ClientChannel(KEY, "elector", ENDS[0])
    server = wire.ServerChannel(KEY, ENDS[1], roles=wire.TO_ELECTOR)
    _, challenge = server.receive(client.open())
    _, proof = client.receive(challenge)
    server.receive(proof)
    return client, server


ANYTHING = st.recursive(
    st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=300), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=40,
)
KINDS = st.sampled_from(
    ["Ask", "Answer", "Where", "Leads", "Council", "Kept", "Join", "Placement", "Stop", "Row"]
)


@given(kind=KINDS, fields=st.lists(ANYTHING, max_size=9), to_server=st.booleans())
@settings(max_examples=many(400), deadline=None)
def test_electors_take_only_their_own_messages_within_bounds(
    kind: str, fields: list[object], to_server: bool
) -> None:
    """Also from one that holds the secret: what is no question or answer breaks the connection."""
    client, server = electors()
    here, there = (client, server) if to_server else (server, client)
    try:
        messages, _ = there.receive(here.send_encoded(msgspec.msgpack.encode([kind, *fields])))
    except WireError:
        return
    for message in messages:
        assert isinstance(message, (wire.Ask, wire.Where) if to_server else (wire.Answer, wire.Leads))
        for value in msgspec.structs.astuple(message):
            assert not isinstance(value, int) or 0 <= value < 1 << 62
            assert not isinstance(value, str) or len(value) <= 255


SEAT = st.builds(
    wire.Seat,
    token=st.integers(-1, 1 << 62),
    node=st.text(max_size=300),
    pid=st.integers(-1, 1 << 31),
    address=st.text(max_size=300),
    port=st.integers(-1, 1 << 16),
)


@given(seats=st.lists(SEAT, max_size=9), term=st.integers(-1, 1 << 53), leader=SEAT)
@settings(max_examples=many(200), deadline=None)
def test_councils_are_bounded(seats: list[wire.Seat], term: int, leader: wire.Seat) -> None:
    client, server = pair(3)
    fits = len(seats) <= wire.MOST_SEATS and 0 <= term < 1 << 53
    for seat in (leader, *seats):
        fits = fits and 1 <= seat.token < 1 << 62 and 0 <= seat.pid < 1 << 31 and 0 <= seat.port < 1 << 16
        fits = fits and len(seat.node) <= 255 and len(seat.address) <= 255
    council = wire.Council(term, 1, leader, 29400, tuple(seats))
    try:
        messages, _ = client.receive(server.send(council))
    except WireError:
        assert not fits
        return
    assert fits
    assert messages == [council]


def test_an_elector_is_none_of_the_controllers_peers_and_the_other_way_round() -> None:
    for role, roles in (("elector", None), ("launcher", wire.TO_ELECTOR), ("agent", wire.TO_ELECTOR)):
        client = wire.ClientChannel(KEY, role, ENDS[0])  # type: ignore[arg-type]
        server = wire.ServerChannel(KEY, ENDS[1], roles=roles) if roles else wire.ServerChannel(KEY, ENDS[1])
        with pytest.raises(WireError):
            server.receive(client.open())
