"""Two pairs of workers, of which the second takes prefixes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import worker_pb2
from kvtransfer.service import ExportService
from tests.worker.pair import Pair, Worker, pair
from tests.worker.reads import StuckPull

PATIENCE_S = 300.0


@asynccontextmanager
async def two_pairs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str = "tcp",
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[Pair, Pair]]:
    """The second one takes prefixes over. To it computing seems slow, and no wait too long."""
    monkeypatch.setattr("prefill_svc.prefix_fetch.MAX_FETCH_S", PATIENCE_S)
    monkeypatch.setattr("worker.prefix_reader.MAX_FETCH_S", PATIENCE_S)
    async with (
        pair(folder, transport, prefill=first) as one,
        pair(folder, transport, prefill=second, number=1) as two,
    ):
        set_compute_s(two, PATIENCE_S)
        yield one, two


def set_compute_s(both: Pair, seconds: float) -> None:
    """However many tokens it is, prefill expects to need so long."""
    both.prefill.host.service._prefixes._expected_s = lambda _: seconds  # type: ignore[attr-defined]


def held_by(holder: Worker, num_blocks: int) -> worker_pb2.PrefixSource:
    return worker_pb2.PrefixSource(worker=holder.address, num_blocks=num_blocks)


class Fetches:
    """Counts the blocks that sources were asked for, fetch by fetch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_wanted: list[int] = []
        real = ExportService.Fetch

        async def fetch(service: ExportService, request: Any, context: Any) -> Any:
            self.num_wanted.append(len(request.block_hashes))
            return await real(service, request, context)

        monkeypatch.setattr(ExportService, "Fetch", fetch)


def stick(both: Pair, monkeypatch: pytest.MonkeyPatch) -> StuckPull:
    """Prefill's reads do not end from now on."""
    stuck = StuckPull()
    monkeypatch.setattr(both.prefill.host.transport, "pull", lambda *_: stuck)
    return stuck
