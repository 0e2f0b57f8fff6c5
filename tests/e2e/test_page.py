"""The page in a real Chromium: what it asks for and draws, whether all can use it, that no text becomes a program."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.view.web.served_run import CRASH, SLOW, MadeRun, Viewer, serving
from tests.unit.view.web.test_access import TOKEN
from tests.unit.view.web.test_gate import HOSTILE

from keepstep.core.incident import Culprit
from keepstep.view.run_snapshot import NodeView
from keepstep.view.web.access import Access
from keepstep.view.web.one_file import page_in_one_file

pytestmark = pytest.mark.e2e
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
PICTURES = ("heat", "pace", "incidents", "recovery", "durability", "links")
if CHROMIUM is None:
    pytest.skip("there is no Chromium here: apt-get install chromium", allow_module_level=True)

# How many colours the drawing of a section has: one that is empty has one.
COLOURS = """(id) => {
  const drawn = document.querySelector(`#${id} canvas:not(.scale)`), found = new Set();
  if (!drawn) return document.querySelectorAll(`#${id} svg *`).length;
  const { data } = drawn.getContext("2d").getImageData(0, 0, drawn.width, drawn.height);
  for (let at = 0; at < data.length; at += 4) found.add(`${data[at]} ${data[at + 1]} ${data[at + 2]}`);
  return found.size;
}"""
SETTLED = (  # the page's scripts may not have run yet
    "!!window.keepstep?.heat?.tile() && keepstep.pictures.every((one) => one.drawn_ms !== undefined)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as begun:
        started = begun.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Seen:
    """A page, what it asked for and what it complained of."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.waits_for: set[Any] = set()  # requests that have no answer yet
        self.failed: list[tuple[str, str | None]] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("request", lambda request: self.waits_for.add(request))
        self.page.on("requestfinished", lambda request: self.waits_for.discard(request))
        self.page.on("requestfailed", self._fail)
        self.page.on(
            "console",
            lambda told: self.complaints.append(told.text) if told.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _fail(self, request: Any) -> None:
        self.waits_for.discard(request)
        self.failed.append((request.url, request.failure))

    def open(self, url: str, *, settled: str = SETTLED) -> Any:
        self.page.goto(url)
        try:
            until(self.page, settled)
        except AssertionError as error:
            waits_for = [one.url for one in self.waits_for]
            raise AssertionError(f"{error}; no answer to {waits_for}; failed {self.failed}") from error
        return self.page


def until(page: Any, expression: str) -> None:
    """Wait until it is true. Chromium's own way is an ``eval`` in the page, which its policy forbids."""
    for _ in range(1200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    drawn = "window.keepstep?.pictures?.map((one) => [one.element.id, one.drawn_ms])"
    raise AssertionError(f"{expression}, but drawn is {page.evaluate(drawn)}")


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    found = Seen(browser)
    yield found
    found.page.close()


def url_of(viewer: Viewer) -> str:
    return f"http://localhost:{viewer.port}/"


def test_all_pictures_are_drawn_and_nobody_else_is_asked(seen: Seen) -> None:
    with serving(MadeRun()) as viewer:
        page = seen.open(url_of(viewer))
        assert "rank 5" in page.inner_text("#headline")
        for name in PICTURES:
            assert page.evaluate(COLOURS, name) > 3, name
        assert not seen.complaints  # a violation of the policy would be one
        assert not [url for url in seen.asked if not url.startswith((url_of(viewer), "data:"))]


def test_a_step_that_does_not_end_is_seen(seen: Seen) -> None:
    hang = replace(SLOW, number=3, kind="hang", onset_step=40, job_slowdown=None, actions=())
    with serving(MadeRun(incidents=(CRASH, hang))) as viewer:
        page = seen.open(url_of(viewer))
        assert "Step 40 does not end: rank 5 on gpu-2." in page.inner_text("#heat .caption")
        assert "step 40 does not end" in page.inner_text("#pace .caption")
        page.focus("#heat canvas[tabindex]")
        page.keyboard.press("End")  # the tiles are where they are drawn
        until(page, "document.getElementById('heat-tells').textContent.includes('step 39')")
        assert not seen.complaints


def test_what_is_chosen_follows_what_is_wrong_until_somebody_chooses(seen: Seen) -> None:
    run = MadeRun()
    with serving(run) as viewer:
        page = seen.open(url_of(viewer))
        assert page.evaluate("keepstep.chosen") == 2
        run.changes["incidents"] = (CRASH, replace(SLOW, number=3, job_slowdown=3.0), SLOW)
        until(page, "keepstep.chosen === 3")
        page.focus("#incidents svg[role=listbox]")
        page.keyboard.press("ArrowDown")
        until(page, "keepstep.chosen === 2")
        run.changes["incidents"] = (CRASH, SLOW, replace(SLOW, number=4, job_slowdown=9.0))
        until(page, "keepstep.state.words.incident === 4 && keepstep.incident(4)")
        assert page.evaluate("keepstep.chosen") == 2
        assert not seen.complaints


def test_it_goes_on_with_the_run(seen: Seen) -> None:
    run = MadeRun()
    with serving(run) as viewer:
        page = seen.open(url_of(viewer))
        run.make_step()
        until(page, "keepstep.state.job.newest_step === 40 && keepstep.heat.tile().columns === 41")
        assert not seen.complaints


def test_it_says_when_the_server_has_gone(seen: Seen) -> None:
    with serving(MadeRun()) as viewer:
        page = seen.open(url_of(viewer))
    page.wait_for_selector("#banner:not([hidden])")
    assert "Not heard from the server since" in page.inner_text("#banner")
    assert "rank 5" in page.inner_text("#headline")  # what was known stays


def test_a_token_in_the_address_is_erased_from_it(seen: Seen) -> None:
    with serving(MadeRun(), Access(TOKEN)) as viewer:
        page = seen.open(f"{url_of(viewer)}#{TOKEN.decode()}")
        assert page.url == url_of(viewer)
        assert page.evaluate("document.cookie") == ""
        page.go_back()
        page.go_forward()
        assert TOKEN.decode() not in page.url
        assert not [url for url in seen.asked if TOKEN.decode() in url]


def test_the_token_is_asked_for(seen: Seen) -> None:
    with serving(MadeRun(), Access(TOKEN)) as viewer:
        page = seen.open(url_of(viewer), settled="!document.getElementById('login').hidden")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('refused').textContent !== ''")
        page.fill("#token", TOKEN.decode())
        page.keyboard.press("Enter")
        until(page, SETTLED)
        assert page.is_hidden("#login")


def test_names_from_the_job_stay_text(seen: Seen) -> None:
    named = replace(SLOW, culprits=(Culprit(rank=5, node=HOSTILE, cause=HOSTILE, confidence="high"),))
    nodes = tuple(NodeView(at, HOSTILE, sealed_step=1, notices=(HOSTILE,)) for at in range(2))
    with serving(MadeRun(name=HOSTILE, incidents=(named,), nodes=nodes)) as viewer:
        page = seen.open(url_of(viewer))
        assert page.evaluate("document.querySelectorAll('#main script, #main textarea').length") == 0
        assert "<script>" in page.inner_text("#answer")
        assert r"\x1b" in page.inner_text("#run")
        assert not seen.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_can_use_it(browser: Any, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    seen = Seen(browser, color_scheme=scheme, bypass_csp=True)  # axe itself comes as an inline script
    with serving(MadeRun()) as viewer:
        page = seen.open(url_of(viewer))
        for one in page.query_selector_all("summary"):
            one.click()
        found = axe.Axe().run(page).response["violations"]
        bad = [
            (one["id"], [node["target"] for node in one["nodes"]][:5])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert not bad
    seen.page.close()


def test_it_is_used_by_keyboard_alone(seen: Seen) -> None:
    with serving(MadeRun()) as viewer:
        page = seen.open(url_of(viewer))
        page.keyboard.press("?")
        assert page.is_visible("#keys")
        page.keyboard.press("h")
        page.focus("#heat canvas[tabindex]")
        page.keyboard.press("Home")
        page.keyboard.press("End")
        until(page, "document.getElementById('heat-tells').textContent.includes('rank 0')")
        for _ in range(3):
            page.keyboard.press("ArrowDown")
        until(page, "document.getElementById('heat-tells').textContent.includes('rank 5 on gpu-2')")
        page.keyboard.press("+")
        until(page, "keepstep.heat.view.row1 - keepstep.heat.view.row0 < 8")
        page.keyboard.press("0")
        until(page, "keepstep.heat.view.row1 - keepstep.heat.view.row0 === 8")
        page.keyboard.press("i")
        page.focus("#incidents svg[role=listbox]")
        page.keyboard.press("ArrowDown")
        until(page, "keepstep.chosen === 1")


def test_it_fits_a_telephone(browser: Any) -> None:
    seen = Seen(browser, viewport={"width": 360, "height": 740})
    with serving(MadeRun()) as viewer:
        page = seen.open(url_of(viewer))
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    seen.page.close()


def test_one_file_shows_the_same_and_asks_nobody(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_in_one_file(MadeRun(), "made", None))
    page = seen.open(path.as_uri())
    for name in PICTURES:
        assert page.evaluate(COLOURS, name) > 3, name
    page.focus("#heat canvas[tabindex]")
    page.keyboard.press("End")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    until(page, "document.getElementById('heat-tells').textContent.includes('rank 5 on gpu-2')")
    assert not seen.complaints
    assert not [url for url in seen.asked if not url.startswith(("file:", "data:"))]
