"""The controller under seeds: loss, delay, repeats, broken connections, deaths of agents and of itself.

Every case is named by its seed; ``-k 'seed17'`` replays one. See ``virtual_cluster.py`` for what is virtual.
"""

from __future__ import annotations

import pytest
from tests.unit.control.virtual_cluster import Crash, Hang, Network, Slow, VirtualJob

CALM = Network()
ROUGH = Network(delay_s=(0.001, 0.3), lost=0.05, repeated=0.2, breaks_per_s=0.02, agent_deaths_per_s=0.01)
DEADLY = Network(delay_s=(0.001, 0.05), repeated=0.1, agent_deaths_per_s=0.02, controller_deaths_per_s=0.05)
NETWORKS = {"calm": CALM, "rough": ROUGH, "deadly": DEADLY}

seeds = pytest.mark.parametrize("seed", range(12), ids=lambda seed: f"seed{seed}")
networks = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())


def check_numbers(job: VirtualJob) -> None:
    """A number always means the same incident, through all deaths of the controller; none is left out."""
    first: dict[int, tuple[str, float]] = {}
    for incident in job.history:
        kind = "hang" if incident.kind == "desync" else incident.kind
        known = first.setdefault(incident.number, (kind, incident.detected_unix_s))
        assert known == (kind, incident.detected_unix_s)
    assert sorted(first) == list(range(1, len(first) + 1))


@seeds
@networks
def test_healthy_run_has_no_incident(seed: int, network: Network) -> None:
    job = VirtualJob(seed, network=network)
    job.run()
    assert job.history == []
    assert job.said == []


@seeds
@networks
def test_one_incident_for_one_slow_rank(seed: int, network: Network) -> None:
    rank = seed % 8
    job = VirtualJob(seed, network=network, faults=(Slow(rank, 40, 70),))
    job.run()
    check_numbers(job)
    (incident,) = job.written.values()
    assert incident.kind == "slow"
    assert incident.onset_step is not None
    assert abs(incident.onset_step - 40) <= 1
    assert incident.status == "relieved"
    assert [culprit.rank for culprit in incident.culprits] == [rank]
    if network is CALM:
        assert incident.relief_step is not None
        assert abs(incident.relief_step - 70) <= 1
        assert incident.detected_step is not None
        assert incident.detected_step - 40 <= 3
        assert [say.what for say in job.said] == ["verdict", "closes"]


@seeds
@pytest.mark.parametrize("network", [CALM, ROUGH], ids=["calm", "rough"])
def test_one_incident_for_each_of_several_slow_ranks(seed: int, network: Network) -> None:
    faults = (Slow(1, 20, 45), Slow(6, 60, 90), Slow(3, 100, 130, 1.5))
    job = VirtualJob(seed, steps=150, network=network, faults=faults)
    job.run()
    check_numbers(job)
    found = sorted(job.written.values(), key=lambda incident: incident.number)
    assert [[culprit.rank for culprit in incident.culprits] for incident in found] == [[1], [6], [3]]
    assert [incident.status for incident in found] == ["relieved"] * 3


@seeds
@networks
def test_a_slow_device_that_no_profile_shows_is_found_by_validation(seed: int, network: Network) -> None:
    rank = seed % 8
    job = VirtualJob(seed, steps=150, network=network, faults=(Slow(rank, 40, 110, hidden=True),))
    job.run()
    check_numbers(job)
    (incident,) = job.written.values()
    assert job.step >= job.steps - 1  # no lost message and no death keeps the job held
    assert job.held_s <= 15.0
    if network is CALM:
        assert job.holds == 4
        assert job.held_s <= 2.0
        assert [culprit.rank for culprit in incident.culprits] == [rank]
        assert incident.culprits[0].cause == "device"
        assert [say.what for say in job.said] == ["verdict", "sharper", "closes"]
    assert {culprit.rank for culprit in incident.culprits} <= {rank}


@seeds
@networks
def test_one_incident_for_one_hang(seed: int, network: Network) -> None:
    job = VirtualJob(seed, steps=80, network=network, faults=(Hang(seed % 8, 50, 40.0),))
    job.run()
    check_numbers(job)
    (incident,) = job.written.values()
    assert incident.kind == "hang"
    assert [culprit.rank for culprit in incident.culprits] == [seed % 8]
    assert incident.status in ("relieved", "ended")
    assert incident.onset_step == 50


@seeds
@networks
def test_one_incident_for_one_crash(seed: int, network: Network) -> None:
    job = VirtualJob(seed, network=network, faults=(Crash(seed % 8, 30),))
    job.run()
    check_numbers(job)
    (incident,) = job.written.values()
    assert incident.kind == "crash"
    assert [culprit.rank for culprit in incident.culprits] == [seed % 8]
    assert incident.status == "ended"


def test_controllers_do_die_in_these_runs() -> None:
    deaths = 0
    for seed in range(12):
        job = VirtualJob(seed, network=DEADLY, faults=(Slow(0, 40, 70),))
        job.run()
        deaths += job.deaths
    assert deaths >= 12


def test_same_seed_same_run() -> None:
    one, other = (VirtualJob(5, network=ROUGH, faults=(Slow(2, 40, 70),)) for _ in range(2))
    one.run()
    other.run()
    assert one.history == other.history
