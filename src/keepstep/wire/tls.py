"""Mutual TLS from three files. It encrypts messages; peers still prove themselves by the run's secret."""

from __future__ import annotations

import ssl

from keepstep.core.errors import UsageError
from keepstep.core.tls_paths import TlsPaths

_CHUNK_BYTES = 1 << 18


class TlsEnd:
    """The server's end of one TLS connection without any I/O: it converts between encrypted and plain bytes."""

    __slots__ = ("_in", "_out", "_tls", "has_ended", "is_up")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self.is_up = False  # whether the TLS handshake is done
        self.has_ended = False  # whether the peer has said that nothing follows

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Take received bytes; return the plain bytes in them and the bytes to send in answer.

        Raises:
            ssl.SSLError: the peer shows no certificate of the authority, or speaks no TLS. Send it ``close()``.
        """
        self._in.write(data)
        plain = bytearray()
        try:
            if not self.is_up:
                self._tls.do_handshake()
                self.is_up = True
            while chunk := self._tls.read(_CHUNK_BYTES):
                plain += chunk
            self.has_ended = True
        except ssl.SSLWantReadError:
            pass  # everything received so far has been read
        return bytes(plain), self._out.read()

    def send(self, data: bytes) -> bytes:
        """The encrypted bytes to send for plain ones. Only allowed when ``is_up``."""
        self._tls.write(data)
        return self._out.read()

    def close(self) -> bytes:
        """The bytes that tell the peer that nothing follows, or about the error that `receive` has raised."""
        try:
            if self.is_up:
                self._tls.unwrap()
        except ssl.SSLError:
            pass  # `unwrap` wants to wait for the peer's own end, which is not needed
        return self._out.read()


def server_context(paths: TlsPaths) -> ssl.SSLContext:
    """TLS settings of a server: clients must show a certificate of the authority."""
    return _context(paths, ssl.PROTOCOL_TLS_SERVER)


def client_context(paths: TlsPaths) -> ssl.SSLContext:
    """TLS settings of a client: the server must show a certificate of the authority.

    Host names are not compared, because the handshake inside TLS binds the secret to the addresses.
    """
    return _context(paths, ssl.PROTOCOL_TLS_CLIENT)


def _context(paths: TlsPaths, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(paths.cert, paths.key)
        context.load_verify_locations(paths.ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"TLS: cannot load {paths.cert}, {paths.key}, {paths.ca}: {error}; all three must be PEM files, "
            f"and the key must belong to the certificate"
        ) from error
    return context
