"""Prefill → transfer → decode with real workers and a small random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import kv_transfer_pb2, types_pb2, worker_pb2
from core.errors import (
    FailedPrecondition,
    HandOffGivenUp,
    InvalidArgument,
    Unavailable,
    from_exception,
)
from decode_svc.service import DecodeService
from engine.batch import StepResult
from tests.engine.harness import make_prompt
from tests.worker.pace import hold_steps
from tests.worker.pair import Pair, flip_a_byte_of, is_idle, pair, worker
from tests.worker.reads import let_leases_end, lose_leases, read_slowly, until

pytestmark = pytest.mark.usefixtures("scheduling")


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_tokens_equal_those_of_transformers_at_every_block_boundary(
    folder: Path, expected, transport: str
) -> None:
    async with pair(folder, transport) as both:
        for length in (1, 15, 16, 17, 32, 50):
            prompt = make_prompt(length)
            result = await both.generate(prompt, f"r{length}")
            assert result.output == expected(prompt)
            assert result.finish_reason == types_pb2.FINISH_REASON_LENGTH
            assert result.transferred_blocks == -(-length // 16)


async def test_prefill_may_hear_of_a_request_before_decode_does(folder: Path, expected) -> None:
    async with pair(folder) as both:
        dispatch = both.dispatch(make_prompt(40), "early")
        both.assign(both.prefill, dispatch)
        await until(lambda: bool(both.decode.host.service._requests._awaited))  # type: ignore[attr-defined]
        (result,) = await both.send_to_decode(dispatch)
        await result.ended.wait()
        assert result.output == expected(make_prompt(40))


async def test_a_request_that_only_prefill_heard_of_ends_with_its_abort(folder: Path) -> None:
    async with pair(folder) as both:
        both.assign(both.prefill, both.dispatch(make_prompt(40), "half"))
        await until(lambda: bool(both.decode.host.service._requests._awaited))  # type: ignore[attr-defined]
        both.abort("half")
        await until(lambda: not both.decode.host.service._requests._awaited)  # type: ignore[attr-defined]


async def test_of_what_decode_does_not_take_prefill_leaves_the_reason_to_decode(
    folder: Path,
) -> None:
    async with pair(folder) as both:
        both.assign(both.prefill, both.dispatch(make_prompt(40), "refused"))
        await until(lambda: bool(both.decode.host.service._requests._awaited))  # type: ignore[attr-defined]
        both.decode.host.service.abort(("refused", 1))
        await until(lambda: ("refused", 1) in both._results)
        result = both.result("refused")
        await until(lambda: result.error is not None)
        assert isinstance(result.error, HandOffGivenUp)


async def test_a_prompt_in_several_chunks_is_announced_as_it_is_computed(
    folder: Path, expected
) -> None:
    chunks = {"max_num_batched_tokens": 32, "max_num_seqs": 32}
    async with pair(folder, prefill=chunks) as both:
        prompt = make_prompt(150)
        assert (await both.generate(prompt, "long")).output == expected(prompt)


async def test_mixed_lengths_at_once_are_all_right(folder: Path, expected) -> None:
    async with pair(folder) as both:
        prompts = [make_prompt(length) for length in range(1, 90, 7)]
        results = await asyncio.gather(
            *(both.generate(prompt, f"r{i}") for i, prompt in enumerate(prompts))
        )
        assert [r.output for r in results] == [expected(prompt) for prompt in prompts]


async def test_a_repeated_prompt_computes_one_block_and_moves_only_what_decode_lacks(
    folder: Path, expected
) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(64)
        first = await both.generate(prompt, "first")
        second = await both.generate(prompt, "second")
        assert (first.cached_tokens, first.transferred_blocks) == (0, 4)
        assert (second.cached_tokens, second.transferred_blocks) == (48, 0)
        assert second.output == first.output == expected(prompt)


async def test_a_small_decode_pool_preempts_and_still_gives_the_right_tokens(
    folder: Path, expected
) -> None:
    async with pair(folder, decode={"num_gpu_blocks_override": 12}) as both:
        prompts = [make_prompt(20, seed) for seed in range(6)]
        results = await asyncio.gather(
            *(both.generate(prompt, f"r{i}", max_tokens=50) for i, prompt in enumerate(prompts))
        )
        assert [r.output for r in results] == [expected(prompt, 50) for prompt in prompts]


async def test_a_small_prefill_pool_serves_many_requests_one_after_the_other(
    folder: Path, expected
) -> None:
    async with pair(folder, prefill={"num_gpu_blocks_override": 6}) as both:
        prompts = [make_prompt(60, seed) for seed in range(6)]
        results = await asyncio.gather(
            *(both.generate(prompt, f"r{i}") for i, prompt in enumerate(prompts))
        )
        assert [r.output for r in results] == [expected(prompt) for prompt in prompts]


async def test_a_request_that_ends_with_its_first_token_is_not_handed_off(folder: Path) -> None:
    async with pair(folder) as both:
        result = await both.generate(make_prompt(40), "one", max_tokens=1)
        assert len(result.output) == 1
        assert result.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_second_attempt_goes_on_where_the_first_one_stopped(folder: Path, expected) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(33)
        whole = expected(prompt, 12)
        result = await both.generate(
            prompt, "again", max_tokens=12, attempt=2, output_token_ids=whole[:5]
        )
        assert result.tokens == dict(list(enumerate(whole))[5:])


async def _start_long(both: Pair, name: str) -> None:
    await both.send(both.dispatch(make_prompt(40), name, max_tokens=400))


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.02, 0.05, 0.2])
async def test_an_abort_at_any_time_frees_everything(
    folder: Path, expected, transport: str, delay_s: float
) -> None:
    async with pair(folder, transport) as both:
        await asyncio.gather(*(_start_long(both, f"r{i}") for i in range(4)))
        await asyncio.sleep(delay_s)
        for i in range(4):
            both.abort(f"r{i}")
        await both.until_idle()
        prompt = make_prompt(40)
        assert (await both.generate(prompt, "next")).output == expected(prompt)


async def test_an_abort_of_an_unknown_request_is_harmless_and_refuses_it_later(
    folder: Path,
) -> None:
    async with pair(folder) as both:
        both.abort("ghost")
        both.abort("ghost")
        with pytest.raises(Exception, match="aborted before it arrived"):
            await both.generate(make_prompt(5), "ghost")


async def test_a_router_that_leaves_frees_what_it_sent(folder: Path, expected) -> None:
    async with pair(folder) as both:
        await asyncio.gather(*(_start_long(both, f"r{i}") for i in range(4)))
        await both.detach()
        await both.until_idle()
        await both.attach()
        prompt = make_prompt(40)
        assert (await both.generate(prompt, "next")).output == expected(prompt)


async def test_a_request_over_its_time_ends_with_deadline_exceeded(folder: Path) -> None:
    async with pair(folder) as both:
        result = await both.generate(make_prompt(5), "slow", max_tokens=400, timeout_s=0.05)
        assert type(result.error).__name__ == "DeadlineExceeded"


async def test_a_lost_lease_fails_the_attempt_and_leaves_nothing_behind(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        lose_leases(both.prefill, monkeypatch)
        result = await both.generate(make_prompt(40), "late")
        assert type(result.error).__name__ == "Unavailable"
        assert "lease" in str(result.error)
        await both.until_idle()
        monkeypatch.undo()
        prompt = make_prompt(40)
        assert (await both.generate(prompt, "next")).output == expected(prompt)


async def test_exports_that_nobody_fetches_expire_without_traffic(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(_: object) -> None: ...

    async with pair(folder) as both:
        stuck = await read_slowly(both, monkeypatch)
        await until(lambda: len(both.prefill.host.service._requests) == 0)  # type: ignore[attr-defined]
        reader = both.decode.host.service._reader  # type: ignore[attr-defined]
        monkeypatch.setattr(reader, "give_up_export", say_nothing)
        both.decode.host.service.abort(("slow", 1))
        stuck.may_settle.set()
        await until(lambda: is_idle(both.decode))
        assert both.prefill.load.exports == 1
        let_leases_end(both.prefill, monkeypatch)
        await both.until_idle()


async def test_workers_that_do_not_fit_together_are_refused_with_both_values(
    folder: Path,
) -> None:
    async with (
        pair(folder) as both,
        worker(folder, DecodeService, "d1", block_size=32) as other,
    ):
        channel_pair = Pair(both.prefill, other)
        await channel_pair.attach()
        try:
            with pytest.raises(Exception, match="do not fit") as caught:
                await channel_pair.send(channel_pair.dispatch(make_prompt(5), "x"))
            error = from_exception(caught.value)
            assert isinstance(error, FailedPrecondition)
            assert "block_size: own 32, peer 16" in error.message or (
                "block_size: own 16, peer 32" in error.message
            )
        finally:
            await channel_pair.close()


@pytest.mark.parametrize("length", [0, 512, 600])
async def test_a_dispatch_that_cannot_be_served_is_refused_by_decode_at_once(
    folder: Path, length: int
) -> None:
    async with pair(folder) as both:
        with pytest.raises(Exception) as caught:
            await both.send(both.dispatch([1] * length, "bad"))
        error = from_exception(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "prompt_token_ids"


async def test_a_step_that_fails_on_the_device_fails_its_requests_only(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        runner = both.decode.host.engine.runner

        def broken(batch):  # type: ignore[no-untyped-def]
            raise RuntimeError("device lost")

        monkeypatch.setattr(type(runner), "execute", broken)
        result = await both.generate(make_prompt(20), "broken")
        assert result.error is not None
        monkeypatch.undo()
        await both.until_idle()
        prompt = make_prompt(20)
        assert (await both.generate(prompt, "next")).output == expected(prompt)


async def test_a_sequence_without_finite_logits_fails_alone(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        runner = type(both.decode.host.engine.runner)
        real_execute = runner.execute

        def execute(self, batch, after_layer=None):  # type: ignore[no-untyped-def]
            result = real_execute(self, batch, after_layer)
            broken = [item.sequence.request_id == "broken" for item in batch.sequences]
            kept = (None if b else t for b, t in zip(broken, result.tokens, strict=True))
            return StepResult(tuple(kept))

        monkeypatch.setattr(runner, "execute", execute)
        prompts = [make_prompt(20, seed) for seed in range(3)]
        good, broken, other = await asyncio.gather(
            both.generate(prompts[0], "good", max_tokens=40),
            both.generate(prompts[1], "broken", max_tokens=40),
            both.generate(prompts[2], "other", max_tokens=40),
        )
        assert "not finite" in str(broken.error)
        assert good.output == expected(prompts[0], 40)
        assert other.output == expected(prompts[2], 40)


async def test_a_repeated_dispatch_starts_nothing_twice(folder: Path, expected) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(40)
        dispatch = both.dispatch(prompt, "twice")
        result = await both.send(dispatch)
        both.assign(both.decode, dispatch)
        await result.ended.wait()
        both.assign(both.decode, dispatch)
        both.assign(both.prefill, dispatch)
        await both.until_idle()
        assert result.output == expected(prompt)
        assert result.error is None


@pytest.mark.parametrize(
    ("epochs_later", "refusal"), [(0, "had its room"), (1, "has restarted since")]
)
async def test_a_late_question_for_room_disturbs_nobody(
    folder: Path, expected, epochs_later: int, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(40)
        go_on = hold_steps(both.decode, monkeypatch)
        result = await both.send(both.dispatch(prompt, "once", max_tokens=60))
        await both.until_decoding()
        question = kv_transfer_pb2.GrantRequest(
            request_id="once",
            attempt=1,
            prefill_epoch=both.prefill.address.epoch,
            decode_epoch=both.decode.address.epoch + epochs_later,
        )
        with pytest.raises(grpc.RpcError, match=refusal):
            await both.decode_imports.Grant(question)
        assert both.decode.load.imports == 0
        go_on()
        await result.ended.wait()
        assert result.output == expected(prompt, 60)


async def test_a_damaged_block_fails_the_attempt_and_is_forgotten_on_both_sides(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(70)
        flip_a_byte_of(both, monkeypatch, index=2)
        result = await both.generate(prompt, "damaged")
        assert isinstance(result.error, Unavailable)
        assert "block 2" in result.error.message
        monkeypatch.undo()
        await both.until_idle()
        # Blocks 0 and 1 are trusted; 2, 3 and the partial one are not cached any more.
        assert both.prefill.load.blocks.cached == 2
        assert both.decode.load.blocks.cached == 0
        again = await both.generate(prompt, "again")
        assert again.output == expected(prompt)
        assert again.cached_tokens == 32


async def test_without_verification_nobody_computes_digests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, decode={"kv_verify": "off"}) as both:
        flip_a_byte_of(both, monkeypatch, index=0)
        result = await both.generate(make_prompt(70), "unverified")
        assert result.error is None


async def test_sampled_verification_finds_damage_in_the_blocks_that_it_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, decode={"kv_verify": "sampled"}) as both:
        flip_a_byte_of(both, monkeypatch, index=3)
        # One block in eight is sampled, at an offset that each request draws.
        offsets = iter(range(8))
        monkeypatch.setattr("worker.settings.random.randrange", lambda _: next(offsets))
        results = [await both.generate(make_prompt(70, seed), f"r{seed}") for seed in range(8)]
        found = [index for index, result in enumerate(results) if result.error is not None]
        assert found == [3]


async def test_a_long_sequence_that_is_preempted_goes_back_to_the_router(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, object] = {"num_gpu_blocks_override": 12, "max_recompute_tokens": 30}
    async with pair(folder, decode=settings) as both:
        prompts = [make_prompt(20, seed) for seed in range(6)]
        go_on = hold_steps(both.decode, monkeypatch)
        generating = asyncio.gather(
            *(_with_preemptions(both, prompt, f"r{i}", 50) for i, prompt in enumerate(prompts))
        )
        # Together they need 15 blocks.
        scheduler = both.decode.host.engine.scheduler
        await until(lambda: scheduler.num_running + scheduler.num_waiting >= 3)
        go_on()
        results = await generating
        assert [output for output, _ in results] == [expected(prompt, 50) for prompt in prompts]
        assert sum(num_attempts > 1 for _, num_attempts in results) > 0


async def _with_preemptions(
    both: Pair, prompt: list[int], name: str, num_outputs: int
) -> tuple[list[int], int]:
    """What a router does: another attempt with the output so far, until one finishes."""
    output: list[int] = []
    for attempt in range(1, 50):
        result = await both.generate(
            prompt, name, max_tokens=num_outputs, attempt=attempt, output_token_ids=output
        )
        output += result.output
        if result.finish_reason:
            return output, attempt
        assert result.was_preempted
    raise AssertionError("it never finished")


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_groups_of_layers_travel_while_the_rest_is_computed(
    folder: Path, expected, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_svc.service.layer_boundaries", lambda chunk, link: {1, 2})
    parts = []
    chunks = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
    async with pair(folder, transport, prefill=chunks) as both:
        hand_off = both.decode.host.service._hand_off  # type: ignore[attr-defined]
        real_announce = hand_off.announce

        def announce(request) -> None:  # type: ignore[no-untyped-def]
            parts.append((list(request.block_ids), request.part_offset, request.part_bytes))
            real_announce(request)

        monkeypatch.setattr(hand_off, "announce", announce)
        prompts = [make_prompt(length) for length in (150, 40, 64)]
        results = await asyncio.gather(
            *(both.generate(prompt, f"r{i}") for i, prompt in enumerate(prompts))
        )
        assert [r.output for r in results] == [expected(prompt) for prompt in prompts]
        assert sum(r.transferred_blocks for r in results) == 10 + 3 + 4
    assert any(num_bytes for _, _, num_bytes in parts)


async def test_an_abort_between_two_groups_of_layers_frees_everything(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_svc.service.layer_boundaries", lambda chunk, link: {1, 2})
    async with pair(folder) as both:
        for delay_s in (0.005, 0.01, 0.015, 0.02, 0.03):
            name = f"aborted-{delay_s}"
            await both.send(both.dispatch(make_prompt(400, int(1e4 * delay_s)), name))
            await asyncio.sleep(delay_s)
            both.abort(name)
            await both.until_idle()
        prompt = make_prompt(40)
        assert (await both.generate(prompt, "next")).output == expected(prompt)


async def test_a_pool_that_quarantine_eats_up_makes_the_worker_leave(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 0.02)
    settings: dict[str, object] = {"num_gpu_blocks_override": 20, "max_quarantined_share": 0.4}
    async with pair(folder, decode=settings) as both:
        pool = both.decode.host.engine.pool
        stuck = pool.allocate(9)
        assert stuck is not None
        go_on = hold_steps(both.decode, monkeypatch)
        running = await both.send(both.dispatch(make_prompt(20), "running", max_tokens=120))
        await both.until_decoding()
        waiting = await both.send(both.dispatch(make_prompt(150), "waiting"))
        pool.quarantine(stuck)
        await waiting.ended.wait()
        assert isinstance(waiting.error, Unavailable)
        assert both.decode.host.state == types_pb2.WORKER_STATE_DRAINING
        with pytest.raises(Exception, match="takes no new requests"):
            await both.generate(make_prompt(5), "refused")
        go_on()
        await running.ended.wait()
        assert running.output == expected(make_prompt(20), 120)
        await asyncio.wait(both.decode.host.vital, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in both.decode.host.vital if task.done()]
        assert "never settle" in str(ended[0].exception())
        pool.settle(stuck)


async def test_a_worker_whose_quarantine_settles_in_time_goes_on(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 0.02)
    settings: dict[str, object] = {"num_gpu_blocks_override": 20, "max_quarantined_share": 0.4}
    async with pair(folder, decode=settings) as both:
        pool = both.decode.host.engine.pool
        go_on = hold_steps(both.decode, monkeypatch)
        await both.send(both.dispatch(make_prompt(20), "running", max_tokens=120))
        await both.until_decoding()
        stuck = pool.allocate(9)
        assert stuck is not None
        pool.quarantine(stuck)
        await until(lambda: both.decode.host.state == types_pb2.WORKER_STATE_DRAINING)
        pool.settle(stuck)
        await until(lambda: both.decode.host.state == types_pb2.WORKER_STATE_READY)
        go_on()
        prompt = make_prompt(40)
        assert (await both.generate(prompt, "next")).output == expected(prompt)


async def one_message(
    message: worker_pb2.RouterMessage,
) -> AsyncIterator[worker_pb2.RouterMessage]:
    yield message


async def test_a_router_that_means_a_former_life_cannot_attach(folder: Path) -> None:
    async with pair(folder) as both:
        request = worker_pb2.AttachRequest(router_id="late", epoch=both.decode.address.epoch - 1)
        call = both.workers[1].Attach(one_message(worker_pb2.RouterMessage(attach=request)))
        with pytest.raises(Exception, match="is in life") as caught:
            async for _ in call:
                pass
        assert isinstance(from_exception(caught.value), Unavailable)
