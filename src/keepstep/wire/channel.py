"""One end of a connection without any I/O: it takes received bytes, and returns messages and the bytes to send.

Handshake (each a length-prefixed msgpack struct of at most 1 KiB)::

    client  Open(protocol, role, nonce, addresses as the client sees them, run)
    server  Challenge(protocol, nonce, proof, run)  proof  = HMAC-SHA256(secret, "server proof" + transcript)
    client  Proof(proof)                            proof  = HMAC-SHA256(secret, "client proof" + transcript)

The transcript is the bytes of Open and the server's nonce, protocol and run, so both proofs cover both nonces, the
role, the version, the addresses and the runs. A run is given by its ``RunKey.tag``: 32 bytes for an id of any length.
From the same transcript each direction gets its own key, and each later frame is ``code (16) | number (8) | message``;
the code is keyed BLAKE2b over number and message.

If the runs differ there is no connection. Instead of Proof the client sends the name of its run, the server answers
with the name of its own, and both refuse. Each name comes with a proof of its own (``Stranger``), so that only a peer
with the secret learns a name or can claim that the run is another one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from keepstep.wire.address import end_name
from keepstep.wire.checking import FromHost, ToHost
from keepstep.wire.election import FromElector, ToElector
from keepstep.wire.framing import LENGTH_BYTES, FrameBuffer, frame
from keepstep.wire.messages import (
    PROTOCOL,
    AgentMessage,
    ClientMessage,
    LauncherMessage,
    Message,
    ToNode,
    ToViewer,
    ViewerMessage,
)
from keepstep.wire.secret import MOST_NAME, TAG_BYTES, RunKey
from keepstep.wire.transfer import Echo, FromHolder, Ping, ToHolder
from keepstep.wire.violation import AnotherJob, Unproven, Violation

T = TypeVar("T")
Role = Literal["agent", "launcher", "client", "viewer", "peer", "elector", "prober", "checker"]

HANDSHAKE_S = 5.0  # longest time from connecting to the proof
HANDSHAKE_LIMIT = 1024
NONCE_BYTES = 32
CODE_BYTES = 16
NUMBER_BYTES = 8
SEAL_BYTES = CODE_BYTES + NUMBER_BYTES
MIB = 1 << 20

# Most bytes in one frame from a proven peer of each role; an agent's profile of many iterations is the longest.
LIMITS: dict[str, int] = {
    "agent": 64 * MIB,
    "launcher": 2 * MIB,
    "client": 64 << 10,
    "viewer": 4 << 10,
    "peer": 4 << 10,
    "elector": 4 << 10,
    "prober": 4 << 10,
    "checker": 256 << 10,
}
SERVER_LIMIT = 16 * MIB  # most bytes in one frame from a server, for example the rank table of a large job
# A program that gives orders is a "client", one that only looks a "viewer". An agent that asks another one for a state
# is a "peer", one that measures the path a "prober"; a launcher that asks another one is an "elector"; a node of
# `keepstep check` that asks the host of the check is a "checker".
TO_CONTROLLER = frozenset({"agent", "launcher", "client", "viewer"})
TO_ELECTOR = frozenset({"elector"})
TO_CHECK = frozenset({"checker"})

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "agent": msgspec.msgpack.Decoder(AgentMessage),
    "launcher": msgspec.msgpack.Decoder(LauncherMessage),
    "client": msgspec.msgpack.Decoder(ClientMessage),
    "viewer": msgspec.msgpack.Decoder(ViewerMessage),
    "peer": msgspec.msgpack.Decoder(ToHolder),
    "elector": msgspec.msgpack.Decoder(ToElector),
    "prober": msgspec.msgpack.Decoder(Ping),
    "checker": msgspec.msgpack.Decoder(ToHost),
}
_FROM_SERVER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToNode)
_FROM: dict[str, msgspec.msgpack.Decoder[Any]] = {  # of roles that hear other messages than nodes do
    "viewer": msgspec.msgpack.Decoder(ToViewer),
    "peer": msgspec.msgpack.Decoder(FromHolder),
    "elector": msgspec.msgpack.Decoder(FromElector),
    "prober": msgspec.msgpack.Decoder(Echo),
    "checker": msgspec.msgpack.Decoder(FromHost),
}
_encoder = msgspec.msgpack.Encoder()
_NO_HANDSHAKE = "not a handshake of keepstep"


class Open(msgspec.Struct, frozen=True, tag="keepstep-open", array_like=True):
    """The first frame of a connection, from the client."""

    protocol: int
    role: str
    nonce: bytes
    local: str  # "host:port" of the client's end, as the client sees it
    remote: str  # "host:port" of the server's end, as the client sees it
    run: bytes = b""


class Challenge(msgspec.Struct, frozen=True, tag="keepstep-challenge", array_like=True):
    """The server's answer: its nonce and its own proof."""

    protocol: int
    nonce: bytes
    proof: bytes
    run: bytes = b""


