"""Secrets are blanked, other text stays."""

from __future__ import annotations

import pytest

from keepstep.detect.secrets import blanked


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("get https://user:hunter22@host/x", "hunter22"),
        ("get https://b.s3.amazonaws.com/k?X-Amz-Signature=abcdef0123&x=1", "abcdef0123"),
        ("url?sig=abcd%2Fefgh", "abcd%2Fefgh"),
        ("token hf_abcdefghijklmnopqrstuv", "hf_abcdefghijklmnopqrstuv"),
        ("key AKIAABCDEFGHIJKLMNOP used", "AKIAABCDEFGHIJKLMNOP"),
        ("Authorization: Bearer abcdefghijklmnop", "abcdefghijklmnop"),
        ("WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
        ("aws_secret_access_key = abcd/efgh+ijkl", "abcd/efgh+ijkl"),
        ("password: 'hunter22'", "hunter22"),
        ("HF_TOKEN=abcdefgh", "abcdefgh"),
        ("ghp_abcdefghijklmnopqrstuvwxyz", "ghp_abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_a_secret_is_blanked(text: str, secret: str) -> None:
    assert secret not in blanked(text)
    assert "***" in blanked(text)


@pytest.mark.parametrize(
    "text", ["KeyError: 'input_ids'", "https://host:443/path", "token ids: 17", "step 3 of 10"]
)
def test_other_text_stays(text: str) -> None:
    assert blanked(text) == text
