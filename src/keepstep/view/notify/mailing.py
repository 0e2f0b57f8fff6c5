"""Notices as mail: plain text, one thread an incident, over STARTTLS or TLS."""

from __future__ import annotations

import hashlib
import re
import smtplib
import ssl
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from typing import Literal

from keepstep.view.notify.delivery import Deadline, NotDeliveredError
from keepstep.view.notify.notice import Notice, plain
from keepstep.view.notify.private import redacted

Security = Literal["starttls", "tls", "none"]
MAILBOX = re.compile(r"[^\s@<>,;:\"()\[\]\\]{1,64}@[^\s@<>,;:\"()\[\]\\]{1,255}")


@dataclass(frozen=True, slots=True)
class MailServer:
    """Where mail is handed in. ``user`` is empty where no password is asked for."""

    host: str
    port: int
    security: Security = "starttls"
    user: str = ""
    password: str = field(default="", repr=False)


def mail_of(notice: Notice, sender: str, recipients: tuple[str, ...]) -> EmailMessage:
    """The notice as a mail. Mails about one incident are one thread."""
    mail = EmailMessage(policy=SMTP)
    mail["Subject"] = plain(f"[keepstep {notice.severity}] {notice.title}", 300)
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    mail["Date"] = format_datetime(datetime.fromtimestamp(notice.unix_s, timezone.utc))
    mail["Message-ID"] = f"<{_digest(notice.id)}@keepstep.invalid>"
    about = notice.id.rsplit("/", 2)[0]  # run, start and incident
    mail["References"] = f"<{_digest(about)}@keepstep.invalid>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content("\n".join(text_lines(notice)) + "\n", cte="quoted-printable")
    return mail


def text_lines(notice: Notice) -> list[str]:
    """The whole notice as lines of plain text."""
    lines = [notice.title, *notice.lines]
    if notice.undelivered:
        lines.append(f"note: {notice.undelivered} earlier notices could not be delivered")
    if notice.page_url:
        lines.append(f"page: {notice.page_url}")
    return lines


def send(
    server: MailServer,
    mail: EmailMessage,
    sender: str,
    recipients: tuple[str, ...],
    timeout_s: float,
    trusted: ssl.SSLContext | None = None,
) -> None:
    """Hand the mail in; returns once the server has taken it for at least one recipient.

    Raises:
        NotDeliveredError: anything else. Where the server offers no STARTTLS nothing is sent.
    """
    deadline, secrets = Deadline(), (server.password,)
    session = _Tls(trusted) if server.security == "tls" else smtplib.SMTP(timeout=timeout_s)
    session.timeout = timeout_s
    try:
        with deadline.within(timeout_s, lambda: session.sock):
            _hand_in(session, server, mail, sender, recipients, trusted)
    except smtplib.SMTPRecipientsRefused as error:
        codes = [code for code, _ in error.recipients.values()]
        raise NotDeliveredError(
            f"it refuses all recipients ({', '.join(map(str, sorted(set(codes))))})",
            is_final=min(codes) >= 500,
        ) from None
    except smtplib.SMTPNotSupportedError as error:
        raise NotDeliveredError(
            f"it cannot do what is needed: {plain(str(error), 200)}", is_final=True
        ) from None
    except smtplib.SMTPResponseException as error:
        told = (
            error.smtp_error.decode(errors="replace")
            if isinstance(error.smtp_error, bytes)
            else error.smtp_error
        )
        said = plain(redacted(told, secrets), 200)
        raise NotDeliveredError(
            f"it answers {error.smtp_code}: {said}", is_final=error.smtp_code >= 500
        ) from None
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise NotDeliveredError(deadline.words_of(error, timeout_s)) from None
    finally:
        session.close()


class _Tls(smtplib.SMTP_SSL):
    """SMTP over TLS that is not connected yet."""

    def __init__(self, trusted: ssl.SSLContext | None) -> None:
        super().__init__(context=trusted or ssl.create_default_context())


def _hand_in(
    session: smtplib.SMTP,
    server: MailServer,
    mail: EmailMessage,
    sender: str,
    recipients: tuple[str, ...],
    trusted: ssl.SSLContext | None,
) -> None:
    # `connect` of smtplib does not remember the name, which certificates are compared with.
    session._host = server.host  # pyright: ignore[reportAttributeAccessIssue]
    code, told = session.connect(server.host, server.port)
    if code != 220:
        raise smtplib.SMTPConnectError(code, told)
    if server.security == "starttls":
        session.starttls(context=trusted or ssl.create_default_context())
    if server.user:
        session.login(server.user, server.password)
    session.send_message(mail, sender, list(recipients))
    # It is taken: that the goodbye fails changes nothing.
    try:
        session.quit()
    except (OSError, smtplib.SMTPException):
        return


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
