"""Whatever bytes come, in whatever state: a channel raises WireError or nothing, and holds no more than one frame."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep import wire
from keepstep.core.errors import WireError
from keepstep.wire.channel import HANDSHAKE_LIMIT
from keepstep.wire.framing import FrameBuffer, frame

SECRET = b"s" * 32
ENDS = wire.Ends("a:1", "b:2"), wire.Ends("b:2", "a:1")
BOUND = HANDSHAKE_LIMIT + 4


def pair(state: int) -> tuple[wire.ClientChannel, wire.ServerChannel]:
    """Both ends after ``state`` steps of the handshake."""
    client = wire.ClientChannel(SECRET, "agent", ENDS[0])
    server = wire.ServerChannel(SECRET, ENDS[1])
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
@settings(max_examples=400, deadline=None)
def test_random_bytes_raise_wire_errors_only(state: int, chunks: list[bytes]) -> None:
    for end in pair(state):
        proven = end.established
        for chunk in chunks:
            try:
                messages, _ = end.receive(chunk)
                assert messages == []
            except WireError:
                assert end.buffered_bytes == 0
            if not proven:
                assert end.buffered_bytes <= BOUND + 3000
        assert end.established == proven


@given(state=st.integers(0, 2), cut=st.integers(0, 400), flip=st.integers(0, 255), at=st.integers(0, 400))
@settings(max_examples=300, deadline=None)
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


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=20), st.lists(st.integers(1, 50), min_size=1))
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=60, deadline=None)
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
