"""Who is told, as a TOML file says: webhooks, Slack, mail, trackers. Addresses and passwords are in files of their own.

least_severity = "warning"

[webhook.pager]
url_file = "pager.url"

[mail.team]
server = "smtp.example.com:587"
from = "keepstep@example.com"
to = ["team@example.com"]
"""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from keepstep.core.config import read_file
from keepstep.core.errors import UsageError
from keepstep.core.incident import Confidence
from keepstep.view.notify.mailing import MAILBOX, MailServer, Security
from keepstep.view.notify.notice import Severity
from keepstep.view.notify.posting import Address, address_of
from keepstep.view.notify.private import from_environment, read_private
from keepstep.view.notify.telling import Rules
from keepstep.view.notify.tracker import TrackerOptions

_PORTS: dict[Security, int] = {"starttls": 587, "tls": 465, "none": 25}
_NEEDS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}


class _Wishes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What may stand at the top of the file, and again for each receiver."""

    least_severity: Severity | None = None
    least_confidence: Confidence | None = None
    at_once: int | None = None
    per_hour: float | None = None
    flapping_times: int | None = None
    flapping_window_s: float | None = None
    silent_after_s: float | None = None
    page_url: str | None = None


class _Reached(_Wishes, kw_only=True, forbid_unknown_fields=True):
    timeout_s: float = 10.0
    ca_file: str = ""  # whose certificates are trusted, instead of the system's


class _Posted(_Reached, kw_only=True, forbid_unknown_fields=True):
    url_file: str = ""
    url_env: str = ""


class _Webhook(_Posted, kw_only=True, forbid_unknown_fields=True):
    key_file: str = ""
    key_env: str = ""


class _Mail(_Reached, kw_only=True, forbid_unknown_fields=True):
    server: str
    sender: str = msgspec.field(name="from")
    to: list[str]
    security: Security = "starttls"
    user: str = ""
    password_file: str = ""
    password_env: str = ""


class _Wandb(_Wishes, kw_only=True, forbid_unknown_fields=True):
    project: str = "keepstep"
    entity: str = ""
    run_id: str = ""
    mode: Literal["", "online", "offline"] = ""
    folder: str = ""


class _TensorBoard(_Wishes, kw_only=True, forbid_unknown_fields=True):
    folder: str


class _Mlflow(_Wishes, kw_only=True, forbid_unknown_fields=True):
    uri: str = ""
    run_id: str = ""
    experiment: str = "keepstep"


class _Otel(_Wishes, kw_only=True, forbid_unknown_fields=True):
    url: str
    headers_file: str = ""  # one line NAME=VALUE,NAME=VALUE


class _File(_Wishes, kw_only=True, forbid_unknown_fields=True):
    webhook: dict[str, _Webhook] = {}
    slack: dict[str, _Posted] = {}
    mail: dict[str, _Mail] = {}
    wandb: _Wandb | None = None
    tensorboard: _TensorBoard | None = None
    mlflow: _Mlflow | None = None
    otel: _Otel | None = None


@dataclass(frozen=True, slots=True)
class PostTo:
    """A webhook, or one of Slack's form."""

    name: str
    rules: Rules
    form: Literal["webhook", "slack"]
    address: Address
    key: str
    timeout_s: float
    trusted: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class MailTo:
    """Mailboxes behind one server."""

    name: str
    rules: Rules
    server: MailServer
    sender: str
    recipients: tuple[str, ...]
    timeout_s: float
    trusted: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class Track:
    """An experiment tracker, or a collector of OpenTelemetry."""

    name: str
    rules: Rules
    options: TrackerOptions


Wanted = PostTo | MailTo | Track


def read_receivers(path: Path, run: str, environ: Mapping[str, str]) -> list[Wanted]:
    """The receivers that the file names. ``run``: the run's name.

    Raises:
        UsageError: the file or one that it names cannot be used; a package is missing.
    """
    tables = read_file(path, "correct the file that --notify names")
    try:
        found = msgspec.convert(tables, _File)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}; docs/howto/see.md lists what may stand there") from None
    reader = _Reader(path, found, run, environ)
    wanted: list[Wanted] = [reader.webhook(name, one) for name, one in found.webhook.items()]
    wanted += [reader.slack(name, one) for name, one in found.slack.items()]
    wanted += [reader.mail(name, one) for name, one in found.mail.items()]
    wanted += reader.trackers()
    if not wanted:
        raise UsageError(
            f"{path}: names nobody to tell; add [webhook.NAME], [slack.NAME], [mail.NAME] or a tracker"
        )
    return wanted


