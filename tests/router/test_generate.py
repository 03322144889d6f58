"""One request through a real router and fake workers."""

import asyncio
import gc
import time

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2
from core.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    TransferError,
    Unavailable,
)
from router.dispatch import Attempt
from tests.model_folder import EOS_TOKEN_ID
from tests.router.fakes import HEARTBEAT_S, Script
from tests.router.stack import REPLY, prompt, stack, wait_for

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def serve(tmp_path, redis_server):
    """`async with serve(...) as s`: a stack on the test's Redis."""
    return lambda **options: stack(tmp_path / "tiny", redis_server.url, **options)


async def test_an_answer_streams_text_tokens_usage_route_and_timing(serve):
    async with serve() as s:
        started = time.monotonic()
        answer = await s.ask(prompt("Where?"))
        took_s = time.monotonic() - started
    assert answer.text == "Paris, of course."
    assert answer.token_ids == REPLY
    assert answer.last.finish_reason == STOP
    assert answer.last.usage == inference_pb2.Usage(prompt_tokens=6, completion_tokens=18)
    assert answer.last.route == inference_pb2.Route(
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        cached_tokens=4,
        transferred_blocks=3,
        attempts=1,
    )
    assert 0 < answer.last.timing.ttft_s <= answer.last.timing.total_s < took_s


async def test_an_attempt_and_its_prompt_are_freed_without_a_search_for_garbage(serve):
    async with serve() as s:
        gc.collect()
        gc.disable()
        try:
            await s.ask(prompt("Where?"))
            # By type(): isinstance would ask every object of the process for its __class__, and
            # some answer with a warning.
            await wait_for(lambda: not any(type(o) is Attempt for o in gc.get_objects()))
        finally:
            gc.enable()


async def test_workers_get_a_complete_dispatch(serve):
    async with serve() as s:
        await s.ask(prompt("ab", max_tokens=3, ignore_eos=True, top_k=7))
        (told_prefill,), (told_decode,) = s.prefills[0].dispatches, s.decodes[0].dispatches
    assert told_prefill == told_decode
    assert len(told_prefill.prompt_token_ids) == 2
    assert told_prefill.attempt == 1
    assert not told_prefill.eos_token_ids
    assert (told_prefill.sampling.max_tokens, told_prefill.sampling.top_k) == (3, 7)
    assert 0 < told_prefill.sampling.seed < 2**63
    assert 500 < told_prefill.timeout_s <= 600


async def test_without_max_tokens_the_rest_of_the_context_is_allowed(serve):
    async with serve() as s:
        await s.ask(prompt("ab"))
        assert s.decodes[0].dispatches[0].sampling.max_tokens == 126
        assert list(s.decodes[0].dispatches[0].eos_token_ids) == [EOS_TOKEN_ID]


async def test_the_first_token_may_be_the_last(serve):
    async with serve() as s:
        answer = await s.ask(prompt(max_tokens=1))
    assert (answer.text, answer.last.finish_reason) == ("P", LENGTH)
    assert answer.last.route.transferred_blocks == 0


async def test_tokens_of_decode_may_overtake_those_of_prefill(serve):
    script = Script(reply=list(REPLY), decode_first=True)
    async with serve(script=script) as s:
        answer = await s.ask(prompt())
    assert answer.token_ids == REPLY
    assert answer.last.route.cached_tokens == 4


async def test_a_stop_string_ends_the_answer_and_frees_both_workers(serve):
    async with serve() as s:
        answer = await s.ask(prompt(stop=[", of"]))
        await wait_for(lambda: s.prefills[0].aborts and s.decodes[0].aborts)
    assert (answer.text, answer.last.finish_reason) == ("Paris", STOP)
    assert answer.token_ids == REPLY[:9]
    assert answer.last.usage.completion_tokens == 9


async def test_a_stop_string_does_not_count_before_min_tokens(serve):
    async with serve() as s:
        answer = await s.ask(prompt(stop=["r"], min_tokens=5))
    assert answer.text == "Paris, of cou"


async def test_text_held_back_for_a_stop_string_comes_in_the_end(serve):
    async with serve() as s:
        assert (await s.ask(prompt(stop=[".x"]))).text == "Paris, of course."


async def test_chat_and_token_ids_are_inputs_too(serve):
    chat = inference_pb2.GenerateRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="hi")]
    )
    ids = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
    async with serve() as s:
        await s.ask(chat)
        await s.ask(ids)
        told = [list(item.prompt_token_ids) for item in s.prefills[0].dispatches]
    assert len(told[0]) == len("user:hi\nassistant:") + 1
    assert told[1] == [1, 2, 3]


