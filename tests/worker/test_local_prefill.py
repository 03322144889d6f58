"""Requests that decode computes itself, with a real worker and a small random model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from core.errors import InvalidArgument, Unavailable, from_exception
from tests import tiny_models
from tests.engine.harness import make_prompt, reference_tokens
from tests.worker.pace import hold_steps
from tests.worker.pair import Pair, pair
from tests.worker.results import Result

pytestmark = pytest.mark.usefixtures("scheduling")


@pytest.fixture(scope="module")
def expected():  # type: ignore[no-untyped-def]
    model = tiny_models.random_model(tiny_models.VARIANTS["llama"])
    return lambda prompt, num_outputs=8: reference_tokens(model, prompt, num_outputs)


async def ended(result: Result) -> Result:
    async with asyncio.timeout(60):
        await result.ended.wait()
    return result


async def alone(both: Pair, prompt: list[int], name: str, **fields: object) -> Result:
    """Generates on decode only, to the end."""
    dispatch = both.dispatch(prompt, name, **fields)  # type: ignore[arg-type]
    return await ended(await both.send_local(dispatch))


async def test_tokens_equal_those_of_transformers_at_every_block_boundary(
    folder: Path, expected
) -> None:  # type: ignore[no-untyped-def]
    async with pair(folder) as both:
        for length in (1, 15, 16, 17, 32, 50):
            result = await alone(both, make_prompt(length), f"r{length}")
            assert result.output == expected(make_prompt(length))
            assert (result.cached_tokens, result.transferred_blocks) == (0, 0)


async def test_a_prompt_that_is_held_whole_computes_its_last_block_again(
    folder: Path, expected
) -> None:  # type: ignore[no-untyped-def]
    async with pair(folder) as both:
        await alone(both, make_prompt(48), "first")
        again = await alone(both, make_prompt(48), "again")
        assert again.cached_tokens == 32
        assert again.output == expected(make_prompt(48))


async def test_the_next_turn_of_a_handed_off_conversation_is_computed_from_its_end(
    folder: Path, expected
) -> None:  # type: ignore[no-untyped-def]
    async with pair(folder) as both:
        first = await both.generate(make_prompt(40), "first", max_tokens=10)
        turn = [*make_prompt(40), *first.output, 7, 8, 9]
        second = await alone(both, turn, "second")
        assert second.cached_tokens == 48
        assert second.output == expected(turn)


async def test_a_prompt_is_computed_in_small_chunks_beside_running_sequences(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    async with pair(folder, decode={"local_prefill_chunk": 8}) as both:
        steps: list[list[int]] = []
        observe = both.decode.host.service.on_scheduled

        def on_scheduled(batch):  # type: ignore[no-untyped-def]
            steps.append([item.num_tokens for item in batch.sequences])
            return observe(batch)

        both.decode.host.service.on_scheduled = on_scheduled  # type: ignore[method-assign]
        running = await both.send_local(both.dispatch(make_prompt(10), "running", max_tokens=60))
        await running.first_token.wait()
        go_on = hold_steps(both.decode, monkeypatch)
        result = await both.send_local(both.dispatch(make_prompt(30), "chunked"))
        go_on()
        await asyncio.gather(ended(result), ended(running))
        assert result.output == expected(make_prompt(30))
        assert running.output == expected(make_prompt(10), 60)
        mixed = [tokens for tokens in steps if len(tokens) == 2 and max(tokens) > 1]
        assert mixed == [[1, 8], [1, 8], [1, 8], [1, 6]]


async def test_handed_off_and_local_requests_share_one_line_for_room(
    folder: Path, expected
) -> None:  # type: ignore[no-untyped-def]
    async with pair(folder, decode={"num_gpu_blocks_override": 16}) as both:
        prompts = [make_prompt(60 + index, seed=index) for index in range(10)]
        results = await asyncio.gather(
            *(
                alone(both, prompt, f"r{i}") if i % 2 else both.generate(prompt, f"r{i}")
                for i, prompt in enumerate(prompts)
            )
        )
        assert [r.output for r in results] == [expected(prompt) for prompt in prompts]


async def test_preempted_local_sequences_still_give_the_right_tokens(
    folder: Path, expected
) -> None:  # type: ignore[no-untyped-def]
    small = {"num_gpu_blocks_override": 12, "max_recompute_tokens": 200}
    async with pair(folder, decode=small) as both:
        prompts = [make_prompt(30, seed=index) for index in range(4)]
        results = await asyncio.gather(
            *(alone(both, prompt, f"r{i}", max_tokens=50) for i, prompt in enumerate(prompts))
        )
        assert [r.output for r in results] == [expected(prompt, 50) for prompt in prompts]


@pytest.mark.parametrize("moment", ["waiting", "running"])
async def test_an_abort_frees_everything(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, decode={"num_gpu_blocks_override": 16}) as both:
        running = await both.send_local(both.dispatch(make_prompt(150), "running", max_tokens=90))
        await running.first_token.wait()
        go_on = hold_steps(both.decode, monkeypatch)
        await both.send_local(both.dispatch(make_prompt(150, seed=1), "waiting"))
        assert both.decode.load.pending_blocks == 10
        assert both.decode.load.requests == 2
        both.abort(moment)
        both.abort("running" if moment == "waiting" else "waiting")
        go_on()


async def test_a_deadline_and_a_router_that_leaves_free_everything(folder: Path) -> None:
    async with pair(folder) as both:
        late = await both.send_local(
            both.dispatch(make_prompt(30), "late", max_tokens=900, timeout_s=0.05)
        )
        await ended(late)
        assert "time is over" in str(late.error)
        await both.send_local(both.dispatch(make_prompt(30), "left", max_tokens=900))
        await both.detach()


async def test_prefill_is_refused_a_request_that_is_computed_on_decode(folder: Path) -> None:
    async with pair(folder) as both:
        await both.send_local(both.dispatch(make_prompt(30), "local", max_tokens=400))
        with pytest.raises(grpc.RpcError) as caught:
            await both.ask_for_grant("local")
        assert isinstance(from_exception(caught.value), Unavailable)
        both.abort("local")


async def test_several_choices_and_prompt_logprobs_need_a_prefill_worker(folder: Path) -> None:
    async with pair(folder) as both:
        for field, fields in (("n", {"n": 2}), ("prompt_logprobs", {"prompt_logprobs": 0})):
            with pytest.raises(InvalidArgument) as caught:
                await both.send_local(both.dispatch(make_prompt(10), field, **fields))
            assert caught.value.field == field
