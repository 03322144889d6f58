"""What can go wrong with a prefix that is fetched costs no answer and no block."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import worker_pb2
from tests.engine.harness import make_prompt
from tests.worker.pace import let_time_pass
from tests.worker.pair import flip_a_byte_at, pair
from tests.worker.prefixes import PATIENCE_S, Fetches, held_by, set_compute_s, stick, two_pairs
from tests.worker.reads import lose_leases, until


async def test_a_prefix_whose_lease_was_over_before_the_read_is_computed(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        await one.until_idle()
        lose_leases(one.prefill, monkeypatch)
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 4))
        assert (result.output, result.cached_tokens) == (expected(prompt), 0)


async def test_blocks_that_did_not_arrive_as_they_are_are_computed_and_forgotten_at_their_source(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        flip_a_byte_at(two.prefill, monkeypatch, index=1)
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 4))
        assert (result.output, result.cached_tokens) == (expected(prompt), 0)
        await until(lambda: one.prefill.load.blocks.cached == 1)


async def test_a_read_that_takes_longer_than_computing_is_given_up_and_quarantined(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        stuck = stick(two, monkeypatch)
        set_compute_s(two, 10.0)
        result = await two.send(two.dispatch(prompt, "again"), held_by(one.prefill, 4))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        let_time_pass(monkeypatch, 10.0)
        await asyncio.wait_for(result.ended.wait(), 30)
        assert stuck.is_aborted.is_set()
        assert (result.output, result.cached_tokens) == (expected(prompt), 0)
        await one.until_idle()
        load = two.prefill.load
        assert (load.blocks.quarantined, load.imports) == (3, 1)
        stuck.may_settle.set()


async def test_what_is_held_of_a_prefix_is_not_evicted_for_the_rest_of_it(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = {"num_gpu_blocks_override": 8}
    async with two_pairs(folder, monkeypatch, second=second) as (one, two):
        prompt = make_prompt(80)
        await one.generate(prompt, "first")
        await two.generate(prompt[:32], "beginning")
        await two.generate(make_prompt(90), "fills the pool")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 5))
        assert (result.output, result.cached_tokens) == (expected(prompt), 64)


async def test_quarantined_blocks_take_their_share_from_later_fetches(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    monkeypatch.setattr("prefill_svc.prefix_fetch.PAUSE_S", 0.0)
    second = {"num_gpu_blocks_override": 12}
    async with two_pairs(folder, monkeypatch, second=second) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        stuck = stick(two, monkeypatch)
        set_compute_s(two, 10.0)
        source = held_by(one.prefill, 4)
        result = await two.send(two.dispatch(prompt, "stuck"), source)
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        let_time_pass(monkeypatch, 10.0)
        await asyncio.wait_for(result.ended.wait(), 30)
        other = make_prompt(65)
        assert (await two.generate(other, "next", source=source)).output == expected(other)
        assert fetches.num_wanted == [3]
        stuck.may_settle.set()


async def test_a_client_that_leaves_ends_a_fetch_on_both_sides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        await one.until_idle()
        stuck = stick(two, monkeypatch)
        await two.send(two.dispatch(prompt, "again"), held_by(one.prefill, 4))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        assert (one.prefill.load.exports, one.prefill.load.blocks.referenced) == (1, 3)
        two.abort("again")
        await asyncio.wait_for(stuck.is_aborted.wait(), 30)
        await one.until_idle()
        stuck.may_settle.set()


async def test_a_fetch_goes_on_for_the_prompt_that_stays(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        go_on = asyncio.Event()
        real_connected = two.prefill.host.peers.connected

        async def connected(address: worker_pb2.WorkerAddress) -> Any:
            await go_on.wait()
            return await real_connected(address)

        monkeypatch.setattr(two.prefill.host.peers, "connected", connected)
        source = held_by(one.prefill, 4)
        await two.send(two.dispatch(prompt, "leaves"), source)
        stays = await two.send(two.dispatch(prompt, "stays"), source)
        fetcher: Any = two.prefill.host.service._prefixes  # type: ignore[attr-defined]
        await until(lambda: [f.num_waiting for f in fetcher._running.values()] == [2])
        two.abort("leaves")
        await until(lambda: [f.num_waiting for f in fetcher._running.values()] == [1])
        go_on.set()
        await asyncio.wait_for(stays.ended.wait(), 30)
        assert (stays.output, stays.cached_tokens) == (expected(prompt), 48)
        assert fetches.num_wanted == [3]


async def test_a_source_that_is_gone_costs_no_answer_and_is_left_alone_for_a_while(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("prefill_svc.prefix_fetch.PAUSE_S", 600.0)
    async with pair(folder, number=1) as two:
        async with pair(folder) as one:
            source = held_by(one.prefill, 4)
        real_connected = two.prefill.host.peers.connected

        async def connected(address: worker_pb2.WorkerAddress) -> Any:
            asked.append(address.worker_id)
            return await real_connected(address)

        monkeypatch.setattr(two.prefill.host.peers, "connected", connected)
        set_compute_s(two, PATIENCE_S)
        for seed in range(2):
            prompt = make_prompt(64, seed)
            result = await two.generate(prompt, f"r{seed}", source=source)
            assert (result.output, result.cached_tokens) == (expected(prompt), 0)
    assert asked == ["p0"]
