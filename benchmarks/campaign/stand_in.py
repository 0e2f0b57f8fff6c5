"""The campaign on the stand-in GPU: the real ProcessGroupNCCL, hosts that run ahead; seeds draw jobs and faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.campaign.case import Case, Verdict, culprit_ranks, left_over, named_for_sure
from benchmarks.campaign.stand_in_draw import (
    CUT,
    FRAMEWORK_LAYOUTS,
    FRAMEWORKS,
    HANGS,
    HEALTHY,
    HISTORY,
    NAME,
    PAIR,
    PORTS,
    SLOW,
    Drawn,
    draw,
    draw_frameworks,
    draw_with_ports,
)
from benchmarks.campaign.trial import Outcome, Plan, StandIn

STAND_IN_NCCL = "stand-in-nccl"  # the backend's name
_KERNEL_US_A_RANK = 2500.0  # in real pace hosts that share two cores have to be ahead of their devices
# In virtual time a host makes at most four steps a second, and a device half as many: what is told takes a second at
# least, which must not be many steps. Who is slow from the start is told by heartbeats, about one a second.
_VIRTUAL_KERNEL_US, _PACE_S = 12_000.0, 0.25
_EARLY_KERNEL_US, _EARLY_PACE_S = 24_000.0, 0.5
_PORTS_KERNEL_US = 5000.0  # in real pace, as counters are: four ranks
# Kernels that follow each other in a step, which takes as long in each layout.
_KERNELS, _KERNELS_OF_DDP = {"megatron": 320, "deepspeed": 180}, 42
_PACKAGES = {"megatron": ("megatron.core", "megatron-core"), "deepspeed": ("deepspeed", "deepspeed")}
_GBPS = "0.0017"  # so that a transfer takes a part of the step that a slow pair can make longer
_WITHIN = 3  # iterations until a slow rank is named that has a healthy past
_EARLY_WITHIN, _SIXTH = 5, 5  # those after the sixth step where it has none, and that step's number
_SETTLES_S = {
    False: 3.0,
    True: 12.0,
}  # for closer looks after the verdict; counters are looked at once a second
_WITHIN_S = 50.0  # the whole time in which a hang is to be told
_FELT = 1.08  # a job that is slower by less, by its devices' clock, need not be called slow
_NETWORK = ("network", "path broken", "link down")  # what the network is called


def plan(seed: int) -> Plan:
    return _plan(draw(seed), with_ports=False)


def plan_frameworks(seed: int) -> Plan:
    return _plan(draw_frameworks(seed), with_ports=False)


def lacks(seed: int) -> str:
    """The package that the seed's layout needs, unless it is installed."""
    from benchmarks.stand_in.launch import is_installed

    module, package = _PACKAGES[draw_frameworks(seed).layout]
    return "" if is_installed(module) else package


def plan_with_ports(seed: int) -> Plan:
    return _plan(draw_with_ports(seed), with_ports=True)


def _plan(drawn: Drawn, *, with_ports: bool) -> Plan:
    ends_by_itself = drawn.kind in HEALTHY
    settings = {"STAND_IN_GBPS": _GBPS} if drawn.kind == PAIR or with_ports else {}
    is_virtual = drawn.is_virtual and not with_ports
    kernel_us = _VIRTUAL_KERNEL_US if is_virtual else _KERNEL_US_A_RANK * drawn.ranks
    pace: tuple[str, ...] = ()
    if drawn.kind == "slow early":
        kernel_us, pace = _EARLY_KERNEL_US, ("--pace-s", str(_EARLY_PACE_S))
    elif is_virtual:
        pace = "--pace-s", str(_PACE_S)
    elif with_ports:
        kernel_us = _PORTS_KERNEL_US
    kernel_us *= _KERNELS_OF_DDP / _KERNELS.get(drawn.layout, _KERNELS_OF_DDP)
    return Plan(
        script="benchmarks/stand_in/jobs/train.py",
        arguments=("--layout", drawn.layout, "--steps", str(drawn.steps), *pace),
        flags=("--shutdown-timeout", "2"),
        truth={
            "kind": drawn.kind,
            "layout": drawn.layout,
            "ranks": drawn.ranks,
            "culprits": drawn.culprits,
            "step": drawn.step,
        },
        nproc=drawn.ranks // drawn.nodes,
        timeout_s=180,
        end_on="" if ends_by_itself else " or ".join(HANGS.get(drawn.kind, ("slow",))),
        end_when_named=True,
        end_after_s=_SETTLES_S[with_ports],
        end_after_truth_s=_WITHIN_S if drawn.kind in HANGS else 0.0,
        stand_in=StandIn(
            faults=drawn.faults,
            clock="virtual" if is_virtual else "real",
            kernel_us=kernel_us,
            values=drawn.layout in ("pipeline", *FRAMEWORK_LAYOUTS),
            settings=settings,
            nodes=drawn.nodes,
            with_ports=with_ports,
        ),
    )


