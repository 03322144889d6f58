"""What workers say of their work before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefill_svc import service as prefill_service
from tests.engine.harness import make_prompt
from tests.worker.pace import hold_steps
from tests.worker.pair import Pair, pair
from tests.worker.reads import until

SMALL: dict[str, object] = {"num_gpu_blocks_override": 16}


@asynccontextmanager
async def filled_decode(both: Pair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A sequence that leaves decode, with 16 blocks, no room for the next; it does not end."""
    go_on = hold_steps(both.decode, monkeypatch)
    await both.send(both.dispatch(make_prompt(200), "long", max_tokens=50))
    await both.until_decoding()
    await until(lambda: both.prefill.load.requests == 0)
    try:
        yield
    finally:
        both.abort("long")
        go_on()


async def test_prefill_reports_what_it_has_to_compute_and_not_what_it_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, decode=SMALL) as both:
        await both.generate(make_prompt(100), "before")
        async with filled_decode(both, monkeypatch):
            await both.send(both.dispatch([*make_prompt(100)[:96], *make_prompt(40)], "partly"))
            await both.send(both.dispatch(make_prompt(150), "new"))
            await until(lambda: both.prefill.load.requests == 2)
            assert both.prefill.load.queued_tokens == 40 + 150
            for name in ("partly", "new"):
                both.abort(name)


async def test_decode_reports_requests_whose_kv_is_still_to_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, decode=SMALL) as both, filled_decode(both, monkeypatch):
        await both.send(both.dispatch(make_prompt(150), "waits"))
        load = both.decode.load
        assert (load.requests, load.pending_blocks) == (2, 10)
        both.abort("waits")


async def test_what_waits_for_room_on_decode_is_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_service, "QUICK_GRANT_S", 0.0)
    few: dict[str, object] = {"max_num_batched_tokens": 160}
    async with (
        pair(folder, prefill=few, decode=SMALL) as both,
        filled_decode(both, monkeypatch),
    ):
        for name, num_tokens in (("asks", 150), ("asks-too", 150), ("behind", 140)):
            await both.send(both.dispatch(make_prompt(num_tokens), name))
        await until(lambda: both.prefill.load.held_tokens == 150 + 150 + 140)
        held = both.prefill.load
        assert (held.held_requests, held.held_blocks) == (1, 9)
        await until(lambda: both.decode.load.held_blocks == 10 + 10)
        for name in ("asks", "asks-too", "behind"):
            both.abort(name)


async def test_both_report_what_a_prompt_token_takes(folder: Path) -> None:
    async with pair(folder) as both:
        assert both.prefill.load.prefill_s_per_token == 0
        await both.generate(make_prompt(50), "handed-off")
        assert both.prefill.load.prefill_s_per_token > 0
        assert both.decode.load.prefill_s_per_token == 0
        local = await both.send_local(both.dispatch(make_prompt(50, seed=1), "local"))
        async with asyncio.timeout(30):
            await local.ended.wait()
        assert both.decode.load.prefill_s_per_token > 0
