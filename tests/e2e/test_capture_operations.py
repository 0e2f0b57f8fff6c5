"""Real Gloo jobs, watched and unwatched: everything is recorded, nothing is changed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.warm.forked import WarmPopen

from keepstep import ring
from keepstep.core.events import SET_UP, Flag, Kind, Op, Phase, element_of, reduction_of

pytestmark = pytest.mark.e2e

JOBS = Path(__file__).with_name("capture_jobs.py")

PROFILED = {
    "allreduce_": Op.ALLREDUCE,
    "allreduce_coalesced_": Op.ALLREDUCE,
    "broadcast_": Op.BROADCAST,
    "reduce_": Op.REDUCE,
    "allgather_": Op.ALLGATHER,
    "_allgather_base_": Op.ALLGATHER,
    "allgather_coalesced_": Op.ALLGATHER,
    "allgather_into_tensor_coalesced_": Op.ALLGATHER,
    "reduce_scatter_": Op.REDUCE_SCATTER,
    "_reduce_scatter_base_": Op.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Op.REDUCE_SCATTER,
    "gather_": Op.GATHER,
    "scatter_": Op.SCATTER,
    "alltoall_": Op.ALLTOALL,
    "alltoall_base_": Op.ALLTOALL,
    "barrier": Op.BARRIER,
    "monitored_barrier_": Op.BARRIER,
    "send": Op.SEND,
    "recv_": Op.RECV,
    "recv_any_source_": Op.RECV,
}


@dataclass(frozen=True)
class Ran:
    """What one run of a job left: per rank its result, exit code, stderr and (watched) its ring."""

    results: list[Any]
    codes: list[int]
    errors: list[str]
    rings: list[ring.RingReader]

    def operations(self, rank: int) -> np.ndarray:
        records = self.rings[rank].snapshot()
        names = self.names(rank)
        of_set_up = records["group"] == (names.index(SET_UP) if SET_UP in names else len(names))
        return records[(records["kind"] != Kind.PHASE) & ~of_set_up]

    def names(self, rank: int) -> list[str]:
        return [group.name for group in self.rings[rank].groups()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(
    tmp_path: Path,
    job: str,
    world: int = 2,
    *,
    watched: bool = True,
    ring_path: str | None = None,
    cold: bool = False,
    again: bool = True,
) -> Ran:
    """Run a job of ``capture_jobs.py`` as ``world`` processes; ``ring_path`` in the place of the test's own rings.

    ``cold`` starts an interpreter for each; else they are forked off one that has imported torch.
    A job without us is judged by its results alone: once one had written them and aborted in torch's own exit.
    ``again``: a job whose ranks did not meet is run once more, as on a busy machine Gloo now and then loses a
    connection while it connects.
    """
    port = free_port()
    descriptors = [ring.create(4096) for _ in range(world)]
    results = [tmp_path / f"{job}-{watched}-{rank}.json" for rank in range(world)]
    processes: list[subprocess.Popen[str]] = []
    for rank in range(world):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")}
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        if watched:
            environment["KEEPSTEP_RUN_DIR"] = str(tmp_path)
            environment["KEEPSTEP_RING"] = ring_path or f"/proc/{os.getpid()}/fd/{descriptors[rank]}"
        processes.append(
            (subprocess.Popen if cold else WarmPopen)(
                [sys.executable, str(JOBS), job, str(results[rank])],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        said = [process.communicate()[1] for process in processes]
        if again and any("Gloo connectFullMesh failed" in text for text in said):
            return run(tmp_path, job, world, watched=watched, ring_path=ring_path, cold=cold, again=False)
        pytest.fail(
            f"{job}: not ended after 120 s; exit codes {[p.returncode for p in processes]}, said {said}"
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()
    readers = [ring.RingReader(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    found = [json.loads(path.read_text()) if path.exists() else None for path in results]
    return Ran(found, [process.returncode for process in processes], errors, readers)


def counted(records: np.ndarray) -> Counter[Op]:
    return Counter(Op(int(op)) for op in records["op"])


def profiled(result: Any) -> Counter[Op]:
    counts: Counter[Op] = Counter()
    for name, count in result["profiled"].items():
        counts[PROFILED[name.removeprefix("c10d::")]] += count
    return counts


def check_matching(ran: Ran) -> None:
    """The n-th collective of a group is the same on every member; the n-th send is the peer's n-th receive."""
    seen: dict[tuple[str, int], tuple[int, int]] = {}
    sent: dict[tuple[str, int, int, int], int] = {}
    received: dict[tuple[str, int, int, int], int] = {}
    for rank in range(len(ran.rings)):
        names = ran.names(rank)
        for record in ran.operations(rank):
            name, seq, peer = names[record["group"]], int(record["seq"]), int(record["peer"])
            if record["kind"] == Kind.COLLECTIVE:
                entry = (int(record["op"]), int(record["bytes"]))
                assert seen.setdefault((name, seq), entry) == entry
            elif peer >= 0 and record["op"] == Op.SEND:
                sent[name, rank, peer, seq] = int(record["bytes"])
            elif peer >= 0:
                received[name, peer, rank, seq] = int(record["bytes"])
    if not any(key not in sent for key in received):
        assert received.items() <= sent.items()


