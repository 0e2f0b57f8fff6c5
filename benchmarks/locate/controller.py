"""The controller's part of one slowdown or hang, alone in its process; prints seconds and memory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import keepstep.locate  # noqa: F401  # the first verdict's import is not what is measured
from keepstep import wire
from keepstep.control.__main__ import collect_rarely
from keepstep.control.cluster import Cluster
from keepstep.control.incidents.locators import Locators
from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import between
from keepstep.core.summary import GroupInfo
from keepstep.wire.messages import AgentMessage
from keepstep.wire.packed import iterations_of


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
        told = decode(message)
        assert isinstance(told, wire.Groups)
        groups.update((one.name, one) for one in told.groups)
    nodes = dict(enumerate(json.loads((folder / "nodes.json").read_text())))
    names = list(dict.fromkeys(nodes.values()))
    cluster = Cluster(len(names))
    for message in messages(folder / "beats"):
        beat = decode(message)
        assert isinstance(beat, wire.Heartbeat)
        cluster.heard(cluster.node(beat.node_rank, names[beat.node_rank]), beat, 0.0)
    frames = list(messages(folder / "answers"))[::-1]  # as received
    collect_rarely()
    locators = Locators()
    began, cpu = time.perf_counter(), time.process_time()
    answers = [decode(frames.pop()) for _ in range(len(frames))]
    decoded = time.perf_counter()
    clocks = locators.offsets(cluster.clock_samples())
    if isinstance(answers[0], wire.States):
        states = [state for answer in answers if isinstance(answer, wire.States) for state in answer.states]
        found = locators.hang(Evidence(groups, nodes, clocks, states=states))
    else:
        profiles = [answer for answer in answers if isinstance(answer, wire.Profile)]
        traffic = [one for answer in profiles for one in answer.traffic]
        causes = [one for answer in profiles for one in answer.causes]
        rows = iterations_of(profiles)
        del answers, profiles
        before, after = between(rows, 0, onset), between(rows, onset, 1 << 30)
        found = locators.slow(
            Evidence(groups, nodes, clocks, before=before, after=after, causes=causes, traffic=traffic)
        )
    done, cpu = time.perf_counter(), time.process_time() - cpu
    status = Path("/proc/self/status").read_text()  # what getrusage tells was the parent's before exec
    memory_mb = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    culprits = [one.rank if one.link is None else sorted(one.link.nodes) for one in found.culprits]
    print(json.dumps({
        "seconds": done - began, "cpu_s": cpu, "decode_s": decoded - began, "memory_mb": memory_mb,
        "culprits": culprits, "evidence": found.evidence,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