class Proof(msgspec.Struct, frozen=True, tag="keepstep-proof", array_like=True):
    """The client's proof, after which both sides send sealed frames."""

    proof: bytes


class Stranger(msgspec.Struct, frozen=True, tag="keepstep-stranger", array_like=True):
    """The name of the sender's run, which is not the receiver's, and a proof that the sender holds the secret."""

    name: Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
    proof: bytes


class Denied(msgspec.Struct, frozen=True, tag="keepstep-denied", array_like=True):
    """Why the server closes. It comes without a proof, so it is only shown to the operator."""

    reason: str


_ToServer = Open | Proof | Stranger
_ToClient = Challenge | Stranger | Denied
_handshake_to_server: msgspec.msgpack.Decoder[_ToServer] = msgspec.msgpack.Decoder(_ToServer)
_handshake_to_client: msgspec.msgpack.Decoder[_ToClient] = msgspec.msgpack.Decoder(_ToClient)


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of a connection as one side sees them, as "host:port"."""

    local: str
    remote: str

    @staticmethod
    def of(connection: socket.socket) -> Ends:
        """The ends of a connected socket."""
        return Ends(end_name(connection.getsockname()), end_name(connection.getpeername()))


class _Sealer:
    """Seals or opens the frames of one direction, with keyed BLAKE2b over a frame's number and message."""

    __slots__ = ("_state", "number")

    def __init__(self, key: bytes) -> None:
        self._state = hashlib.blake2b(key=key, digest_size=CODE_BYTES)
        self.number = 0

    def seal(self, body: bytes) -> bytes:
        """The whole frame for a message, length first."""
        numbered = self.number.to_bytes(NUMBER_BYTES, "big") + body
        self.number += 1
        state = self._state.copy()
        state.update(numbered)
        length = CODE_BYTES + len(numbered)
        return length.to_bytes(LENGTH_BYTES, "big") + state.digest() + numbered

    def open(self, sealed: bytes | bytearray) -> bytes | bytearray:
        """The message in a frame's body. Raises Violation if the code or the number is wrong."""
        if len(sealed) <= SEAL_BYTES:
            raise Violation("malformed", f"a sealed frame of {len(sealed)} bytes, shorter than its seal")
        state = self._state.copy()
        state.update(sealed[CODE_BYTES:])
        if not hmac.compare_digest(state.digest(), sealed[:CODE_BYTES]):
            raise Violation("tampered", "a frame's code does not fit its bytes")
        number = int.from_bytes(sealed[CODE_BYTES:SEAL_BYTES], "big")
        if number != self.number:
            if number < self.number:
                raise Violation("replayed", f"frame {number} again, expected {self.number}")
            raise Violation("reordered", f"frame {number} before {self.number}")
        self.number = number + 1
        return sealed[SEAL_BYTES:]


