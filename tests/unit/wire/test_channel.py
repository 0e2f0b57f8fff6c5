"""Both ends of a connection without sockets: handshake, sealing, and every way to be refused."""

from __future__ import annotations

import pytest

from keepstep import wire
from keepstep.wire.channel import HANDSHAKE_LIMIT, LIMITS, SEAL_BYTES
from keepstep.wire.framing import FrameBuffer, frame

SECRET = b"s" * 32
HERE, THERE = "10.0.0.2:4000", "10.0.0.1:29400"
HELLO = wire.Hello("agent", "gpu-1", 0, 77)


def ends(
    secret: bytes = SECRET, role: wire.Role = "agent", remote: str = THERE
) -> tuple[wire.ClientChannel, wire.ServerChannel]:
    return (
        wire.ClientChannel(secret, role, wire.Ends(HERE, remote)),
        wire.ServerChannel(SECRET, wire.Ends(THERE, HERE)),
    )


def shaken(role: wire.Role = "agent") -> tuple[wire.ClientChannel, wire.ServerChannel]:
    client, server = ends(role=role)
    _, challenge = server.receive(client.open())
    _, proof = client.receive(challenge)
    server.receive(proof)
    assert client.established
    assert server.established
    return client, server


def refused(call: object, *arguments: object) -> str:
    with pytest.raises(wire.Violation) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.reason


def test_messages_cross_both_ways() -> None:
    client, server = shaken()
    beat = wire.Heartbeat(0, 1, 2.5, (wire.RankBeat(3, 17, 2, 99),))
    messages, answer = server.receive(client.send(HELLO) + client.send(beat))
    assert messages == [HELLO, beat]
    assert answer == b""
    assert server.role == "agent"
    welcome = wire.Welcome(5)
    assert client.receive(server.send(welcome)) == ([welcome], b"")


def test_bytes_may_come_one_by_one() -> None:
    client, server = ends()
    to_client = b"".join(server.receive(bytes([one]))[1] for one in client.open())
    to_server = b"".join(client.receive(bytes([one]))[1] for one in to_client)
    received = [m for one in to_server + client.send(HELLO) for m in server.receive(bytes([one]))[0]]
    assert received == [HELLO]


def test_wrong_secret_is_seen_by_the_client_first() -> None:
    client, server = ends(secret=b"x" * 32)
    _, challenge = server.receive(client.open())
    with pytest.raises(wire.Unproven, match="does not hold this run's secret"):
        client.receive(challenge)


def test_server_refuses_a_wrong_proof() -> None:
    client, server = ends()
    _, challenge = server.receive(client.open())
    _, proof = client.receive(challenge)
    assert refused(server.receive, proof[:-1] + bytes([proof[-1] ^ 1])) == "unauthenticated"
    assert not server.established


def test_server_refuses_a_proof_made_for_another_nonce() -> None:
    client, server = ends()
    _, challenge = server.receive(client.open())
    _, proof = client.receive(challenge)
    again, other = ends()
    other.receive(again.open())
    assert refused(other.receive, proof) == "unauthenticated"


def test_server_proof_cannot_be_reflected() -> None:
    """A peer without the secret cannot use the server's own proof as its own."""
    import msgspec

    from keepstep.wire.channel import Challenge, Proof, encode

    client, server = ends()
    _, challenge = server.receive(client.open())
    proof = msgspec.msgpack.decode(challenge[4:], type=Challenge).proof
    assert refused(server.receive, frame(encode(Proof(proof)))) == "unauthenticated"  # type: ignore[arg-type]


def test_relayed_connection_is_refused_by_its_addresses() -> None:
    client, server = ends(remote="10.9.9.9:29400")
    assert refused(server.receive, client.open()) == "address"


def test_translated_addresses_can_be_allowed() -> None:
    client = wire.ClientChannel(SECRET, "agent", wire.Ends(HERE, "10.9.9.9:1"))
    server = wire.ServerChannel(SECRET, wire.Ends(THERE, HERE), check_addresses=False)
    _, challenge = server.receive(client.open())
    server.receive(client.receive(challenge)[1])
    assert server.established


def test_other_protocol_version_is_told_to_the_peer() -> None:
    from keepstep.wire.channel import Open, encode

    client, server = ends()
    opening = frame(encode(Open(wire.PROTOCOL + 1, "agent", b"n" * 32, HERE, THERE)))  # type: ignore[arg-type]
    with pytest.raises(wire.Violation) as caught:
        server.receive(opening)
    assert caught.value.reason == "version"
    client.open()
    with pytest.raises(wire.Violation, match="speaks protocol 2") as told:
        client.receive(server.denial(caught.value))
    assert told.value.reason == "denied"


@pytest.mark.parametrize("at", [4, 10, 4 + SEAL_BYTES, -1])
def test_tampered_frame(at: int) -> None:
    client, server = shaken()
    sealed = bytearray(client.send(HELLO))
    sealed[at] ^= 0x40
    assert refused(server.receive, bytes(sealed)) == "tampered"


def test_replayed_frame() -> None:
    client, server = shaken()
    sealed = client.send(HELLO)
    server.receive(sealed)
    assert refused(server.receive, sealed) == "replayed"


def test_reordered_frame() -> None:
    client, server = shaken()
    client.send(HELLO)
    assert refused(server.receive, client.send(HELLO)) == "reordered"


def test_frame_of_another_connection() -> None:
    client, _ = shaken()
    _, server = shaken()
    assert refused(server.receive, client.send(HELLO)) == "tampered"


def test_frame_sent_back_to_its_sender() -> None:
    client, _ = shaken()
    assert refused(client.receive, client.send(HELLO)) == "tampered"


def test_role_may_only_send_its_own_messages() -> None:
    client, server = shaken("launcher")
    assert refused(server.receive, client.send(wire.Heartbeat(0, 1, 1.0, ()))) == "malformed"


def test_tiny_limit_before_proof_large_after() -> None:
    _, server = ends()
    assert refused(server.receive, (HANDSHAKE_LIMIT + 1).to_bytes(4, "big")) == "oversized"
    _, server = shaken()
    server.receive(LIMITS["agent"].to_bytes(4, "big"))
    _, server = shaken("client")
    assert refused(server.receive, LIMITS["agent"].to_bytes(4, "big")) == "oversized"


def test_nothing_is_taken_after_a_violation() -> None:
    client, server = shaken()
    good = client.send(HELLO)
    refused(server.receive, b"\xff" * 64)
    assert server.buffered_bytes == 0
    assert refused(server.receive, good) == "malformed"
    assert server.buffered_bytes == 0


def test_second_opening_is_refused() -> None:
    client, server = ends()
    server.receive(client.open())
    assert refused(server.receive, client.open()) == "malformed"


def test_frame_buffer_splits_and_joins() -> None:
    frames = FrameBuffer(16)
    frames.feed(frame(b"one") + frame(b"two") + frame(b"three")[:5])
    assert [frames.take(), frames.take(), frames.take()] == [b"one", b"two", None]
    frames.feed(frame(b"three")[5:])
    assert [frames.take(), frames.take()] == [b"three", None]
    assert len(frames) == 0


def test_frame_buffer_refuses_an_empty_frame() -> None:
    frames = FrameBuffer(16)
    frames.feed(bytes(4))
    assert refused(frames.take) == "malformed"
