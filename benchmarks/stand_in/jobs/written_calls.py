"""Writes into a rank's ring what the probe and NCCL's shim would write of a job of many small operations, at a pace.

python written_calls.py SECONDS CALLS STEPS_A_SECOND [LINES_A_SECOND]

No torch, no NCCL: two cores can keep the pace for eight ranks, so that the agent's cost can be measured beside them.
Operations of one step are written a few at a time, as a job makes them. The GPU's times are there of each step and of
the calls of one in 16, eight in a row, as the shim thins them at 500 calls and 5 steps a second
(`native/nccl_timing.hpp`). Nothing is written of links. Each rank writes so many lines of a healthy log a second, too.
"""

from __future__ import annotations

import os
import sys
import time

from keepstep.core.events import WORLD_PEER, Device, Flag, Kind, Op, Phase, element_bits
from keepstep.ring import RingWriter

_PIECES = 10  # of a step
_PROBE = int(Flag.ON_DEVICE | Flag.END_BY_WAIT) | element_bits("float32")
_CALLED, _TIMED = int(Flag.ENQUEUED), int(Flag.ENQUEUED | Flag.TIMED)
_IN_A_ROW, _RARE = 8, 16
_LINE = (
    "2026-01-02 03:04:05,678 INFO train.py:12: iteration {step} loss {loss:.6f} lr 3.0e-04 grad norm 1.25\n"
)


def main() -> None:
    seconds, calls, pace = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    lines = round(float(sys.argv[4]) / pace / _PIECES) if len(sys.argv) > 4 else 0  # a piece
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    writer = RingWriter(os.environ["KEEPSTEP_RING"], rank=rank, world_size=world_size, join=True)
    members = list(range(world_size))
    group = writer.group("0", members, "cuda:nccl", "default_pg")
    shims = writer.group("nccl-1", members, "nccl", f"rank {rank} of {world_size}")
    site = writer.site("written_calls.py:1 main")
    collective, op = int(Kind.COLLECTIVE), int(Op.ALLREDUCE)
    begun = due = time.monotonic()
    steps = int(seconds * pace)
    for step in range(steps):
        iteration = writer.start(int(Kind.DEVICE), int(Device.ITERATION), -1, step + 1, 0, _TIMED, 0)
        shim = _CALLED if step // _IN_A_ROW % _RARE else _TIMED
        for piece in range(_PIECES):
            for _ in range(calls * piece // _PIECES, calls * (piece + 1) // _PIECES):
                called = writer.start(collective, op, group, WORLD_PEER, 256, _PROBE, site)
                writer.start(collective, op, shims, WORLD_PEER, 256, shim, 0)()
                called()
            if lines:
                print(_LINE.format(step=step, loss=2.0 + step % 97 / 97) * lines, end="", flush=True)
            due += 1 / (pace * _PIECES)
            time.sleep(max(due - time.monotonic(), 0.0))
        iteration()
        writer.start(int(Kind.PHASE), int(Phase.OPTIMIZER), -1, WORLD_PEER, 0, 0, 0)()
    if rank == 0:
        print(f"pace {steps / (time.monotonic() - begun):.3f} steps a second", flush=True)


if __name__ == "__main__":
    main()
