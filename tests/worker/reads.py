"""Reads and leases that a test holds in its hand, and waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from core.errors import TransferError
from kvtransfer.base import Pull
from kvtransfer.exports import ExportKey, ExportTable
from tests.engine.harness import make_prompt
from tests.worker.pair import Pair, Worker


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


async def read_slowly(both: Pair, monkeypatch: pytest.MonkeyPatch) -> StuckPull:
    """Begins a request, "slow", whose read does not end; nor do those after it."""
    stuck = StuckPull()
    monkeypatch.setattr(both.decode.host.transport, "pull", lambda *_: stuck)
    await both.send(both.dispatch(make_prompt(40), "slow"))
    await asyncio.wait_for(stuck.has_begun.wait(), 30)
    return stuck


def exports_of(lender: Worker) -> ExportTable:
    exports: ExportTable = lender.host.service._exporter.exports  # type: ignore[attr-defined]
    return exports


def let_leases_end(lender: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run now are over; nobody has noticed yet."""
    monkeypatch.setattr(exports_of(lender), "_clock", lambda: time.monotonic() + 3600)


def lose_leases(lender: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is over in the moment in which its reader is done."""
    exports = exports_of(lender)
    real_release = exports.release

    def release_late(key: ExportKey) -> bool:
        if key in exports._exports:
            exports._exports[key].expires_at = 0.0
        return real_release(key)

    monkeypatch.setattr(exports, "release", release_late)
