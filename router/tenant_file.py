"""The tenants of now: reads the file again when it changes, and keeps the last good one."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.api_keys import DEFAULT_TENANT, ApiKeys, bearer_key
from core.errors import StartupError, Unauthenticated
from core.logs import event
from router.tenants import TenantFileError, Tenants, parse_tenants

logger = logging.getLogger(__name__)

POLL_S = 1.0
_Version = tuple[int, int, int]


class TenantBook:
    """`current` is replaced as a whole; who holds a Tenant keeps it to the request's end."""

    def __init__(self, path: Path | None, keys: ApiKeys) -> None:
        """Reads the file if there is one; `keys` count beside those in it.

        Raises StartupError.
        """
        self._path = path
        self._keys = keys
        self._version: _Version | None = None
        self.current = Tenants()
        if path is None:
            return
        try:
            self._version = _version(path)
            self.current = _read(path)
        except (OSError, UnicodeDecodeError, TenantFileError) as error:
            raise StartupError(f"tenants file {path}: {error}") from error

    def tenant(self, authorization: str | None) -> str:
        """Name of the tenant that calls with this `Authorization` header. Raises
        Unauthenticated."""
        if self._path is None:
            return self._keys.tenant(authorization)
        current = self.current
        has_keys = self._keys.are_needed or current.has_keys
        if current.has_default and (authorization is None or not has_keys):
            return DEFAULT_TENANT
        name = current.name_of(bearer_key(authorization))
        if name is None and self._keys.are_needed:
            return self._keys.tenant(authorization)
        if name is None:
            raise Unauthenticated("the API key is not valid")
        return name

    async def run(self) -> None:
        """Follows the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Takes a changed file over. One that is wrong or gone is reported once."""
        assert self._path is not None
        try:
            version = await asyncio.to_thread(_version, self._path)
            if version == self._version:
                return
            self._version = version
            self.current = await asyncio.to_thread(_read, self._path)
        except FileNotFoundError as error:
            if self._version is not None:
                event(logger, logging.ERROR, "tenants_refused", path=self._path, error=error)
            self._version = None
        except (OSError, UnicodeDecodeError, TenantFileError) as error:
            event(logger, logging.ERROR, "tenants_refused", path=self._path, error=error)
        else:
            event(logger, logging.INFO, "tenants_loaded", path=self._path)


def _version(path: Path) -> _Version:
    """Changes with the file's content, also when a mounted file is swapped by a link."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: Path) -> Tenants:
    return parse_tenants(path.read_text(encoding="utf-8"))
