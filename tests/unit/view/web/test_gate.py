"""Every answer has safe headers; nothing but reading; foreign text stays text; nothing secret is logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException
from tests.unit.view.web.served_run import CRASH, SLOW, MadeRun, serving
from tests.unit.view.web.test_access import TOKEN

from keepstep.core.incident import Culprit
from keepstep.view.run_snapshot import NodeView
from keepstep.view.web import app
from keepstep.view.web.access import Access

HOSTILE = "<script>alert(1)</script>\x1b[31m\nnode \u202e </textarea>"


def test_each_answer_has_safe_headers_and_no_cors() -> None:
    with serving(access=Access(TOKEN)) as viewer:
        for path, method in (
            ("/", "GET"),
            ("/static/page.js", "GET"),
            ("/api", "GET"),
            ("/none", "GET"),
            ("/api", "POST"),
            ("/login", "POST"),
        ):
            _, headers, _ = viewer.ask(path, method, Origin="http://evil.example")
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["cache-control"] == "no-store"
            assert not [name for name in headers if name.startswith("access-control")]
            assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_the_server_only_shows(method: str) -> None:
    with serving() as viewer:
        for path in ("/api", "/", "/api/incidents/1", "/metrics"):
            status, headers, _ = viewer.ask(path, method)
            assert status in (400, 405)
            assert status == 400 or headers["allow"] == "GET, HEAD"


def test_head_has_no_body() -> None:
    with serving() as viewer:
        assert viewer.ask("/api", "HEAD")[::2] == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/uplot.LICENSE.txt",
        "/static/",
    ],
)
def test_no_other_file_is_to_be_had(path: str) -> None:
    with serving() as viewer:
        assert viewer.ask(path)[0] == 404


def test_names_that_are_asked_for_are_not_kept() -> None:
    with serving() as viewer:
        for number in range(20):
            assert viewer.ask(f"/static/{number}{'x' * 8000}")[0] == 404
    assert app._files.cache_info().currsize == 1
    assert all(len(name) < 30 for name in app._files())


def test_foreign_text_is_json_text_and_never_html() -> None:
    named = replace(
        SLOW, culprits=(Culprit(rank=5, node=HOSTILE, cause=HOSTILE, confidence="high"),), summary=HOSTILE
    )
    run = MadeRun(
        name=HOSTILE,
        incidents=(named,),
        nodes=(NodeView(0, HOSTILE, notices=(HOSTILE,)),),
        troubles=(HOSTILE,),
        backup_trouble=HOSTILE,
    )
    with serving(run) as viewer:
        for path in ("/api", "/api/incidents", "/api/incidents/2"):
            _, headers, body = viewer.ask(path)
            assert headers["content-type"] == "application/json"
            assert b"\x1b" not in body
            assert "<script>" in json.dumps(json.loads(body))  # unchanged: who shows it makes text of it
        frame = viewer.raw()
        frame.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while b"\n\n" not in received.partition(b"\r\n\r\n")[2]:
            received += frame.recv(65536)
        frame.close()
        event = received.partition(b"\r\n\r\n")[2]
        assert (
            len(re.findall(rb"^data: ", event, re.MULTILINE)) == 1
        )  # a newline in a name begins no line of its own


def test_no_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    secret = TOKEN.decode()
    with caplog.at_level(logging.DEBUG), serving(access=Access(TOKEN)) as viewer:
        viewer.ask(f"/api?token={secret}")
        viewer.ask("/login", "POST", TOKEN)
        viewer.ask("/api", Authorization=f"Bearer {secret}")
        viewer.ask(f"/{secret}")
    assert secret not in caplog.text


def test_ten_thousand_incidents_fit() -> None:
    many = tuple(
        replace(CRASH, number=number, status="open" if number % 100 == 0 else "relieved")
        for number in range(1, 10_001)
    )
    with serving(MadeRun(incidents=many)) as viewer:
        _, _, body = viewer.ask("/api")
        content = json.loads(body)
        assert content["job"]["incidents"] == 10_000
        assert content["incidents"][-1]["number"] == 10_000
        assert len(content["incidents"]) <= 120
        assert len(body) < 300_000
        older = json.loads(viewer.ask("/api/incidents?before=51&most=1000")[2])
        assert [one["number"] for one in older["incidents"]] == list(range(1, 51))
        assert len(json.loads(viewer.ask("/api/incidents?most=99999")[2])["incidents"]) == 200
        assert json.loads(viewer.ask("/api/incidents/1")[2])["number"] == 1
        assert viewer.ask("/api/incidents/10001")[0] == 404
        assert json.loads(viewer.ask("/api/incidents?most=0")[2])["incidents"] == []


def test_a_number_without_end_is_no_incident_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as viewer:
        for about in ("incidents", "pipeline"):
            for number in ("9" * 5000, "-1", "x"):
                assert viewer.ask(f"/api/{about}/{number}")[0] == 404
    assert caplog.text == ""


def test_few_wait_for_a_picture() -> None:
    async def ask() -> list[object]:
        turns = app._Turns()

        async def draw() -> None:
            async with turns:
                await asyncio.sleep(0.01)

        return await asyncio.gather(*(draw() for _ in range(40)), return_exceptions=True)

    refused = [one for one in asyncio.run(ask()) if one is not None]
    assert len(refused) == 40 - 1 - app._MOST_WAITING
    assert all(isinstance(one, HTTPException) and one.status_code == 503 for one in refused)
