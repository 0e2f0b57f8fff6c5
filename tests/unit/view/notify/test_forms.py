"""The forms in which receivers get a notice."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.unit.view.notify.told_runs import HOSTILE, Look, acted, seen, slow

from keepstep.view.notify.forms import notice_schema, signature, slack_body, webhook_body
from keepstep.view.notify.notice import Notice

ROOT = Path(__file__).parents[4]


@pytest.fixture
def notice() -> Notice:
    look = Look()
    look.at(seen())
    (found,) = look.at(seen(acted(slow(1, 3))))
    return found


def test_a_webhook_gets_the_whole_notice(notice: Notice) -> None:
    body = json.loads(webhook_body(notice))
    assert body["schema"] == 1
    assert (body["what"], body["severity"], body["run"]) == ("opened", "warning", "train-7b")
    assert body["incident"]["culprits"][0] == {
        "name": "rank 3",
        "rank": 3,
        "node": "gpu-1",
        "link": None,
        "cause": "compute",
        "stage": "backward",
        "slowdown": 2.0,
        "confidence": "high",
    }
    assert msgspec.json.decode(webhook_body(notice), type=Notice) == notice


def test_the_schema_in_the_docs_is_that_of_the_code() -> None:
    written = json.loads((ROOT / "docs/reference/notice-schema.json").read_text())
    assert written == json.loads(msgspec.json.encode(notice_schema())), "make it anew: see the page Notices"


def test_a_receiver_can_check_the_signature() -> None:
    header = signature("key", b'{"a":1}', 1_700_000_000)
    expected = hmac.new(b"key", b'1700000000.{"a":1}', hashlib.sha256).hexdigest()
    assert header == f"t=1700000000,v1={expected}"


def texts(node: object) -> list[str]:
    """All texts in a Slack message that others' words may be in."""
    if isinstance(node, dict):
        return [text for value in node.values() for text in texts(value)]
    if isinstance(node, list):
        return [text for value in node for text in texts(value)]
    return [node] if isinstance(node, str) else []


def test_slack_sees_no_markup_in_the_words_of_a_job(notice: Notice) -> None:
    message = json.loads(slack_body(replace(notice, title=HOSTILE, lines=(HOSTILE,))))
    assert not any("<" in text or ">" in text for text in texts(message))
    assert "&lt;!channel&gt;" in message["text"]
    assert message["mrkdwn"] is False
    sections = [block["text"] for block in message["blocks"] if block["type"] == "section"]
    assert [(one["type"], one["emoji"]) for one in sections] == [("plain_text", False)] * 2


def test_slack_takes_no_more_than_3000_characters(notice: Notice) -> None:
    message = json.loads(slack_body(replace(notice, lines=("<&>" * 5000,))))
    (_, text) = [block["text"]["text"] for block in message["blocks"] if block["type"] == "section"]
    assert len(text) <= 3000
    rest = text.replace("&lt;", "").replace("&gt;", "").replace("&amp;", "")
    assert rest == "…", "no entity is cut in two"
