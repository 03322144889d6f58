"""Single tokens of a choice, on their shortest way and on the others."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.v1 import types_pb2, worker_pb2
from core.detokenizer import detokenizers
from core.errors import InternalError
from router.choice import Choice, Pace
from router.metrics import RouterMetrics
from router.outputs import OutputLog
from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer
from tests.router.recording_lane import RecordingLane

TOKENIZER = byte_tokenizer()


def ids(text):
    return TOKENIZER.encode(text).ids


class Subject:
    """A choice whose text goes down `lane`, after a first token."""

    def __init__(self, *, stop=(), min_tokens=0):
        self.registry = CollectorRegistry()
        self.log, self.lane = OutputLog(), RecordingLane()
        resolved = SimpleNamespace(stop=stop, sampling=SimpleNamespace(min_tokens=min_tokens))
        pace = Pace(0.0, RouterMetrics(self.registry))
        self.choice = Choice(0, self.log, detokenizers(TOKENIZER)(), resolved, pace)
        self.stopped, self.errors = [], []
        self.take = self.choice.token_taker(lambda: self.stopped.append(True), self.errors.append)

    def receive(self, index, *token_ids, **fields):
        self.choice.receive(
            worker_pb2.SequenceOutput(output_index=index, token_ids=token_ids, **fields)
        )

    def take_all(self, token_ids, *, first):
        for index, token_id in enumerate(token_ids, first):
            self.take(index, token_id, float(index))


@asynccontextmanager
async def pushing(**options):
    """A Subject with a lane, which has its first token."""
    subject = Subject(**options)
    subject.receive(0, *ids("<"))

    async def follow():
        with subject.log.follow() as follower:
            await follower.push_text(subject.lane)

    task = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    assert subject.lane.sent == ["<"]
    yield subject
    task.cancel()


async def test_each_text_goes_down_the_lane():
    async with pushing() as s:
        s.take_all(ids("abc"), first=1)
        assert "".join(s.lane.sent) == "<abc"
        assert s.choice.token_ids == ids("<abc")


async def test_parts_of_a_character_wait_for_the_rest():
    async with pushing() as s:
        s.take_all(ids("é🙂"), first=1)
        s.take_all(ids("a"), first=7)
        assert "".join(s.lane.sent) == "<é🙂a"


async def test_a_part_of_a_character_in_a_message_keeps_its_place():
    async with pushing() as s:
        s.receive(1, ids("é")[0])
        s.take_all(ids("ab"), first=2)
        assert "".join(s.lane.sent) == "<\ufffdab"


async def test_what_is_known_already_is_left_out():
    async with pushing() as s:
        s.take_all(ids("ab"), first=1)
        s.take_all(ids("ab"), first=1)
        s.take_all(ids("bc"), first=2)
        assert ("".join(s.lane.sent), s.errors) == ("<abc", [])


async def test_a_gap_between_tokens_is_the_workers_fault():
    async with pushing() as s:
        s.take(2, *ids("b"), 0.0)
        assert [type(error) for error in s.errors] == [InternalError]
        assert s.lane.sent == ["<"]


async def test_a_token_that_cannot_be_is_the_workers_fault():
    async with pushing() as s:
        s.take(1, -1, 0.0)
        assert len(s.errors) == 1


async def test_special_tokens_leave_no_text():
    async with pushing() as s:
        s.take_all([EOS_TOKEN_ID, *ids("a")], first=1)
        assert s.lane.sent == ["<", "a"]
        assert s.choice.token_ids == [*ids("<"), EOS_TOKEN_ID, *ids("a")]


async def test_a_stop_string_ends_the_text_in_the_middle():
    async with pushing(stop=("bc",)) as s:
        s.take_all(ids("abc"), first=1)
        assert (s.lane.sent, s.stopped, s.choice.is_finished) == (["<", "a"], [True], True)
        assert s.log.choices[0].finish_reason == types_pb2.FINISH_REASON_STOP


async def test_a_stop_string_does_not_count_before_enough_tokens():
    async with pushing(stop=("b",), min_tokens=4) as s:
        s.take_all(ids("abcb"), first=1)
        assert ("".join(s.lane.sent), s.stopped) == ("<abc", [True])


async def test_every_time_between_tokens_is_counted_once():
    async with pushing() as s:
        s.take_all(ids("aéb"), first=1)
        s.take_all(ids("b"), first=4)  # known
        assert s.registry.get_sample_value("baton_inter_token_latency_seconds_count") == 4


@given(text=st.text(max_size=30), cuts=st.lists(st.booleans(), max_size=60))
def test_all_ways_of_a_token_give_the_same_text(text, cuts):
    asyncio.run(check_all_ways(text, cuts))


async def check_all_ways(text, cuts):
    token_ids = ids(text)
    async with pushing() as s:
        for index, token_id in enumerate(token_ids, 1):
            is_alone = index >= len(cuts) or cuts[index]
            if is_alone:
                s.take(index, token_id, 0.0)
            else:
                s.receive(index, token_id)
        assert s.errors == []
        assert "".join(s.lane.sent) == "<" + text
