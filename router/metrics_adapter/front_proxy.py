"""Whom the adapter trusts: the API server's front proxy, by CA and name."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from core.errors import StartupError


@dataclass
class FrontProxy:
    """`ca` is PEM; without `names` any name that the CA has certified will do."""

    ca: str
    names: frozenset[str] = field(default_factory=frozenset)

    def allows(self, common_name: str) -> bool:
        return not self.names or common_name in self.names

    def trust_in(self, context: ssl.SSLContext) -> None:
        """Has `context` accept client certificates of the CA, besides what it accepts already.

        Raises StartupError when the CA cannot be read.
        """
        try:
            context.load_verify_locations(cadata=self.ca)
        except (ssl.SSLError, ValueError) as error:
            raise StartupError(f"the front proxy's CA cannot be read: {error}") from error
