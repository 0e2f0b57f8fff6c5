"""Posting to servers on good and bad days; nothing secret is told."""

from __future__ import annotations

import ssl
import time
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.certificates import certificates
from tests.unit.view.notify.receiving import refused_port, web

from keepstep.core.errors import UsageError
from keepstep.view.notify.delivery import NotDeliveredError
from keepstep.view.notify.posting import address_of, post

SECRET = "s3cr3t-of-the-path"


def failure(url: str, timeout_s: float = 5.0) -> NotDeliveredError:
    with pytest.raises(NotDeliveredError) as raised:
        post(address_of(url, "url"), b"{}", {}, timeout_s)
    assert SECRET not in str(raised.value)
    assert str(raised.value).isprintable()
    return raised.value


def test_what_arrives() -> None:
    with web("204") as server:
        post(address_of(f"{server.url}?a=%20b", "url"), b'{"a":1}', {"X-A": "b"}, 5.0)
    (request,) = server.requests
    assert request.target == f"/services/T000/B000/{SECRET}?a=%20b"
    assert request.body == b'{"a":1}'
    assert (request.headers["x-a"], request.headers["host"]) == ("b", f"127.0.0.1:{server.port}")


@pytest.mark.parametrize(
    ("answer", "is_final", "words"),
    [
        ("500\n\nbroken \x1b[31m " + SECRET, False, "it answers 500: broken  [31m ***"),
        ("503", False, "it answers 503"),
        ("429\nRetry-After: 7", False, "it answers 429"),
        ("404\n\nno_service", True, "it answers 404: no_service"),
        ("302\nLocation: http://127.0.0.1:1/elsewhere", True, "is not followed"),
        ("301\nLocation: file:///etc/passwd", True, "is not followed"),
        ("reset", False, "Connection reset by peer"),
        ("close", False, ""),
        ("junk", False, "BadStatusLine"),
    ],
)
def test_what_does_not_arrive(answer: str, is_final: bool, words: str) -> None:
    with web(answer) as server:
        error = failure(server.url)
        assert error.is_final is is_final
        assert words in str(error)
    assert server.connections == 1, "it was not followed, nor tried again here"


@pytest.mark.parametrize("how", ["hang", "drip"])
def test_an_answer_that_takes_for_ever_is_cut_off(how: str) -> None:
    with web(how) as server:
        assert str(failure(server.url, 0.3)) == "no answer within 0.3 s"


def test_nobody_listens() -> None:
    with refused_port() as port:
        error = failure(f"http://127.0.0.1:{port}/{SECRET}")
    assert (str(error), error.is_final) == ("Connection refused", False)


@pytest.mark.parametrize(
    ("header", "wait_s"), [("7", 7.0), ("100000", 300.0), ("-3", None), ("soon", None), ("9" * 30, None)]
)
def test_how_long_the_receiver_asks_to_wait(header: str, wait_s: float | None) -> None:
    with web(f"429\nRetry-After: {header}") as server:
        assert failure(server.url).wait_s == wait_s


def test_a_time_at_which_to_come_back() -> None:
    with web(f"503\nRetry-After: {formatdate(time.time() + 100, usegmt=True)}") as server:
        wait_s = failure(server.url).wait_s
    assert wait_s is not None
    assert 0 < wait_s <= 100


def test_tls_is_checked(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(paths.cert, paths.key)
    with web("200", tls=serving) as server:
        url = server.url.replace("http:", "https:")
        assert "certificate is not trusted" in str(failure(url))
        trusted = ssl.create_default_context(cafile=paths.ca)
        post(address_of(url, "url"), b"{}", {}, 5.0, trusted)
        assert len(server.requests) == 1


def test_over_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with web("200") as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        post(address_of("http://hooks.example.com:8080/x", "url"), b"{}", {}, 5.0)
    (request,) = proxy.requests
    assert request.target == "http://hooks.example.com:8080/x"
    assert request.headers["host"] == "hooks.example.com:8080"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/s3cr3t",
        "file:///s3cr3t",
        "s3cr3t",
        "https://",
        "https://me:s3cr3t@example.com/",
        "https://example.com/s3cr3t path",
        "https://example.com:99999/s3cr3t",
        "https://[::1/s3cr3t",
        "https://example.com/s3cr3t\r\nHost: evil",
        f"https://{'a' * 70}.com/s3cr3t",
    ],
)
def test_addresses_that_are_none_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        address_of(url, "hook.url")
    assert "s3cr3t" not in str(raised.value)
    assert str(raised.value).startswith("hook.url: ")


def test_an_address_shows_no_path() -> None:
    address = address_of("https://hooks.example.com/services/T0/s3cr3t?token=s3cr3t", "url")
    assert address.shown == "https://hooks.example.com"
    assert "s3cr3t" not in repr(address)
    assert address_of("http://[::1]:8080/a", "url").shown == "http://[::1]:8080"
