"""Mail through real SMTP servers."""

from __future__ import annotations

import email
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.message import EmailMessage
from email.policy import default
from pathlib import Path

import pytest
from tests.certificates import certificates
from tests.unit.view.notify.told_runs import HOSTILE, Look, over, seen, slow

from keepstep.view.notify.delivery import NotDeliveredError
from keepstep.view.notify.mailing import MailServer, mail_of, send
from keepstep.view.notify.notice import Notice

aiosmtpd = pytest.importorskip("aiosmtpd.controller", reason="aiosmtpd, a mail server, is not installed")
FROM, TO = "keepstep@example.com", ("a@example.com", "b@example.com")


class Mailbox:
    """Takes mail, or refuses it."""

    def __init__(self, answer: str = "250 taken") -> None:
        self.answer = answer
        self.mails: list[tuple[list[str], EmailMessage]] = []

    async def handle_DATA(self, server: object, session: object, envelope: object) -> str:
        content, recipients = envelope.content, envelope.rcpt_tos  # type: ignore[attr-defined]
        self.mails.append((recipients, email.message_from_bytes(content, policy=default)))  # type: ignore[arg-type]
        return self.answer


class Server(aiosmtpd.Controller):
    """Listens at any port that is free."""

    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@contextmanager
def smtp(mailbox: Mailbox, **more: object) -> Iterator[int]:
    server = Server(mailbox, hostname="127.0.0.1", port=0, **more)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


@pytest.fixture
def notice() -> Notice:
    look = Look()
    look.at(seen())
    (found,) = look.at(seen(slow(1, 3)))
    return found


def hand_in(port: int, notice: Notice, timeout_s: float = 5.0, **more: object) -> None:
    server = replace(MailServer("127.0.0.1", port, "none"), **more)
    trusted = more.pop("trusted", None)
    send(server, mail_of(notice, FROM, TO), FROM, TO, timeout_s, trusted)  # type: ignore[arg-type]


def failure(port: int, notice: Notice, timeout_s: float = 5.0, **more: object) -> NotDeliveredError:
    with pytest.raises(NotDeliveredError) as raised:
        hand_in(port, notice, timeout_s, **more)
    return raised.value


def test_what_arrives(notice: Notice) -> None:
    mailbox = Mailbox()
    with smtp(mailbox) as port:
        hand_in(port, notice)
    ((recipients, mail),) = mailbox.mails
    assert recipients == list(TO)
    assert mail["Subject"] == f"[keepstep warning] {notice.title}"
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail.get_content().splitlines() == [notice.title, *notice.lines]


def test_mails_of_one_incident_are_one_thread() -> None:
    look = Look()
    look.at(seen())
    first, other = look.at(seen(slow(1, 3), slow(2, 1)))
    (last, _) = look.at(seen(over(slow(1, 3)), over(slow(2, 1))))
    mails = [mail_of(one, FROM, TO) for one in (first, last, other)]
    assert mails[0]["References"] == mails[1]["References"] != mails[2]["References"]
    assert len({mail["Message-ID"] for mail in mails}) == 3


def test_no_word_of_the_job_becomes_a_header(notice: Notice) -> None:
    mailbox = Mailbox()
    with smtp(mailbox) as port:
        hand_in(port, replace(notice, title=HOSTILE, lines=(".", "ü" * 2000)))
    ((recipients, mail),) = mailbox.mails
    assert recipients == list(TO)
    assert mail["Bcc"] is None
    assert "Bcc: all@example.com" in mail["Subject"]
    *_, dot, long = mail.get_content().replace("\r\n", "\n").rstrip("\n").split("\n")
    assert (dot, long) == (".", "ü" * 2000)


def test_starttls_or_nothing(tmp_path: Path, notice: Notice) -> None:
    paths = certificates(tmp_path)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(paths.cert, paths.key)
    mailbox = Mailbox()
    with smtp(mailbox, tls_context=serving) as port:
        assert "certificate is not trusted" in str(failure(port, notice, security="starttls"))
        trusted = ssl.create_default_context(cafile=paths.ca)
        server = MailServer("127.0.0.1", port, "starttls")
        send(server, mail_of(notice, FROM, TO), FROM, TO, 5.0, trusted)
    assert len(mailbox.mails) == 1
    with smtp(mailbox) as port:
        error = failure(port, notice, security="starttls")
        assert "STARTTLS" in str(error)
        assert error.is_final
    assert len(mailbox.mails) == 1, "nothing was sent in the clear"


def test_what_the_server_refuses(notice: Notice) -> None:
    for answer, is_final in (("554 no \x1b[31mspam", True), ("451 later", False)):
        with smtp(Mailbox(answer)) as port:
            error = failure(port, notice)
            assert (error.is_final, str(error).isprintable()) == (is_final, True)
            assert str(error).startswith(f"it answers {answer[:3]}: ")


def test_a_server_that_hangs_is_left() -> None:
    look = Look()
    look.at(seen())
    (notice,) = look.at(seen(slow(1, 3)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []
        thread = threading.Thread(target=lambda: kept.append(server.accept()[0]))
        thread.start()
        error = failure(server.getsockname()[1], notice, 0.3)
        thread.join()
        for sock in kept:
            sock.close()
    assert (str(error), error.is_final) == ("no answer within 0.3 s", False)


def test_a_password_is_not_in_an_error(notice: Notice) -> None:
    server = MailServer("127.0.0.1", 1, "starttls", "me", "pa55word")
    assert "pa55word" not in repr(server)
