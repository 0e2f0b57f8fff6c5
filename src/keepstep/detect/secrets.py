"""Blanks secrets in what is shown or sent: passwords and tokens in URLs, keys by their form, values by their names."""

from __future__ import annotations

import re

BLANK = "***"
_FORMS = (
    # user:password@host, and signed URLs
    (re.compile(r"(?<=://)[^\s/@:]{0,200}:[^\s/@]{1,400}(?=@)"), BLANK),
    (
        re.compile(
            r"(?i)([?&](?:x-amz-(?:signature|credential|security-token)|signature|sig|token|access_token|api_?key|key|"
            r"password|secret)=)[^&\s\"']{3,}"
        ),
        rf"\1{BLANK}",
    ),
    # forms of known issuers
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|"
            r"sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[\w-]{10,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|AIza[\w-]{30,}|"
            r"ya29\.[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
        ),
        BLANK,
    ),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{12,}"), rf"\1{BLANK}"),
    # values by their names
    (
        re.compile(
            r"(?i)(\b[\w-]{0,40}(?:password|passwd|secret|secret[_-]?(?:access[_-]?)?key|api[_-]?key|access[_-]?key|"
            r"auth[_-]?token|access[_-]?token|private[_-]?key)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{4,}"
        ),
        rf"\1{BLANK}",
    ),
    (re.compile(r"(\b[A-Z0-9_]{0,40}(?:TOKEN|API_KEY|SECRET)=)[^\s\"']{4,}"), rf"\1{BLANK}"),
    (re.compile(r"\b(?:[0-9a-f]{40})\b(?=[^\n]{0,40}(?i:wandb))|(?<=wandb\.login\(key=.)[0-9a-f]{40}"), BLANK),
)  # fmt: skip


def blanked(text: str) -> str:
    """The text with secrets replaced by ``***``."""
    for form, with_ in _FORMS:
        text = form.sub(with_, text)
    return text
