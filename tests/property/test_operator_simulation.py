"""Whatever happens to a job in Kubernetes, two operators that see it late keep to what they promise."""

from __future__ import annotations

import random

import pytest
from tests.effort import many
from tests.unit.kubernetes.virtual_cluster import VirtualCluster, node, training_job

from keepstep.kubernetes.actions import Make, SetTaints
from keepstep.kubernetes.node_remedies import VALUE
from keepstep.kubernetes.since import Since

NODES, SPARES, MACHINES = 3, 2, 12
LIMIT, KILLS = 3, 6
FOREIGN = {"key": "example.com/gpu", "value": "x", "effect": "PreferNoSchedule"}
MESSAGES = {
    0: "",
    1: "keepstep: exit code 1 (training): rank 1 failed",
    75: "keepstep: exit code 75 (infrastructure): a node was lost; nodes blamed: n[1-2]",
    137: "",
}


class Life:
    """One job's life, by the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = cluster = VirtualCluster(
            training_job(NODES, SPARES, nodeRemedy="auto", restartLimit=LIMIT, podRestartLimit=KILLS)
        )
        cluster.nodes = {f"n{index}": node(f"n{index}") for index in range(MACHINES)}
        cluster.nodes["n3"]["spec"]["taints"] = [FOREIGN]
        self.incident = 0
        self.tainted_s: list[float] = []
        self.own: set[str] = set()  # nodes that have our taint
        self.since = [Since(), Since()]
        self.views = [cluster.view(), cluster.view()]
        self.calm = False
        cluster.refuses = lambda _: not self.calm and self.rng.random() < 0.1

    def happens(self) -> None:
        cluster, rng = self.cluster, self.rng
        names = cluster.running()
        what = rng.random()
        if names and what < 0.1:
            cluster.end(rng.choice(names), rng.choice([75, 137, 137, 75]))
        elif names and what < 0.11:
            code = rng.choice([0, 1, 75, 75, 137])
            cluster.end_all(code, MESSAGES[code])
        elif names and what < 0.2:
            cluster.evict(rng.choice(names))
        elif what < 0.24:
            cluster.lose(rng.choice(sorted(cluster.nodes)))
        elif what < 0.4:
            cluster.recover(rng.choice(sorted(cluster.nodes)))
        elif what < 0.5:
            self.incident += 1
            nodes = rng.sample(sorted(cluster.nodes), rng.choice([1, 1, 1, 2]))
            kind = rng.choice(["slow", "hardware", "lost"])
            state = rng.choice(["running", "recovering", "created"])
            cluster.tells(*((one, kind, self.incident) for one in nodes), state=state)
        elif what < 0.6:
            cluster.told, cluster.trouble = None, rng.choice([("NoAnswer", "x"), ("SecretForbidden", "y")])
        elif what < 0.63:
            one = cluster.nodes[rng.choice(sorted(cluster.nodes))]
            one["status"]["conditions"] = one["status"]["conditions"][:1]

    def turn(self) -> None:
        """Time passes; each operator may look at what it saw last, or earlier."""
        cluster = self.cluster
        cluster.now_s += self.rng.choice([0.3, 1, 5, 20])
        if not self.calm:
            self.happens()
        for number, since in enumerate(self.since):
            if self.calm or self.rng.random() < 0.7:
                self.views[number] = cluster.view()
            self.views[number].now_s = cluster.now_s
            over = cluster.status.get("phase") in ("Succeeded", "Failed")
            for action in cluster.look(self.views[number], since):
                fresh = self.views[number].status.get("phase") in ("Succeeded", "Failed")
                assert not (over and fresh and isinstance(action, Make)), "a job that is over gets no pods"
                if isinstance(action, SetTaints):
                    theirs = [one for one in action.taints if one.value != VALUE]
                    assert [one.key for one in theirs] == [FOREIGN["key"]] * (action.node == "n3")
        cluster.schedule()
        self.check()

    def check(self) -> None:
        cluster = self.cluster
        status = cluster.status
        assert status.get("attempt", 0) <= LIMIT
        places = [pod["spec"]["nodeName"] for pod in cluster.pods.values() if pod["spec"].get("nodeName")]
        assert len(places) == len(set(places)), "no two pods share a node"
        own = {
            name
            for name, one in cluster.nodes.items()
            if any(taint["value"] == VALUE for taint in one["spec"].get("taints", ()))
        }
        self.tainted_s += [cluster.now_s] * len(own - self.own)
        self.own = own
        hour = [one for one in self.tainted_s if cluster.now_s - one < 3500]
        assert len(hour) <= 1, "a tenth of the job's nodes an hour, and one at least"
        assert len(own) <= max(1, MACHINES // 10)
        assert len(status.get("faults", [])) <= 200


@pytest.mark.parametrize("seed", range(many(10)))
def test_operators_keep_to_what_they_promise(seed: int) -> None:
    life = Life(seed)
    for _ in range(200):
        life.turn()
    cluster = life.cluster
    life.calm = True
    cluster.told, cluster.trouble = None, ("NotRunning", "")
    for name in list(cluster.nodes):
        cluster.recover(name)
    for pod in list(cluster.pods):
        if "deletionTimestamp" in cluster.pods[pod]["metadata"]:
            del cluster.pods[pod]
    for _ in range(150):
        life.turn()
    phase = cluster.status["phase"]
    if phase in ("Succeeded", "Failed"):
        assert not cluster.running()
    else:
        assert phase == "Running"
        assert len(cluster.running()) == NODES + SPARES
