"""Whatever pods of other makers and strangers do, an operator that sees it late does to nodes only what it may.

The twin knows all that ever was: which pods the scheduler put where, and when a taint came by whose word.
"""

from __future__ import annotations

import random

import pytest
from tests.effort import many
from tests.unit.kubernetes.virtual_cluster import node
from tests.unit.kubernetes.virtual_pods import BY_MAKER, BY_NAME, VirtualPods, pod

from keepstep.kubernetes.actions import EndPod, Make, Mark, SetTaints, Unmark
from keepstep.kubernetes.node_remedies import CONDITIONS, VALUE
from keepstep.kubernetes.objects import FAULTS

MACHINES = 30
JOBS = {"auto": "auto", "advise": "advise", "off": "off", "two": "auto"}
FOREIGN = {"key": "example.com/gpu", "value": "x", "effect": "PreferNoSchedule"}
EVERYTHING = [{"operator": "Exists"}]


class Life:
    """Some jobs' lives, by the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = cluster = VirtualPods()
        cluster.nodes = {f"n{at}": node(f"n{at}") for at in range(MACHINES)}
        cluster.nodes["n3"]["spec"]["taints"] = [FOREIGN]
        self.seen = cluster.view()
        self.serial = 0
        # What the twin knows.
        self.placed: dict[str, set[str]] = {job: set() for job in JOBS}
        self.tainted_s: dict[str, dict[str, float]] = {job: {} for job in JOBS}  # by node

    def make_pod(self) -> None:
        rng, job = self.rng, self.rng.choice(list(JOBS))
        self.serial += 1
        at = rng.choice(list(self.cluster.nodes))
        odd = rng.random()
        managed, tolerations = (BY_NAME, ()) if odd < 0.02 else (BY_MAKER, EVERYTHING if odd < 0.04 else ())
        phase = rng.choice(["Running", "Running", "Pending"])
        self.cluster.pods.append(
            pod(f"{job}-{self.serial}", at, job=job, remedy=JOBS[job], now_s=self.cluster.now_s,
                managed=managed, tolerations=tolerations, phase=phase)
        )  # fmt: skip
        if odd >= 0.04 and phase == "Running":
            self.placed[job].add(at)

    def happens(self) -> None:
        cluster, rng = self.cluster, self.rng
        what = rng.random()
        if what < 0.3:
            self.make_pod()
        elif what < 0.5 and cluster.pods:
            cluster.pods.remove(rng.choice(cluster.pods))
        elif what < 0.8:
            self.serial += 1
            kind = rng.choice(list(CONDITIONS))
            cluster.tells(rng.choice([*cluster.nodes, "n99"]), kind, self.serial, job=rng.choice(list(JOBS)))
        elif what < 0.85:
            name = rng.choice(list(cluster.nodes))
            for condition in cluster.conditions(name):
                cluster.uncondition(name, condition)
        elif what < 0.9:
            ready = cluster.nodes[rng.choice(list(cluster.nodes))]["status"]["conditions"][0]
            ready["status"] = rng.choice(["True", "Unknown"])
        elif what < 0.92:
            cluster.take_over()
            self.seen = cluster.view()
        elif what < 0.94:
            name = rng.choice(list(cluster.nodes))
            cluster.nodes[name]["metadata"].setdefault("annotations", {})["own"] = "x"

    def turn(self) -> None:
        """Time passes; the operator may look at what it saw last, or earlier."""
        cluster = self.cluster
        cluster.now_s += self.rng.choice([0.3, 1, 5, 120])
        self.happens()
        if self.rng.random() < 0.7:
            self.seen = cluster.view()
        before = {name: cluster.taints(name) for name in cluster.nodes}
        for one in cluster.look(self.seen):
            assert not isinstance(one, Make | EndPod | Unmark)
            if isinstance(one, Mark):
                job = job_in(one.message)
                assert JOBS[job] != "off"
                assert one.node in self.placed[job], "only nodes where the scheduler put a pod of the job"
            elif isinstance(one, SetTaints):
                theirs = [each.key for each in one.taints if each.value != VALUE]
                assert theirs == [FOREIGN["key"]] * (one.node == "n3")
                added = {each.key for each in one.taints} - set(before[one.node])
                if added and one.version == self.seen[1][one.node].metadata.resource_version:
                    self.count(one)
        self.check()

    def count(self, order: SetTaints) -> None:
        """Note when the taint of an order came, where it came."""
        if order.node in self.cluster.nodes and self.cluster.taints(order.node) == [
            one.key for one in order.taints
        ]:
            self.tainted_s[job_in(order.why)][order.node] = self.cluster.now_s

    def check(self) -> None:
        cluster = self.cluster
        ours = [name for name in cluster.nodes if any("keepstep.dev/" in one for one in cluster.taints(name))]
        assert len(ours) <= max(1, MACHINES // 10)
        for job, remedy in JOBS.items():
            hour = [at_s for at_s in self.tainted_s[job].values() if cluster.now_s - at_s < 3500]
            assert len(hour) <= (remedy == "auto"), "a tenth of the job's nodes an hour, and one at least"
        for one in cluster.nodes.values():
            assert len(one["metadata"].get("annotations", {}).get(FAULTS, "")) < 20_000


def job_in(text: str) -> str:
    return text.partition("job=ml/")[2].partition(" ")[0]


@pytest.mark.parametrize("seed", range(many(10)))
def test_an_operator_does_only_what_it_may(seed: int) -> None:
    life = Life(seed)
    for _ in range(300):
        life.turn()
    for _ in range(20):
        life.cluster.settle(2)
    assert life.cluster.look() == [], "it comes to rest"
