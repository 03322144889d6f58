"""A made-up CA, as the API server's front proxy has one."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    """Issues client certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.file = folder / f"{name}.pem"
        certificate = self._sign(self._name, self._key.public_key(), is_ca=True)
        self.file.write_bytes(certificate)

    def issue(self, common_name: str) -> str:
        """A file with a certificate of that name and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        file = self._folder / f"{self.file.stem}-{common_name}.pem"
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file.write_bytes(pem + self._sign(_name(common_name), key.public_key(), is_ca=False))
        return str(file)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, is_ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - DAY)
            .not_valid_after(NOW + DAY)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
