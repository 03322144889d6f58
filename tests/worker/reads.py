"""Reads that a test holds in its hand, and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from core.errors import TransferError
from kvtransfer.base import Pull


class StuckPull(Pull):
    """A read that neither ends nor settles by itself."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.is_aborted = asyncio.Event()
        self.may_settle = asyncio.Event()

    async def done(self) -> None:
        self.has_begun.set()
        await self.is_aborted.wait()
        raise TransferError("the read was aborted")

    def abort(self) -> None:
        self.is_aborted.set()

    async def settled(self) -> None:
        await self.may_settle.wait()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)