class _Channel:
    """The part that both ends share: frames, seals, and refusing everything after the first violation."""

    __slots__ = (
        "_broken",
        "_decoder",
        "_frames",
        "_in",
        "_key",
        "_nonce",
        "_out",
        "_runs_differ",
        "_transcript",
        "ends",
        "established",
        "role",
    )

    def __init__(self, key: RunKey, role: str, ends: Ends) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = b""
        self._runs_differ = False
        self._frames = FrameBuffer(HANDSHAKE_LIMIT)
        self._in: _Sealer | None = None
        self._out: _Sealer | None = None
        self._decoder = _FROM_SERVER  # until `_agree`, which sets it with `_in`, nothing is decoded
        self._broken = False
        self.role = role
        self.ends = ends
        self.established = False

    def receive(self, data: bytes) -> tuple[list[Message], bytes]:
        """Take received bytes; return the messages in them and the bytes to send in answer.

        Raises:
            Violation: the peer broke the protocol. The connection must be closed; later calls raise again.
        """
        if self._broken:
            raise Violation("malformed", "bytes after the connection was refused")
        messages: list[Message] = []
        answer = b""
        try:
            self._frames.feed(data)
            while (body := self._frames.take()) is not None:
                if self._in is None:
                    answer += self._handshake(body)
                else:
                    wrong = f"no message that a peer of role {self.role} may send"
                    messages.append(_decoded(self._decoder, self._in.open(body), wrong))
        except Violation:
            self._broken = True
            self._frames.clear()
            raise
        return messages, answer

    def send(self, message: Message) -> bytes:
        """The bytes of one message. Only allowed when ``established``."""
        return self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> bytes:
        """The bytes of a message that was encoded once for many peers. Only allowed when ``established``."""
        assert self._out is not None, "send before the handshake is done"
        return self._out.seal(body)

    def _handshake(self, body: bytes | bytearray) -> bytes:
        raise NotImplementedError

    def _code(self, label: bytes, more: bytes = b"") -> bytes:
        """A code over this connection's transcript that only a holder of the secret can compute."""
        return hmac.digest(self._key.secret, label + b"\0" + self._transcript + more, "sha256")

    def _stranger(self, label: bytes) -> bytes:
        """The frame that tells a peer of another run which run this is."""
        name = self._key.name
        return frame(_encoder.encode(Stranger(name, self._code(label, name.encode()))))

    def _parted(self, label: bytes, message: Stranger) -> Violation:
        """The error to raise because the peer says that its run is another one."""
        if not self._runs_differ or not hmac.compare_digest(
            self._code(label, message.name.encode()), message.proof
        ):
            return Unproven("unauthenticated", "the peer names another run without a proof")
        return AnotherJob(self.ends.remote, message.name, self._key.name)

    def _agree(self, *, is_server: bool, limit: int, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        to_server = _Sealer(self._code(b"key to server"))
        to_client = _Sealer(self._code(b"key to client"))
        self._in, self._out = (to_server, to_client) if is_server else (to_client, to_server)
        self._frames.limit = limit + SEAL_BYTES
        self._decoder = decoder
        self.established = True


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes | bytearray, wrong: str) -> T:
    """The message in ``body``. Raises Violation, which begins with ``wrong``, if the decoder knows no such message."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Violation("malformed", f"{wrong}: {error}") from error


def _transcript(opening: bytes | bytearray, server_nonce: bytes, server_run: bytes) -> bytes:
    return (
        len(opening).to_bytes(LENGTH_BYTES, "big")
        + bytes(opening)
        + PROTOCOL.to_bytes(4, "big")
        + server_nonce
        + server_run
    )


class ServerChannel(_Channel):
    """The server's end. ``role`` is what the client claims to be, once it has."""

    __slots__ = ("_check_addresses", "_roles")

    def __init__(
        self,
        key: RunKey,
        ends: Ends,
        *,
        check_addresses: bool = True,
        roles: Collection[str] = TO_CONTROLLER,
    ) -> None:
        super().__init__(key, "", ends)
        self._roles = roles
        self._check_addresses = check_addresses

    def _handshake(self, body: bytes | bytearray) -> bytes:
        message = _decoded(_handshake_to_server, body, _NO_HANDSHAKE)
        if isinstance(message, Open):
            return self._challenge(message, body)
        if not self._transcript:
            raise Unproven("unauthenticated", "a proof before the challenge")
        if isinstance(message, Stranger):
            raise self._parted(b"client is a stranger", message)
        if not hmac.compare_digest(self._code(b"client proof"), message.proof):
            raise Unproven("unauthenticated", "the peer does not hold this run's secret")
        if self._runs_differ:
            raise Unproven("unauthenticated", "the peer's proof is for another run")
        self._agree(is_server=True, limit=LIMITS[self.role], decoder=_DECODERS[self.role])
        return b""

    def _challenge(self, message: Open, body: bytes | bytearray) -> bytes:
        if self._transcript:
            raise Violation("malformed", "a second opening on one connection")
        if message.protocol != PROTOCOL:
            raise Violation(
                "version",
                f"the peer speaks protocol {message.protocol}, this controller {PROTOCOL}; use one version",
            )
        if message.role not in self._roles or len(message.nonce) != NONCE_BYTES:
            raise Violation("malformed", "an opening with an unknown role or a nonce of the wrong length")
        if len(message.run) != TAG_BYTES:
            raise Violation("malformed", "an opening that does not say for which run it is")
        if self._check_addresses and (message.local, message.remote) != (self.ends.remote, self.ends.local):
            raise Violation(
                "address",
                f"the peer means the connection {message.local} to {message.remote}, this one is {self.ends.remote} "
                f"to {self.ends.local}; addresses that are translated on the way need --allow-translated-addresses",
            )
        self.role = message.role
        self._runs_differ = not hmac.compare_digest(message.run, self._key.tag)
        self._transcript = _transcript(body, self._nonce, self._key.tag)
        challenge = Challenge(PROTOCOL, self._nonce, self._code(b"server proof"), self._key.tag)
        return frame(_encoder.encode(challenge))

    def denial(self, violation: Violation) -> bytes:
        """The bytes that tell a peer why it is refused; empty once the handshake is done."""
        if self.established:
            return b""
        if isinstance(violation, AnotherJob):  # the peer has proved that it holds the secret
            return self._stranger(b"server is a stranger")
        return frame(_encoder.encode(Denied(f"{violation.reason}: {violation}"[:400])))


