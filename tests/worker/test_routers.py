"""Routers that leave, and one that was never there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import worker_pb2
from core.errors import Unavailable
from kvtransfer.peers import Peer
from tests.engine.harness import make_prompt
from tests.worker.pace import StepsSince
from tests.worker.pair import ROUTER, pair
from tests.worker.reads import until


async def test_a_router_that_is_not_attached_is_refused(folder: Path) -> None:
    async with pair(folder) as both:
        dispatch = both.dispatch(make_prompt(5), "stranger")
        dispatch.router_id = "nobody"
        for worker in (both.decode, both.prefill):
            with pytest.raises(Unavailable, match="nobody is not attached"):
                await worker.host.service.accept(
                    worker_pb2.Assignment(dispatch=dispatch, partner=both.prefill.address)
                )
            assert len(worker.host.service._requests) == 0  # type: ignore[attr-defined]


async def test_prefill_ends_what_a_router_that_left_has_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        # Prefill computes nothing, so that only this ends the request.
        monkeypatch.setattr(both.prefill.host.loop, "add", lambda _: None)
        await both.send(both.dispatch(make_prompt(40), "orphan"))
        await until(lambda: both.decode.load.imports == 1)
        await both.detach(0)
        await both.until_idle()


async def test_decode_ends_what_a_router_that_left_has_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        await both.send(both.dispatch(make_prompt(40), "orphan", max_tokens=460))
        await both.until_decoding()
        steps = StepsSince(both.decode.host.service, "abort_router", both.decode, monkeypatch)
        await both.detach(1)
        await both.until_idle()
        assert steps.has_begun and steps.count < 5


async def test_a_router_that_leaves_during_the_handshake_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        host = both.decode.host
        real_connected = host.peers.connected

        def has_left() -> bool:
            try:
                host.hub.require(ROUTER)
            except Unavailable:
                return True
            return False

        has_ended = asyncio.Event()

        async def connected(address: worker_pb2.WorkerAddress) -> Peer:
            try:
                await both.detach()
                await until(has_left)
                return await real_connected(address)
            finally:
                has_ended.set()

        monkeypatch.setattr(host.peers, "connected", connected)
        both.assign(both.decode, both.dispatch(make_prompt(40), "late"))
        async with asyncio.timeout(30):
            await has_ended.wait()
        await both.until_idle()
        assert len(host.service._requests) == 0  # type: ignore[attr-defined]
