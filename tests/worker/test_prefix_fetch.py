"""A prefill worker takes a prefix over that another worker has computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import worker_pb2
from kvtransfer.link import LinkEstimate
from kvtransfer.service import ExportService
from prefill_svc.prefix_fetch import is_cheaper
from tests.engine.harness import make_prompt
from tests.worker.pair import Pair, Worker, flip_a_byte_at, pair
from tests.worker.reads import StuckPull, until

PATIENCE_S = 30.0


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
    monkeypatch.setattr("prefill_svc.prefix_reader.MAX_FETCH_S", PATIENCE_S)
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


@pytest.mark.parametrize(
    ("compute_s", "cheaper"), [(0.1, False), (0.103, False), (0.104, True), (5.0, True)]
)
def test_fetching_is_cheaper_when_the_bytes_and_two_messages_take_less_than_computing(
    compute_s: float, cheaper: bool
) -> None:
    link = LinkEstimate(bytes_per_s=1e6, overhead_s=1e-3)
    assert is_cheaper(100_000, link, compute_s) is cheaper


def test_what_is_not_known_yet_is_tried() -> None:
    assert is_cheaper(100_000, LinkEstimate(), compute_s=1e-6)
    assert is_cheaper(100_000, LinkEstimate(bytes_per_s=1.0), compute_s=0.0)


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_a_prefix_of_another_prefill_worker_is_not_computed_again(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async with two_pairs(folder, monkeypatch, transport) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 4))
        assert result.output == expected(prompt)
        # The last token is computed, for its logits, and into a block of its own.
        assert result.cached_tokens == 48


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_a_conversation_goes_on_with_what_a_decode_worker_holds_of_it(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async with two_pairs(folder, monkeypatch, transport) as (one, two):
        prompt = make_prompt(40)
        answer = await one.generate(prompt, "first turn", max_tokens=30)
        prompt += [*answer.output, *make_prompt(10)]
        result = await two.generate(prompt, "second turn", source=held_by(one.decode, 4))
        assert result.output == expected(prompt)
        assert result.cached_tokens == 64


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_the_partner_of_a_hand_off_may_be_the_source(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async with two_pairs(folder, monkeypatch, transport) as (_, two):
        prompt = make_prompt(40)
        answer = await two.generate(prompt, "first turn", max_tokens=30)
        prompt += [*answer.output, *make_prompt(10)]
        result = await two.generate(prompt, "second turn", source=held_by(two.decode, 4))
        assert result.output == expected(prompt)
        assert (result.cached_tokens, result.transferred_blocks) == (64, 1)


async def test_only_what_is_missing_is_fetched_and_no_more_than_the_source_seems_to_hold(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(150)
        await one.generate(prompt, "first")
        await two.generate(prompt[:40], "beginning")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 7))
        assert result.output == expected(prompt)
        assert (fetches.num_wanted, result.cached_tokens) == ([5], 112)


async def test_a_source_that_holds_less_than_was_thought_gives_what_it_has(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(100)
        await one.generate(prompt[:40], "first")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 6))
        assert result.output == expected(prompt)
        assert result.cached_tokens == 32


async def test_prompts_that_share_a_prefix_fetch_it_once(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prefix = make_prompt(64)
        await one.generate(prefix, "first")
        prompts = [prefix + make_prompt(20, seed) for seed in range(4)]
        results = await asyncio.gather(
            *(
                two.generate(prompt, f"r{index}", source=held_by(one.prefill, 4))
                for index, prompt in enumerate(prompts)
            )
        )
        assert [result.output for result in results] == [expected(prompt) for prompt in prompts]
        assert [result.cached_tokens for result in results] == [64] * 4
        assert fetches.num_wanted == [4]


async def test_a_prefix_larger_than_the_room_for_fetches_comes_in_portions(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    second = {"num_gpu_blocks_override": 12}
    async with two_pairs(folder, monkeypatch, second=second) as (one, two):
        prompt = make_prompt(125)
        await one.generate(prompt, "first")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 7))
        assert result.output == expected(prompt)
        assert (fetches.num_wanted, result.cached_tokens) == ([3, 3, 1], 112)


async def test_a_prompt_with_log_probabilities_of_its_own_is_computed_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        source = held_by(one.prefill, 4)
        result = await two.generate(prompt, "scored", source=source, prompt_logprobs=0)
        assert len(result.prompt_logprobs) == 63
        assert fetches.num_wanted == []


async def test_prompts_of_another_tenant_find_nothing(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first", hash_salt="a")
        source = held_by(one.prefill, 4)
        result = await two.generate(prompt, "again", source=source, hash_salt="b")
        assert (result.output, result.cached_tokens) == (expected(prompt), 0)


async def test_a_prefix_whose_lease_was_over_before_the_read_is_computed(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        await one.until_idle()
        exports = one.prefill.host.service._exporter.exports  # type: ignore[attr-defined]
        real_release = exports.release

        def release_late(key: tuple[str, int]) -> bool:
            exports._exports[key].expires_at = 0.0
            return real_release(key)

        monkeypatch.setattr(exports, "release", release_late)
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
        set_compute_s(two, 0.2)
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 4))
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
        set_compute_s(two, 0.2)
        source = held_by(one.prefill, 4)
        await two.generate(prompt, "stuck", source=source)
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
