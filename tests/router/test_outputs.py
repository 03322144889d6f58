import asyncio

import pytest

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from core.errors import InternalError, Unavailable
from core.tokenizer import Detokenizer
from router.output_text import OutputText
from router.outputs import OutputLog
from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer

END = inference_pb2.GenerateResponse(text="!", finish_reason=types_pb2.FINISH_REASON_LENGTH)
A, B, C = byte_tokenizer().encode("abc").ids


def output(index, *token_ids, **fields):
    return worker_pb2.SequenceOutput(output_index=index, token_ids=token_ids, **fields)


def output_text(log, stop=(), min_tokens=0):
    return OutputText(log, Detokenizer(byte_tokenizer()), stop, min_tokens)


async def read_all(messages):
    return [message async for message in messages]


async def test_a_late_subscriber_gets_everything_in_one_message():
    log = OutputLog("r")
    log.append(1, "one ")
    log.append(2, "two")
    log.finish(END)
    with log.subscribe() as messages:
        (message,) = await read_all(messages)
    assert (message.text, list(message.token_ids), message.output_index) == ("one two!", [1, 2], 0)
    assert message.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert message.request_id == "r"


async def test_a_slow_subscriber_gets_what_waits_in_one_message():
    log = OutputLog("r")
    with log.subscribe() as messages:
        log.append(1, "a")
        first = await anext(messages)
        log.append(2, "b")
        log.append(3, "c")
        second = await anext(messages)
    assert (first.text, first.output_index) == ("a", 0)
    assert (second.text, list(second.token_ids), second.output_index) == ("bc", [2, 3], 1)


async def test_a_long_backlog_comes_in_messages_of_bounded_size(monkeypatch):
    monkeypatch.setattr("router.outputs.MAX_TOKENS_PER_MESSAGE", 2)
    log = OutputLog("r")
    for token_id in range(5):
        log.append(token_id, str(token_id), types_pb2.TokenLogprobs(logprob=-token_id))
    log.finish(END)
    with log.subscribe() as messages:
        received = await read_all(messages)
    assert [list(message.token_ids) for message in received] == [[0, 1], [2, 3], [4]]
    assert [message.text for message in received] == ["01", "23", "4!"]
    assert [message.output_index for message in received] == [0, 2, 4]
    assert [len(message.logprobs) for message in received] == [2, 2, 1]


async def test_an_error_comes_after_the_tokens_that_are_there():
    log = OutputLog("r")
    log.append(1, "a")
    log.fail(Unavailable("gone"))
    with log.subscribe() as messages:
        assert (await anext(messages)).text == "a"
        with pytest.raises(Unavailable, match="gone"):
            await anext(messages)


async def test_subscribers_are_counted_while_they_listen():
    log = OutputLog("r")
    with log.subscribe(), log.subscribe():
        assert log.num_subscribers == 2
    assert log.num_subscribers == 0


async def test_a_subscriber_waits_for_what_has_not_come_yet():
    log = OutputLog("r")
    with log.subscribe() as messages:
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        log.append(1, "a")
        assert (await waiting).text == "a"


async def test_log_probabilities_stay_with_their_tokens():
    log = OutputLog("r")
    entries = [types_pb2.TokenLogprobs(logprob=-value) for value in (1, 2)]
    text = output_text(log)
    text.add(output(0, A, logprobs=entries[:1]))
    text.add(output(0, A, B, logprobs=entries))
    log.finish(END)
    with log.subscribe() as messages:
        (message,) = await read_all(messages)
    assert list(message.logprobs) == entries


def test_repeated_tokens_are_dropped():
    log = OutputLog("r")
    text = output_text(log)
    for item in (output(0, A), output(0, A), output(0, A, B), output(1, B, C)):
        assert not text.add(item)
    assert log.token_ids == [A, B, C]


def test_a_gap_in_the_tokens_is_a_workers_fault():
    with pytest.raises(InternalError, match="begins at token 2; the next is 0"):
        output_text(OutputLog("r")).add(output(2, A))


def test_tokens_after_a_stop_string_are_dropped():
    log = OutputLog("r")
    assert output_text(log, stop=("b",)).add(output(0, A, B, C))
    assert log.token_ids == [A, B]


def test_the_token_that_ends_the_text_is_not_part_of_it():
    log = OutputLog("r")
    text = output_text(log)
    text.add(output(0, A, B, finish_reason=types_pb2.FINISH_REASON_STOP))
    assert log.token_ids == [A, B]
    assert "".join(log._texts) + text.flush() == "a"


def test_the_last_token_is_part_of_the_text_when_only_the_length_ended_it():
    log = OutputLog("r")
    text = output_text(log)
    text.add(output(0, A, EOS_TOKEN_ID, B, finish_reason=types_pb2.FINISH_REASON_LENGTH))
    assert "".join(log._texts) + text.flush() == "ab"
