"""A made-up certificate authority."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from core.tls import Tls

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates; its own is `certificate`. All is PEM."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.certificate = self._sign(name, self._key.public_key(), is_ca=True)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """A certificate for the DNS name `name`, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return self._sign(name, key.public_key(), is_ca=False), pem

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, *, is_ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_NOW - _DAY)
            .not_valid_after(_NOW + _DAY)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def identity(folder: Path, authority: Authority, name: str = "baton") -> Tls:
    """A service's TLS with a new certificate of `authority`."""
    folder.mkdir(exist_ok=True)
    cert, key = authority.issue(name)
    (folder / "tls.crt").write_bytes(cert)
    (folder / "tls.key").write_bytes(key)
    (folder / "ca.crt").write_bytes(authority.certificate)
    return Tls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", "baton")