@pytest.mark.parametrize(
    "job", ["plain", "ddp", pytest.param("fsdp2", marks=pytest.mark.long), "pipeline", "tensor_parallel"]
)
def test_everything_is_recorded_and_nothing_changed(tmp_path: Path, job: str) -> None:
    cold = job == "fsdp2"
    watched = run(tmp_path, job, cold=cold)
    unwatched = run(tmp_path, job, watched=False, cold=cold)
    assert watched.codes == [0, 0], watched.errors
    assert watched.results == unwatched.results  # results bit by bit, and what torch itself counted
    for rank, result in enumerate(watched.results):
        records = watched.operations(rank)
        assert counted(records) == profiled(result)
        assert (records["end_ns"] >= records["start_ns"]).all()
        assert not (records["flags"] & Flag.FAILED).any()
        assert watched.rings[rank].header.dropped == 0
        assert not [site for site in watched.rings[rank].sites() if site.startswith("keepstep: not")]
        left = watched.rings[rank].in_flight()
        assert left[["kind", "op"]].tolist() == [(Kind.PHASE, Phase.TEARDOWN)]  # it lasts to the end
    check_matching(watched)


def test_ddp_is_the_same_whoever_looks_at_its_operators(tmp_path: Path) -> None:
    watched = run(tmp_path, "ddp_unprofiled")
    unwatched = run(tmp_path, "ddp_unprofiled", watched=False)
    assert watched.codes == [0, 0], watched.errors
    assert watched.results == unwatched.results
    assert all(result["counted"] for result in watched.results)
    for reader in watched.rings:
        assert not [site for site in reader.sites() if site.startswith("keepstep: not")]
    check_matching(watched)


def test_flags_bytes_and_peers_of_known_calls(tmp_path: Path) -> None:
    ran = run(tmp_path, "plain")
    assert ran.codes == [0, 0], ran.errors
    groups = [group for group in ran.rings[0].groups() if group.name != SET_UP]
    assert groups[0].name == "0"
    assert groups[0].members == (0, 1)
    assert "cpu:gloo" in groups[0].backend
    assert [group.members for group in groups] == [(0, 1), (0, 1)]
    records = ran.operations(0)
    synchronous, asynchronous = records[:10], records[10:20]
    assert (synchronous["flags"] & 0xFF == Flag.SYNC_KNOWN).all()
    assert (asynchronous["flags"] & 0xFF == Flag.SYNC_KNOWN | Flag.ASYNC | Flag.END_BY_WAIT).all()
    assert {element_of(flags) for flags in synchronous["flags"].tolist()} == {"float32"}
    reductions = [reduction_of(flags) for flags in synchronous["flags"].tolist()]
    assert reductions == ["SUM", "", "SUM", "", "", "SUM", "SUM", "", "", ""]
    # all-reduce, broadcast, reduce, all-gather (twice), reduce-scatter (twice), gather, scatter, all-to-all
    assert synchronous["bytes"].tolist() == [32, 32, 32, 64, 64, 32, 32, 32, 16, 32]
    assert asynchronous["bytes"].tolist() == synchronous["bytes"].tolist()
    assert (synchronous["wait_ns"] > 0).all()
    p2p = records[records["kind"] == Kind.P2P]
    assert set(p2p["peer"].tolist()) == {1, -1}  # -1: received from anybody
    assert (p2p["flags"] & 0xFF == Flag.END_BY_WAIT).all()
    sites = ran.rings[0].sites()
    assert {sites[record["site"]].split(":")[0] for record in records} == {str(JOBS)}


