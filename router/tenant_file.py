"""The tenants and API keys of now: files are read again when they change; the last good one
counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from core.api_keys import DEFAULT_TENANT, ApiKeys, bearer_key
from core.errors import StartupError, Unauthenticated
from core.logs import event
from router.tenants import TenantFileError, Tenants, parse_tenants

logger = logging.getLogger(__name__)

POLL_S = 1.0
_ONE_TENANT = Tenants()
_NO_KEYS = ApiKeys({})

T = TypeVar("T")
_Version = tuple[int, int, int]


class _File(Generic[T]):
    """One file's content: `current` is replaced as a whole. `name`: of its log events."""

    def __init__(self, name: str, path: Path, read: Callable[[Path], T]) -> None:
        """Raises what `read` raises, and OSError."""
        self._name = name
        self._path = path
        self._read = read
        self._version: _Version | None = _version(path)
        self.current = read(path)
        self._is_unread = False
        """Whether the last change could not be read, and so is to be tried again."""

    async def refresh(self) -> None:
        """Takes a changed file over. One that is wrong or gone is reported once."""
        try:
            version = await asyncio.to_thread(_version, self._path)
            if version == self._version and not self._is_unread:
                return
            self._version = version
            self.current = await asyncio.to_thread(self._read, self._path)
            self._is_unread = False
        except FileNotFoundError as error:
            if self._version is not None:
                self._tell_refused(error)
            self._version = None
        except (OSError, UnicodeDecodeError, TenantFileError, StartupError) as error:
            was_unread, self._is_unread = self._is_unread, _cannot_be_read(error)
            if not (was_unread and self._is_unread):
                self._tell_refused(error)
        else:
            event(logger, logging.INFO, f"{self._name}_loaded", path=self._path)

    def _tell_refused(self, error: Exception) -> None:
        event(logger, logging.ERROR, f"{self._name}_refused", path=self._path, error=error)


class TenantBook:
    """`current` is replaced as a whole; who holds a Tenant keeps it to the request's end."""

    def __init__(self, tenants: Path | None, api_keys: Path | None) -> None:
        """Reads the files that there are; keys of both count. Raises StartupError."""
        self._keys = _open_keys(api_keys) if api_keys is not None else None
        self._tenants = _open_tenants(tenants) if tenants is not None else None

    @property
    def current(self) -> Tenants:
        return self._tenants.current if self._tenants is not None else _ONE_TENANT

    def tenant(self, authorization: str | None) -> str:
        """Name of the tenant that calls with this `Authorization` header. Raises
        Unauthenticated."""
        keys = self._keys.current if self._keys is not None else _NO_KEYS
        if self._tenants is None:
            return keys.tenant(authorization)
        current = self.current
        has_keys = keys.are_needed or current.has_keys
        if current.has_default and (authorization is None or not has_keys):
            return DEFAULT_TENANT
        name = current.name_of(bearer_key(authorization))
        if name is None and keys.are_needed:
            return keys.tenant(authorization)
        if name is None:
            raise Unauthenticated("the API key is not valid")
        return name

    async def run(self) -> None:
        """Follows the files until cancelled."""
        while self._tenants is not None or self._keys is not None:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Takes over what has changed."""
        if self._tenants is not None:
            await self._tenants.refresh()
        if self._keys is not None:
            await self._keys.refresh()


def _open_keys(path: Path) -> _File[ApiKeys]:
    try:
        return _File("api_keys", path, ApiKeys.load)
    except OSError as error:
        raise StartupError(f"the API keys {path} cannot be read: {error}") from error


def _open_tenants(path: Path) -> _File[Tenants]:
    try:
        return _File("tenants", path, _read)
    except (OSError, UnicodeDecodeError, TenantFileError) as error:
        raise StartupError(f"tenants file {path}: {error}") from error


def _cannot_be_read(error: Exception) -> bool:
    return isinstance(error, OSError) or isinstance(error.__cause__, OSError)


def _version(path: Path) -> _Version:
    """Changes with the file's content, also when a mounted file is swapped by a link."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: Path) -> Tenants:
    return parse_tenants(path.read_text(encoding="utf-8"))
