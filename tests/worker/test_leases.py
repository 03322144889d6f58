"""What keeps a lease alive, and what the end of one does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import kv_transfer_pb2
from tests.engine.harness import make_prompt
from tests.worker.pace import StepsSince, hold_steps
from tests.worker.pair import Pair, pair
from tests.worker.reads import exports_of, read_slowly, until

pytestmark = pytest.mark.usefixtures("scheduling")

RENEWING = {"lease_s": 0.03}
"""Of decode: it renews every 10 ms what prefill, by its own setting, leases for 10 s."""


class Renewals:
    """Counts what decode asks of prefill, and grants it."""

    def __init__(self) -> None:
        self.count = 0

    async def count_those_of(self, both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        peer = await both.decode.host.peers.connected(both.prefill.address)
        monkeypatch.setattr(peer.exports, "Renew", self._renew)

    async def _renew(self, request: Any, timeout: float) -> Any:
        self.count += 1
        return kv_transfer_pb2.RenewReply(lease_held=True)


async def test_decode_renews_the_lease_while_it_reads_and_no_longer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals = Renewals()
    async with pair(folder, decode=RENEWING) as both:
        await renewals.count_those_of(both, monkeypatch)
        stuck = await read_slowly(both, monkeypatch)
        await until(lambda: renewals.count >= 3)
        both.abort("slow")
        stuck.may_settle.set()
        await both.until_idle()
        count = renewals.count
        await asyncio.sleep(0.1)
        assert renewals.count == count


async def test_decode_renews_nothing_that_it_has_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals = Renewals()
    async with pair(folder, decode=RENEWING) as both:
        await renewals.count_those_of(both, monkeypatch)
        go_on = hold_steps(both.decode, monkeypatch)
        await both.send(both.dispatch(make_prompt(40), "running"))
        await both.until_decoding()
        count = renewals.count
        await asyncio.sleep(0.1)
        assert renewals.count == count
        go_on()


async def test_a_read_whose_lease_is_over_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, decode=RENEWING) as both:
        stuck = await read_slowly(both, monkeypatch)
        monkeypatch.setattr(exports_of(both.prefill), "renew", lambda _: False)
        await asyncio.wait_for(stuck.is_aborted.wait(), 30)
        result = both.result("slow")
        await asyncio.wait_for(result.ended.wait(), 30)
        assert "lease" in str(result.error)
        stuck.may_settle.set()


async def test_decode_gives_up_what_prefill_says_nothing_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 0.02)
    async with pair(folder, decode={"import_timeout_s": 0.2}) as both:
        monkeypatch.setattr(both.prefill.host.loop, "add", lambda _: None)
        result = await both.generate(make_prompt(40), "silent")
        assert "nothing was heard from prefill" in str(result.error)
        both.abort("silent")


async def test_an_aborted_sequence_is_computed_no_further(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        await both.send(both.dispatch(make_prompt(40), "long", max_tokens=400))
        await both.until_decoding()
        steps = StepsSince(both.decode.host.loop, "abort", both.decode, monkeypatch)
        both.abort("long")
        await both.until_idle()
        assert steps.has_begun and steps.count < 5


async def test_an_abort_ends_the_lease_of_a_request_that_prefill_is_done_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        stuck = await read_slowly(both, monkeypatch)
        service = both.prefill.host.service
        await until(lambda: len(service._requests) == 0)  # type: ignore[attr-defined]
        assert both.prefill.load.exports == 1
        service.abort(("slow", 1))
        assert both.prefill.load.exports == 0
        stuck.may_settle.set()
        both.abort("slow")


async def test_an_export_that_decode_gives_up_makes_room_for_the_next_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 60)
    async with pair(folder, prefill={"max_export_share": 0.05}) as both:
        stuck = await read_slowly(both, monkeypatch)
        await both.send(both.dispatch(make_prompt(50), "next"))
        await until(lambda: both.prefill.load.queue_depth == 1)
        both.decode.host.service.abort(("slow", 1))
        await until(lambda: both.prefill.load.queue_depth == 0)
        stuck.may_settle.set()
        both.abort("next")
