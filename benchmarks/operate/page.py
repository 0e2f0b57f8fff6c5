"""What the page of a large job costs: the serve process, the wire, the drawing. Needs Chromium and playwright.

The run is made up in the serve process (`benchmarks.operate.large_run`), so its CPU time holds the making, too.
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks._report import Line, Report
from benchmarks.operate import page_load

_RANKS = 131_072
_VIEWERS = 50
_SECONDS = 30.0
_GOALS: dict[str, tuple[str, float | None, bool]] = {  # unit, goal, whether that is the most or the least
    "first paint": ("s", 1.0, True),
    "first picture with data": ("s", None, True),
    "first paint, on the wire": ("kB", 300.0, True),
    "live, on the wire": ("kB/s", 20.0, True),
    "drawing of the slowest picture, median": ("ms", 50.0, True),
    "the same, longest, with what other programs took meanwhile": ("ms", None, True),
    "serve with 1 viewer": ("% of a core", 10.0, True),
    f"serve with {_VIEWERS} viewers": ("% of a core", 10.0, True),
    "serve, memory": ("MB", 300.0, True),
    f"viewers that got all, of {_VIEWERS}, one of which reads nothing": ("viewers", _VIEWERS - 1, False),
}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _wait_for(port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not come")


class _Viewer(threading.Thread):
    """Takes the events as a browser would; a slow one takes nothing."""

    def __init__(self, port: int, *, is_slow: bool = False) -> None:
        super().__init__(daemon=True)
        self._port, self._is_slow = port, is_slow
        self.received = self.events = 0
        self.done = threading.Event()

    def run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as line:
            if self._is_slow:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            line.settimeout(0.5)
            while not self.done.is_set():
                if self._is_slow:
                    self.done.wait(0.5)
                    continue
                try:
                    part = line.recv(1 << 16)
                except TimeoutError:
                    continue
                self.received += len(part)
                self.events += part.count(b"\nevent: ")


def _cpu_share(process: psutil.Process, seconds: float) -> float:
    def used() -> float:
        times = process.cpu_times()
        return times.user + times.system

    began, at = used(), time.monotonic()
    time.sleep(seconds)
    return 100 * (used() - began) / (time.monotonic() - at)


# Every drawing from now on, in milliseconds by picture; each is drawn once more, so that there is one.
_KEEP_DRAWINGS = """
window.drawn = {};
for (const one of keepstep.pictures) {
  const draw = one.draw, times = drawn[one.element.id] = [];
  one.draw = () => { const began = performance.now(); draw(); times.push(performance.now() - began); };
}
keepstep.redrawAll();
"""


def _in_browser(port: int, process: psutil.Process, picture: Path | None) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as begun:
        browser = begun.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        wire = page.context.new_cdp_session(page)
        wire.send("Network.enable")
        sent = [0]

        def count(event: dict[str, Any]) -> None:
            sent[0] += event["encodedDataLength"]

        wire.on("Network.dataReceived", count)
        page.goto(f"http://localhost:{port}/")
        while not page.evaluate("window.keepstep?.heat?.tile() ? true : false"):
            page.wait_for_timeout(20)
        with_data_s = page.evaluate("performance.now()") / 1e3
        paint_s = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
        page.wait_for_timeout(1000)
        first_kb = page.evaluate(
            "performance.getEntries().reduce((sum, one) => sum + (one.transferSize || 0), 0) / 1e3"
        )
        before = sent[0]
        began = time.monotonic()
        used = sum(process.cpu_times()[:2])
        page.evaluate(_KEEP_DRAWINGS)
        while time.monotonic() - began < _SECONDS:
            page.wait_for_timeout(500)
        took = time.monotonic() - began
        share = 100 * (sum(process.cpu_times()[:2]) - used) / took
        drawn = {name: times for name, times in page.evaluate("drawn").items() if times}
        if picture is not None:
            page.screenshot(path=str(picture), full_page=True)
        browser.close()
    return {
        "first paint": paint_s,
        "first picture with data": with_data_s,
        "first paint, on the wire": first_kb,
        "live, on the wire": (sent[0] - before) / took / 1e3,
        "drawing of the slowest picture, median": max(statistics.median(one) for one in drawn.values()),
        "the same, longest, with what other programs took meanwhile": max(map(max, drawn.values())),
        "serve with 1 viewer": share,
    }


def measure(picture: Path | None = None) -> dict[str, float]:
    """All figures."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.operate.large_run", str(port), str(_RANKS)]
    with subprocess.Popen(command) as serving:
        try:
            _wait_for(port)
            process = psutil.Process(serving.pid)
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            line.request("GET", "/api")  # the first look takes the samples of the run so far
            line.getresponse().read()
            line.close()
            found = _in_browser(port, process, picture)
            viewers = [_Viewer(port, is_slow=at == 0) for at in range(_VIEWERS)]
            for one in viewers:
                one.start()
            time.sleep(5)
            found[f"serve with {_VIEWERS} viewers"] = _cpu_share(process, _SECONDS)
            found["serve, memory"] = process.memory_info().rss / 1e6
            most = max(one.events for one in viewers)
            found[f"viewers that got all, of {_VIEWERS}, one of which reads nothing"] = float(
                sum(one.events >= most - 1 for one in viewers)
            )
            for one in viewers:
                one.done.set()
            for one in viewers:
                one.join()
        finally:
            serving.terminate()
    return found


def report(out: Path, picture: Path | None = None) -> None:
    """Measure, print a table, and write the figures to ``out``."""
    made = Report("operate --part page", quick=False, packages=("keepstep", "numpy", "playwright", "uvicorn"))
    page_load.add_controllers_share(made)
    found = measure(picture)
    about = f"a made-up run of {_RANKS} ranks, which the serve process makes, too"
    for name, (unit, goal, is_most) in _GOALS.items():
        figure = round(found[name], 3)
        met = None if goal is None else figure <= goal if is_most else figure >= goal
        wording = None if goal is None else f"{'at most' if is_most else 'at least'} {goal:g}"
        made.add(Line(name, figure, unit, wording, met, limit=about))
    made.finish(out)
