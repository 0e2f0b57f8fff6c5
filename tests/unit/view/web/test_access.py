"""Who may look: the address, the token and its file, the cookie, the names of the server."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import time
from pathlib import Path

import pytest
from tests.certificates import certificates
from tests.unit.view.web.served_run import serving

from keepstep.core.errors import UsageError
from keepstep.view.web.access import Access, names_of, read_token
from keepstep.view.web.serving import Address, check_address, tls_context

TOKEN = b"4f1d9c0aa77e3b5c2d6e8f90123456789abcdef0"


def token_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_others_reach_it_only_with_a_token_and_tls() -> None:
    check_address(Address.read("127.0.0.1:8642"), has_token=False, has_tls=False)
    check_address(Address.read("[::1]:0"), has_token=False, has_tls=False)
    for host in ("0.0.0.0:8642", "[::]:1", "gpu-1:80", "10.1.2.3"):
        for has_token, has_tls in ((False, False), (True, False), (False, True)):
            with pytest.raises(UsageError, match="--token-file and --tls-cert"):
                check_address(Address.read(host), has_token=has_token, has_tls=has_tls)
        check_address(Address.read(host), has_token=True, has_tls=True)


@pytest.mark.parametrize("text", ["127.0.0.1:x", "a b:1", "host:70000", "user@host:1", "http://host:1"])
def test_an_address_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write it like"):
        Address.read(text)


def test_a_token_is_read_from_a_file_of_mine_alone(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path, TOKEN + b"\n")) == TOKEN
    for mode in (0o640, 0o604, 0o660):
        with pytest.raises(UsageError, match="others may read it"):
            read_token(token_file(tmp_path, TOKEN, mode))


@pytest.mark.parametrize(
    "weak", [b"", b"secret", b"f" * 64, b"0123456789abcdef", b"a b\nc", b"\xff" * 40, b"x" * 9999]
)
def test_a_weak_token_is_refused_and_not_repeated(tmp_path: Path, weak: bytes) -> None:
    with pytest.raises(UsageError, match="openssl rand -hex 32") as refused:
        read_token(token_file(tmp_path, weak))
    assert not weak.strip() or weak.decode("latin-1") not in str(refused.value)


def test_a_token_file_that_is_none_is_refused(tmp_path: Path) -> None:
    target = token_file(tmp_path, TOKEN)
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "missing", "."):
        with pytest.raises(UsageError, match="--token-file"):
            read_token(tmp_path / name)


def test_nothing_of_the_run_is_shown_without_the_token() -> None:
    access = Access(TOKEN)
    with serving(access=access) as viewer:
        for path in (
            "/api",
            "/api/incidents",
            "/api/incidents/1",
            "/api/pipeline/1",
            "/api/tile",
            "/api/cell",
            "/api/events",
            "/metrics",
        ):
            status, headers, body = viewer.ask(path)
            assert (status, headers["www-authenticate"][:6]) == (401, "Bearer")
            assert b"gpu" not in body
            assert viewer.ask(path, Authorization="Bearer wrong")[0] == 401
            assert viewer.ask(path, Cookie="keepstep=wrong")[0] == 401
        # The page itself holds nothing of the run: it has to be there for the token in its address's fragment.
        status, _, page = viewer.ask("/")
        assert status == 200
        assert b"gpu-" not in page
        assert viewer.ask("/healthz")[2] == b"ok\n"
        assert viewer.ask("/api", Authorization="Bearer " + TOKEN.decode())[0] == 200


def test_the_token_is_changed_for_a_cookie_that_no_script_reads() -> None:
    with serving(access=Access(TOKEN, cookie_name="keepstep-1")) as viewer:
        status, headers, _ = viewer.ask("/login", "POST", TOKEN)
        cookie = headers["set-cookie"]
        assert status == 200
        assert cookie.startswith("keepstep-1=")
        assert {part.strip().lower() for part in cookie.split(";")} >= {
            "httponly",
            "samesite=strict",
            "path=/",
        }
        assert TOKEN.decode() not in cookie
        assert viewer.ask("/api", Cookie=cookie.partition(";")[0])[0] == 200
        assert viewer.ask("/api", Cookie=f"other=1; {cookie.partition(';')[0]}")[0] == 200


def test_a_wrong_long_or_foreign_login_gets_no_cookie() -> None:
    with serving(access=Access(TOKEN)) as viewer:
        for body, headers, expected in (
            (b"wrong", {}, 403),
            (TOKEN + b"x" * 5000, {}, 403),
            (TOKEN, {"Origin": "http://evil.example"}, 403),
            (TOKEN, {"Sec_Fetch_Site": "cross-site"}, 403),
        ):
            status, answered, _ = viewer.ask("/login", "POST", body, **headers)
            assert (status, "set-cookie" in answered) == (expected, False)
        own = f"http://127.0.0.1:{viewer.port}"
        assert viewer.ask("/login", "POST", TOKEN, Origin=own)[0] == 200
        assert viewer.ask("/login", "GET")[0] == 405


def test_with_tls_the_cookie_is_secure(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    context = tls_context(Path(paths.cert), Path(paths.key))
    with serving(access=Access(TOKEN), tls=context) as viewer:
        trusting = ssl.create_default_context(cafile=paths.ca)
        line = http.client.HTTPSConnection("127.0.0.1", viewer.port, timeout=20, context=trusting)
        line.request("POST", "/login", TOKEN)
        answer = line.getresponse()
        assert answer.status == 200
        assert "; secure" in answer.getheader("set-cookie", "").lower()
        line.close()
        # Who does not speak TLS gets nothing.
        with viewer.raw() as plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(4096).startswith(b"HTTP")


def test_files_that_are_no_certificate_and_key_are_refused(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    for certificate, key in (
        (paths.key, paths.cert),
        (paths.cert, paths.ca),
        (paths.cert, str(tmp_path / "none")),
    ):
        with pytest.raises(UsageError, match="both are PEM files"):
            tls_context(Path(certificate), Path(key))


def test_the_cookie_of_another_token_is_no_use() -> None:
    assert Access(TOKEN).cookie != Access(TOKEN[::-1]).cookie
    assert not Access(TOKEN).lets_in({"cookie": f"keepstep={Access(TOKEN[::-1]).cookie}"})
    assert not Access(TOKEN).lets_in({"cookie": "keepstep=\u00ff; =;;"})
    assert not Access(TOKEN).lets_in(
        {"cookie": f"keepstep{Access(TOKEN).cookie}; other={Access(TOKEN).cookie}"}
    )
    assert not Access(TOKEN).lets_in({"authorization": f"Basic {TOKEN.decode()}"})


def test_a_hostile_cookie_is_read_at_once() -> None:
    began_s = time.thread_time()
    assert not Access(TOKEN).lets_in({"cookie": 'keepstep="' + "\\" * 16_000 + '"'})
    assert Access(TOKEN).lets_in({"cookie": f'a="\\\\"; keepstep={Access(TOKEN).cookie}'})
    assert time.thread_time() - began_s < 1.0  # by `http.cookies` it takes 13 s


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8642", "127.0.0.1.nip.io", "", "10.0.0.1", "localhost.evil"]
)
def test_a_page_that_was_rebound_to_this_address_reads_nothing(name: str) -> None:
    with serving() as viewer:
        status, _, body = viewer.ask("/api", Host=name)
        assert status == 421
        assert b"gpu" not in body


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:9999", "127.0.0.1:1", "[::1]:8642", "localhost."])
def test_the_server_is_called_by_its_names_through_tunnels_too(name: str) -> None:
    with serving() as viewer:
        assert viewer.ask("/healthz", Host=name)[0] == 200


def test_a_server_for_others_is_called_by_its_names_and_addresses() -> None:
    access = Access(TOKEN, names_of("gpu-1", ["Watch.Example."]), only_loopback=False)
    for name in ("gpu-1:8642", "watch.example", "10.0.0.7:8642", "[fd00::1]"):
        assert access.is_called(name)
    assert not access.is_called("evil.example")