@pytest.mark.parametrize(("job", "forwards"), [("ddp", 3 + 1), ("pipeline", 4)])
def test_forward_passes_are_marked(tmp_path: Path, job: str, forwards: int) -> None:
    """DDP's at once; those of pipeline stages from the first optimizer step on."""
    ran = run(tmp_path, job)
    for reader in ran.rings:
        records = reader.snapshot()
        marked = records[(records["kind"] == Kind.PHASE) & (records["op"] == Phase.MODEL)]
        assert len(marked) == forwards
        assert (marked["end_ns"] > marked["start_ns"]).all()


def test_the_wait_for_gradients_begins_when_they_are_computed(tmp_path: Path) -> None:
    ran = run(tmp_path, "ddp")
    records = ran.rings[0].snapshot()
    reduced = records[(records["op"] == Op.ALLREDUCE) & (records["kind"] == Kind.COLLECTIVE)]
    backwards = records[(records["kind"] == Kind.PHASE) & (records["op"] == 2)]
    waited = reduced[reduced["wait_ns"] > 0]
    assert len(waited) > 0
    for record in waited:
        during = [b for b in backwards if b["start_ns"] <= record["start_ns"] <= b["end_ns"]]
        assert len(during) == 1
        assert record["start_ns"] <= record["wait_ns"] <= record["end_ns"] <= during[0]["end_ns"]


def test_a_dead_peer_is_told_as_without_us(tmp_path: Path) -> None:
    watched = run(tmp_path, "peer_dies")
    unwatched = run(tmp_path, "peer_dies", watched=False)
    assert watched.results[0]["seen"] == unwatched.results[0]["seen"]
    assert "nothing" not in watched.results[0]["seen"]
    last = watched.operations(0)
    assert last[last["op"] == Op.ALLREDUCE]["flags"][0] & Flag.FAILED


def test_groups_come_and_go_as_without_us(tmp_path: Path) -> None:
    watched = run(tmp_path, "regroup")
    unwatched = run(tmp_path, "regroup", watched=False)
    assert watched.codes == [0, 0], watched.errors
    assert watched.results == unwatched.results
    names = watched.names(0)
    assert len(names) == len(set(names))
    assert {"0", "0#2", "0#3"} <= set(names)
    pairs = [group for group in watched.rings[0].groups() if group.desc == "pair"]
    assert [pair.members for pair in pairs] == [(0, 1)] * 2
    check_matching(watched)


def test_compiled_ddp_computes_the_same_and_compilation_is_marked(tmp_path: Path) -> None:
    watched = run(tmp_path, "compiled_ddp")
    unwatched = run(tmp_path, "compiled_ddp", watched=False)
    assert watched.codes == [0, 0], watched.errors
    assert [r["digest"] for r in watched.results] == [r["digest"] for r in unwatched.results]
    for reader in watched.rings:
        records = reader.snapshot()
        phases = Counter(records[records["kind"] == Kind.PHASE]["op"].tolist())
        assert phases[int(Phase.COMPILE)] >= 1
        assert not [site for site in reader.sites() if site.startswith("keepstep: not")]


def test_compiled_graphs_work_and_are_recorded(tmp_path: Path) -> None:
    watched = run(tmp_path, "compiled")
    unwatched = run(tmp_path, "compiled", watched=False)
    assert watched.codes == [0, 0], watched.errors
    assert watched.results == unwatched.results
    assert counted(watched.operations(0))[Op.ALLREDUCE] == 2


def test_a_ring_that_cannot_be_opened_is_said_once(tmp_path: Path) -> None:
    ran = run(tmp_path, "ddp", world=1, ring_path="/nowhere/ring")
    assert ran.codes == [0], ran.errors
    said = [line for line in ran.errors[0].splitlines() if "keepstep" in line]
    assert len(said) == 1
    assert "trains unwatched" in said[0]
    assert "/nowhere/ring" in said[0]
