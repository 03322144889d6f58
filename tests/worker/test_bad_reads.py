"""Reads that do not end, that are given up, and that bring other bytes than they should."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.service import ExportService
from tests.engine.harness import make_prompt
from tests.worker.pair import flip_a_byte_of, pair
from tests.worker.reads import StuckPull


async def test_a_read_that_is_given_up_is_aborted_and_its_blocks_are_nobodys_until_it_settles(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but the read's end may let the next one in, least of all a look every second.
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 60)
    async with pair(folder, decode={"num_gpu_blocks_override": 8}) as both:
        stuck = StuckPull()
        monkeypatch.setattr(both.decode.host.transport, "pull", lambda *_: stuck)
        await both.send(both.dispatch(make_prompt(100), "stuck"))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        both.abort("stuck")
        await asyncio.wait_for(stuck.is_aborted.wait(), 30)
        assert both.decode.load.blocks.quarantined == 7
        monkeypatch.undo()
        prompt = make_prompt(40)
        waiting = await both.send(both.dispatch(prompt, "waiting"))
        await asyncio.sleep(0.1)
        assert both.decode.load.blocks.quarantined == 7
        stuck.may_settle.set()
        await asyncio.wait_for(waiting.ended.wait(), 30)
        assert waiting.output == expected(prompt)


async def test_prefill_hears_of_damage_before_another_attempt_can_begin(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    real_release = ExportService.Release

    async def release(self: ExportService, request: Any, context: Any) -> Any:
        reply = await real_release(self, request, context)
        events.append("prefill has heard of it")
        return reply

    monkeypatch.setattr(ExportService, "Release", release)
    async with pair(folder) as both:
        flip_a_byte_of(both, monkeypatch, index=0)
        hub = both.decode.host.hub
        real_publish = hub.publish

        def publish(router_id: str, output: Any) -> None:
            if output.HasField("error"):
                events.append("the router is told")
            real_publish(router_id, output)

        monkeypatch.setattr(hub, "publish", publish)
        result = await both.generate(make_prompt(40), "damaged")
        assert result.error is not None
        await both.until_idle()
    assert events == ["prefill has heard of it", "the router is told"]
