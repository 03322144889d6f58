"""Tells the application whom a TLS client's certificate names."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PEER_NAME = "peer_common_name"
"""In a request's state: the common name, None without a certificate."""


class PeerNameProtocol(HttpToolsProtocol):
    """The certificate has been verified in the handshake."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        certificate = self.transport.get_extra_info("ssl_object").getpeercert() or {}
        names = [
            value
            for part in certificate.get("subject", ())
            for key, value in part
            if key == "commonName"
        ]
        self.scope["state"][PEER_NAME] = names[0] if names else None
