import asyncio
import time

import pytest

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from core.detokenizer import detokenizers
from core.errors import InternalError, Unavailable
from router.follower import MAX_TOKENS_PER_CHUNK
from router.output_text import OutputText
from router.outputs import Outcome, OutputLog
from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer
from tests.router.recording_lane import RecordingLane

LENGTH = types_pb2.FINISH_REASON_LENGTH
OUTCOME = Outcome(inference_pb2.Usage(), inference_pb2.Route(), inference_pb2.Timing())
A, B, C = byte_tokenizer().encode("abc").ids


def output(index, *token_ids, **fields):
    return worker_pb2.SequenceOutput(output_index=index, token_ids=token_ids, **fields)


def output_text(log, stop=(), min_tokens=0):
    return OutputText(log.choices[0], detokenizers(byte_tokenizer())(), stop, min_tokens)


def end(log):
    for choice in log.choices:
        choice.finish(LENGTH, "!")
    log.finish(OUTCOME)


async def read_all(log):
    with log.follow() as follower:
        chunks = []
        while (chunk := await follower.next()) is not None:
            chunks.append(chunk)
        return chunks


async def test_a_late_follower_gets_everything_in_one_chunk():
    log = OutputLog()
    log.choices[0].append(1, "one ")
    log.choices[0].append(2, "two")
    end(log)
    (message,) = await read_all(log)
    assert (message.text, list(message.token_ids), message.output_index) == ("one two!", [1, 2], 0)
    assert message.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_slow_follower_gets_what_waits_in_one_chunk():
    log = OutputLog()
    with log.follow() as follower:
        log.choices[0].append(1, "a")
        first = await follower.next()
        log.choices[0].append(2, "b")
        log.choices[0].append(3, "c")
        second = await follower.next()
    assert (first.text, first.output_index) == ("a", 0)
    assert (second.text, list(second.token_ids), second.output_index) == ("bc", [2, 3], 1)


async def test_a_long_backlog_comes_in_chunks_of_bounded_size(monkeypatch):
    monkeypatch.setattr("router.outputs.MAX_TOKENS_PER_CHUNK", 2)
    log = OutputLog()
    for token_id in range(5):
        log.choices[0].append(token_id, str(token_id), types_pb2.TokenLogprobs(logprob=-token_id))
    end(log)
    received = await read_all(log)
    assert [list(message.token_ids) for message in received] == [[0, 1], [2, 3], [4]]
    assert [message.text for message in received] == ["01", "23", "4!"]
    assert [message.output_index for message in received] == [0, 2, 4]
    assert [len(message.logprobs) for message in received] == [2, 2, 1]


async def test_an_error_comes_after_the_tokens_that_are_there():
    log = OutputLog()
    log.choices[0].append(1, "a")
    log.fail(Unavailable("gone"))
    with log.follow() as follower:
        assert (await follower.next()).text == "a"
        with pytest.raises(Unavailable, match="gone"):
            await follower.next()


async def test_followers_are_counted_while_they_listen():
    log = OutputLog()
    with log.follow(), log.follow():
        assert log.num_followers == 2
    assert log.num_followers == 0


async def test_a_follower_waits_for_what_has_not_come_yet():
    log = OutputLog()
    with log.follow() as follower:
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        log.choices[0].append(1, "a")
        assert (await waiting).text == "a"


async def test_log_probabilities_stay_with_their_tokens():
    log = OutputLog()
    entries = [types_pb2.TokenLogprobs(logprob=-value) for value in (1, 2)]
    text = output_text(log)
    text.add(output(0, A, logprobs=entries[:1]))
    text.add(output(0, A, B, logprobs=entries))
    end(log)
    (message,) = await read_all(log)
    assert list(message.logprobs) == entries


def test_repeated_tokens_are_dropped():
    log = OutputLog()
    text = output_text(log)
    for item in (output(0, A), output(0, A), output(0, A, B), output(1, B, C)):
        assert not text.add(item)
    assert log.choices[0].token_ids == [A, B, C]


def test_a_gap_in_the_tokens_is_a_workers_fault():
    with pytest.raises(InternalError, match="begins at token 2; the next is 0"):
        output_text(OutputLog()).add(output(2, A))


