"""RAS's port on the stand-in says which rank is behind, in the form of NCCL's own answers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, start

RECORDED = Path(__file__).parents[1] / "recorded" / "h100" / "barrier_of_one_rank"


def ask(port: int, *lines: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as server:
        server.sendall("".join(line + "\n" for line in lines).encode())
        answer = b""
        while part := server.recv(65536):
            answer += part
    return answer.decode()


def keys(value: Any) -> Any:
    """The form of an answer: names all the way down, of a list's first element."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value else None


def test_ras_counts_the_calls_of_each_rank(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fault = Fault("hang", rank=1, step=6, where="reduce")
    settings = {"NCCL_RAS_ADDR": f"localhost:{port}"}
    words = ["--layout", "ddp", "--steps", "30"]
    with start(
        TRAIN, words, tmp_path, ranks=2, watched=False, faults=[fault], clock="virtual", settings=settings
    ) as job:
        job.wait_until_stuck()
        as_json = ask(port, "CLIENT PROTOCOL 2", "SET FORMAT json", "VERBOSE STATUS")
        as_text = ask(port, "CLIENT PROTOCOL 2", "VERBOSE STATUS")
    status = json.loads(as_json[as_json.index("{") :])
    ranks = status["communicators"][0]["ranks"]
    calls = [rank["collective_counts"]["AllReduce"] for rank in ranks]
    assert calls[0] > calls[1] > 0
    assert f"Rank 1 has launched up to operation {calls[1]} -- GPU 1 managed by process" in as_text
    real = (RECORDED / "ras.json.txt").read_text()
    real = real[real.index("{") :]
    assert keys(status)["communicators"][0]["ranks"] == keys(json.loads(real))["communicators"][0]["ranks"]
