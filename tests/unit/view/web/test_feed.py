"""One look for all viewers: what has changed is encoded once, a slow viewer gets the newest, nobody looks in vain."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from tests.unit.view.web.served_run import SLOW, MadeRun

from keepstep.core.errors import RunError
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.web.feed import Feed, changed_sections


def data_of(frame: bytes) -> tuple[str, dict[str, Any]]:
    lines = dict(line.split(": ", 1) for line in frame.decode().strip().split("\n"))
    return lines["event"], json.loads(lines["data"])


def test_only_what_has_changed_is_sent_again() -> None:
    async def scene() -> None:
        run = MadeRun()
        feed = Feed(run)
        first = await feed.look()
        viewer = feed.frames(first.version)
        run.make_step()
        await feed.look()
        event, data = data_of(await anext(viewer))
        assert event == "change"
        assert data["version"] == first.version + 1
        assert "incidents" not in data
        assert "links" not in data
        assert data["job"]["newest_step"] == 40
        assert data["pace"]["from"] == 40
        assert len(data["pace"]["steps"]) == 1
        await viewer.aclose()

    asyncio.run(scene())


def test_a_viewer_who_missed_a_moment_gets_the_newest_as_a_whole() -> None:
    async def scene() -> None:
        run = MadeRun()
        feed = Feed(run)
        first = await feed.look()
        slow, quick = feed.frames(first.version), feed.frames(first.version)
        got: list[bytes] = []
        for _ in range(5):
            run.make_step()
            await feed.look()
            got.append(await anext(quick))
        event, data = data_of(await anext(slow))
        assert (event, data["version"]) == ("whole", first.version + 5)
        assert [data_of(frame)[0] for frame in got] == ["change"] * 5
        assert feed.viewers == 2
        await slow.aclose()
        await quick.aclose()
        assert feed.viewers == 0

    asyncio.run(scene())


def test_all_viewers_get_the_very_same_bytes() -> None:
    async def scene() -> None:
        run = MadeRun()
        feed = Feed(run)
        seen = (await feed.look()).version
        viewers = [feed.frames(seen) for _ in range(50)]
        run.make_step()
        await feed.look()
        frames = [await anext(viewer) for viewer in viewers]
        assert all(frame is frames[0] for frame in frames)
        for viewer in viewers:
            await viewer.aclose()

    asyncio.run(scene())


def test_nobody_looks_at_a_run_that_nobody_watches() -> None:
    async def scene() -> None:
        run = MadeRun()
        feed = Feed(run)
        looking = asyncio.create_task(feed.run())
        for _ in range(10):
            await asyncio.sleep(0)
        assert run.looks == 0
        moment = await feed.newest()
        assert (run.looks, moment.version) == (1, 0)
        assert await feed.newest() is moment
        looking.cancel()

    asyncio.run(scene())


def test_a_scrape_is_one_look() -> None:
    async def scene() -> None:
        run, now = MadeRun(), [100.0]
        feed = Feed(run, clock=lambda: now[0])
        looking = asyncio.create_task(feed.run())
        await feed.newest(lingers=False)
        for _ in range(10):
            await asyncio.sleep(0)
        assert run.looks == 1
        assert not feed.is_wanted()
        await feed.newest()
        assert feed.is_wanted()
        looking.cancel()

    asyncio.run(scene())


def test_a_large_job_is_looked_at_less_often() -> None:
    async def scene() -> None:
        for world, interval_s in ((8, 1.0), (4096, 1.0), (8192, 2.0), (65_536, 5.0)):
            feed = Feed(MadeRun(steps=1, world=world))
            await feed.look()
            assert feed.interval_s == interval_s

    asyncio.run(scene())


def test_who_is_told_of_each_snapshot_harms_nobody() -> None:
    told: list[RunSnapshot] = []

    def fails(snapshot: RunSnapshot) -> None:
        told.append(snapshot)
        raise ValueError("a tracker that is broken")

    async def scene() -> None:
        feed = Feed(MadeRun(), on_snapshot=(fails, told.append))
        await feed.look()
        await feed.look()

    asyncio.run(scene())
    assert len(told) == 4


def test_a_run_that_cannot_be_read_any_more_stays_as_it_was_and_says_so() -> None:
    class Lost(MadeRun):
        def refresh(self) -> RunSnapshot:
            if self.looks:
                raise RunError("status.json: not the JSON that keepstep writes\nthe file was cut")
            return super().refresh()

    async def scene() -> None:
        now = [100.0]
        feed = Feed(Lost(), clock=lambda: now[0])
        await feed.look()
        now[0] += 7.0
        moment = await feed.look()
        assert moment.content["job"]["newest_step"] == 39
        assert moment.content["clock"]["age_s"] == 7.0
        assert moment.content["job"]["troubles"] == [
            r"status.json: not the JSON that keepstep writes\nthe file was cut"
        ]

    asyncio.run(scene())


def test_of_the_incidents_only_those_that_differ() -> None:
    before = {"incidents": [{"number": 1, "lost_s": 1.0}, {"number": 2, "lost_s": 1.0}]}
    now = {
        "incidents": [
            {"number": 1, "lost_s": 1.0},
            {"number": 2, "lost_s": 2.0},
            {"number": 3, "lost_s": 0.0},
        ]
    }
    assert [one["number"] for one in changed_sections(before, now)["incidents"]] == [2, 3]
    assert changed_sections(now, now) == {}
    assert changed_sections({}, now) == now


def test_points_of_the_pace_that_changed_later_are_sent_again() -> None:
    before = {"pace": {"stride": 1, "steps": [0, 1, 2], "lost": [0.0, 0.0, 0.1]}}
    now = {"pace": {"stride": 1, "steps": [0, 1, 2, 3], "lost": [0.0, 0.2, 0.1, 0.0]}}
    assert changed_sections(before, now)["pace"] == {
        "stride": 1,
        "steps": [1, 2, 3],
        "lost": [0.2, 0.1, 0.0],
        "from": 1,
    }
    wider = {"pace": {"stride": 2, "steps": [0, 2], "lost": [0.0, 0.1]}}
    assert changed_sections(now, wider) == wider


def test_a_change_of_a_large_job_is_small() -> None:
    async def scene() -> None:
        run = MadeRun(steps=20, world=16_384, incidents=(replace(SLOW, victims=tuple(range(16_000))),))
        feed = Feed(run)
        await feed.look()
        run.make_step()
        moment = await feed.look()
        # Looked at every two seconds; twice as often as a job of 131,072 ranks.
        assert len(moment.change_frame) < 20_000
        assert len(moment.whole_gzipped) < 60_000

    asyncio.run(scene())
