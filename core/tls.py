"""Mutual TLS between services: both sides show a certificate of the deployment's own CA.

The CA is the deployment's alone: whoever has a certificate of it may speak as any service, so
it must sign nothing else. All certificates carry one name (`--tls-name`) instead of addresses,
which in a cluster change with every pod. Files may be replaced while a service runs, as
cert-manager does: a server shows the new certificate from the next handshake on, and a
router with its next stream to a worker. A channel keeps the certificate with which it was opened.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc
from pydantic import Field

from core.errors import StartupError
from core.logs import event
from core.settings import Settings

logger = logging.getLogger(__name__)


class TlsSettings(Settings):
    """Settings of every service that others call, or that calls others."""

    tls_cert: Path | None = Field(
        None,
        description="This service's certificate (PEM) for calls between services, with --tls-key "
        "and --tls-ca; without them such calls are not encrypted",
    )
    tls_key: Path | None = Field(None, description="Key of --tls-cert (PEM)")
    tls_ca: Path | None = Field(
        None, description="CA of this deployment alone (PEM): it signs all services' certificates"
    )
    tls_name: str = Field("baton", description="DNS name in the certificates of all services")


class Tls:
    """One service's certificate, key and CA. Raises StartupError when they cannot be used."""

    def __init__(self, cert: Path, key: Path, ca: Path, name: str) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self.name = name
        """Of the service that is called, whatever its address."""
        self._stamp = self._stamps()
        self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that takes calls only from services of this deployment."""
        # The stubs do not know that None may be returned, too.
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._new_configuration,  # type: ignore[arg-type]
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For calls to other services."""
        ca, key, cert = self._read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def client_context(self) -> ssl.SSLContext:
        """The same for HTTP/2 without gRPC's library; `name` is to be asked for. Reads files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        try:
            context.load_verify_locations(self._ca)
            # Without a password, OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password="")
        except OSError as error:
            raise StartupError(
                f"--tls-cert, --tls-key or --tls-ca cannot be used: {error}"
            ) from error
        return context

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Who is called, whatever its address."""
        return (("grpc.ssl_target_name_override", self.name),)

    def _new_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Before each handshake, in a thread of gRPC's; None: nothing has changed."""
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return None
            configuration = self._configuration()
        except StartupError as error:
            # Files that are being replaced; the old ones go on.
            event(logger, logging.ERROR, "certificate_unreadable", error=error.message)
            return None
        self._stamp = stamp
        event(logger, logging.INFO, "certificate_replaced", path=self._cert)
        return configuration

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca, key, cert = self._read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def _stamps(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in (self._ca, self._key, self._cert))
        except OSError as error:
            raise StartupError(f"{error.filename} cannot be read: {error.strerror}") from error

    def _read(self) -> tuple[bytes, bytes, bytes]:
        try:
            return self._ca.read_bytes(), self._key.read_bytes(), self._cert.read_bytes()
        except OSError as error:
            raise StartupError(f"{error.filename} cannot be read: {error.strerror}") from error


def load_tls(settings: TlsSettings) -> Tls | None:
    """None without any of the three files, which is logged. Raises StartupError."""
    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_ca
    if cert is not None and key is not None and ca is not None:
        return Tls(cert, key, ca, settings.tls_name)
    given = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
    missing = [flag for flag, path in given.items() if path is None]
    if len(missing) < len(given):
        raise StartupError(f"TLS between services needs {' and '.join(missing)}, too")
    event(logger, logging.INFO, "tls_off", hint="--tls-cert, --tls-key and --tls-ca turn it on")
    return None