class ClientChannel(_Channel):
    """The client's end."""

    __slots__ = ("_opening",)

    def __init__(self, key: RunKey, role: Role, ends: Ends) -> None:
        super().__init__(key, role, ends)
        self._opening = b""

    def open(self) -> bytes:
        """The first bytes to send."""
        self._opening = _encoder.encode(
            Open(PROTOCOL, self.role, self._nonce, self.ends.local, self.ends.remote, self._key.tag)
        )
        return frame(self._opening)

    def _handshake(self, body: bytes | bytearray) -> bytes:
        message = _decoded(_handshake_to_client, body, _NO_HANDSHAKE)
        if isinstance(message, Denied):
            raise Violation("denied", f"the controller refused: {message.reason}")
        if isinstance(message, Stranger):
            raise self._parted(b"server is a stranger", message)
        if self._transcript:
            raise Violation("malformed", "a second challenge on one connection")
        if message.protocol != PROTOCOL:
            raise Violation(
                "version", f"the controller speaks protocol {message.protocol}, this node {PROTOCOL}"
            )
        if len(message.nonce) != NONCE_BYTES or len(message.run) != TAG_BYTES:
            raise Violation("malformed", "a challenge with a nonce or a run of the wrong length")
        self._transcript = _transcript(self._opening, message.nonce, message.run)
        if not hmac.compare_digest(self._code(b"server proof"), message.proof):
            raise Unproven("unauthenticated", "the server does not hold this run's secret")
        if not hmac.compare_digest(message.run, self._key.tag):
            self._runs_differ = True
            return self._stranger(b"client is a stranger")
        self._agree(is_server=False, limit=SERVER_LIMIT, decoder=_FROM.get(self.role, _FROM_SERVER))
        return frame(_encoder.encode(Proof(self._code(b"client proof"))))


def encode(message: Message) -> bytes:
    """The msgpack bytes of a message without a frame, to give to ``send_encoded`` for many peers."""
    return _encoder.encode(message)
