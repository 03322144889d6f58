"""Several choices of one request: each is the answer of a lone request with its seed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import types_pb2
from core.errors import InvalidArgument, Unavailable, from_exception
from core.sampling import choice_seed
from tests.engine.harness import make_prompt
from tests.worker.pace import hold_steps
from tests.worker.pair import Pair, pair
from tests.worker.reads import until
from tests.worker.results import Result

pytestmark = pytest.mark.usefixtures("scheduling")

SEED = 44
"""With it no draw of these tests falls near the border of two tokens, where rounding decides:
the nearest comes within 9e-6, and a prefill's KV differs from a decode's by some 3e-7."""
SEEDED = {"temperature": 1.0, "seed": SEED}
GREEDY: dict[str, object] = {}


async def lone(
    both: Pair, prompt: list[int], choice: int, sampling: dict[str, object], **fields: object
) -> Result:
    """The lone request that a choice must equal."""
    seed = choice_seed(int(sampling.get("seed", 0)), choice)  # type: ignore[call-overload]
    name = f"lone-{len(prompt)}-{choice}-{sum(prompt)}"
    result = await both.generate(prompt, name, sampling={**sampling, "seed": seed}, **fields)
    assert result.finish_reason
    return result


async def outputs_of_lone_ones(
    both: Pair, prompt: list[int], n: int, sampling: dict[str, object], **fields: object
) -> list[list[int]]:
    results = [await lone(both, prompt, choice, sampling, **fields) for choice in range(n)]
    return [result.output for result in results]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("n", "lengths"), [(2, (1, 15, 16, 17, 31, 50)), (8, (16, 17))])
async def test_choices_equal_lone_requests_around_every_block_border(
    folder: Path, n: int, lengths: tuple[int, ...], sampling: dict[str, object]
) -> None:
    async with pair(folder) as both:
        for length in lengths:
            prompt = make_prompt(length)
            results = await both.generate_choices(
                prompt, f"n{length}", max_tokens=20, n=n, sampling=sampling
            )
            expected = await outputs_of_lone_ones(both, prompt, n, sampling, max_tokens=20)
            assert [result.output for result in results] == expected
            assert len({tuple(output) for output in expected}) == (1 if sampling is GREEDY else n)
            assert [r.transferred_blocks for r in results] == [-(-length // 16)] * n


async def test_choices_share_the_full_blocks_and_copy_the_partial_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        go_on = hold_steps(both.decode, monkeypatch)
        prompt = make_prompt(40)
        await both.send_choices(both.dispatch(prompt, "many", max_tokens=400, n=4, sampling=SEEDED))
        await both.until_decoding()
        assert both.decode.load.running == 4
        # Two full blocks, and one for each choice, as long as none has filled it.
        assert both.decode.load.blocks.referenced == 6
        both.abort("many")
        go_on()


@pytest.mark.parametrize("max_recompute_tokens", [0, 1000])
async def test_a_small_decode_pool_preempts_choices_and_each_is_still_right(
    folder: Path, max_recompute_tokens: int
) -> None:
    settings: dict[str, object] = {
        "num_gpu_blocks_override": 12,
        "max_recompute_tokens": max_recompute_tokens,
    }
    async with pair(folder, decode=settings) as both:
        prompts = [make_prompt(20, seed) for seed in range(2)]
        outputs = await asyncio.gather(
            *(generate_with_preemptions(both, p, f"r{i}", 4, 40) for i, p in enumerate(prompts))
        )
        for prompt, found in zip(prompts, outputs, strict=True):
            expected = await outputs_of_lone_ones(both, prompt, 4, SEEDED, max_tokens=40)
            assert found == expected


async def generate_with_preemptions(
    both: Pair, prompt: list[int], name: str, n: int, num_outputs: int
) -> list[list[int]]:
    """What a router does: choices that decode gives back go on, each by itself."""
    fields = {"max_tokens": num_outputs, "n": n, "sampling": SEEDED}
    results = await both.generate_choices(prompt, name, **fields)
    return [
        await _finish(both, prompt, f"{name}/{choice}", choice, result, num_outputs)
        for choice, result in enumerate(results)
    ]


async def _finish(
    both: Pair, prompt: list[int], name: str, choice: int, result: Result, num_outputs: int
) -> list[int]:
    output = result.output
    sampling = {**SEEDED, "seed": choice_seed(SEED, choice)}
    for attempt in range(2, 50):
        if result.finish_reason:
            return output
        assert result.was_preempted
        fields = {"max_tokens": num_outputs, "sampling": sampling, "output_token_ids": output}
        result = await both.generate(prompt, name, attempt=attempt, **fields)
        output = output + result.output
    raise AssertionError("it never finished")


@pytest.mark.parametrize("max_recompute_tokens", [0, 1000])
async def test_a_prompt_that_leaves_no_room_for_copies_is_still_answered(
    folder: Path, max_recompute_tokens: int
) -> None:
    settings: dict[str, object] = {
        "num_gpu_blocks_override": 6,
        "max_recompute_tokens": max_recompute_tokens,
    }
    async with pair(folder, decode=settings) as both:
        prompt = make_prompt(70)
        outputs = await generate_with_preemptions(both, prompt, "full", 8, 12)
        assert outputs == await outputs_of_lone_ones(both, prompt, 8, SEEDED, max_tokens=12)


async def test_more_choices_than_places_in_the_batch_wait_with_their_blocks(folder: Path) -> None:
    async with pair(folder, decode={"max_num_seqs": 3}) as both:
        prompt = make_prompt(40)
        results = await both.generate_choices(prompt, "many", n=8, sampling=SEEDED)
        assert [r.output for r in results] == await outputs_of_lone_ones(both, prompt, 8, SEEDED)


async def test_a_choice_that_ends_with_its_first_token_is_not_handed_off(folder: Path) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(40)
        free = await outputs_of_lone_ones(both, prompt, 4, SEEDED)
        assert free[0][0] != free[1][0]
        sampling = {**SEEDED, "stop_token_ids": [free[0][0]]}
        results = await both.generate_choices(prompt, "stops", n=4, sampling=sampling)
        assert results[0].output == free[0][:1]
        assert results[0].finish_reason == types_pb2.FINISH_REASON_STOP
        expected = await outputs_of_lone_ones(both, prompt, 4, sampling, attempt=2)
        assert [r.output for r in results] == expected


async def test_when_every_choice_ends_with_its_first_token_nothing_is_handed_off(
    folder: Path,
) -> None:
    async with pair(folder) as both:
        results = await both.generate_choices(
            make_prompt(40), "short", n=4, max_tokens=1, sampling=SEEDED
        )
        assert [r.finish_reason for r in results] == [types_pb2.FINISH_REASON_LENGTH] * 4
        assert [r.transferred_blocks for r in results] == [0] * 4
        await both.until_idle()
        assert both.decode.load.blocks.cached == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1])
async def test_aborted_choices_end_alone_whenever_it_happens(folder: Path, delay_s: float) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(40)
        results = await both.send_choices(
            both.dispatch(prompt, "some", max_tokens=60, n=4, sampling=SEEDED)
        )
        await asyncio.sleep(delay_s)
        both.abort_choice("some", 0)
        both.abort_choice("some", 2)
        async with asyncio.timeout(60):
            await results[1].ended.wait()
            await results[3].ended.wait()
        await both.until_idle()
        expected = await outputs_of_lone_ones(both, prompt, 4, SEEDED, max_tokens=60)
        assert [results[1].output, results[3].output] == [expected[1], expected[3]]
        for choice in (0, 2):
            output = results[choice].output
            assert output == expected[choice][: len(output)]


async def test_a_request_whose_choices_are_all_aborted_before_the_commit_ends(
    folder: Path,
) -> None:
    async with pair(folder) as both:
        dispatch = both.dispatch(make_prompt(40), "none", n=2)
        results = await both.send_to_decode(dispatch)
        for choice in (0, 5, 1):
            both.abort_choice("none", choice)
        await until(lambda: both.decode.load.requests == 0)
        both.assign(both.prefill, dispatch)
        await until(lambda: results[0].error is not None)
        assert isinstance(results[0].error, Unavailable)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
async def test_an_abort_frees_all_choices(folder: Path, delay_s: float) -> None:
    async with pair(folder) as both:
        for index in range(3):
            dispatch = both.dispatch(
                make_prompt(40, index), f"r{index}", max_tokens=400, n=5, sampling=SEEDED
            )
            await both.send_choices(dispatch)
        await asyncio.sleep(delay_s)
        for index in range(3):
            both.abort(f"r{index}")
        await both.until_idle()


async def test_choices_have_log_probabilities_of_their_own(folder: Path) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(33)
        sampling = {**SEEDED, "logprobs": 2}
        results = await both.generate_choices(prompt, "many", n=3, sampling=sampling)
        for choice, result in enumerate(results):
            alone = await lone(both, prompt, choice, sampling)
            assert sorted(result.logprobs) == sorted(alone.logprobs) == list(range(8))
            for index, logprobs in alone.logprobs.items():
                assert result.logprobs[index].logprob == pytest.approx(logprobs.logprob, abs=1e-4)


async def test_several_choices_cannot_go_on_from_outputs(folder: Path) -> None:
    async with pair(folder) as both:
        with pytest.raises(Exception) as caught:
            await both.generate(make_prompt(5), "bad", n=2, output_token_ids=[1, 2])
        error = from_exception(caught.value)
        assert isinstance(error, InvalidArgument) and error.field == "n"
