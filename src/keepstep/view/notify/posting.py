"""Posts a message to an address over HTTP: within a time, without following redirects, without showing the address."""

from __future__ import annotations

import http.client
import re
import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from keepstep.core.errors import UsageError
from keepstep.view.notify.delivery import Deadline, NotDeliveredError
from keepstep.view.notify.notice import plain
from keepstep.view.notify.private import redacted

_MOST_WAIT_S = 300.0  # longest time that a receiver's Retry-After is heeded
_MOST_ANSWER_BYTES = 2000
_AGAIN = frozenset((408, 425, 429))  # answers of 4xx after which another try may succeed
_TARGET = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to post. Path and query are often a secret, so only ``shown`` may be told."""

    is_secure: bool
    host: str
    port: int
    target: str = field(repr=False)

    @property
    def shown(self) -> str:
        """Scheme, host and port."""
        scheme, usual = ("https", 443) if self.is_secure else ("http", 80)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}" + ("" if self.port == usual else f":{self.port}")

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be shown: path and query, and the parts of them that are long."""
        parts = re.split(r"[/?&=]", self.target)
        return (self.target if len(self.target) > 1 else "", *(one for one in parts if len(one) >= 8))


def address_of(url: str, where: str) -> Address:
    """The address that a URL names. ``where``: what holds the URL, for the error, which does not show it.

    Raises:
        UsageError: it is no URL of http or https, or has a user and password in it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except (ValueError, UnicodeError):
        raise UsageError(f"{where}: holds no usable URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{where}: must hold a URL that begins with https:// (or http://)")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{where}: a user and password in the URL are not sent; leave them out")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not _TARGET.fullmatch(target):
        raise UsageError(f"{where}: the URL has characters that must be percent-encoded")
    is_secure = parts.scheme == "https"
    return Address(is_secure, host, port or (443 if is_secure else 80), target)


def post(
    address: Address,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float,
    trusted: ssl.SSLContext | None = None,
) -> None:
    """Post ``body``; returns once the receiver has answered with 2xx.

    ``trusted``: whose certificates are believed, by default those of the system. Proxies are those of the environment
    (``https_proxy``, ``no_proxy``).

    Raises:
        NotDeliveredError: anything else.
    """
    deadline = Deadline()
    connection, target, more = _connection(address, timeout_s, trusted)
    try:
        with deadline.within(timeout_s, lambda: connection.sock):
            connection.request("POST", target, body, {**headers, **more})
            with connection.getresponse() as answer:
                told = answer.read(_MOST_ANSWER_BYTES) if answer.status >= 300 else b""
        if deadline.has_passed:
            raise TimeoutError  # half an answer may look like a whole one
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotDeliveredError(deadline.words_of(error, timeout_s)) from None
    finally:
        connection.close()
    if answer.status >= 300:
        raise _refused(answer.status, answer.getheader("Retry-After"), told, address.secrets)


def _refused(
    status: int, retry_after: str | None, told: bytes, secrets: tuple[str, ...]
) -> NotDeliveredError:
    if status < 400:
        return NotDeliveredError(
            f"it answers {status} (go elsewhere), and that is not followed: give the final address",
            is_final=True,
        )
    said = plain(redacted(told.decode(errors="replace"), secrets).strip(), 200)
    why = f"it answers {status}" + (f": {said}" if said else "")
    is_final = status < 500 and status not in _AGAIN
    return NotDeliveredError(why, is_final=is_final, wait_s=_wait_s(retry_after))


def _wait_s(retry_after: str | None) -> float | None:
    """Seconds that the header asks for: a number, or a date."""
    if retry_after is None:
        return None
    try:
        if re.fullmatch(r"\s*\d{1,9}\s*", retry_after, re.ASCII):
            wait_s = float(retry_after)
        else:
            wait_s = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError, IndexError):
        return None
    return min(max(wait_s, 0.0), _MOST_WAIT_S)


def _connection(
    address: Address, timeout_s: float, trusted: ssl.SSLContext | None
) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """A connection, what to ask it for, and further headers. Over a proxy where the environment names one."""
    proxy = None
    if not urllib.request.proxy_bypass(address.host):
        proxy = urllib.request.getproxies().get("https" if address.is_secure else "http")
    reached, secret_path = address, address.target
    headers: dict[str, str] = {}
    if proxy:
        try:
            reached = address_of(proxy if "://" in proxy else f"http://{proxy}", "the proxy's variable")
        except UsageError as error:
            raise NotDeliveredError(str(error), is_final=True) from None
        if not address.is_secure:
            secret_path, headers = f"{address.shown}{address.target}", {"Host": address.shown.split("//")[1]}
    if not address.is_secure:
        return http.client.HTTPConnection(reached.host, reached.port, timeout=timeout_s), secret_path, headers
    context = trusted or ssl.create_default_context()
    connection = http.client.HTTPSConnection(reached.host, reached.port, timeout=timeout_s, context=context)
    if proxy:
        connection.set_tunnel(address.host, address.port)
    return connection, secret_path, headers