def judge(plan: Plan, outcome: Outcome) -> Verdict:
    """Right ranks and kind in time, nobody else ever named."""
    kind, layout, ranks = plan.truth["kind"], plan.truth["layout"], plan.truth["ranks"]
    assert plan.stand_in is not None
    drawn = Drawn(kind, layout, ranks, plan.stand_in.nodes, 0, tuple(plan.stand_in.faults))
    why = left_over(outcome)
    if not outcome.truths:
        why.append("the fault did not come")
    named = [one for one in outcome.incidents if one["culprits"]]
    wrong = [one for one in named if _is_wrong(one, drawn)]
    measured: dict[str, Any] = {
        "kind": f"{kind}, {layout}",
        "ranks": ranks,
        "nodes": drawn.nodes,
        "wrong": len(wrong),
        "wrong_for_sure": sum(map(named_for_sure, wrong)),
        "nobody_named": len(outcome.incidents) - len(named),
        "hangs_of_healthy": 0,
    }
    why += [f"wrongly named: {_told(one)}" for one in wrong]
    if kind in HEALTHY:
        hangs = [one for one in outcome.incidents if one["kind"] != "slow"]
        measured["hangs_of_healthy"] = len(hangs)
        why += [f"told a {one['kind']}" for one in hangs]
    elif kind in HANGS:
        _judge_hang(drawn, outcome, why, measured, with_ports=plan.stand_in.with_ports)
    else:
        _judge_slow(drawn, outcome, why, measured, with_ports=plan.stand_in.with_ports)
    if kind in HEALTHY and (outcome.timed_out or outcome.exit_code):
        why.append("the job did not end" if outcome.timed_out else f"exit code {outcome.exit_code}")
    del outcome.notes["periods_ns"]  # it is judged
    return Verdict(why, measured)


def _is_wrong(incident: Mapping[str, Any], drawn: Drawn) -> bool:
    """Whether anybody is named who is not to blame."""
    fault = drawn.faults[0]
    ends = {fault.rank, fault.peer}
    for one in incident["culprits"]:
        if one["rank"] is not None and one["rank"] not in drawn.culprits:
            return True
        if one["link"] is not None and (fault.peer < 0 or not _holds(one["link"], ends, drawn)):
            return True
        if one["rank"] is None and one["link"] is None and fault.peer < 0:
            return True
    return False


