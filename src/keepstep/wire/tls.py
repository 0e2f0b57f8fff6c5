"""Mutual TLS from three paths. It hides what is said; who may speak is still proved by the run's secret."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from keepstep.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """PEM files: this side's certificate and key, and the authority that signed the other side's."""

    cert: str
    key: str
    ca: str

    @staticmethod
    def of(cert: str | None, key: str | None, ca: str | None) -> TlsPaths | None:
        """From flags: all three or none.

        Raises:
            UsageError: some are given and some are not.
        """
        if cert and key and ca:
            return TlsPaths(cert, key, ca)
        if cert or key or ca:
            raise UsageError("TLS wants all of --tls-cert, --tls-key and --tls-ca, or none")
        return None


def server_context(paths: TlsPaths) -> ssl.SSLContext:
    """For the controller: clients must show a certificate of the authority."""
    return _context(paths, ssl.PROTOCOL_TLS_SERVER)


def client_context(paths: TlsPaths) -> ssl.SSLContext:
    """For nodes: the controller must show a certificate of the authority. Host names are not compared, because the
    handshake inside binds the secret to the addresses."""
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
