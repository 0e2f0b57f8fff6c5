"""Certificates for the tests of mutual TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keepstep import wire


def certificates(folder: Path, *addresses: str) -> wire.TlsPaths:
    """An authority and one certificate for both sides, for 127.0.0.1 and other addresses."""
    now = datetime.datetime.now(datetime.timezone.utc)
    names = {kind: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, kind)]) for kind in ("ca", "node")}
    keys = {kind: ec.generate_private_key(ec.SECP256R1()) for kind in names}
    paths = wire.TlsPaths(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem"))
    for kind, path in (("ca", paths.ca), ("node", paths.cert)):
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[kind])
            .issuer_name(names["ca"])
            .public_key(keys[kind].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=kind == "ca", path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.IPAddress(ipaddress.ip_address(one)) for one in ("127.0.0.1", *addresses)]
                ),
                critical=False,
            )
        )
        signed = builder.sign(keys["ca"], hashes.SHA256())
        Path(path).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    Path(paths.key).write_bytes(
        keys["node"].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
