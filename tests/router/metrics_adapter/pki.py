"""A made-up CA with files, as the API server's front proxy has one."""

from __future__ import annotations

from pathlib import Path

from tests import pki


class Authority:
    """Issues client certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._authority = pki.Authority(name)
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._authority.certificate)

    def issue(self, common_name: str) -> str:
        """A file with a certificate of that name and its key."""
        certificate, key = self._authority.issue(common_name)
        file = self._folder / f"{self.file.stem}-{common_name}.pem"
        file.write_bytes(key + certificate)
        return str(file)
