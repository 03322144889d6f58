"""Who may call: the operator's file of API keys, and the tenant behind each key."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from core.errors import StartupError, Unauthenticated

DEFAULT_TENANT = "default"
"""Of a key without a tenant, and of everybody where no keys are asked for."""

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


def bearer_key(authorization: str | None) -> str:
    """KEY of an `Authorization` header `Bearer KEY`. Raises Unauthenticated."""
    if authorization is None:
        raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
    match = _BEARER.fullmatch(authorization.strip())
    if match is None:
        raise Unauthenticated("the API key is not valid")
    return match[1]


class ApiKeys:
    """Tenants by key. Without any key, everybody may call.

    Keys are kept and looked up as digests under a secret of this process, so that the time a
    look-up takes says nothing about how much of a guessed key is right.
    """

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._digest(key): tenant for key, tenant in tenants.items()}

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Those of the operator's file. Raises StartupError."""
        return cls(read_api_keys(path))

    @property
    def are_needed(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header `Bearer KEY`. Raises Unauthenticated."""
        if not self._tenants:
            return DEFAULT_TENANT
        tenant = self._tenants.get(self._digest(bearer_key(authorization)))
        if tenant is None:
            raise Unauthenticated("the API key is not valid")
        return tenant

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._secret, digest_size=32).digest()


def read_api_keys(path: Path) -> dict[str, str]:
    """Tenants by key, of a file with lines of `KEY` or `KEY TENANT`; `#` begins a comment.

    Raises StartupError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise StartupError(f"the API keys {path} cannot be read: {error}") from error
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or not words[0].isascii():
            # The line may hold a key, so it is not shown.
            raise StartupError(f"{path}, line {number}, is not KEY or KEY TENANT")
        if words[0] in tenants:
            raise StartupError(f"{path}, line {number}, repeats a key")
        tenants[words[0]] = words[1] if len(words) == 2 else DEFAULT_TENANT
    if not tenants:
        raise StartupError(f"the API keys {path} are empty: nobody could call")
    return tenants
