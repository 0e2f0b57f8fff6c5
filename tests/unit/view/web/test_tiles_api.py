"""Cells of the heat map over HTTP, and the page as one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.view.web.served_run import SLOW, MadeRun, serving
from tests.unit.view.web.test_gate import HOSTILE

from keepstep.core.incident import Culprit
from keepstep.view.web.app import STATIC
from keepstep.view.web.one_file import page_in_one_file


def read_tile(body: bytes) -> tuple[tuple[int, ...], bytes]:
    magic, *head = struct.unpack("<4s7I", body[:32])
    assert magic == b"KST1"
    assert len(body) == 32 + head[0] * head[1]
    return tuple(head[:6]), body[32:]


def test_a_tile_shows_the_slow_rank_in_its_row_of_the_layout() -> None:
    with serving(MadeRun()) as viewer:
        _, headers, body = viewer.ask("/api/tile")
        assert headers["content-type"] == "application/octet-stream"
        (rows, columns, *window), cells = read_tile(body)
        assert (rows, columns, window) == (8, 40, [0, 8, 0, 40])
        slow = [cells[row * columns + 39] for row in range(rows)]
        # tp2-pp2-dp2: rank 5 is tp 1, pp 0, dp 1, and so in the fourth row.
        assert slow.index(max(slow)) == 3
        assert max(slow) == 160  # twice its usual
        cell = json.loads(viewer.ask("/api/cell?row0=0&row1=8&column0=39")[2])
        assert (cell["rank"], cell["node"], round(cell["ratio"], 1)) == (5, "gpu-2", 2.0)


def test_only_the_new_columns_are_asked_for() -> None:
    with serving(MadeRun(steps=100)) as viewer:
        whole = read_tile(viewer.ask("/api/tile?columns=512")[2])
        part = read_tile(viewer.ask("/api/tile?column0=98&column1=100&columns=512")[2])
        assert part[0] == (8, 2, 0, 8, 98, 100)
        assert part[1] == b"".join(whole[1][row * 100 + 98 : row * 100 + 100] for row in range(8))


@pytest.mark.parametrize(
    "query",
    [
        "row0=99&row1=1",
        "row0=-1",
        "rows=0&columns=0",
        "rows=99999999999999",
        "column0=1e9",
        "mode=%00",
        "row0=5&row1=5",
    ],
)
def test_a_strange_window_gets_a_bounded_tile(query: str) -> None:
    with serving(MadeRun()) as viewer:
        status, _, body = viewer.ask(f"/api/tile?{query}")
        assert status == 200
        assert len(body) <= 32 + 512 * 512
        assert viewer.ask(f"/api/cell?{query}")[0] == 200


def test_a_run_without_steps_has_an_empty_tile() -> None:
    with serving(MadeRun(steps=0, ranks=None, newest_step=-1, world_size=0, layout=None)) as viewer:
        assert read_tile(viewer.ask("/api/tile")[2])[0][1] == 0
        assert json.loads(viewer.ask("/api/cell")[2]) == {"rank": None}


def test_static_files_are_small_and_ask_nobody() -> None:
    sent = 0
    with serving() as viewer:
        page = viewer.ask("/", Accept_Encoding="gzip")[2]
        names = [path.name for path in STATIC.iterdir() if path.suffix in (".js", ".css")]
        sent = len(page) + sum(
            len(viewer.ask(f"/static/{name}", Accept_Encoding="gzip")[2]) for name in names
        )
    assert sent < 100_000
    for path in STATIC.iterdir():
        if path.name.startswith("uplot"):
            continue
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), path
        assert not re.search(r"https?://(?!www\.w3\.org)", text), path
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script>|<style|style=|\son\w+=", html)


def test_one_file_holds_all_and_trusts_only_what_is_in_it(tmp_path: Path) -> None:
    named = replace(SLOW, culprits=(Culprit(rank=5, node=HOSTILE, confidence="high"),))
    page = page_in_one_file(MadeRun(name=HOSTILE, incidents=(named,)), "runs/made", tmp_path)
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page.replace("https://github.com/leeoniya/uPlot", "")
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    for text in (*scripts, *styles):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy[1]
    assert len(scripts) == len(styles) == 1
    assert "<script>alert" not in page
    data = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    embedded = json.loads(data[1])
    assert embedded["state"]["job"]["name"] == HOSTILE
    assert set(embedded["heat"]["tiles"]) == {"own", "peers"}
