"""Sound files of every kind that keepstep reads, small ones, which the hostile files are made of."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS = 4
_STATUS: dict[str, Any] = {
    "unix_s": 1.7e9, "state": "running", "state_s": 3.0, "newest_step": 12, "world_size": 1, "most_nodes": 1,
    "open_incidents": [1], "counters": {"bytes_in": 4096}, "backups": {"step": 4, "trouble": ""},
    "recovery": {"rank": 0, "what": "failed", "incarnation": 1, "seconds": 2.5}, "restarts": 1, "max_restarts": 2,
    "spares": ["gpu-09"], "checks": {"gpu-01": ["a disk is full"], "gpu-02": []},
    "rank_columns": ["rank", "alive", "step", "phase", "iteration_s", "self_s", "idle_s", "in_flight"],
    "nodes": [
        {"node": "gpu-01", "agent": "live",
         "ranks": [[0, True, 12, 1, 0.5, 0.1, 2.0, {"op": 1, "group": "0", "seq": 9}]]}
    ],
}  # fmt: skip


def dump(rank: int, seq: int = 7, calls: int = 4, **more: Any) -> dict[str, Any]:
    """The dump of a rank; rank 3 has not made the last call. ``more``: of its last entry."""
    late = int(rank == RANKS - 1)
    frames = [{"name": "<module>", "filename": "/home/me/train.py", "line": 50}]
    entries: list[dict[str, Any]] = [
        {
            "record_id": one, "pg_id": 0, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce",
            "collective_seq_id": one, "p2p_seq_id": 0, "op_id": one, "is_p2p": False, "frames": frames,
            "input_sizes": [[4096]], "input_dtypes": ["Float"], "output_sizes": [[4096]], "output_dtypes": ["Float"],
            "state": "scheduled" if one == seq else "completed", "retired": one != seq,
            "time_created_ns": 1_700_000_000_000_000_000 + one * 1_000_000_000, "timeout_ms": 600_000,
        }
        for one in range(max(seq - calls, 1), seq + 1 - late)
    ]  # fmt: skip
    entries[-1].update(more)
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}},
        "pg_status": {"0": {"last_enqueued_collective": seq - late, "last_completed_collective": seq - 1}},
        "entries": entries,
    }


def dumps(folder: Path, ranks: Sequence[int] = range(RANKS), seq: int = 7) -> None:
    """Dumps of a job that hangs."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(rank, seq)))


def training_log(iterations: int, factor: float = 1.5) -> bytes:
    """A log of Megatron-LM that is slower from its middle on."""
    lines = [
        f" [2025-11-25 10:00:00] iteration {one:8d}/ {iterations} | consumed samples: {one * 8} | elapsed time per "
        f"iteration (ms): {100 * (factor if one > iterations // 2 else 1) + one % 3:.1f} | loss: 1.0 |"
        for one in range(1, iterations + 1)
    ]
    return ("\n".join(lines) + "\n").encode()


def call_log(steps: int, ranks: int = 2) -> bytes:
    """A call log of MegaTrace of some steps of three calls each."""
    lines: list[str] = []
    for step in range(steps):
        for rank in range(ranks):
            for place, (name, size) in enumerate(
                (("AllGather", 64), ("ReduceScatter", 128), ("AllReduce", 4))
            ):
                nanoseconds = (step * 10 + place) * 10_000_000 + rank * 1000
                at = f"{1755590149 + nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
                lines.append(
                    f"[save_count 1] [{at}] [Rank {rank}] Fun {name} Data {size} stream 0x55919d298060 opCount {step:x}"
                )
    return ("\n".join(lines) + "\n").encode()


def incident(**more: Any) -> bytes:
    """The file of an incident."""
    from keepstep.core.incident import Culprit, Incident
    from keepstep.report.incidents import incident_to_json

    one = Incident(
        1, "slow", 5, 7, None, 1.5, (Culprit(0, None, "gpu-01", "forward", 1.5, "high", "compute"),), (1, 2),
        ("iteration 1 s → 2 s",), (), world_size=4, ranks_reporting=4, iteration_before_s=1.0, iteration_after_s=2.0,
    )  # fmt: skip
    return json.dumps(json.loads(incident_to_json(one)) | more).encode()


