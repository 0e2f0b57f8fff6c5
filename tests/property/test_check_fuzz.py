"""What nodes of a check send, also one that holds the secret and sends nonsense: rows are compared and shown anyway."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep import wire
from keepstep.core.errors import WireError
from keepstep.core.node_row import Burnt, Nic, NodeRow, PathSpeed
from keepstep.core.validation import DeviceFigure
from keepstep.report.node_table import table
from keepstep.validate.judge_nodes import compared
from keepstep.wire.checking import Arrived, Concluded, PairsTested, PairTests, Reported

KEY = wire.RunKey(b"s" * 32)
ENDS = wire.Ends("10.0.0.1:5", "10.0.0.2:6"), wire.Ends("10.0.0.2:6", "10.0.0.1:5")
NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(max_size=20)
FIGURES = st.builds(DeviceFigure, NUMBER, TEXT, st.floats(), TEXT, st.floats(), st.floats())
ROWS = st.builds(
    NodeRow,
    node=st.sampled_from(["a", "b", "c\n"]),
    memory=st.tuples(NUMBER, NUMBER),
    shared=NUMBER,
    disk=NUMBER,
    kernel=TEXT,
    versions=st.lists(st.tuples(st.sampled_from(["driver", "NCCL", ""]), TEXT), max_size=3).map(tuple),
    gpus=st.lists(TEXT, max_size=3).map(tuple),
    nics=st.lists(
        st.builds(
            Nic, TEXT, st.sampled_from(["ethernet", "infiniband", "roce"]), st.booleans(), NUMBER, TEXT, st.booleans()
        ),
        max_size=3,
    ).map(tuple),
    paths=st.lists(
        st.builds(PathSpeed, st.sampled_from(["/data", ""]), st.floats(), st.floats(), TEXT, st.booleans(), TEXT),
        max_size=3,
    ).map(tuple),
    burnt=st.lists(
        st.builds(
            Burnt,
            st.sampled_from(["GPU 0", "CPU", ""]),
            st.sampled_from(["H100", ""]),
            st.floats(),
            NUMBER,
            NUMBER,
            st.lists(FIGURES, max_size=3).map(tuple),
            st.lists(TEXT, max_size=2).map(tuple),
            st.lists(TEXT, max_size=2).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    links=st.lists(TEXT, max_size=2).map(tuple),
    unfit=st.lists(TEXT, max_size=2).map(tuple),
    warnings=st.lists(TEXT, max_size=2).map(tuple),
)  # fmt: skip


def pair() -> tuple[wire.ClientChannel, wire.ServerChannel]:
    """A node and the host of a check that have proved themselves to each other."""
    client = wire.ClientChannel(KEY, "checker", ENDS[0])
    server = wire.ServerChannel(KEY, ENDS[1], roles=wire.TO_CHECK)
    _, challenge = server.receive(client.open())
    _, proof = client.receive(challenge)
    server.receive(proof)
    return client, server


@given(st.lists(ROWS, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_every_row_is_taken_compared_and_shown(rows: list[NodeRow]) -> None:
    client, server = pair()
    taken: list[NodeRow] = []
    for row in rows:
        (message,), _ = server.receive(client.send(Reported(row)))
        assert isinstance(message, Reported)
        taken.append(message.row)
    assert all(line.isprintable() for line in table(compared(taken), ["x\n"]).split("\n"))


ANYTHING = st.recursive(
    st.one_of(NUMBER, st.floats(), st.text(max_size=600), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=9), st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=40,
)
KINDS = st.sampled_from(["Arrived", "Reported", "PairTests", "PairsTested", "Concluded", "Refused", "Join"])


@given(kind=KINDS, fields=st.lists(ANYTHING, max_size=6), to_host=st.booleans())
@settings(max_examples=200, deadline=None)
def test_only_messages_of_a_check_are_taken(kind: str, fields: list[object], to_host: bool) -> None:
    client, server = pair()
    here, there = (client, server) if to_host else (server, client)
    try:
        messages, _ = there.receive(here.send_encoded(msgspec.msgpack.encode([kind, *fields])))
    except WireError:
        return
    taken = (Arrived, Reported, PairsTested) if to_host else (PairTests, Concluded, wire.Refused)
    assert all(isinstance(message, taken) for message in messages)