@pytest.mark.parametrize(
    "fault",
    [TransferError("the lease did not hold"), ResourceExhausted("full"), Unavailable("gone")],
)
async def test_a_retry_continues_without_a_missing_or_repeated_token(serve, fault):
    script = Script(reply=list(REPLY), num_decode_tokens=4, fault=fault, num_faults=2)
    async with serve(script=script) as s:
        answer = await s.ask(prompt())
        first, second, third = s.decodes[0].dispatches
    assert answer.token_ids == REPLY
    assert answer.text == "Paris, of course."
    assert answer.last.route.attempts == 3
    assert list(first.output_token_ids) == []
    assert list(second.output_token_ids) == REPLY[:5]
    assert list(third.output_token_ids) == REPLY[:10]
    assert first.sampling == second.sampling == third.sampling
    assert first.request_id == second.request_id


async def test_workers_that_do_not_fit_together_are_the_operators_business(serve, caplog):
    fault = FailedPrecondition("fingerprints of decode-0 and prefill-0 differ")
    script = Script(reply=list(REPLY), num_decode_tokens=0, fault=fault)
    async with serve(script=script) as s:
        with pytest.raises(FailedPrecondition, match="do not fit together; the router's log"):
            await s.ask(prompt())
    assert "fingerprints of decode-0 and prefill-0 differ" in caplog.text


async def test_after_three_attempts_the_client_gets_the_error(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=0, fault=Unavailable("gone"))
    async with serve(script=script) as s:
        with pytest.raises(Unavailable, match="have failed; send it again"):
            await s.ask(prompt())
        assert [item.attempt for item in s.decodes[0].dispatches] == [1, 2, 3]


async def test_preemptions_are_no_failures_however_many(serve):
    async with serve(script=Script(REPLY, num_decode_tokens=1, preempts=True, num_faults=6)) as s:
        answer = await s.ask(prompt("Where?"))
        assert not s.prefills[0].aborts
    assert answer.token_ids == REPLY
    assert answer.text == "Paris, of course."
    assert answer.last.route.attempts == 7


async def test_an_error_that_no_retry_cures_is_not_retried(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=0, fault=InternalError("a bug"))
    async with serve(script=script) as s:
        with pytest.raises(InternalError, match="a bug"):
            await s.ask(prompt())
        assert len(s.decodes[0].dispatches) == 1
        await wait_for(lambda: s.prefills[0].aborts and s.decodes[0].aborts)


async def test_a_worker_that_refuses_is_avoided_in_the_next_attempt(serve):
    async with serve(num_decode=2) as s:
        s.decodes[0].refusal = ResourceExhausted("full")
        for _ in range(5):
            answer = await s.ask(prompt())
            assert answer.last.route.decode_worker == "decode-1"


async def test_a_killed_decode_worker_is_replaced_in_mid_answer(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=4, num_faults=1)
    async with serve(script=script, num_decode=2) as s:
        asking = asyncio.create_task(s.ask(prompt()))
        await wait_for(lambda: any(worker.dispatches for worker in s.decodes))
        victim = next(worker for worker in s.decodes if worker.dispatches)
        await asyncio.sleep(0.1)
        await victim.stop()
        answer = await asking
    assert answer.token_ids == REPLY
    assert answer.last.route.attempts == 2
    assert answer.last.route.decode_worker != victim.record.worker_id


async def test_a_silent_worker_counts_as_unreachable(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=4, num_faults=1)
    # The others have 30 times as long as they need, or a busy machine would count them as lost.
    async with serve(script=script, num_decode=2, worker_silence_s=30 * HEARTBEAT_S) as s:
        asking = asyncio.create_task(s.ask(prompt()))
        await wait_for(lambda: any(worker.dispatches for worker in s.decodes))
        victim = next(worker for worker in s.decodes if worker.dispatches)
        victim.is_silent = True
        answer = await asking
    assert answer.token_ids == REPLY
    assert answer.last.route.decode_worker != victim.record.worker_id


async def test_prefill_may_die_once_decode_has_taken_over(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=4)
    async with serve(script=script) as s:
        messages = aiter(s.stub.Generate(prompt()))
        num_tokens = 0
        while num_tokens < 5:
            num_tokens += len((await anext(messages)).token_ids)
        await s.prefills[0].stop()
        dispatch = s.decodes[0].dispatches[0]
        for index in range(5, len(REPLY)):
            s.decodes[0].send(dispatch, s.decodes[0].script_output(dispatch, index))
        rest = [message async for message in messages]
    assert rest[-1].route.attempts == 1
    assert rest[-1].usage.completion_tokens == len(REPLY)


async def test_a_request_waits_for_a_worker_that_is_being_replaced(serve):
    async with serve() as s:
        await s.decodes[0].stop()
        asking = asyncio.create_task(s.ask(prompt()))
        await asyncio.sleep(0.3)
        s.decodes[0].record.epoch += 1
        await s.decodes[0].start(s.registry)
        assert (await asking).text == "Paris, of course."


