"""Communicators of NCCL, of which each member may know only its own place."""

from __future__ import annotations

from dataclasses import replace

from keepstep.control.cluster import Cluster
from keepstep.core.events import Op
from keepstep.core.iteration_table import table_of
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary


def place(name: str, number: int, size: int) -> GroupInfo:
    return GroupInfo(name, (), "nccl", f"rank {number} of {size}; split 1 of nccl-1")


def test_the_members_follow_from_what_all_members_tell() -> None:
    cluster = Cluster()
    cluster.learn_groups([GroupInfo("nccl-1", (0, 1, 2, 3), "nccl", "rank 0 of 4")], 0)
    for rank, number in ((7, 1), (3, 0)):
        assert "nccl-2" not in cluster.communicators
        cluster.learn_groups([place("nccl-2", number, 2)], rank)
    assert cluster.communicators["nccl-2"].members == (3, 7)
    assert cluster.communicators["nccl-1"].members == (0, 1, 2, 3)
    assert not cluster.groups


def test_what_a_communicator_serves_may_be_known_later() -> None:
    cluster = Cluster()
    told = GroupInfo("nccl-1", (0, 1), "nccl", "rank 0 of 2")
    for serves in ("", "1000003", "5"):
        cluster.learn_groups([replace(told, serves=serves)], 0)
    assert cluster.communicators["nccl-1"].serves == "1000003"
    assert cluster.communicators["nccl-1"].shown == "3"


def test_what_makes_no_sense_is_left_out() -> None:
    cluster = Cluster()
    for told in (place("nccl-2", 2, 2), GroupInfo("nccl-2", (), "nccl", "?"), place("nccl-2", 0, 99_999_999)):
        cluster.learn_groups([told], 0)
    cluster.learn_groups([place("nccl-3", 0, 2)], 0)
    cluster.learn_groups([place("nccl-3", 3, 4)], 3)
    assert not cluster.communicators


def test_peers_of_messages_become_ranks_of_the_job() -> None:
    def message(group: str, op: Op, peer: int) -> StreamSummary:
        return StreamSummary(group, int(op), peer, 1, 8, 1, 0.0, 0.1, 0.1, 0.1, 0.1)

    streams = (
        message("nccl-2", Op.SEND, 1),
        message("nccl-2", Op.ALLREDUCE, -1),
        message("nccl-2", Op.RECV, 9),  # no place there
        message("nccl-9", Op.RECV, 0),  # whose members are not known
        message("0", Op.SEND, 5),  # of Gloo: a rank already
    )
    rows = [
        IterationSummary(3, 0, 0.0, 1.0, 0.5, 0.5, streams=streams),
        IterationSummary(7, 0, 0.0, 1.0, 0.5, 0.5),
    ]
    known = {"nccl-2": GroupInfo("nccl-2", (3, 7), "nccl")}
    first, second = table_of(rows).with_ranks_of_the_job(known)
    assert [(one.group, one.peer) for one in first.streams] == [("nccl-2", 7), ("nccl-2", -1), ("0", 5)]
    assert second.streams == ()
    assert (first.rank, second.rank) == (3, 7)