def _holds(link: Mapping[str, Any], ends: set[int], drawn: Drawn) -> bool:
    """Whether the link is between the nodes of these two ranks."""
    on_node = drawn.ranks // drawn.nodes
    return {rank // on_node for rank in link["ranks"]} == {rank // on_node for rank in ends}


def _told(incident: Mapping[str, Any]) -> str:
    who = [
        f"rank {one['rank']}" if one["rank"] is not None else f"link {one['link'] and one['link']['ranks']}"
        for one in incident["culprits"]
    ]
    first = incident["culprits"][0]
    return f"{incident['kind']}, {', '.join(who)}, {first['cause']}, {first['confidence']}"


def _judge_pair(
    culprits: Sequence[Mapping[str, Any]], with_ports: bool, why: list[str], measured: dict[str, Any]
) -> None:
    """Whether the pair itself is named, which it has to be where ports tell it."""
    measured["pair_named"] = bool(culprits) and all(one["link"] is not None for one in culprits)
    if with_ports and not measured["pair_named"]:
        why.append("not told between which nodes")


def _judge_slow(
    drawn: Drawn, outcome: Outcome, why: list[str], measured: dict[str, Any], *, with_ports: bool
) -> None:
    measured["felt"] = felt = _felt(outcome.notes["periods_ns"], drawn.step)
    found = [one for one in outcome.incidents if one["kind"] == "slow"]
    right = [one for one in found if _is_right(one, drawn)]
    if not right:
        told = [_told(one) if one["culprits"] else one["summary"] for one in found]
        if felt is None or felt >= _FELT or drawn.kind != PAIR:
            why.append(f"not named; told: {told}")
        return
    first = right[0]
    measured["confidence"] = sorted({one["confidence"] for one in first["culprits"]})
    measured["onset_error"] = first["onset_step"] - drawn.step
    if drawn.kind == PAIR:
        _judge_pair(first["culprits"], with_ports, why, measured)
    if drawn.kind == "slow early":
        measured["late"] = late = first["detected_step"] - max(drawn.step, _SIXTH)
        if late > _EARLY_WITHIN:
            why.append(f"named {late} iterations after the sixth step or the onset")
    else:
        measured["iterations"] = iterations = first["detected_step"] - drawn.step + 1
        if drawn.kind in SLOW and iterations > _WITHIN:
            why.append(f"named after {iterations} iterations")


def _is_right(incident: Mapping[str, Any], drawn: Drawn) -> bool:
    culprits = incident["culprits"]
    if drawn.kind == PAIR:
        return bool(culprits) and all(
            one["rank"] is None and one["cause"] in (*_NETWORK, "inside the node") for one in culprits
        )
    causes = {one["cause"] for one in culprits}
    return sorted(culprit_ranks(incident)) == drawn.culprits and causes == {"compute on the GPU"}


def _felt(periods_ns: Sequence[Sequence[int]], onset: int) -> float | None:
    """How much longer the job's steps are from the onset on, by its devices' own clock; None without a time before."""
    grown: list[float] = []
    for one in periods_ns:
        before, after = one[HISTORY // 2 : onset - 1], one[onset + 1 :]
        if before and after:
            grown.append(median(after) / median(before))
    return round(median(grown), 3) if grown else None


def _judge_hang(
    drawn: Drawn, outcome: Outcome, why: list[str], measured: dict[str, Any], *, with_ports: bool
) -> None:
    found = [one for one in outcome.incidents if one["kind"] in HANGS[drawn.kind]]
    if not found:
        why.append(f"no hang told; told: {[one['kind'] for one in outcome.incidents]}")
        return
    last = found[-1]
    culprits = last["culprits"]
    measured["confidence"] = sorted({one["confidence"] for one in culprits})
    measured["stage"] = [one["stage"] for one in culprits]
    if outcome.truths:
        measured["seconds_to_verdict"] = round(found[0]["detected_unix_s"] - outcome.truths[0]["unix_s"], 1)
    if drawn.kind == CUT:
        _judge_pair(culprits, with_ports, why, measured)
        if not culprits or any(one["cause"] not in _NETWORK for one in culprits):
            why.append(f"not the network: {_told(last) if culprits else last['summary']}")
        return
    if culprit_ranks(last) != drawn.culprits:
        why.append(f"named {culprit_ranks(last)}, true {drawn.culprits}")
        return
    phase = drawn.kind.removeprefix("hang ")
    if drawn.kind == "never ends" and culprits[0]["cause"] != "its GPU stands still":
        why.append(f"cause {culprits[0]['cause']}")
    elif phase in ("forward", "backward", "data", "optimizer") and phase not in measured["stage"][0]:
        why.append(f"stage {measured['stage'][0]}, true {phase}")


CASE = Case(
    NAME,
    200,
    "right rank and kind >= 97 %, wrong with confidence high 0, no hang told of healthy jobs (stand-in for the GPU)",
    plan,
    judge,
    ("iterations", "late", "seconds_to_verdict", "felt"),
    share=0.97,
    zero=("wrong_for_sure", "hangs_of_healthy"),
)
FRAMEWORKS_CASE = replace(CASE, name=FRAMEWORKS, seeds=72, plan=plan_frameworks, lacks=lacks)
PORTS_CASE = Case(
    PORTS,
    12,
    "the pair of nodes named by the counters of their ports, wrong with confidence high 0 (stand-in for the GPU)",
    plan_with_ports,
    judge,
    ("iterations", "seconds_to_verdict", "felt"),
    share=0.97,
    zero=("wrong_for_sure",),
)
