"""Both ends of a connection without sockets: handshake, sealing, and every way to be refused."""

from __future__ import annotations

import msgspec
import pytest

from keepstep import wire
from keepstep.wire.channel import (
    HANDSHAKE_LIMIT,
    LIMITS,
    SEAL_BYTES,
    Challenge,
    Open,
    Proof,
    Stranger,
    encode,
)
from keepstep.wire.framing import FrameBuffer, frame

KEY = wire.RunKey(b"s" * 32, "job-a")
HERE, THERE = "10.0.0.2:4000", "10.0.0.1:29400"
HELLO = wire.Hello("agent", "gpu-1", 0, 77)


def ends(
    key: wire.RunKey = KEY, role: wire.Role = "agent", remote: str = THERE
) -> tuple[wire.ClientChannel, wire.ServerChannel]:
    return (
        wire.ClientChannel(key, role, wire.Ends(HERE, remote)),
        wire.ServerChannel(KEY, wire.Ends(THERE, HERE)),
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
    client, server = ends(wire.RunKey(b"x" * 32, "job-a"))
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
    client, server = ends()
    _, challenge = server.receive(client.open())
    proof = msgspec.msgpack.decode(challenge[4:], type=Challenge).proof
    assert refused(server.receive, frame(encode(Proof(proof)))) == "unauthenticated"  # type: ignore[arg-type]


def test_relayed_connection_is_refused_by_its_addresses() -> None:
    client, server = ends(remote="10.9.9.9:29400")
    assert refused(server.receive, client.open()) == "address"


def test_translated_addresses_can_be_allowed() -> None:
    client = wire.ClientChannel(KEY, "agent", wire.Ends(HERE, "10.9.9.9:1"))
    server = wire.ServerChannel(KEY, wire.Ends(THERE, HERE), check_addresses=False)
    _, challenge = server.receive(client.open())
    server.receive(client.receive(challenge)[1])
    assert server.established


def test_other_protocol_version_is_told_to_the_peer() -> None:
    client, server = ends()
    opening = frame(encode(Open(wire.PROTOCOL + 1, "agent", b"n" * 32, HERE, THERE)))  # type: ignore[arg-type]
    with pytest.raises(wire.Violation) as caught:
        server.receive(opening)
    assert caught.value.reason == "version"
    client.open()
    with pytest.raises(wire.Violation, match=f"speaks protocol {wire.PROTOCOL + 1}") as told:
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
    assert len(server._frames) == 0
    assert refused(server.receive, good) == "malformed"
    assert len(server._frames) == 0


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


OTHER = wire.RunKey(KEY.secret, "job-b")


def strangers(role: wire.Role = "agent") -> tuple[wire.ClientChannel, wire.ServerChannel]:
    """Both hold one secret, and belong to two runs."""
    roles = {role}
    client = wire.ClientChannel(OTHER, role, wire.Ends(HERE, THERE))
    return client, wire.ServerChannel(KEY, wire.Ends(THERE, HERE), roles=roles)


@pytest.mark.parametrize("role", ["agent", "launcher", "client", "peer", "elector"])
def test_two_runs_with_one_secret_refuse_each_other_and_say_which_they_are(role: wire.Role) -> None:
    client, server = strangers(role)
    _, challenge = server.receive(client.open())
    _, farewell = client.receive(challenge)
    with pytest.raises(wire.AnotherJob) as at_server:
        server.receive(farewell)
    with pytest.raises(wire.AnotherJob) as at_client:
        client.receive(server.denial(at_server.value))
    assert not client.established
    assert not server.established
    assert str(at_server.value) == f"{HERE} belongs to job 'job-b', this is job 'job-a'"
    assert str(at_client.value) == f"{THERE} belongs to job 'job-a', this is job 'job-b'"
    assert at_client.value.reason == "another-job"
    assert refused(server.receive, farewell) == "malformed"


def test_a_job_without_an_id_is_another_one_than_one_with() -> None:
    unnamed = wire.RunKey(KEY.secret)
    client = wire.ClientChannel(unnamed, "agent", wire.Ends(HERE, THERE))
    server = wire.ServerChannel(KEY, wire.Ends(THERE, HERE))
    with pytest.raises(wire.AnotherJob, match="belongs to a job without --rdzv-id, this is job 'job-a'"):
        server.receive(client.receive(server.receive(client.open())[1])[1])


def test_who_lacks_the_secret_is_told_no_name() -> None:
    thief = wire.RunKey(b"x" * 32, "job-b")
    client = wire.ClientChannel(thief, "agent", wire.Ends(HERE, THERE))
    server = wire.ServerChannel(KEY, wire.Ends(THERE, HERE))
    _, challenge = server.receive(client.open())
    with pytest.raises(wire.Unproven):
        client.receive(challenge)
    for said in (Stranger("job-b", bytes(32)), Proof(bytes(32))):
        server = wire.ServerChannel(KEY, wire.Ends(THERE, HERE))
        _, challenge = server.receive(client.open())
        with pytest.raises(wire.Unproven) as caught:
            server.receive(frame(encode(said)))  # type: ignore[arg-type]
        assert b"job-a" not in challenge + server.denial(caught.value)


@pytest.mark.parametrize("after_challenge", [False, True])
@pytest.mark.parametrize("key", [KEY, OTHER])
def test_nobody_without_the_secret_can_say_that_the_run_is_another(
    key: wire.RunKey, after_challenge: bool
) -> None:
    client = wire.ClientChannel(key, "agent", wire.Ends(HERE, THERE))
    opening = client.open()
    if after_challenge:
        client.receive(wire.ServerChannel(KEY, wire.Ends(THERE, HERE)).receive(opening)[1])
    forged = frame(encode(Stranger("job-a", bytes(32))))  # type: ignore[arg-type]
    if client.established:
        assert refused(client.receive, forged) == "tampered"
        return
    with pytest.raises(wire.Unproven, match="without a proof"):
        client.receive(forged)


def test_the_names_of_two_runs_hold_for_one_connection_and_cannot_be_sent_back() -> None:
    client, server = strangers()
    again, other = strangers()
    _, farewell = client.receive(server.receive(client.open())[1])
    other.receive(again.open())
    assert refused(other.receive, farewell) == "unauthenticated"
    assert refused(client.receive, farewell) == "unauthenticated"


def test_the_secret_alone_makes_no_connection_with_another_run() -> None:
    """A program that sends the proof that it could, though the runs differ."""
    client, server = strangers()
    client.receive(server.receive(client.open())[1])
    proof = Proof(client._code(b"client proof"))
    assert refused(server.receive, frame(encode(proof))) == "unauthenticated"  # type: ignore[arg-type]
    assert not server.established


def test_a_client_takes_one_challenge() -> None:
    client, server = strangers()
    _, challenge = server.receive(client.open())
    client.receive(challenge)
    assert refused(client.receive, challenge) == "malformed"


def test_an_opening_has_to_say_for_which_run_it_is() -> None:
    _, server = ends()
    opening = frame(encode(Open(wire.PROTOCOL, "agent", b"n" * 32, HERE, THERE)))  # type: ignore[arg-type]
    assert refused(server.receive, opening) == "malformed"


def test_an_id_of_any_length_and_script_fits_into_the_handshake() -> None:
    keys = [wire.RunKey(KEY.secret, "é\udc80" * 5_000 + end) for end in "ab"]
    assert keys[0].tag != keys[1].tag
    assert keys[0].name != keys[1].name
    assert all(len(key.name) <= wire.MOST_NAME for key in keys)
    client = wire.ClientChannel(keys[0], "agent", wire.Ends(HERE, THERE))
    server = wire.ServerChannel(keys[1], wire.Ends(THERE, HERE))
    _, challenge = server.receive(client.open())
    _, farewell = client.receive(challenge)
    assert max(map(len, (client.open(), challenge, farewell))) <= HANDSHAKE_LIMIT
    with pytest.raises(wire.AnotherJob):
        server.receive(farewell)


def test_a_name_is_told_as_one_line() -> None:
    key = wire.RunKey(KEY.secret, "a\n\x1b[31mb")
    server = wire.ServerChannel(key, wire.Ends(THERE, HERE))
    client = wire.ClientChannel(KEY, "agent", wire.Ends(HERE, THERE))
    _, farewell = client.receive(server.receive(client.open())[1])
    with pytest.raises(wire.AnotherJob) as caught:
        server.receive(farewell)
    assert str(caught.value).isprintable()


def test_a_key_shows_no_secret() -> None:
    assert "secret" not in repr(KEY)
    assert "tag" not in repr(KEY)