class _Reader:
    def __init__(self, path: Path, file: _File, run: str, environ: Mapping[str, str]) -> None:
        self._path, self._file, self._run, self._environ = path, file, run, environ

    def webhook(self, name: str, one: _Webhook) -> PostTo:
        key = self._private(f"webhook.{name}", "key", one.key_file, one.key_env, needed=False)
        return self._posted("webhook", name, one, key)

    def slack(self, name: str, one: _Posted) -> PostTo:
        return self._posted("slack", name, one, "")

    def _posted(self, form: Literal["webhook", "slack"], name: str, one: _Posted, key: str) -> PostTo:
        where = f"{form}.{name}"
        url = self._private(where, "url", one.url_file, one.url_env)
        address = address_of(url, one.url_file or f"${one.url_env}")
        timeout_s = self._timeout_s(where, one)
        return PostTo(
            where, self._rules(where, one), form, address, key, timeout_s, self._trusted(where, one)
        )

    def mail(self, name: str, one: _Mail) -> MailTo:
        where = f"mail.{name}"
        host, _, port = one.server.rpartition(":") if ":" in one.server else (one.server, "", "")
        if not host or (port and not (port.isdecimal() and 0 < int(port) < 65_536)):
            raise self._wrong(where, f"server = {one.server!r} is no HOST:PORT")
        for mailbox in (one.sender, *one.to):
            if not MAILBOX.fullmatch(mailbox) or not mailbox.isascii() or not mailbox.isprintable():
                raise self._wrong(where, f"{mailbox!r} is no mail address like name@example.com")
        if not one.to:
            raise self._wrong(where, "to = [] names nobody")
        password = self._private(
            where, "password", one.password_file, one.password_env, needed=bool(one.user)
        )
        if password and one.security == "none":
            raise self._wrong(where, 'a password is not sent with security = "none"; use "starttls" or "tls"')
        server = MailServer(
            host.strip("[]"), int(port or _PORTS[one.security]), one.security, one.user, password
        )
        return MailTo(
            where,
            self._rules(where, one),
            server,
            one.sender,
            tuple(one.to),
            self._timeout_s(where, one),
            self._trusted(where, one),
        )

    def trackers(self) -> list[Wanted]:
        file, found = self._file, list[Wanted]()
        if (wandb := file.wandb) is not None:
            options = TrackerOptions(
                "wandb",
                self._run,
                wandb.project,
                wandb.entity,
                wandb.run_id,
                wandb.mode,
                self._file_name(wandb.folder),
            )
            found.append(self._track("wandb", wandb, options))
        if (board := file.tensorboard) is not None:
            folder = str(Path(self._file_name(board.folder)) / "keepstep")
            options = TrackerOptions("tensorboard", self._run, folder=folder)
            found.append(self._track("tensorboard", board, options))
        if (mlflow := file.mlflow) is not None:
            options = TrackerOptions(
                "mlflow", self._run, mlflow.experiment, run_id=mlflow.run_id, uri=mlflow.uri
            )
            found.append(self._track("mlflow", mlflow, options))
        if (otel := file.otel) is not None:
            address_of(otel.url, f"{self._path}: otel.url")
            options = TrackerOptions(
                "otel", self._run, uri=otel.url, headers=self._headers(otel.headers_file)
            )
            found.append(self._track("otel", otel, options))
        return found

    def _track(self, kind: str, one: _Wishes, options: TrackerOptions) -> Track:
        try:
            is_there = importlib.util.find_spec(_NEEDS[kind]) is not None
        except ModuleNotFoundError:  # of a package above it
            is_there = False
        if not is_there:
            raise UsageError(f"{self._path}: [{kind}] needs a package: pip install 'keepstep[{kind}]'")
        return Track(kind, self._rules(kind, one), options)

    def _rules(self, where: str, one: _Wishes) -> Rules:
        """What the receiver wants, else what stands at the top, else the default."""
        wishes: dict[str, object] = {}
        for name in _Wishes.__struct_fields__:
            for table in (self._file, one):
                if (value := getattr(table, name)) is not None:
                    wishes[name] = value
        rules = msgspec.convert(wishes, Rules)
        is_possible = rules.per_hour >= 0 and rules.flapping_window_s >= 0 and rules.silent_after_s >= 10
        if rules.at_once < 1 or rules.flapping_times < 2 or not is_possible:
            raise self._wrong(
                where, "at_once is at least 1, flapping_times 2, silent_after_s 10, and nothing is negative"
            )
        if rules.page_url:
            address_of(rules.page_url, f"{self._path}: page_url")
            if "#" in rules.page_url or not rules.page_url.isprintable():
                raise self._wrong(
                    where, "page_url must not hold the token behind a #: everybody who is told reads it"
                )
        return rules

    def _private(self, where: str, what: str, file: str, variable: str, *, needed: bool = True) -> str:
        if file and variable:
            raise self._wrong(where, f"give {what}_file or {what}_env, not both")
        if file:
            return read_private(Path(self._file_name(file)))
        if variable:
            return from_environment(variable, self._environ)
        if needed:
            raise self._wrong(where, f"needs {what}_file, a file of mode 0600, or {what}_env")
        return ""

    def _headers(self, file: str) -> dict[str, str]:
        if not file:
            return {}
        text = read_private(Path(self._file_name(file)))
        pairs = [pair.partition("=") for pair in text.split(",")]
        if not all(name.strip() and equals for name, equals, _ in pairs):
            raise self._wrong("otel", "headers_file must hold one line like NAME=VALUE,NAME=VALUE")
        return {name.strip(): value.strip() for name, _, value in pairs}

    def _trusted(self, where: str, one: _Reached) -> ssl.SSLContext | None:
        if not one.ca_file:
            return None
        try:
            return ssl.create_default_context(cafile=self._file_name(one.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise self._wrong(
                where, f"ca_file {one.ca_file}: {error.strerror or 'no certificates in PEM'}"
            ) from None

    def _timeout_s(self, where: str, one: _Reached) -> float:
        if not 0.1 <= one.timeout_s <= 300:
            raise self._wrong(where, "timeout_s is between 0.1 and 300")
        return one.timeout_s

    def _file_name(self, name: str) -> str:
        """A file that is named, seen from the folder of the TOML file."""
        return str(self._path.parent / Path(name).expanduser()) if name else ""

    def _wrong(self, where: str, what: str) -> UsageError:
        return UsageError(f"{self._path}: [{where}]: {what}")
