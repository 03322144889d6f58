import asyncio
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    StartupError,
    Unavailable,
    Unreachable,
    from_exception,
)
from core.rpc import ErrorInterceptor, RpcServer, open_channel, pod_errors, run_service


async def hello():
    yield worker_pb2.RouterMessage(attach=worker_pb2.AttachRequest(router_id="r"))


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Raises `error`; a stream yields one message first, or hangs after it."""

    def __init__(self, error=None):
        self.error = error
        self.is_closed = asyncio.Event()

    async def GetWorkerStatus(self, request, context):
        raise self.error

    async def Attach(self, request, context):
        try:
            yield worker_pb2.WorkerMessage(state=types_pb2.WORKER_STATE_READY)
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.is_closed.set()


@asynccontextmanager
async def serving(worker):
    """A server with `worker`; yields a channel to it and the server."""
    server = RpcServer("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc_server)
    address = await server.start(["baton.v1.Worker"])
    async with open_channel(address) as channel:
        yield channel, server
    await server.stop(0)


async def test_an_error_of_a_unary_call_arrives_as_it_was_raised():
    error = InvalidArgument("top_p must be in (0, 1]", field="top_p")
    async with serving(FakeWorker(error)) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).GetWorkerStatus(
                worker_pb2.WorkerStatusRequest()
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    arrived = from_exception(caught.value)
    assert (type(arrived), arrived.message, arrived.field) == (
        InvalidArgument,
        "top_p must be in (0, 1]",
        "top_p",
    )


async def test_an_error_of_a_stream_arrives_after_its_messages():
    async with serving(FakeWorker(ResourceExhausted("full", retry_after_s=2))) as (channel, _):
        # Nothing is sent: what gRPC sends as a call ends may fail by itself.
        call = worker_pb2_grpc.WorkerStub(channel).Attach()
        assert (await call.read()).state == types_pb2.WORKER_STATE_READY
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    arrived = from_exception(caught.value)
    assert (type(arrived), arrived.retry_after_s) == (ResourceExhausted, 2.0)


@pytest.mark.parametrize(
    ("raised", "arrives"), [(KeyError("x"), InternalError), (TimeoutError(), DeadlineExceeded)]
)
async def test_foreign_exceptions_are_translated(raised, arrives):
    async with serving(FakeWorker(raised)) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).GetWorkerStatus(
                worker_pb2.WorkerStatusRequest()
            )
    assert type(from_exception(caught.value)) is arrives


async def test_a_cancellation_that_nobody_asked_for_is_answered():
    async with serving(FakeWorker(asyncio.CancelledError())) as (channel, _):
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetWorkerStatus(worker_pb2.WorkerStatusRequest(), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Attach(hello(), timeout=60):
                pass
    for caught in (unary, stream):
        assert type(from_exception(caught.value)) is Unavailable


async def call_with_pod_errors(channel, **options):
    with pod_errors("decode-0"):
        await worker_pb2_grpc.WorkerStub(channel).GetWorkerStatus(
            worker_pb2.WorkerStatusRequest(), **options
        )


async def test_a_pods_own_error_is_told_from_no_answer():
    async with serving(FakeWorker(InvalidArgument("bad", field="top_p"))) as (channel, _):
        with pytest.raises(InvalidArgument, match="bad"):
            await call_with_pod_errors(channel)
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(Unreachable, match="decode-0: UNAVAILABLE"):
            await call_with_pod_errors(channel)
        with pytest.raises(Unreachable, match="decode-0: DEADLINE_EXCEEDED"):
            await call_with_pod_errors(channel, timeout=0.001, wait_for_ready=True)


async def test_a_channel_that_closes_before_or_under_a_call_is_no_answer():
    channel = open_channel("127.0.0.1:1")
    call = asyncio.ensure_future(call_with_pod_errors(channel, wait_for_ready=True))
    await asyncio.sleep(0.05)
    await channel.close(None)
    with pytest.raises(Unreachable, match="decode-0: the connection was closed"):
        await call
    with pytest.raises(Unreachable, match="closed"):
        await call_with_pod_errors(channel)


async def test_a_caller_that_is_cancelled_itself_stays_cancelled():
    async with open_channel("127.0.0.1:1") as channel:
        call = asyncio.ensure_future(call_with_pod_errors(channel, wait_for_ready=True))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_cancelled_stream_closes_the_handler():
    worker = FakeWorker()
    async with serving(worker) as (channel, _):
        call = worker_pb2_grpc.WorkerStub(channel).Attach(hello())
        await call.read()
        call.cancel()
        async with asyncio.timeout(30):
            await worker.is_closed.wait()


async def test_health_says_serving_only_when_told_so():
    states = health_pb2.HealthCheckResponse
    async with serving(FakeWorker()) as (channel, server):
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.NOT_SERVING
        await server.set_serving(True)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.SERVING


async def test_a_used_port_is_refused_with_its_name():
    first, second = RpcServer("127.0.0.1", 0), None
    address = await first.start([])
    second = RpcServer("127.0.0.1", int(address.rsplit(":", 1)[1]))
    with pytest.raises(StartupError, match=f"cannot listen on {address}"):
        await second.start([])
    await first.stop(0)


async def test_a_host_that_does_not_exist_is_one_line(monkeypatch, capfd):
    async def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    with pytest.raises(StartupError, match=r"127\.0\.0\.300:0: Name or service not known"):
        await RpcServer("127.0.0.300", 0).start([])
    assert capfd.readouterr().err == ""


def test_ctrl_c_during_the_start_ends_quietly(capsys):
    async def main():
        raise KeyboardInterrupt

    assert run_service(main) == 130
    assert capsys.readouterr().err == ""


def test_a_startup_error_is_one_line_and_exit_code_one(capsys):
    async def main():
        raise StartupError("no room for a single block")

    assert run_service(main) == 1
    assert capsys.readouterr().err == "error: no room for a single block\n"


async def test_health_of_a_service_can_be_asked_by_its_name():
    states = health_pb2.HealthCheckResponse
    async with serving(FakeWorker()) as (channel, server):
        stub = health_pb2_grpc.HealthStub(channel)
        question = health_pb2.HealthCheckRequest(service="baton.v1.Worker")
        assert (await stub.Check(question)).status == states.NOT_SERVING
        await server.set_serving(True)
        assert (await stub.Check(question)).status == states.SERVING


async def test_an_ipv6_host_is_listened_on_as_it_is_usually_written():
    server = RpcServer("::1", 0)
    address = await server.start([])
    assert address.startswith("[::1]:")
    await server.stop(0)


class ContextOfAFinishedCall:
    """What a handler has left of a call whose client is gone."""

    async def write(self, message):
        pass

    async def abort(self, code, message, trailing_metadata):
        raise grpc.aio.InternalError("the call is over")


@pytest.mark.parametrize("method", ["GetWorkerStatus", "Attach"])
async def test_an_error_that_comes_after_the_client_has_left_is_no_fault(method):
    worker = FakeWorker(DeadlineExceeded("the request's time is over"))
    make = {
        "GetWorkerStatus": grpc.unary_unary_rpc_method_handler,
        "Attach": grpc.stream_stream_rpc_method_handler,
    }[method]

    async def continuation(details):
        return make(getattr(worker, method))

    details = SimpleNamespace(method=method)
    handler = await ErrorInterceptor().intercept_service(continuation, details)
    call = handler.unary_unary or handler.stream_stream
    with pytest.raises(asyncio.CancelledError):
        await call(worker_pb2.AttachRequest(), ContextOfAFinishedCall())


async def test_a_new_channel_does_not_inherit_the_backoff_of_an_old_one():
    server = RpcServer("127.0.0.1", 0)
    address = await server.start([])
    await server.stop(0)
    async with open_channel(address) as old, open_channel(address) as new:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(old).Check(health_pb2.HealthCheckRequest())
        again = RpcServer("127.0.0.1", int(address.rsplit(":", 1)[1]))
        await again.start([])
        await health_pb2_grpc.HealthStub(new).Check(health_pb2.HealthCheckRequest())
        await again.stop(0)
