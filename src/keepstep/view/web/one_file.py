"""The page of a run as one file: the same page with the data inside, which asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from pathlib import Path
from typing import Any

import msgspec

from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.run_source import RunSource
from keepstep.view.web.feed import content_of
from keepstep.view.web.heat import heat_of
from keepstep.view.web.pipeline_bars import pipeline_content

STATIC = Path(__file__).parent / "static"
_MOST_PIPELINES = 8  # newest incidents whose pipeline is in the file
_STYLES = ("uplot.css", "page.css")
_SCRIPT = re.compile(r'<script src="static/(\w+\.js)"></script>\n')


def page_in_one_file(source: RunSource, run: str, folder: Path | None) -> str:
    """The page of the run as it is now, as HTML."""
    snapshot = source.read_all()
    heat = heat_of(snapshot, source.samples, threading.Lock(), None)
    embedded = {
        "state": {"version": 0, **content_of(snapshot, heat, run)},
        "heat": heat.whole(),
        "pipelines": _pipelines(snapshot, folder),
    }
    return _assembled(embedded)


def _pipelines(snapshot: RunSnapshot, folder: Path | None) -> dict[str, Any]:
    newest = [one for one in snapshot.incidents if one.onset_step is not None][-_MOST_PIPELINES:]
    return {str(one.number): pipeline_content(folder, one, snapshot.layout) for one in newest}


def _assembled(embedded: dict[str, Any]) -> str:
    page = (STATIC / "index.html").read_text()
    names = _SCRIPT.findall(page)
    script = "\n".join((STATIC / name).read_text() for name in names)
    style = "\n".join((STATIC / name).read_text() for name in _STYLES)
    assert "</script" not in script.lower()
    assert "</style" not in style.lower()
    # In JSON `<` stands in strings only: written as an escape no text of the job can end the element.
    data = msgspec.json.encode(embedded).decode().replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    page = _SCRIPT.sub("", page)
    page = re.sub(r'<link rel="(icon|stylesheet)"[^>]*>\n', "", page)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n<style>{style}</style>\n</head>'
    )
    page = page.replace('<meta charset="utf-8">\n', "", 1).replace(
        "<head>\n", '<head>\n<meta charset="utf-8">\n', 1
    )
    page = page.replace("</head>", head, 1)
    end = f'<script type="application/json" id="embedded">{data}</script>\n<script>{script}</script>\n</body>'
    return page.replace("</body>", end, 1)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
