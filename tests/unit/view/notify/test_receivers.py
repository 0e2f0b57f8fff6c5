"""The file that names who is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.errors import UsageError
from keepstep.view.notify.private import read_private, redacted
from keepstep.view.notify.receivers import MailTo, PostTo, Track, read_receivers

SECRET = "s3cr3t-of-the-path"
URL = f"https://hooks.example.com/services/{SECRET}"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def refused(folder: Path, text: str) -> str:
    """What is said of a file; it holds no secret."""
    file = written(folder / "notify.toml", text)
    with pytest.raises(UsageError) as raised:
        read_receivers(file, "r", {"HOOK": URL, "BAD": f"ftp://{SECRET}"})
    assert SECRET not in str(raised.value)
    assert str(raised.value).isprintable()
    return str(raised.value)


def test_all_kinds_of_receivers(tmp_path: Path) -> None:
    written(tmp_path / "pager.url", f"{URL}\n")
    written(tmp_path / "key", "signing key")
    written(tmp_path / "password", "pa55word")
    file = written(
        tmp_path / "notify.toml",
        """
        least_severity = "warning"
        page_url = "https://page.example.com/"
        [webhook.pager]
        url_file = "pager.url"
        key_file = "key"
        least_severity = "critical"
        timeout_s = 3
        [slack.team]
        url_env = "HOOK"
        [mail.oncall]
        server = "smtp.example.com"
        user = "keepstep"
        password_file = "password"
        from = "keepstep@example.com"
        to = ["a@example.com", "b@example.com"]
        [otel]
        url = "http://127.0.0.1:4318"
        """,
        0o644,
    )
    try:
        pager, team, oncall, otel = read_receivers(file, "r", {"HOOK": URL})
    except UsageError as error:
        pytest.skip(str(error))
    assert isinstance(pager, PostTo)
    assert isinstance(team, PostTo)
    assert isinstance(oncall, MailTo)
    assert isinstance(otel, Track)
    assert (pager.name, pager.form, pager.key, pager.timeout_s) == (
        "webhook.pager",
        "webhook",
        "signing key",
        3.0,
    )
    assert [one.rules.least_severity for one in (pager, team, oncall)] == ["critical", "warning", "warning"]
    assert team.rules.page_url == "https://page.example.com/"
    assert team.address.target == f"/services/{SECRET}"
    assert (oncall.server.port, oncall.server.password) == (587, "pa55word")
    assert SECRET not in f"{pager}{team}"
    assert "pa55word" not in f"{oncall}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names nobody to tell"),
        ("[webhook.a]\n", "[webhook.a]: needs url_file, a file of mode 0600, or url_env"),
        ("[webhook.a]\nurl_file = 'none.url'\n", "none.url: No such file or directory; write it with"),
        ("[webhook.a]\nurl_env = 'NONE'\n", "the environment variable NONE is not set"),
        ("[webhook.a]\nurl_env = 'BAD'\n", "$BAD: must hold a URL that begins with https://"),
        ("[webhook.a]\nurl_env = 'HOOK'\nurl_file = 'x'\n", "give url_file or url_env, not both"),
        ("[webhook.a]\nurl = 'https://x'\n", "unknown field `url`"),
        ("[webhook.a]\nurl_env = 'HOOK'\nleast_severity = 'loud'\n", "Invalid enum value 'loud'"),
        ("[webhook.a]\nurl_env = 'HOOK'\ntimeout_s = 0\n", "timeout_s is between 0.1 and 300"),
        ("[webhook.a]\nurl_env = 'HOOK'\nat_once = 0\n", "at_once is at least 1"),
        ("[webhook.a]\nurl_env = 'HOOK'\nsilent_after_s = 0\n", "silent_after_s 10"),
        ("[webhook.a]\nurl_env = 'HOOK'\nper_hour = -1\n", "nothing is negative"),
        (
            "page_url = 'https://x/#token'\n[webhook.a]\nurl_env = 'HOOK'\n",
            "page_url must not hold the token",
        ),
        ("[webhook.a]\nurl_env = 'HOOK'\nca_file = 'none.pem'\n", "ca_file none.pem: No such file"),
        ("[mail.a]\nserver = 'x'\nfrom = 'a@b'\nto = ['a@b\\nBcc: c@d']\n", "is no mail address"),
        ('[mail.a]\nserver = "x"\nfrom = "a@b"\nto = ["a@b\\nBcc: c@d"]\n', "is no mail address"),
        ("[mail.a]\nserver = 'x'\nfrom = 'a@b'\nto = []\n", "names nobody"),
        ("[mail.a]\nserver = 'x:0'\nfrom = 'a@b'\nto = ['a@b']\n", "is no HOST:PORT"),
        ("[mail.a]\nserver = 'x'\nfrom = 'a@b'\nto = ['a@b']\nuser = 'me'\n", "needs password_file"),
        (
            "[mail.a]\nserver = 'x'\nfrom = 'a@b'\nto = ['a@b']\nsecurity = 'none'\npassword_env = 'HOOK'\n",
            "a password is not sent with",
        ),
        ("[otel]\nurl = 'grpc://x'\n", "otel.url: must hold a URL"),
        ("[webhook]\na = 1\n", "Expected `object`, got `int`"),
        ("= nonsense", "notify.toml"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.url", URL, 0o644)
    assert "can be read or written by others" in refused(tmp_path, "[webhook.a]\nurl_file = 'a.url'\n")


@pytest.mark.parametrize("content", ["", "two\nlines", "x" * 9000, "\x1b[31m"])
def test_a_file_that_holds_no_secret(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="must hold one line"):
        read_private(written(tmp_path / "a", content))


def test_secrets_are_blanked() -> None:
    assert redacted("a key of keys", ("key", "keys", "")) == "a *** of ***"