def status() -> dict[str, Any]:
    """The content of a status file."""
    return json.loads(json.dumps(_STATUS))


def run_folder(folder: Path) -> None:
    """The folder of a run with an incident, iterations, and a saved ring."""
    from keepstep.ring import RingReader, RingWriter, create

    for name in ("incidents", "nodes/0", "rings"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"script": "train.py", "rings": {}}))
    (folder / "status.json").write_text(json.dumps(_STATUS))
    (folder / "end.json").write_text(json.dumps({"exit_code": 1, "reason": "rank 0 failed"}))
    (folder / "incidents" / "0001.json").write_bytes(incident())
    checkpoints = {"newest": 4, "on_the_way": [8], "storage": "/mnt", "troubles": ["the disk is full"]}
    (folder / "nodes/0/checkpoints.json").write_text(json.dumps(checkpoints))
    with open(folder / "nodes/0/iterations.jsonl", "w") as file:
        for step in range(60):
            cells = {"t": 1.7e9 + step, "d": 1.0 + (step > 30), "self": 0.5, "blocked": 0.1}
            file.write(json.dumps({"step": step, "ranks": {"0": cells, "1": cells}}) + "\n")
    fd = create(64)
    writer = RingWriter(fd, rank=0, world_size=1)
    group, site = writer.group("world", range(1), "gloo", ""), writer.site("train.py:7")
    for number in range(32):
        writer.start(1, 1, group, -1, number, 0, site)()
    RingReader(fd).save((folder / "rings" / "rank-00000.ring").resolve())
    os.close(fd)


def ras_answer(ranks: int = 32, behind: int = 7) -> dict[str, Any]:
    """The JSON of NCCL's RAS on a job of which one rank is behind, one failed and one does not answer."""
    told: list[dict[str, Any]] = [
        {
            "rank": one, "host": f"192.0.2.{one // 8}", "pid": 4000 + one, "cuda_dev": one % 8, "nvml_dev": one % 8,
            "status": {"init_state": 0, "async_error": 5 * (one == 3), "finalize_called": False, "destroy_flag": False,
                       "abort_flag": False},
            "collective_counts": {"Broadcast": 4, "AllGather": 1, "AllReduce": 131 - 43 * (one == behind)},
        }
        for one in range(ranks - 1)
    ]  # fmt: skip
    gone = {"rank": ranks - 1, "host": "192.0.2.3", "pid": 9, "cuda_dev": 7, "nvml_dev": 7}
    gone["status"] = {"unresponsive": True, "considered_dead": False}
    whole = {
        "hash": "0x136787b2369741c6",
        "secondary_hash": "0x3f:0xec",
        "size": ranks,
        "ranks_count": ranks - 1,
    }
    whole |= {"missing_ranks_count": 1, "ranks": told, "missing_ranks": [gone]}
    ras = {"collection_time_sec": 0.0, "timeouts_count": 0}
    return {"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [whole], "ras": ras}


def ras_text(ranks: int = 32, behind: int = 7) -> bytes:
    """The text of NCCL's RAS on the same job."""
    return f"""NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         {ranks}        {ranks}

Communicators... (0.000s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        {ranks}        {ranks}   RUNNING  INCOMPLETE,ERROR,MISMATCH

Errors
======

#0-0 (136787b2369741c6) INCOMPLETE
  Missing communicator data from 1 rank
  Rank {ranks - 1} -- GPU 7 managed by process 9 on node 192.0.2.3

#0-0 (136787b2369741c6) ERROR
  Asynchronous error on 1 rank
  Rank 3 reported Invalid usage -- GPU 3 managed by process 4003 on node 192.0.2.0

Warnings
========

#0-0 (136787b2369741c6) MISMATCH
  Communicator ranks have different AllReduce operation counts
  {ranks - 2} ranks have launched up to operation 131
  Rank {behind} has launched up to operation 88 -- GPU 7 managed by process 4007 on node 192.0.2.0
""".encode()
