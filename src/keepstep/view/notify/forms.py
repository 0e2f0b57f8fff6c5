"""A notice as the JSON that a webhook gets, and as a message of Slack's incoming webhooks."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec

from keepstep.view.notify.mailing import text_lines
from keepstep.view.notify.notice import Notice

NOTICE_SCHEMA_ID = "https://keepstep.dev/schema/notice.json"
SIGNATURE = "X-Keepstep-Signature"

# Slack cuts or refuses longer texts.
_MOST_TITLE, _MOST_BLOCK, _MOST_LINES = 3000, 3000, 40
_ICONS = {"info": ":white_circle:", "warning": ":large_orange_circle:", "critical": ":red_circle:"}


def webhook_body(notice: Notice) -> bytes:
    """The notice as one JSON object."""
    return msgspec.json.encode(notice)


def notice_schema() -> dict[str, Any]:
    """The JSON schema of what a webhook gets, made from the dataclasses: ``docs/reference/notice-schema.json``."""
    schema = msgspec.json.schema(Notice)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": NOTICE_SCHEMA_ID, **schema}


def signature(key: str, body: bytes, unix_s: int) -> str:
    """The value of the header ``X-Keepstep-Signature``: ``t=TIME,v1=HMAC``, of ``TIME.BODY`` with SHA-256."""
    return f"t={unix_s},v1={hmac.digest(key.encode(), b'%d.%b' % (unix_s, body), hashlib.sha256).hex()}"


def slack_body(notice: Notice) -> bytes:
    """The notice as a message for a Slack incoming webhook, and for others that take its ``text``.

    All of a run's own words are in plain text, in which nothing mentions anybody, links or formats.
    """
    title, *lines = text_lines(notice)
    icon = _ICONS[notice.severity]
    label = {"type": "mrkdwn", "text": f"{icon} {notice.severity}"}
    blocks: list[dict[str, Any]] = [
        {"type": "context", "elements": [label]},
        {"type": "section", "text": _plain_text(title)},
    ]
    shown = "\n".join(lines[:_MOST_LINES])
    if shown:
        blocks.append({"type": "section", "text": _plain_text(shown)})
    return msgspec.json.encode(
        {
            "text": _escaped(title)[:_MOST_TITLE],
            "mrkdwn": False,
            "unfurl_links": False,
            "unfurl_media": False,
            "blocks": blocks,
        }
    )


def _plain_text(text: str, longest: int = _MOST_BLOCK) -> dict[str, Any]:
    escaped = _escaped(text)
    while len(escaped) > longest:  # cut before it is escaped, so that no entity is cut in two
        text = text[: len(text) - max((len(escaped) - longest) // 5, 1)]
        escaped = _escaped(f"{text}…")
    return {"type": "plain_text", "text": escaped, "emoji": False}


def _escaped(text: str) -> str:
    """The three characters that Slack gives a meaning, as it asks for; ``<!channel>`` is then only words."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