def test_tokens_after_a_stop_string_are_dropped():
    log = OutputLog()
    assert output_text(log, stop=("b",)).add(output(0, A, B, C))
    assert log.choices[0].token_ids == [A, B]


def test_the_token_that_ends_the_text_is_not_part_of_it():
    log = OutputLog()
    text = output_text(log)
    text.add(output(0, A, B, finish_reason=types_pb2.FINISH_REASON_STOP))
    assert log.choices[0].token_ids == [A, B]
    assert "".join(log.choices[0].texts) + text.flush() == "a"


def test_the_last_token_is_part_of_the_text_when_only_the_length_ended_it():
    log = OutputLog()
    text = output_text(log)
    text.add(output(0, A, EOS_TOKEN_ID, B, finish_reason=types_pb2.FINISH_REASON_LENGTH))
    assert "".join(log.choices[0].texts) + text.flush() == "ab"


async def test_the_last_chunk_comes_together_with_the_outcome():
    log = OutputLog()
    with log.follow() as follower:
        log.choices[0].append(1, "a")
        log.choices[0].finish(LENGTH)
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        log.finish(OUTCOME)
        assert (await waiting).finish_reason == LENGTH


async def test_every_choice_gets_its_turn_and_its_own_end():
    log = OutputLog(n=2)
    first, second = log.choices
    with log.follow() as follower:
        first.append(1, "a")
        second.append(2, "b")
        assert [(await follower.next()).choice for _ in range(2)] == [0, 1]
        second.finish(LENGTH)
        ended = await follower.next()
        assert (ended.choice, ended.output_index, ended.token_ids) == (1, 1, [])
        assert ended.finish_reason == LENGTH
        assert not follower.is_at_end
        first.append(3, "c")
        first.finish(LENGTH)
        log.finish(OUTCOME)
        assert (await follower.next()).token_ids == [3]
        assert follower.is_at_end
        assert await follower.next() is None


async def test_a_follower_that_leaves_news_unread_is_told_from_one_that_waits():
    log, before = OutputLog(), time.monotonic()
    with log.follow() as slow, log.follow() as waiting:
        reading = asyncio.ensure_future(waiting.next())
        await asyncio.sleep(0)
        later = time.monotonic() + 50
        assert (slow.unread_s(later), waiting.unread_s(later)) == (0.0, 0.0)
        log.choices[0].append(1, "a")
        after = time.monotonic()
        await reading
        assert later - after <= slow.unread_s(later) <= later - before
        assert waiting.unread_s(later) == 0.0
        assert log.unread_s(later) == 0.0
    assert log.unread_s(later) == 0.0


async def pushing(log, lane):
    """A follower in a task of its own that pushes; it returns the chunk that comes after."""

    async def follow():
        with log.follow() as follower:
            await follower.push_text(lane)
            return await follower.next()

    task = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    return task


async def test_text_is_pushed_in_the_moment_in_which_it_comes():
    log, lane = OutputLog(), RecordingLane()
    log.choices[0].append(1, "a")
    log.choices[0].append(2, "b")
    task = await pushing(log, lane)
    assert lane.sent == ["ab"]
    log.choices[0].append(3, "c")
    assert lane.sent == ["ab", "c"]
    log.choices[0].append(4, "")
    log.choices[0].push(lane, 5, "d")
    assert lane.sent == ["ab", "c", "d"]
    end(log)
    last = await task
    assert (last.text, last.output_index, last.finish_reason) == ("!", 5, LENGTH)
    assert lane.sent == ["ab", "c", "d"]


async def test_what_comes_in_one_turn_of_the_loop_goes_in_one_piece():
    log, lane = OutputLog(), RecordingLane()
    task = await pushing(log, lane)
    log.choices[0].append(1, "a")
    log.choices[0].append(2, "b")
    await asyncio.sleep(0)
    log.choices[0].append(3, "c")
    await asyncio.sleep(0)
    assert lane.texts == ["ab", "c"]
    task.cancel()


