"""Calls of grpcio's clients to the server."""

from __future__ import annotations

import asyncio
import gzip

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


async def test_one_message_is_answered_with_one(serve):
    async with serve() as s:
        assert await s.unary()(b"hello") == b"re: hello"
        assert await s.unary()(b"") == b"re: "


async def test_messages_of_a_generator_and_of_a_context_arrive_in_order(serve):
    async with serve() as s:
        counted = [each async for each in s.stream("Count")(b"3000")]
        assert counted == [str(number).encode() for number in range(3000)]
        written = [each.strip() async for each in s.stream("Write")(b"3000 50")]
        assert written == counted


async def test_a_stream_may_end_without_a_message(serve):
    async with serve() as s:
        call = s.stream("Count")(b"0")
        assert [each async for each in call] == []
        assert await call.code() is grpc.StatusCode.OK


async def test_both_sides_may_stream_in_turns(serve):
    async with serve() as s:
        call = s.chat()()
        for number in range(20):
            await call.write(b"%d" % number)
            assert await call.read() == b"re: %d" % number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_many_streams_at_a_time_share_a_connection(serve):
    async def count(number):
        return [each async for each in s.stream("Count")(b"%d" % number)]

    async with serve() as s:
        counted = await asyncio.gather(*(count(number) for number in range(200)))
        assert [len(each) for each in counted] == [*range(200)]
        assert len(s.shared.connections) == 1


async def test_a_large_upload_and_a_large_answer_pass_through_smaller_windows(serve):
    options = [("grpc.max_receive_message_length", 64 << 20)]
    async with (
        serve() as s,
        grpc.aio.insecure_channel(s.address, options=options) as channel,
    ):
        data = bytes(range(256)) * (100 << 10)
        assert await channel.unary_unary("/test.Probe/Echo")(data) == b"re: " + data


async def test_uploads_of_many_messages_are_read_to_the_end(serve):
    async with serve() as s:
        sizes = [0, 1, 5, 3 << 20, 1000, 20 << 20, 2]
        assert await s.uploads()(bytes(size) for size in sizes) == str(sum(sizes)).encode()


async def test_metadata_arrives_and_so_does_what_a_call_ends_with(serve):
    async def refuse(request, context):
        seen = dict(context.invocation_metadata())
        trailing = (("seen-bin", seen["asked-bin"]), ("seen", seen["asked"]))
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone: 100 % “lost”\n", trailing)

    async with serve(Refuse=grpc.unary_unary_rpc_method_handler(refuse)) as s:
        metadata = (("asked", "a b"), ("asked-bin", b"\x00\xff"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.unary("Refuse")(b"", metadata=metadata)
    error = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "gone: 100 % “lost”\n")
    assert dict(error.trailing_metadata()) == {"seen": "a b", "seen-bin": b"\x00\xff"}


async def test_a_bug_of_a_servicer_is_logged_and_an_internal_error(serve, caplog):
    async def stumble(request, context):
        raise KeyError("x")

    async with serve(Stumble=grpc.unary_unary_rpc_method_handler(stumble)) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.unary("Stumble")(b"")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "call_failed method=/test.Probe/Stumble error=KeyError" in caplog.text


async def test_a_method_that_is_not_there_is_unimplemented(serve):
    async with serve() as s:
        with pytest.raises(grpc.aio.AioRpcError, match=r"no method /test\.Probe/Nothing") as caught:
            await s.unary("Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_understood(serve, compression):
    async with serve() as s:
        answer = await s.unary()(b"x" * 10_000, compression=compression)
        assert answer == b"re: " + b"x" * 10_000


async def test_a_bomb_is_refused(serve, monkeypatch):
    monkeypatch.setattr("router.grpc_server.call.MAX_MESSAGE_BYTES", 1000)
    assert len(gzip.compress(bytes(100_000))) < 1000
    async with serve() as s:
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1000") as caught:
            await s.unary()(bytes(100_000), compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_synchronous_client_is_served_as_well(serve):
    def calls(address):
        with grpc.insecure_channel(address) as channel:
            answer = channel.unary_unary("/test.Probe/Echo")(b"a")
            counted = list(channel.unary_stream("/test.Probe/Count")(b"100"))
            chatted = list(channel.stream_stream("/test.Probe/Chat")(iter([b"b", b"c"])))
        return answer, counted[-1], chatted

    async with serve() as s:
        answers = await asyncio.to_thread(calls, s.address)
    assert answers == (b"re: a", b"99", [b"re: b", b"re: c"])


async def test_health_and_reflection_are_there(serve):
    async with serve() as s:
        await s.server.set_serving(True)
        health = health_pb2_grpc.HealthStub(s.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service="test.Probe"))).status == 1
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = [service.name for service in answer.list_services_response.service]
    assert "test.Probe" in names
