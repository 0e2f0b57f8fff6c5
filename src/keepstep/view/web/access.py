"""Who may see the page: a server's token, the cookie made of it, and the names by which the server may be called."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import UsageError

_MOST_TOKEN_BYTES = 1024
_MADE_BY = "make one with `(umask 077; openssl rand -hex 32 > FILE)`"


@dataclass(frozen=True, slots=True)
class Access:
    """What a server asks of its viewers.

    ``token``: None where everybody who reaches the address may look. ``names``: host names by which the server may be
    called, lower case, besides the addresses.
    """

    token: bytes | None = None
    names: frozenset[str] = frozenset({"localhost"})
    only_loopback: bool = True
    cookie_name: str = "keepstep"

    @property
    def cookie(self) -> str:
        """The cookie of a viewer who has shown the token. It tells nothing about the token."""
        return hmac.new(self.token or b"", b"keepstep page cookie", hashlib.sha256).hexdigest()

    def is_token(self, shown: bytes) -> bool:
        """Whether this is the token, in a time that does not depend on how much of it is right."""
        return self.token is not None and hmac.compare_digest(_digest(shown.strip()), _digest(self.token))

    def lets_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers (names in lower case) may read the run."""
        if self.token is None:
            return True
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(shown.encode("latin-1", "replace")):
            return True
        return any(
            hmac.compare_digest(_digest(value.encode("latin-1", "replace")), _digest(self.cookie.encode()))
            for value in _cookies(headers.get("cookie", ""), self.cookie_name)
        )

    def is_called(self, host: str) -> bool:
        """Whether a ``Host`` header names this server. Another name is a page that was rebound to this address.

        The port is not looked at: it may be that of a tunnel.
        """
        name = _without_port(host).lower().rstrip(".")
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self.names
        return address.is_loopback or not self.only_loopback


def is_loopback(host: str) -> bool:
    """Whether a server at this host, a name or an address, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path) -> bytes:
    """The token in a file of mode 0600 that is ours. Raises UsageError for any other file, and for a weak token."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}; {_MADE_BY}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"--token-file {path}: is no regular file; {_MADE_BY}")
        if found.st_uid != os.geteuid():
            raise UsageError(f"--token-file {path}: belongs to another user; {_MADE_BY}")
        if found.st_mode & 0o077:
            raise UsageError(
                f"--token-file {path}: others may read it; `chmod 600 {path}` and make a new token"
            )
        token = os.read(descriptor, _MOST_TOKEN_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if len(token) > _MOST_TOKEN_BYTES or not token.isascii() or not token.decode().isprintable():
        raise UsageError(f"--token-file {path}: is no token of printable ASCII in one line; {_MADE_BY}")
    if not _is_strong(token.decode()):
        raise UsageError(f"--token-file {path}: the token has less than 128 random bits; {_MADE_BY}")
    return token


def names_of(host: str, given: Iterable[str] = ()) -> frozenset[str]:
    """The names by which a server at ``host`` is called: this machine's, and those that the user gives."""
    names = {"localhost", *given}
    if not is_loopback(host):
        names |= {host, socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower().rstrip(".") for name in names)


def _cookies(header: str, name: str) -> Iterator[str]:
    """The values of a cookie. Ours is never quoted, and unquoting costs `http.cookies` seconds for a hostile header."""
    for one in header.split(";"):
        found, _, value = one.strip().partition("=")
        if found == name:
            yield value


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()  # of one length, so that the comparison does not tell the token's


def _is_strong(token: str) -> bool:
    """Whether a random token of this length has 128 bits, and this one looks random: it does not repeat itself."""
    is_hexadecimal = all(c in "0123456789abcdefABCDEF-" for c in token)
    return len(token) >= (32 if is_hexadecimal else 22) and len(set(token)) >= 8


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