async def test_a_second_follower_ends_nothing_for_the_first():
    log, lane = OutputLog(), RecordingLane()
    task = await pushing(log, lane)
    log.choices[0].append(1, "a")
    with log.follow() as second:
        assert log.choices[0].lane is None
        assert (await second.next()).text == "a"
        waiting = asyncio.ensure_future(second.next())
        await asyncio.sleep(0)
        log.choices[0].append(2, "b")
        assert lane.sent == ["a", "b"]
        assert (await waiting).text == "b"
    end(log)
    assert (await task).text == "!"


async def test_another_models_text_is_pushed_once():
    log, lane = OutputLog(), RecordingLane()
    task = await pushing(log, lane)
    log.choices[0].append_text("a")
    log.choices[0].append_text("b")
    assert lane.sent == ["ab"]
    end(log)
    assert (await task).text == "!"


async def test_another_models_text_waits_for_a_client_that_does_not_keep_up():
    log, lane = OutputLog(), RecordingLane()
    task = await pushing(log, lane)
    log.choices[0].append_text("a")
    lane.fill()
    log.choices[0].append_text("b")
    end(log)
    assert (await task).text == "b!"
    assert lane.sent == ["a"]


async def test_what_is_too_long_for_a_chunk_is_not_pushed_in_one_piece():
    log, written = OutputLog(), []
    for token_id in range(MAX_TOKENS_PER_CHUNK + 1):
        log.choices[0].append(token_id, "a")
    with log.follow() as follower:
        await follower.push_tokens(lambda *chunk: written.append(chunk))
        assert written == []
        assert len((await follower.next()).token_ids) == MAX_TOKENS_PER_CHUNK


async def test_a_client_that_keeps_up_again_goes_on_where_it_was():
    log, lane, again = OutputLog(), RecordingLane(), RecordingLane()

    async def follow():
        with log.follow() as follower:
            await follower.push_text(lane)
            taken = await follower.next()
            await follower.push_text(again)
            return taken, await follower.next()

    task = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    for token_id, text in enumerate(["a", "b", "", "c", "d"]):
        log.choices[0].append(token_id, text)
        if text == "a":
            lane.fill()
        await asyncio.sleep(0)
    end(log)
    taken, last = await task
    assert (lane.sent, taken.text, again.sent, last.text) == (["a"], "b", ["c", "d"], "!")


async def test_nothing_is_pushed_to_a_client_that_does_not_keep_up():
    log, lane = OutputLog(), RecordingLane()
    task = await pushing(log, lane)
    log.choices[0].append(1, "a")
    lane.fill()
    log.choices[0].append(2, "b")
    log.choices[0].append(3, "c")
    assert (await task).text == "bc"
    assert lane.sent == ["a"]


async def test_a_client_that_did_not_keep_up_before_is_pushed_nothing():
    log, lane = OutputLog(), RecordingLane()
    lane.is_full = True
    task = await pushing(log, lane)
    assert log.choices[0].lane is None
    log.choices[0].append(1, "a")
    assert (await task).text == "a"


async def test_a_client_whose_connection_fails_harms_only_itself():
    def write(*chunk):
        raise OSError("gone")

    log = OutputLog()
    with log.follow() as follower:
        pushed = asyncio.ensure_future(follower.push_tokens(write))
        await asyncio.sleep(0)
        log.choices[0].append(1, "a")
        with pytest.raises(OSError, match="gone"):
            await pushed
    end(log)
    assert [chunk.text for chunk in await read_all(log)] == ["a!"]


async def test_an_error_ends_the_pushing():
    log, lane = OutputLog(), RecordingLane()
    task = await pushing(log, lane)
    log.choices[0].append(1, "a")
    log.fail(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await task
    assert (lane.sent, lane.on_full) == (["a"], None)


async def test_choices_side_by_side_are_pulled():
    log, lane = OutputLog(2), RecordingLane()
    task = await pushing(log, lane)
    log.choices[1].append(1, "a")
    assert ((await task).choice, lane.sent) == (1, [])


async def test_the_last_token_and_the_end_come_together():
    log, lane = OutputLog(), RecordingLane()
    text = output_text(log)
    task = await pushing(log, lane)
    text.add(output(0, A, B, finish_reason=LENGTH))
    assert lane.sent == []
    end(log)
    assert (await task).text == "ab!"
