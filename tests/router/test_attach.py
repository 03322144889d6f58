"""One worker's link: what it hears and says, and how it tells that the worker is away."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.address import port_of
from core.errors import Unavailable
from core.rpc import RpcServer
from router.attach import WorkerLink
from router.routing import Work
from tests.pki import Authority, identity
from tests.router.stack import wait_for

KEY = ("r", 1)
COLUMNS = ("stream_ids", "output_indexes", "token_ids")
READY = worker_pb2.WorkerMessage(state=types_pb2.WORKER_STATE_READY, load=types_pb2.Load(running=3))


class Worker(worker_pb2_grpc.WorkerServicer):
    """Says what is put into `say`; an exception ends the stream, None ends it well."""

    def __init__(self):
        self.say = asyncio.Queue()
        self.say.put_nowait(READY)
        self.heard = []
        self.num_attached = 0

    async def Attach(self, requests, context):
        self.num_attached += 1
        reading = asyncio.create_task(self._read(requests))
        try:
            while (message := await self.say.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            reading.cancel()
            self.num_attached -= 1

    async def _read(self, requests):
        async for message in requests:
            self.heard.append(message)

    async def GetWorkerStatus(self, request, context):
        return worker_pb2.WorkerStatus(id="decode-0")


@asynccontextmanager
async def serve(worker, port=0, tls=None):
    server = RpcServer("127.0.0.1", port, tls)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc_server)
    address = await server.start([])
    try:
        yield address
    finally:
        await server.stop(0)


class Sink:
    def __init__(self):
        self.outputs = []
        self.lost = []

    def on_output(self, link, output):
        self.outputs.append(output)

    def on_lost(self, link, error):
        self.lost.append(error.message)


@asynccontextmanager
async def linked(address, *, tls=None, silence_s=60.0):
    """A link that runs, and a sink of its dispatch KEY. In the end no task of it is left."""
    before = asyncio.all_tasks()
    record = types_pb2.WorkerRecord(worker_id="decode-0", epoch=7, address=address)
    link, sink = WorkerLink(record, "router-0", silence_s, _ignore, _ignore, tls), Sink()
    link.subscribe(make_dispatch(), sink, Work(sequences=1))
    running = asyncio.create_task(link.run())
    try:
        yield link, sink
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not link.is_attached
        assert [task for task in asyncio.all_tasks() - before if "WorkerLink" in repr(task)] == []


def _ignore(*_):
    """Nobody observes."""


def make_dispatch(num_tokens=1):
    return worker_pb2.Dispatch(
        request_id="r", attempt=1, stream_id=5, prompt_token_ids=range(num_tokens)
    )


async def reason(address, **options):
    """Why a worker at `address` is lost."""
    async with linked(address, **options) as (_, sink):
        await wait_for(lambda: sink.lost)
    prefix = "worker decode-0 cannot be reached: "
    assert sink.lost[0].startswith(prefix)
    return sink.lost[0].removeprefix(prefix)


async def test_a_worker_is_attached_when_it_has_said_something():
    worker = Worker()
    worker.say.get_nowait()
    async with serve(worker) as address, linked(address) as (link, _):
        await wait_for(lambda: worker.heard)
        attach = worker_pb2.AttachRequest(router_id="router-0", epoch=7)
        assert worker.heard == [worker_pb2.RouterMessage(attach=attach)]
        assert not link.is_attached
        worker.say.put_nowait(READY)
        await wait_for(lambda: link.is_ready)
        assert link.load == READY.load


async def test_what_is_sent_counts_until_a_report_tells_of_it():
    worker = Worker()
    async with serve(worker) as address, linked(address) as (link, _):
        await wait_for(lambda: link.is_ready)
        assert link.predicted.total == Work(sequences=1)
        load = types_pb2.Load(running=4)
        worker.say.put_nowait(worker_pb2.WorkerMessage(load=load, accepted=[5]))
        await wait_for(lambda: link.load == load)
        assert link.predicted.total == Work()


async def test_a_link_that_ends_ends_the_workers_stream():
    worker = Worker()
    async with serve(worker) as address:
        async with linked(address) as (link, sink):
            await wait_for(lambda: link.is_ready)
        assert sink.lost == ["worker decode-0 cannot be reached: the router let go of it"]
        await wait_for(lambda: worker.num_attached == 0)


async def test_what_one_turn_says_is_one_message():
    worker = Worker()
    async with serve(worker) as address, linked(address) as (link, _):
        await wait_for(lambda: link.is_ready)
        link.assign(make_dispatch(), partner=None)
        link.abort(KEY)
        link.abort(KEY, choice=2)
        await wait_for(lambda: len(worker.heard) > 1)
        link.abort(("s", 2))
        await wait_for(lambda: len(worker.heard) > 2)
    _, first, second = worker.heard
    assert [each.dispatch for each in first.assignments] == [make_dispatch()]
    assert [each.choice for each in first.aborts] == [0, 2]
    assert [each.request_id for each in second.aborts] == ["s"]


async def test_a_long_prompt_gets_through():
    worker = Worker()
    async with serve(worker) as address, linked(address) as (link, _):
        await wait_for(lambda: link.is_ready)
        for _ in range(3):
            link.assign(make_dispatch(500_000), partner=None)
            await asyncio.sleep(0)
        await wait_for(lambda: len(worker.heard) == 4)
    assert all(
        len(message.assignments[0].dispatch.prompt_token_ids) == 500_000
        for message in worker.heard[1:]
    )


async def test_outputs_come_in_order_however_many():
    worker = Worker()
    outputs = [
        worker_pb2.SequenceOutput(request_id="r", attempt=1, output_index=index)
        for index in range(1000)
    ]
    async with serve(worker) as address, linked(address) as (_, sink):
        for part in (outputs[:1], outputs[1:500], outputs[500:]):
            worker.say.put_nowait(worker_pb2.WorkerMessage(outputs=part))
        await wait_for(lambda: len(sink.outputs) == 1000)
    assert sink.outputs == outputs


async def test_tokens_come_in_order_however_many():
    worker, taken = Worker(), []
    async with serve(worker) as address, linked(address) as (link, _):
        link.take_tokens(5, lambda index, token_id, _: taken.append((index, token_id)))
        for first, last in ((0, 1), (1, 900), (900, 901), (901, 1000)):
            indexes = range(first, last)
            tokens = worker_pb2.StepTokens(
                stream_ids=[5] * len(indexes),
                output_indexes=indexes,
                token_ids=[2 * index for index in indexes],
            )
            worker.say.put_nowait(worker_pb2.WorkerMessage(tokens=tokens))
        await wait_for(lambda: len(taken) == 1000)
    assert taken == [(index, 2 * index) for index in range(1000)]


@pytest.mark.parametrize("column", ["stream_ids", "output_indexes", "token_ids"])
@pytest.mark.parametrize("length", [1, 128])
async def test_columns_of_different_lengths_are_not_believed(column, length):
    tokens = worker_pb2.StepTokens(**dict.fromkeys(COLUMNS, [5] * length))
    getattr(tokens, column).append(5)
    worker, taken = Worker(), []
    async with serve(worker) as address, linked(address) as (link, sink):
        link.take_tokens(5, lambda *token: taken.append(token))
        worker.say.put_nowait(worker_pb2.WorkerMessage(tokens=tokens))
        await wait_for(lambda: sink.lost)
    assert "not of one length" in sink.lost[0]
    assert taken == []


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, "the worker ended the stream"),
        (Unavailable("decode-0 is in life 8, not 7"), "UNAVAILABLE: decode-0 is in life 8, not 7"),
        (ValueError("a bug"), "INTERNAL: ValueError: a bug"),
    ],
)
async def test_a_worker_that_ends_the_stream_says_why_and_is_asked_again(end, reason):
    worker = Worker()
    worker.say.put_nowait(end)
    async with serve(worker) as address, linked(address) as (link, sink):
        await wait_for(lambda: sink.lost)
        worker.say.put_nowait(READY)
        await wait_for(lambda: link.is_ready)
    assert sink.lost[0] == f"worker decode-0 cannot be reached: {reason}"


async def test_a_worker_that_restarts_at_its_address_is_attached_again():
    async with serve(Worker()) as address, linked(address) as (link, sink):
        await wait_for(lambda: link.is_ready)
    async with linked(address) as (link, sink):
        await wait_for(lambda: sink.lost)
        assert "UNAVAILABLE: " in sink.lost[0]
        async with serve(Worker(), port_of(address)):
            await wait_for(lambda: link.is_ready)
        await wait_for(lambda: not link.is_attached)
        with pytest.raises(Unavailable, match="decode-0 is not attached"):
            link.assign(make_dispatch(), partner=None)
        link.abort(KEY)


async def test_a_worker_that_says_nothing_is_lost():
    worker = Worker()
    async with serve(worker) as address:
        assert await reason(address, silence_s=0.2) == "silent for 0.2 s"
        await wait_for(lambda: worker.num_attached == 0)


async def test_a_stopped_process_and_a_host_that_drops_packets_are_silent():
    with socket.socket() as stopped:
        stopped.bind(("127.0.0.1", 0))
        stopped.listen(0)
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        # The system takes connections for a process that is stopped, until there are too many.
        assert await reason(address, silence_s=0.2) == "silent for 0.2 s"
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(stopped.getsockname())
        assert await reason(address, silence_s=0.2) == "silent for 0.2 s"
        for each in waiting:
            each.close()


async def test_what_is_no_grpc_server_is_unavailable():
    async def refuse(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert (await reason(address)).startswith("UNAVAILABLE: what comes is not HTTP/2")
    server.close()
    await server.wait_closed()


async def test_messages_that_cannot_be_used_do_not_cost_the_worker(caplog):
    async def attach(requests, context):
        yield b"\xff"
        yield READY.SerializeToString()

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(attach)
    server.add_registered_method_handlers("baton.v1.Worker", {"Attach": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with linked(f"127.0.0.1:{port}") as (_, sink):
        await wait_for(lambda: len(sink.lost) > 1)
    assert "DecodeError" in sink.lost[0]
    assert "what decode-0 says cannot be used" in caplog.text
    await server.stop(0)


async def test_workers_of_the_deployment_are_heard_over_tls(tmp_path):
    authority, worker = Authority("ours"), Worker()
    tls = identity(tmp_path / "router", authority)
    stranger = identity(tmp_path / "stranger", Authority("theirs"))
    async with serve(worker, tls=identity(tmp_path / "worker", authority)) as address:
        async with linked(address, tls=tls) as (link, _):
            await wait_for(lambda: link.is_ready)
        await wait_for(lambda: worker.num_attached == 0)
        assert "CERTIFICATE_VERIFY_FAILED" in await reason(address, tls=stranger)
        assert (await reason(address)).startswith("UNAVAILABLE: ")


async def test_calls_beside_the_stream_open_a_channel_when_they_are_made():
    async with serve(Worker()) as address:
        async with linked(address) as (link, _):
            await wait_for(lambda: link.is_ready)
            assert link._channel is None
            request = worker_pb2.WorkerStatusRequest()
            assert (await link.worker.GetWorkerStatus(request)).id == "decode-0"
            channel = link._channel
            assert (await link.worker.GetWorkerStatus(request)).id == "decode-0"
            assert link._channel is channel
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        with pytest.raises(Unavailable, match="has let go of decode-0"):
            _ = link.worker
