"""Real jobs in whose state one bit is turned over: named at the next save, and mended bit by bit.

    python -m benchmarks.corrupt --case all

Each seed is a job of two to four ranks on one node (a session under DDP over Gloo, every step saved), which holds a
batch norm, a late average of the weights on one rank, a part that each rank trains for itself, and random states. In
one rank, one bit of one parameter or optimizer state is turned over: ``after`` the optimizer's step, or ``before`` the
forward, so that the ranks average what came of it. With three ranks or more the job goes back by itself
(``--on-corrupt restore``); with two one is killed some time after the verdict. A seed passes when one incident names
the rank (of two both, as one of them), its node, the tensor and the step, and the last losses of every step are those
of an undisturbed training, bit by bit.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.checkpoint_faults.campaign import Campaign
from benchmarks.corrupt.real import carried_out, drawn

GOAL = (
    "named at the next save in all, the right rank where there are three replicas; bit-equal after a restore"
)

CAMPAIGN = Campaign(
    name="corrupt",
    doc=__doc__,
    cases={"after": partial(drawn, "after"), "before": partial(drawn, "before")},
    carry_out=carried_out,
    before=lambda: None,
    summary="summary.json",
    limit="one host, CPU, small model; 0.3 s and more from save to save",
    goal=GOAL,
    results="corrupt",
    seeds=20,
)

if __name__ == "__main__":
    sys.exit(CAMPAIGN.main())
