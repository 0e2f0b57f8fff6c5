"""The three files of mutual TLS, for those that only pass their paths on."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """Paths of PEM files: this side's certificate and key, and the authority that signed the other side's."""

    cert: str
    key: str
    ca: str

    @staticmethod
    def of(cert: str | None, key: str | None, ca: str | None) -> TlsPaths | None:
        """The paths from three flags; None if none of them is given. Raises UsageError if only some are."""
        if cert and key and ca:
            return TlsPaths(cert, key, ca)
        if cert or key or ca:
            raise UsageError("TLS wants all of --tls-cert, --tls-key and --tls-ca, or none")
        return None