async def test_the_wait_for_a_worker_has_an_end(serve):
    async with serve(worker_wait_s=0.3) as s:
        await s.decodes[0].stop()
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await s.ask(prompt())


async def test_cancelling_the_call_aborts_on_both_workers(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=2)
    async with serve(script=script) as s:
        call = s.stub.Generate(prompt())
        await call.read()
        call.cancel()
        await wait_for(lambda: s.prefills[0].aborts and s.decodes[0].aborts)
        dispatch = s.decodes[0].dispatches[0]
        assert s.decodes[0].aborts == [(dispatch.request_id, 1)]
        await wait_for(lambda: s.router._table.num_running == 0)
        status = await s.stub.GetStatus(inference_pb2.GetStatusRequest())
        assert status.router.num_requests == 0


async def test_the_clients_deadline_aborts_on_both_workers(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=2)
    async with serve(script=script) as s:
        with pytest.raises(DeadlineExceeded):
            await s.ask(prompt(), timeout=2)
        # gRPC rounds up what it sends.
        assert 0 < s.decodes[0].dispatches[0].timeout_s <= 2.1
        await wait_for(lambda: s.prefills[0].aborts and s.decodes[0].aborts)


async def test_the_routers_own_time_limit_holds_without_a_deadline(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=2)
    async with serve(script=script, request_timeout_s=0.3) as s:
        with pytest.raises(DeadlineExceeded):
            await s.ask(prompt())


async def test_a_repeated_call_gets_the_same_answer_and_computes_nothing(serve):
    request = prompt()
    request.request_id = "mine"
    async with serve() as s:
        first = await s.ask(request)
        second = await s.ask(request)
        assert len(s.decodes[0].dispatches) == 1
    assert second.token_ids == first.token_ids == REPLY
    assert second.text == first.text
    assert second.last.route == first.last.route


async def test_a_call_that_joins_a_running_one_gets_everything_from_the_start(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=4)
    request = prompt()
    request.request_id = "mine"
    async with serve(script=script) as s:
        first, second = s.stub.Generate(request), s.stub.Generate(request)
        first_ids, second_ids = [], []
        while len(first_ids) < 5:
            first_ids += (await first.read()).token_ids
        while len(second_ids) < 5:
            second_ids += (await second.read()).token_ids
        assert first_ids == second_ids == REPLY[:5]
        first.cancel()
        await asyncio.sleep(0.1)
        assert s.decodes[0].aborts == []
        second.cancel()
        await wait_for(lambda: s.decodes[0].aborts)
        assert len(s.decodes[0].dispatches) == 1


async def test_another_request_under_a_used_id_is_refused(serve):
    async with serve() as s:
        request = prompt("one")
        request.request_id = "mine"
        await s.ask(request)
        request.prompt = "two"
        with pytest.raises(AlreadyExists) as caught:
            await s.ask(request)
    assert caught.value.field == "request_id"


async def test_a_failed_request_may_be_asked_again_under_its_id(serve):
    fault = InternalError("a bug")
    script = Script(reply=list(REPLY), num_decode_tokens=0, fault=fault, num_faults=1)
    request = prompt()
    request.request_id = "mine"
    async with serve(script=script) as s:
        with pytest.raises(InternalError):
            await s.ask(request)
        script.num_faults = 0
        assert (await s.ask(request)).token_ids == REPLY


async def test_a_wrong_request_is_refused_and_no_worker_hears_of_it(serve):
    too_long = prompt("x" * 1000)
    garbage = prompt("\x00\x1f" * 500_000)
    huge = prompt("x" * (5 << 20))
    async with serve() as s:
        with pytest.raises(InvalidArgument, match="prompt has 1000 tokens or more; the limit is"):
            await s.ask(too_long)
        with pytest.raises(InvalidArgument, match="the limit is 127"):
            await s.ask(garbage)
        with pytest.raises(InvalidArgument, match=r"bytes; the limit is 4194304"):
            await s.ask(huge)
        assert s.prefills[0].dispatches == s.decodes[0].dispatches == []
        assert (await s.ask(prompt())).token_ids == REPLY


async def test_a_message_of_almost_grpcs_own_limit_is_refused_by_us(serve):
    async with serve() as s:
        call = s.stub.Generate(prompt("x" * (31 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_whose_client_does_not_read_is_ended(serve):
    script = Script(reply=REPLY, num_decode_tokens=2)
    async with serve(script=script, client_stall_s=0.05) as s:
        deadline = asyncio.get_running_loop().time() + 60
        with s.router._table.follow(prompt(), deadline) as follower:
            await wait_for(lambda: s.prefills[0].aborts and s.decodes[0].aborts)
        assert isinstance(follower.log.error, Cancelled)
