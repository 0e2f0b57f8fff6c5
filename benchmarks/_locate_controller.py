"""The controller's part of one slowdown, alone in its process: read, decode, locate; prints seconds and memory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.control.profiles import iterations_of
from keepstep.core.iteration_table import between
from keepstep.core.summary import GroupInfo
from keepstep.locate import locate_slow
from keepstep.wire.messages import AgentMessage


def messages(path: Path) -> Iterator[bytes]:
    """Frame by frame, as they would come in."""
    with open(path, "rb") as file:
        while length := file.read(4):
            yield file.read(int.from_bytes(length, "big"))


def main() -> None:
    """``FOLDER ONSET``."""
    folder, onset = Path(sys.argv[1]), int(sys.argv[2])
    decode = msgspec.msgpack.Decoder(AgentMessage).decode
    groups: dict[str, GroupInfo] = {}
    for message in messages(folder / "groups"):
        groups.update((one.name, one) for one in decode(message).groups)
    nodes = dict(enumerate(json.loads((folder / "nodes.json").read_text())))
    frames = list(messages(folder / "profiles"))[::-1]  # as received
    began, cpu = time.perf_counter(), time.process_time()
    answers = [decode(frames.pop()) for _ in range(len(frames))]
    decoded = time.perf_counter()
    rows = iterations_of(answers)
    del answers
    before, after = between(rows, 0, onset), between(rows, onset, 1 << 30)
    found = locate_slow(before, after, groups, nodes)
    done, cpu = time.perf_counter(), time.process_time() - cpu
    status = Path("/proc/self/status").read_text()  # what getrusage tells was the parent's before exec
    memory_mb = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    culprits = [culprit.rank for culprit in found.culprits]
    print(json.dumps({
        "seconds": done - began, "cpu_s": cpu, "decode_s": decoded - began, "memory_mb": memory_mb,
        "culprits": culprits, "evidence": found.evidence,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
