"""The tests of held ranks, several in this process: figures come, what does not come is said, limits hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch

from keepstep.core.cpu_counters import CpuCounters
from keepstep.core.validation import RankTests, TransferEndpoint
from keepstep.validate import device_tests, worker
from keepstep.validate.plan import transfers
from keepstep.validate.worker import HeldTests


@pytest.fixture(autouse=True)
def patient_and_single_threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One compute thread, as ``keepstep run`` gives each of several ranks; figures come however busy the host is."""
    monkeypatch.setattr(worker, "MOST_LIMIT_S", 600.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def held(*ranks: int) -> Iterator[dict[int, HeldTests]]:
    with ExitStack() as stack:
        made: dict[int, HeldTests] = {}
        for rank in ranks:
            made[rank] = HeldTests(rank, "cpu")
            stack.callback(made[rank].stop)
        yield made


def run_all(tests: dict[int, HeldTests], members: tuple[int, ...], limit_s: float = 600.0) -> dict[int, Any]:
    planned = transfers([members])
    endpoints = {rank: TransferEndpoint(**one.endpoint()) for rank, one in tests.items()}
    reports: dict[int, Any] = {}

    def run(rank: int) -> None:
        own = tuple(one for one in planned if rank in (one.source, one.target))
        reports[rank] = tests[rank].run(asdict(RankTests(rank, own, endpoints, limit_s)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in tests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports


def test_every_device_and_link_is_measured() -> None:
    with held(*range(5)) as tests:
        reports = run_all(tests, (0, 1, 2, 3, 4))
    assert [reports[rank]["missing"] for rank in range(5)] == [()] * 5
    assert all(one["value"] > 0 for rank in range(5) for one in reports[rank]["devices"])
    received = {(one["source"], one["target"]) for rank in range(5) for one in reports[rank]["links"]}
    assert received == {(one.source, one.target) for one in transfers([range(5)])}


def test_a_partner_that_never_comes_costs_a_figure_and_no_more() -> None:
    with held(0, 1, 2) as tests:
        del tests[1]
        reports = run_all(tests, (0, 1, 2), limit_s=1.5)
    assert any("0 → 1" in text or "1 → 2" in text for rank in (0, 2) for text in reports[rank]["missing"])
    assert {(one["source"], one["target"]) for one in reports[0]["links"]} <= {(2, 0)}


def test_the_training_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    with held(0) as tests:
        assert run_all(tests, (0,))[0]["devices"]
    assert torch.equal(before, torch.get_rng_state())


def test_stopped_tests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with held(0, 1) as tests:
        tests[0].stop()
        report = tests[0].run(asdict(RankTests(0, transfers([(0, 1)]), {}, 20.0)))
    assert report["links"] == ()


class Entry:
    def __init__(self, name: str, figure: float) -> None:
        self.name, self._figure = name, figure

    def load(self) -> Any:
        return lambda device: self._figure


def test_custom_tests_are_run_and_those_that_fail_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [Entry("disk", 3.5), Entry("bad", float("nan"))]
    monkeypatch.setattr(
        device_tests, "entry_points", lambda group: entries if group == device_tests.TESTS else []
    )
    with held(0) as tests:
        report = run_all(tests, (0,))[0]
    assert {one["test"]: one["value"] for one in report["devices"]}["disk"] == 3.5
    assert report["missing"] == ("custom test bad gave nan; it must give a number above 0",)


@pytest.mark.parametrize("body", [{}, {"limit_s": 1}, {"limit_s": 1, "transfers": [{}], "endpoints": {}}])
def test_orders_that_are_none_are_refused(body: dict[str, Any]) -> None:
    with held(0) as tests, pytest.raises((KeyError, TypeError, ValueError)):
        tests[0].run(body)


class BusyHost:
    """Clocks of a thread that has its core a quarter of the time."""

    busy_s = 0.0

    def thread_time(self) -> float:
        self.busy_s += 1e-3
        return self.busy_s

    def perf_counter(self) -> float:
        return 4 * self.busy_s

    monotonic = perf_counter


@pytest.mark.parametrize(("throttled", "limited", "taken"), [(False, 0.0, 0.75), (True, 0.75, 0.0)])
def test_time_of_others_on_the_core_leaves_the_figure_alone_and_time_beyond_the_quota_lowers_it(
    monkeypatch: pytest.MonkeyPatch, throttled: bool, limited: float, taken: float
) -> None:
    host = BusyHost()

    def counters(pid: int, quota: Any) -> CpuCounters:
        return CpuCounters(0, throttled_us=int(host.busy_s * 1e9) if throttled else 0)

    monkeypatch.setattr(device_tests, "time", host)
    monkeypatch.setattr(device_tests, "cpu_counters", counters)
    (figure,) = (
        one for one in device_tests.device_tests(0, "cpu", lambda: False) if not isinstance(one, str)
    )
    assert (round(figure.limited, 6), round(figure.taken, 6)) == (limited, taken)
    alone = 2 * 384**3 / 1e-3 * 1e-12
    assert figure.value == pytest.approx(alone * (1 - limited))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_tested_in_every_number_format_that_it_has() -> None:
    found = list(device_tests.device_tests(0, "cuda:0", lambda: True))
    figures = {one.test: one.value for one in found if not isinstance(one, str)}
    assert not [one for one in found if isinstance(one, str)]
    assert {"fp32"} < set(figures)
    assert all(value > 0 for value in figures.values())
