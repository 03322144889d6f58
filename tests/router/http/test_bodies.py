"""Bodies on their way to the socket."""

import asyncio
from types import SimpleNamespace

from router.http.bodies import ChunkedBody
from router.text_lane import TextBatch


def cycle(written, name="", *, write_paused=False, http_version="1.1"):
    transport = SimpleNamespace(
        write=lambda data: written.append((name, data)), is_closing=lambda: False
    )
    flow = SimpleNamespace(write_paused=write_paused)
    scope = {"http_version": http_version}
    return Cycle(transport=transport, flow=flow, scope=scope)


class Cycle(SimpleNamespace):
    """Stands for uvicorn's, which bodies refer to weakly."""


def body_of(cycle, batch):
    body = ChunkedBody(cycle, batch)
    body.kept = cycle
    return body


async def test_what_many_bodies_send_in_one_turn_is_written_together_and_in_order():
    written, batch = [], TextBatch()
    bodies = [body_of(cycle(written, name), batch) for name in "ab"]
    for body in bodies:
        body.text_lane(b"<", b">").put('é"')
    assert written == []
    await asyncio.sleep(0)
    chunk = '7\r\n<"é\\"">\r\n'.encode()
    assert written == [("a", b"8" + chunk[1:]), ("b", b"8" + chunk[1:])]


async def test_flushing_keeps_the_order_before_what_is_sent_another_way():
    written, batch = [], TextBatch()
    subject = cycle(written)
    body = body_of(subject, batch)
    body.text_lane(b"", b"").put("1")
    body.flush(1, is_last=False)
    subject.transport.write(b"2")
    await asyncio.sleep(0)
    assert [data for _, data in written] == [b'3\r\n"1"\r\n', b"2"]


async def test_to_http_1_0_the_text_goes_without_chunks():
    written = []
    subject = cycle(written, http_version="1.0")
    body_of(subject, TextBatch()).text_lane(b"<", b">").put("1")
    await asyncio.sleep(0)
    assert written == [("", b'<"1">')]


def test_to_http_1_0_only_the_last_part_ends_the_body():
    subject = cycle([], http_version="1.0")
    body = body_of(subject, TextBatch())
    body.flush(100, is_last=False)
    body.flush(10, is_last=False)
    assert subject.expected_content_length > 1 << 60  # enough for both, whichever goes first
    body.flush(7, is_last=True)
    assert subject.expected_content_length == 7


async def test_a_closed_transport_that_says_so_is_no_fault(caplog):
    def fail(data):
        raise RuntimeError("closed")

    subject, aborted = cycle([]), []
    subject.transport.write, subject.transport.abort = fail, lambda: aborted.append(True)
    body_of(subject, TextBatch()).text_lane(b"", b"").put("1")
    subject.transport.is_closing = lambda: True
    await asyncio.sleep(0)
    assert (caplog.records, aborted) == ([], [])


async def test_a_full_socket_is_told():
    full = []
    subject = cycle([], write_paused=True)
    body = body_of(subject, TextBatch())
    body.full()  # nobody sends texts yet
    lane = body.text_lane(b"", b"")
    body.full()  # nobody asked
    lane.on_full = lambda: full.append(True)
    body.full()
    assert (lane.is_full, full) == (True, [True])
    subject.flow.write_paused = False
    assert not lane.is_full


async def test_a_full_socket_is_told_to_every_prompt_of_a_request():
    told = []
    body = body_of(cycle([]), TextBatch())
    for prompt in "ab":
        body.text_lane(b"", b"").on_full = lambda prompt=prompt: told.append(prompt)
    body.full()
    assert told == ["a", "b"]


async def test_lanes_that_are_over_are_not_kept():
    body = body_of(cycle([]), TextBatch())
    for _ in range(3):
        body.text_lane(b"", b"")
    assert len(body._lanes) == 1


async def test_a_connection_that_fails_keeps_nobody_else_from_writing():
    def fail(data):
        raise RuntimeError("closed")

    written, batch, aborted = [], TextBatch(), []
    broken = cycle([])
    broken.transport.write, broken.transport.abort = fail, lambda: aborted.append(True)
    for subject in (broken, cycle(written)):
        body_of(subject, batch).text_lane(b"", b"").put("1")
    await asyncio.sleep(0)
    assert (len(written), aborted) == (1, [True])


def test_what_is_sent_in_one_write_goes_in_one_piece():
    written = []
    subject = cycle(written)
    transport = subject.transport
    transport.close = lambda: written.append("closed")
    with body_of(subject, TextBatch()).in_one_write():
        subject.transport.write(b"head ")
        subject.transport.write(b"first")
        subject.transport.close()
        assert written == [("", b"head first"), "closed"]
    assert written == [("", b"head first"), "closed"]
    assert subject.transport is transport


def test_a_client_that_is_gone_gets_no_head():
    written = []
    subject = cycle(written)
    subject.transport.is_closing = lambda: True
    with body_of(subject, TextBatch()).in_one_write():
        subject.transport.write(b"head")
    assert written == []
