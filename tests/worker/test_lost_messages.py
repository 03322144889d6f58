"""Messages between prefill and decode that do not get through, or whose answers do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import kv_transfer_pb2
from core.errors import Unavailable
from kvtransfer.service import ExportService, ImportService
from tests.engine.harness import make_prompt
from tests.worker.pair import Pair, flip_a_byte_of, pair
from tests.worker.reads import let_leases_end, read_slowly, until


def lose_last_answers(
    monkeypatch: pytest.MonkeyPatch, num_lost: int, may_be_lost: asyncio.Event
) -> None:
    """Decode takes the last announcement, but so many of its answers do not arrive."""
    real_announce = ImportService.Announce
    left = iter(range(num_lost))

    async def announce(self: ImportService, request: Any, context: Any) -> Any:
        reply = await real_announce(self, request, context)
        if request.is_last and next(left, None) is not None:
            await may_be_lost.wait()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a fault")
        return reply

    monkeypatch.setattr(ImportService, "Announce", announce)


async def until_prefill_is_done(both: Pair) -> None:
    await until(lambda: len(both.prefill.host.service._requests) == 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_lost", [1, 100])
async def test_what_decode_has_committed_goes_on_when_prefill_does_not_hear_of_it(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    is_committed = asyncio.Event()
    lose_last_answers(monkeypatch, num_lost, is_committed)
    async with pair(folder) as both:
        prompt = make_prompt(40)
        result = await both.send(both.dispatch(prompt, "once", max_tokens=300))
        await both.until_decoding()
        is_committed.set()
        await until_prefill_is_done(both)
        await asyncio.wait_for(result.ended.wait(), 30)
        assert result.error is None
        assert result.output == expected(prompt, 300)


async def test_prefill_may_leave_before_it_hears_that_decode_has_everything(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_last_answers(monkeypatch, 1, asyncio.Event())
    async with pair(folder) as both:
        prompt = make_prompt(40)
        result = await both.send(both.dispatch(prompt, "once", max_tokens=300))
        await both.until_decoding()
        assert len(both.prefill.host.service._requests) == 1  # type: ignore[attr-defined]
        both.prefill.host.service.abort(("once", 1))
        await asyncio.wait_for(result.ended.wait(), 30)
        assert result.error is None
        assert result.output == expected(prompt, 300)


async def test_an_announcement_that_decode_never_takes_fails_the_attempt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def announce(self: ImportService, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "a fault")

    monkeypatch.setattr(ImportService, "Announce", announce)
    async with pair(folder) as both:
        result = await both.generate(make_prompt(40), "unheard")
        assert "a fault" in str(result.error)


async def test_a_release_whose_answer_is_lost_is_asked_again(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_release = ExportService.Release
    left = iter(range(1))

    async def release(self: ExportService, request: Any, context: Any) -> Any:
        reply = await real_release(self, request, context)
        if next(left, None) is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a fault")
        return reply

    monkeypatch.setattr(ExportService, "Release", release)
    async with pair(folder) as both:
        prompt = make_prompt(40)
        result = await both.generate(prompt, "once")
        assert result.error is None
        assert result.output == expected(prompt)


async def test_a_report_of_damage_that_fails_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_release = ExportService.Release
    left = iter(range(1))

    async def release(self: ExportService, request: Any, context: Any) -> Any:
        if next(left, None) is not None:
            raise Unavailable("a fault")
        return await real_release(self, request, context)

    monkeypatch.setattr(ExportService, "Release", release)
    async with pair(folder) as both:
        flip_a_byte_of(both, monkeypatch, index=2)
        result = await both.generate(make_prompt(70), "damaged")
        assert "block 2" in str(result.error)
        await both.until_idle()
        assert both.prefill.load.blocks.cached == 2


async def test_a_revocation_by_another_life_of_prefill_ends_nothing(folder: Path, expected) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(40)
        result = await both.send(both.dispatch(prompt, "once", max_tokens=100))
        await both.until_decoding()
        later = both.prefill.address.epoch + 1
        await both.decode_imports.Revoke(
            kv_transfer_pb2.RevokeRequest(request_id="once", attempt=1, prefill_epoch=later)
        )
        await asyncio.wait_for(result.ended.wait(), 30)
        assert result.output == expected(prompt, 100)


async def test_an_announcement_without_an_answer_is_waited_for_as_long_as_its_lease_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 0.02)
    lose_last_answers(monkeypatch, 1, asyncio.Event())
    # Decode does not renew it so soon, and so is not the first to find out.
    async with pair(folder, decode={"lease_s": 600.0, "max_lease_s": 600.0}) as both:
        stuck = await read_slowly(both, monkeypatch)
        result = both.result("slow")
        assert not result.ended.is_set()
        let_leases_end(both.prefill, monkeypatch)
        await asyncio.wait_for(result.ended.wait(), 30)
        assert "lease is over" in str(result.error)
        await asyncio.wait_for(stuck.is_aborted.wait(), 30)
        stuck.may_settle.set()
